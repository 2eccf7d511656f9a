"""Refuses what cannot run with --hdp before any process group is made, with the numbers and what to change."""

import os
from typing import Any

from megatron_hdp.cost import CostModel
from megatron_hdp.data.corpus import SPLITS
from megatron_hdp.errors import ConfigError
from megatron_hdp.seams.conflicts import REFUSALS
from megatron_hdp.seams.costs import check_window, stages_from_args
from megatron_hdp.seams.expert_layout import refuse_experts
from megatron_hdp.seams.p2p import refuse_pipeline
from megatron_hdp.seams.parts import layers_of_parts

_LARGEST_SEED = 2**32 - len(SPLITS)  # every split's stream has its own, counted from --seed

LIMITS: tuple[tuple[str, int, int | None, str], ...] = (
    ("seq_length", 1, None, "the context, in tokens"),
    ("global_batch_size", 1, None, "sequences in a step"),
    ("context_parallel_size", 1, None, "ranks, which are folded into the pool"),
    ("tensor_model_parallel_size", 1, None, "ranks"),
    ("pipeline_model_parallel_size", 1, None, "stages"),
    ("num_layers_per_virtual_pipeline_stage", 1, None, "layers of a model part"),
    ("num_virtual_stages_per_pipeline_rank", 1, None, "model parts of a stage"),
    ("decoder_first_pipeline_num_layers", 1, None, "layers of the first stage"),
    ("decoder_last_pipeline_num_layers", 1, None, "layers of the last stage"),
    ("num_experts", 1, None, "experts of a layer"),
    ("moe_router_topk", 1, None, "experts of a token"),
    ("expert_model_parallel_size", 1, None, "ranks that share the experts"),
    ("expert_tensor_parallel_size", 1, None, "ranks that share an expert"),
    ("train_iters", 0, None, "steps"),
    ("eval_iters", 0, None, "steps"),
    ("eval_interval", 0, None, "steps between evaluations, 0 for none"),
    ("seed", 0, _LARGEST_SEED, "the seed of the order of the data"),
)
"""Numbers that Megatron takes and stumbles over later: option, least, most, what it is."""


def refuse_numbers(args: Any) -> None:
    """Raise `ConfigError` for a number out of its range; one that was not given is fine, but for --seq-length."""
    for name, least, most, what in LIMITS:
        value = getattr(args, name, None)
        if value is not None and not (least <= value and (most is None or value <= most)):
            bound = f"at least {least}" if most is None else f"from {least} to {most}"
            raise ConfigError(f"--{name.replace('_', '-')} is {value}: {what}; it must be {bound}")
    if args.seq_length is None:
        raise ConfigError("--hdp needs --seq-length: the context, to which longer documents are cut")
    positions = args.max_position_embeddings
    if positions is not None and positions < args.seq_length:
        raise ConfigError(
            f"--max-position-embeddings {positions} is smaller than the context --seq-length {args.seq_length}: "
            f"set --max-position-embeddings to at least {args.seq_length}"
        )
    refuse_experts(args)


def refuse_attention(args: Any) -> None:
    """Raise `ConfigError` for windows and numbers of heads that attention over rings cannot have."""
    _require_windows(args)
    heads, groups = args.num_attention_heads, args.num_query_groups
    if heads and args.group_query_attention and (groups < 1 or heads % groups):
        raise ConfigError(
            f"--num-query-groups {groups} does not divide --num-attention-heads {heads}: every key/value head serves "
            "equally many query heads"
        )


def refuse_heads(cost: CostModel, pool_size: int) -> None:
    """Raise `ConfigError` where --hdp-exchange heads was asked for and no ring of the pool can swap heads."""
    possible = [ranks for ranks in range(2, (cost.heads or 1) + 1) if cost.swaps_heads(ranks)]
    if possible and not 1 < pool_size < possible[0]:
        return
    among = f"only be swapped among {', '.join(map(str, possible))} ranks" if possible else "not be swapped"
    raise ConfigError(
        f"--hdp-exchange heads: the {cost.heads} query and {cost.kv_heads} key/value heads of a process can {among}, "
        f"and the pool has {pool_size}. The number of ranks that swap must divide the query heads, and divide the "
        "key/value heads or be a multiple of them: use another exchange, or fewer tensor-parallel ranks"
    )


def refuse_offload(args: Any) -> None:
    """Raise `ConfigError` for what --hdp-offload cannot run with. After Megatron's checks, which complete the flags.

    Every model part that has layers must have 3 or more: its first and last keep their activations, and every rank is
    planned to send away as much as the others. Parts without layers (an embedding or the loss alone) hold none.
    """
    stages, parts = stages_from_args(args)
    numbers = {number for stage in layers_of_parts(args) for number in stage if number}
    if min(numbers) < 3:
        where = "a part" if len(numbers) == 1 else "the smallest part"
        raise ConfigError(
            f"--hdp-offload: {args.num_layers} layers on {stages} pipeline stages of {parts} model parts are "
            f"{min(numbers)} in {where}, whose first and last keep their activations, so nothing can leave: use parts "
            "of at least 3 layers, or drop the flag"
        )
    if getattr(args, "gradient_accumulation_fusion", False) and getattr(args, "overlap_grad_reduce", False):
        raise ConfigError(
            "--hdp-offload with --overlap-grad-reduce: fused gradient accumulation leaves a mark on the weight that "
            "torch does not hand through the hooks of saved tensors, and the reduction would wait for a gradient in "
            "vain: add --no-gradient-accumulation-fusion, or drop --overlap-grad-reduce"
        )


def _require_windows(args: Any) -> None:
    if not args.window_size:
        return
    check_window(args.window_size)
    skip = args.window_attn_skip_freq
    if isinstance(skip, list) and args.num_layers is not None and len(skip) != args.num_layers:
        raise ConfigError(
            f"--window-attn-skip-freq has {len(skip)} entries for --num-layers {args.num_layers}: give one per layer"
        )
    if isinstance(skip, int) and skip < 1:
        raise ConfigError(f"--window-attn-skip-freq is {skip}: every how many layers one has no window, at least 1")


_TOKENIZER_FILES = ("tokenizer_model", "vocab_file", "merge_file")


def refuse_conflicts(args: Any, defaults: Any) -> None:
    """Raise `ConfigError` naming every flag that cannot run with --hdp."""
    _require_no_conflict(args)
    _require_data(args)
    _require_tokenizer(args, defaults)


def refuse_checked(args: Any, model_config: Any) -> None:
    """Raise `ConfigError` for what only shows once Megatron's checks have completed the flags, before it starts.

    Args:
        args: as validated.
        model_config: the GPTModelConfig of the run. No process group need exist.
    """
    _require_no_conflict(args)  # again: Megatron sets flags from others, and scripts may set some
    layers_of_parts(args)
    refuse_pipeline(model_config.transformer)


def _require_no_conflict(args: Any) -> None:
    reasons = [f"{refusal.flag}: {refusal.why}" for refusal in REFUSALS if refusal.applies(args)]
    if reasons:
        raise ConfigError("--hdp cannot run with:\n  " + "\n  ".join(reasons))


def _require_data(args: Any) -> None:
    sources = ("data_path", "data_args_path", "train_data_path", "per_split_data_args_path")
    if not any(getattr(args, name, None) for name in sources):
        raise ConfigError("--hdp needs documents: give --data-path (or --train-data-path) with .bin/.idx prefixes")


def _require_tokenizer(args: Any, defaults: Any) -> None:
    """Megatron finds a missing tokenizer late and with a stack trace; say it at once."""
    kind = args.tokenizer_type or (defaults or {}).get("tokenizer_type")
    if kind is None:
        raise ConfigError("no tokenizer: give --tokenizer-type (and --tokenizer-model or --vocab-size, as it needs)")
    for name in _TOKENIZER_FILES:
        path = getattr(args, name, None)
        # a Hugging Face name such as org/model is no path; only what looks like a local file is checked here
        if path is None:
            continue
        local = path.startswith((".", "/", "~")) or os.path.splitext(path)[1] != ""
        if local and kind != "HuggingFaceTokenizer" and not os.path.exists(os.path.expanduser(path)):
            raise ConfigError(f"--{name.replace('_', '-')} {path}: no such file (for --tokenizer-type {kind})")
    if kind == "NullTokenizer" and args.vocab_size is None:
        raise ConfigError("--tokenizer-type NullTokenizer needs --vocab-size")
    needs_model = ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer", "TikTokenizer")
    if kind in (*needs_model, "HuggingFaceTokenizer") and not args.tokenizer_model:
        raise ConfigError(f"--tokenizer-type {kind} needs --tokenizer-model")
    if kind == "GPT2BPETokenizer" and not (args.vocab_file and args.merge_file) and not args.tokenizer_model:
        raise ConfigError("--tokenizer-type GPT2BPETokenizer needs --vocab-file and --merge-file")
