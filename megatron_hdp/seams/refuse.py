"""What cannot run with --hdp, refused before any process group is made: which flag, why, what to do."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron_hdp.data.corpus import SPLITS
from megatron_hdp.errors import ConfigError


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
    Refusal("--mtp-num-layers", _on("mtp_num_layers"), "multi-token prediction shifts labels past the ends of pieces"),
    Refusal("--multi-latent-attention", _on("multi_latent_attention"), "latent attention does not pass through rings"),
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
        "--expert-model-parallel-size",
        _above("expert_model_parallel_size", 1),
        "expert parallel needs equal micro-batch counts in its groups, which the planner does not give yet",
    ),
    Refusal(
        "--num-experts",
        _on("num_experts"),
        "auxiliary router losses would depend on how sequences are spread over ranks, and padding would be routed",
    ),
    Refusal(
        "--ddp-average-in-collective",
        _on("ddp_average_in_collective"),
        "gradients are summed and divided once by the tokens of the batch; drop the flag",
    ),
    Refusal(
        "--sequence-parallel",
        _on("sequence_parallel"),
        "pieces are not yet padded to the tensor-parallel size; drop the flag",
    ),
    Refusal(
        "--attention-dropout",
        _above("attention_dropout", 0.0),
        "ring attention has no dropout (Megatron's default is 0.1); pass --attention-dropout 0",
    ),
    Refusal("--window-size", _on("window_size"), "sliding windows are not yet supported by the ring"),
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
        lambda args: getattr(args, "position_embedding_type", "rope") not in ("rope", "learned_absolute", "none"),
        "positions of pieces are only given to rope, learned_absolute and none",
    ),
    Refusal("--fp8-format", _on("fp8"), "pieces are not padded to the multiples that 8-bit kernels need"),
    Refusal("--fp4-format", _on("fp4"), "pieces are not padded to the multiples that 4-bit kernels need"),
    Refusal("--tp-comm-overlap", _on("tp_comm_overlap"), "its buffers have fixed shapes, and micro-batches differ"),
    Refusal(
        "--fine-grained-activation-offloading",
        _on("fine_grained_activation_offloading"),
        "its plan is frozen after the first step, and micro-batches differ from step to step",
    ),
    Refusal("--cpu-offloading-num-layers", _on("cpu_offloading_num_layers"), "it assumes equal micro-batches"),
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

_LARGEST_SEED = 2**32 - len(SPLITS)  # every split's stream has its own, counted from --seed

LIMITS: tuple[tuple[str, int, int | None, str], ...] = (
    ("seq_length", 1, None, "the context, in tokens"),
    ("global_batch_size", 1, None, "sequences in a step"),
    ("context_parallel_size", 1, None, "ranks, which are folded into the pool"),
    ("tensor_model_parallel_size", 1, None, "ranks"),
    ("pipeline_model_parallel_size", 1, None, "stages"),
    ("train_iters", 0, None, "steps"),
    ("eval_iters", 0, None, "steps"),
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


_TOKENIZER_FILES = ("tokenizer_model", "vocab_file", "merge_file")


def refuse_conflicts(args: Any, defaults: Any) -> None:
    """Raise `ConfigError` naming every flag that cannot run with --hdp."""
    reasons = [f"{refusal.flag}: {refusal.why}" for refusal in REFUSALS if refusal.applies(args)]
    if reasons:
        raise ConfigError("--hdp cannot run with:\n  " + "\n  ".join(reasons))
    _require_data(args)
    _require_tokenizer(args, defaults)


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
