"""Which pool ranks share experts, from Megatron's flags, and numbers of experts that cannot be."""

from typing import Any

from megatron_hdp.errors import ConfigError
from megatron_hdp.seams.costs import listed


def refuse_experts(args: Any) -> None:
    """Raise `ConfigError` for numbers of experts, losses and layers that do not go together; Megatron may not have
    completed the flags yet."""
    if not getattr(args, "num_experts", None):
        return
    if args.moe_router_topk > args.num_experts:
        raise ConfigError(
            f"--moe-router-topk is {args.moe_router_topk}, and --num-experts {args.num_experts}: a token cannot choose "
            "more experts than there are"
        )
    frequency = args.moe_layer_freq
    if isinstance(frequency, list) and args.num_layers is not None and len(frequency) != args.num_layers:
        raise ConfigError(
            f"--moe-layer-freq has {len(frequency)} entries for --num-layers {args.num_layers}: give one per layer"
        )
    if isinstance(frequency, int) and frequency < 1:
        raise ConfigError(f"--moe-layer-freq is {frequency}: every how many layers one has experts, at least 1")
    kinds, coefficients = listed(args.moe_router_load_balancing_type), listed(args.moe_aux_loss_coeff)
    if len(kinds) != len(coefficients):
        raise ConfigError(
            f"--moe-aux-loss-coeff has {len(coefficients)} values ({' '.join(map(str, coefficients))}) for "
            f"{len(kinds)} of --moe-router-load-balancing-type ({' '.join(kinds)}): give one coefficient for each type"
        )


def expert_group_from_args(args: Any) -> int:
    """Consecutive pool ranks that exchange tokens between their experts; 1 if experts stay inside a column.

    Megatron numbers processes by tensor rank first, then by expert or column, then by stage ("tp-cp-ep-dp-pp"): an
    expert group is expert-tensor-parallel x expert-parallel consecutive processes of a stage, a column
    tensor-parallel many. So groups are consecutive pool ranks wherever one number is a multiple of the other.

    Raises `ConfigError`, with the numbers, for layouts where groups and columns cut through each other, or groups do
    not divide the pool, or the experts.
    """
    tensor, stages = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    ranks = getattr(args, "expert_model_parallel_size", None) or 1
    parts = getattr(args, "expert_tensor_parallel_size", None) or tensor
    group = ranks * parts
    if not getattr(args, "num_experts", None):
        if ranks > 1:
            raise ConfigError(f"--expert-model-parallel-size {ranks} without --num-experts: drop it")
        return 1
    shown = f"--expert-model-parallel-size {ranks} x --expert-tensor-parallel-size {parts} = {group} processes"
    if args.num_experts % ranks:
        raise ConfigError(f"--num-experts {args.num_experts} is not a multiple of --expert-model-parallel-size {ranks}")
    if group % tensor and tensor % group:
        raise ConfigError(
            f"experts: groups of {shown} cut through columns of --tensor-model-parallel-size {tensor}: one must be a "
            "multiple of the other"
        )
    if getattr(args, "use_tp_pp_dp_mapping", False) and stages > 1 and group != tensor:
        raise ConfigError(
            f"experts: with --use-tp-pp-dp-mapping and {stages} pipeline stages, groups of {shown} would have to be "
            f"columns of {tensor} processes: drop the mapping"
        )
    columns = max(1, group // tensor)
    pool = args.world_size // (tensor * stages)
    if pool % columns:
        raise ConfigError(
            f"experts: groups of {shown} are {columns} pool ranks, which do not divide the pool of {pool} "
            f"({args.world_size} processes / {tensor} tensor parallel / {stages} stages)"
        )
    return int(columns)
