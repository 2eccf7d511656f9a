"""Flags that conflict with --hdp: which, why, what to do."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_hdp.seams.costs import listed


@dataclass(frozen=True)
class Refusal:
    """One flag that conflicts with --hdp."""

    flag: str
    applies: Callable[[Any], bool]
    why: str


def _on(name: str) -> Callable[[Any], bool]:
    """The option is set to something true."""
    return lambda args: bool(getattr(args, name, None))


def _above(name: str, limit: float) -> Callable[[Any], bool]:
    """The option is a number above the limit."""
    return lambda args: (getattr(args, name, None) or 0) > limit


def _balances_by(kind: str) -> Callable[[Any], bool]:
    """Experts are balanced in this way, alone or with others."""
    return lambda args: bool(args.num_experts) and kind in listed(getattr(args, "moe_router_load_balancing_type", None))


_MAMBA = ("mamba_state_dim", "mamba_head_dim", "mamba_num_groups", "mamba_num_heads")


def _shapes_mamba_layers(args: Any) -> bool:
    """A size of Mamba layers was given."""
    return any(
        getattr(args, name, default) != default
        for name, default in ((name, getattr(TransformerConfig, name)) for name in _MAMBA)
    )


_POSITIONS = ("rope", "yarn", "learned_absolute", "none")

_NO_HYBRID = "hybrid (Mamba) models are not supported: state does not pass over rings"

REFUSALS: tuple[Refusal, ...] = (
    Refusal(
        "--hybrid-context-parallel",
        _on("hybrid_context_parallel"),
        "it is Megatron's own scheme for the same purpose, and only one can lay out the data; drop one of the two",
    ),
    Refusal(
        "--attention-backend local",
        lambda args: getattr(getattr(args, "attention_backend", None), "name", "") == "local",
        "it would put Megatron's own attention back in place of the ring; use another backend",
    ),
    Refusal(
        "--hybrid-layer-pattern",
        lambda args: any(
            getattr(args, name, None) is not None for name in ("hybrid_layer_pattern", "hybrid_override_pattern")
        ),
        f"{_NO_HYBRID}, and a GPT model ignores the pattern but for its layers and multi-token prediction; drop the "
        "flag (or --hybrid-override-pattern, its old name) and give --num-layers",
    ),
    Refusal("--is-hybrid-model", _on("is_hybrid_model"), f"{_NO_HYBRID}; drop the flag"),
    Refusal(
        ", ".join(f"--{name.replace('_', '-')}" for name in _MAMBA),
        _shapes_mamba_layers,
        f"{_NO_HYBRID}, and a GPT model ignores the sizes of Mamba layers; drop the flags",
    ),
    Refusal("--mtp-num-layers", _on("mtp_num_layers"), "multi-token prediction shifts labels past the ends of pieces"),
    Refusal(
        "--multi-latent-attention with fused rotary positions",
        lambda args: bool(getattr(args, "multi_latent_attention", False) and getattr(args, "apply_rope_fusion", False)),
        "the fused kernel takes positions 0, 1, 2, ... of one sequence; pass --no-rope-fusion",
    ),
    Refusal(
        "--experimental-attention-variant",
        _on("experimental_attention_variant"),
        "only plain causal attention passes through rings",
    ),
    Refusal(
        "--cuda-graph-impl",
        lambda args: (
            str(getattr(args, "cuda_graph_impl", None) or "none") != "none"
            or bool(getattr(args, "enable_cuda_graph", False))
            or bool(getattr(args, "optimizer_cuda_graph", False))
        ),
        "a captured graph has fixed shapes, and micro-batches differ in shape; turn CUDA graphs off",
    ),
    Refusal("--use-torch-fsdp2", _on("use_torch_fsdp2"), "ranks with unequal micro-batch counts would hang"),
    Refusal(
        "--use-megatron-fsdp",
        _on("use_megatron_fsdp"),
        "ranks with unequal micro-batch counts would hang",
    ),
    Refusal(
        "--moe-router-load-balancing-type global_aux_loss",
        _balances_by("global_aux_loss"),
        "it counts choices over all micro-batches so far, whose order and size depend on the layout; use aux_loss, "
        "which is per sequence with --hdp",
    ),
    Refusal(
        "--moe-router-load-balancing-type sinkhorn",
        _balances_by("sinkhorn"),
        "the choice for a token would depend on what else is in its micro-batch; use aux_loss",
    ),
    Refusal(
        "--moe-router-load-balancing-type quantile_balancing",
        _balances_by("quantile_balancing"),
        "quantiles are taken over the tokens of a micro-batch, which depend on the layout; use aux_loss",
    ),
    Refusal(
        "--moe-expert-capacity-factor",
        lambda args: (getattr(args, "moe_expert_capacity_factor", None) or -1) >= 0,
        "which tokens an expert drops would depend on what else is in their micro-batch; drop the flag",
    ),
    Refusal(
        "--moe-expert-rank-capacity-factor",
        lambda args: getattr(args, "moe_expert_rank_capacity_factor", None) is not None,
        "which tokens an expert drops would depend on what else is in their micro-batch; drop the flag",
    ),
    Refusal("--moe-input-jitter-eps", _on("moe_input_jitter_eps"), "the noise would depend on the layout"),
    Refusal(
        "--moe-enable-routing-replay",
        _on("moe_enable_routing_replay"),
        "it replays choices by micro-batch, and micro-batches differ from step to step",
    ),
    Refusal(
        "--overlap-moe-expert-parallel-comm",
        _on("overlap_moe_expert_parallel_comm"),
        "its schedule runs two micro-batches in turns on all ranks, and their numbers differ between ranks",
    ),
    Refusal(
        "--moe-token-dispatcher-type flex",
        lambda args: bool(args.num_experts) and getattr(args, "moe_token_dispatcher_type", None) == "flex",
        "DeepEP, HybridEP and NCCL EP were not tried with micro-batches of unequal size; use alltoall",
    ),
    Refusal(
        "--mlp-chunks-for-training with --num-experts",
        lambda args: bool(args.num_experts) and (getattr(args, "mlp_chunks_for_training", None) or 1) > 1,
        "routers need the whole micro-batch; drop one of the two",
    ),
    Refusal(
        "--num-experts with --tensor-model-parallel-size and without --sequence-parallel",
        lambda args: bool(args.num_experts) and args.tensor_model_parallel_size > 1 and not args.sequence_parallel,
        "Megatron trains experts on tensor-parallel ranks with sequence parallelism only; add --sequence-parallel",
    ),
    Refusal(
        "--expert-tensor-parallel-num-weight-shards",
        lambda args: (
            (getattr(args, "expert_tensor_parallel_num_weight_shards", None) or 0)
            > (getattr(args, "expert_tensor_parallel_size", None) or args.tensor_model_parallel_size)
        ),
        "weight shards beyond tensor parallelism change which ranks share experts",
    ),
    Refusal(
        "--ddp-average-in-collective",
        _on("ddp_average_in_collective"),
        "gradients are summed and divided once by the tokens of the batch; drop the flag",
    ),
    Refusal(
        "--ddp-reduce-scatter-with-fp32-accumulation with --overlap-grad-reduce",
        lambda args: (
            bool(getattr(args, "ddp_reduce_scatter_with_fp32_accumulation", False))
            and bool(getattr(args, "overlap_grad_reduce", False))
        ),
        "in backward a rank would wait for the reduction of one bucket before the next, while another rank needs it in "
        "a ring first; drop one of the two",
    ),
    Refusal(
        "--cp-comm-type",
        lambda args: any(kind != "p2p" for kind in listed(getattr(args, "cp_comm_type", None))),
        "how ranks share attention is --hdp-exchange: ring, gather and heads are p2p, all_gather and a2a; drop "
        "the flag",
    ),
    Refusal(
        "--attention-dropout",
        _above("attention_dropout", 0.0),
        "ring attention has no dropout (Megatron's default is 0.1); pass --attention-dropout 0",
    ),
    Refusal(
        "--softmax-type",
        lambda args: (getattr(args, "softmax_type", None) or "vanilla") != "vanilla",
        "only the vanilla softmax can be merged across a ring",
    ),
    Refusal(
        "--apply-query-key-layer-scaling",
        _on("apply_query_key_layer_scaling"),
        "the extra scale per layer is not applied by ring attention",
    ),
    Refusal("--qk-clip", _on("qk_clip"), "ring attention does not record the largest logit"),
    Refusal("--log-max-attention-logit", _on("log_max_attention_logit"), "ring attention does not record it"),
    Refusal(
        "--position-embedding-type",
        lambda args: getattr(args, "position_embedding_type", "rope") not in _POSITIONS,
        "positions of pieces are only given to " + ", ".join(_POSITIONS),
    ),
    Refusal(
        "--rotary-interleaved with --position-embedding-type yarn",
        lambda args: bool(getattr(args, "rotary_interleaved", False)) and args.position_embedding_type == "yarn",
        "Megatron has no such rotary embedding; drop one of the two",
    ),
    Refusal("--fp8-format", _on("fp8"), "pieces are not padded to the multiples that 8-bit kernels need"),
    Refusal("--fp4-format", _on("fp4"), "pieces are not padded to the multiples that 4-bit kernels need"),
    Refusal("--tp-comm-overlap", _on("tp_comm_overlap"), "its buffers have fixed shapes, and micro-batches differ"),
    Refusal(
        "--fine-grained-activation-offloading",
        _on("fine_grained_activation_offloading"),
        "its plan is frozen after the first step, and micro-batches differ from step to step; use --hdp-offload",
    ),
    Refusal(
        "--cpu-offloading-num-layers",
        _on("cpu_offloading_num_layers"),
        "it assumes equal micro-batches; use --hdp-offload",
    ),
    Refusal(
        "--hierarchical-context-parallel-sizes",
        _on("hierarchical_context_parallel_sizes"),
        "the pool is one level of rings; drop the flag",
    ),
    Refusal("--rampup-batch-size", _on("rampup_batch_size"), "the batch of a step is a function of the step alone"),
    Refusal("--step-batch-size-schedule", _on("step_batch_size_schedule"), "the batch size is constant"),
    Refusal("--decrease-batch-size-if-needed", _on("decrease_batch_size_if_needed"), "no batch size needs rounding"),
    Refusal("--iterations-to-skip", _on("iterations_to_skip"), "skipped steps have no micro-batches to throw away"),
    Refusal("--phase-transition-iterations", _on("phase_transition_iterations"), "data has one phase"),
    Refusal("--full-validation", _on("full_validation"), "evaluation runs --eval-iters steps"),
    Refusal("--multiple-validation-sets", _on("multiple_validation_sets"), "there is one validation set"),
    Refusal("--sft", _on("sft"), "only pretraining documents (.bin/.idx) are read"),
    Refusal("--fim-data", _on("fim_data"), "only plain documents (.bin/.idx) are read"),
    Refusal(
        "--mock-data",
        _on("mock_data"),
        "mock data has no document lengths to plan with; give --data-path to a .bin/.idx corpus",
    ),
    Refusal("--perform-rl-step", _on("perform_rl_step"), "only pretraining is supported"),
    Refusal("--yaml-cfg", _on("yaml_cfg"), "Megatron does not run its usual argument checks for it"),
    Refusal(
        "--tensor-parallel-num-weight-shards",
        lambda args: (
            (getattr(args, "tensor_parallel_num_weight_shards", None) or args.tensor_model_parallel_size)
            > args.tensor_model_parallel_size
        ),
        "weight shards beyond tensor parallelism change which ranks form the pool",
    ),
)
