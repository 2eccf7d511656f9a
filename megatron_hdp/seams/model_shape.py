"""The model and layout of Megatron's args, as the memory estimate counts them, and what it does not know."""

from collections.abc import Callable
from typing import Any

from megatron_hdp import cpu
from megatron_hdp.config import HdpConfig
from megatron_hdp.cost import CostModel
from megatron_hdp.memory import RESERVE_BYTES, ModelShape, Parallel
from megatron_hdp.seams.costs import windows_from_args
from megatron_hdp.seams.output import loss_chunk_from_args

CPU_RESERVE_BYTES = 2**30
"""Of a CPU rank: Python with torch and Megatron imported takes 0.6 GiB of its own, buffers of gloo come on top."""
_OPTIMIZERS = ("adam", "sgd")


def _on(name: str) -> Callable[[Any], bool]:
    return lambda args: bool(getattr(args, name, None))


def _given(name: str) -> Callable[[Any], bool]:
    return lambda args: getattr(args, name, None) is not None


def _more_than(name: str, limit: float) -> Callable[[Any], bool]:
    return lambda args: (getattr(args, name, None) or 0) > limit


UNKNOWN: tuple[tuple[str, Callable[[Any], bool]], ...] = (
    ("--num-experts", _on("num_experts")),
    ("--multi-latent-attention", _on("multi_latent_attention")),
    ("--mtp-num-layers", _on("mtp_num_layers")),
    ("--experimental-attention-variant", _given("experimental_attention_variant")),
    ("--attention-output-gate", _on("attention_output_gate")),
    ("--heterogeneous-layers-config-path", _given("heterogeneous_layers_config_path")),
    ("--heterogeneous-layers-config-encoded-json", _given("heterogeneous_layers_config_encoded_json")),
    ("--decoder-first-pipeline-num-layers", _given("decoder_first_pipeline_num_layers")),
    ("--decoder-last-pipeline-num-layers", _given("decoder_last_pipeline_num_layers")),
    ("--account-for-embedding-in-pipeline-split", _on("account_for_embedding_in_pipeline_split")),
    ("--account-for-loss-in-pipeline-split", _on("account_for_loss_in_pipeline_split")),
    ("--pipeline-model-parallel-layout", _given("pipeline_model_parallel_layout")),
    ("an --optimizer other than adam and sgd", lambda args: args.optimizer not in _OPTIMIZERS),
    ("--use-precision-aware-optimizer", _on("use_precision_aware_optimizer")),
    ("--optimizer-cpu-offload", _on("optimizer_cpu_offload")),
    ("--num-distributed-optimizer-instances", _more_than("num_distributed_optimizer_instances", 1)),
    ("--defer-embedding-wgrad-compute", _on("defer_embedding_wgrad_compute")),
    ("a vocabulary without --padded-vocab-size", lambda args: args.padded_vocab_size is None),
)
"""What makes the number of parameters, or what is kept besides layers, another one than is counted."""

UNKNOWN_IN_LAYERS: tuple[tuple[str, Callable[[Any], bool]], ...] = (
    ("--hidden-dropout", _more_than("hidden_dropout", 0.0)),
    ("--fp32-residual-connection", _on("fp32_residual_connection")),
    ("--apply-residual-connection-post-layernorm", _on("apply_residual_connection_post_layernorm")),
    ("--qk-layernorm with LayerNorm", lambda args: args.qk_layernorm and args.normalization != "RMSNorm"),
    ("--qk-l2-norm", _on("qk_l2_norm")),
    ("--quick-geglu", _on("quick_geglu")),
    ("--activation-func-clamp-value", _given("activation_func_clamp_value")),
    ("--glu-linear-offset", _on("glu_linear_offset")),
    ("--mlp-chunks-for-training", _more_than("mlp_chunks_for_training", 1)),
    ("--no-rope-freq", _on("no_rope_freq")),
    ("positions that are not rotary", lambda args: args.position_embedding_type not in ("rope", "yarn")),
)
"""What makes a layer keep other activations than are counted. A profile may have been measured with these flags, or
without: the layer's name does not say, and where nothing is counted there is nothing to compare it with."""


def unknown(args: Any, model_config: Any) -> str | None:
    """Why the model cannot be counted; None if it can."""
    found = [flag for flag, applies in UNKNOWN if applies(args)]
    if getattr(args, "spec", None) or getattr(model_config, "transformer_layer_spec", None) is not None:
        found.append("a layer spec of your own (--spec)")
    if found:
        return f"it does not know {', '.join(found)}"
    found = [flag for flag, applies in UNKNOWN_IN_LAYERS if applies(args)]
    if found:
        return f"it does not know what layers keep with {', '.join(found)}"
    return _difference(args, model_config)


def _difference(args: Any, model_config: Any) -> str | None:
    """A script may build another model than its flags say; then they are no ground to count on."""
    transformer = getattr(model_config, "transformer", None)
    if transformer is None:
        return None
    shape = shape_from_args(args)
    pairs = {
        "num_layers": (transformer.num_layers, shape.layers),
        "hidden_size": (transformer.hidden_size, shape.hidden),
        "ffn_hidden_size": (transformer.ffn_hidden_size, shape.ffn),
        "num_attention_heads": (transformer.num_attention_heads, shape.heads),
        "num_query_groups": (transformer.num_query_groups, shape.kv_heads),
        "kv_channels": (transformer.kv_channels, shape.head_dim),
        "gated_linear_unit": (bool(transformer.gated_linear_unit), shape.gated),
        "add_bias_linear": (bool(transformer.add_bias_linear), shape.bias),
        "vocab_size": (model_config.vocab_size, shape.vocabulary),
        "share_embeddings_and_output_weights": (model_config.share_embeddings_and_output_weights, shape.tied),
    }
    changed = [f"{name} is {built}, not {asked}" for name, (built, asked) in pairs.items() if built != asked]
    return f"the script builds another model than its flags say: {', '.join(changed)}" if changed else None


def shape_from_args(args: Any) -> ModelShape:
    """The model of the flags."""
    heads = args.num_attention_heads
    return ModelShape(
        layers=args.num_layers,
        hidden=args.hidden_size,
        ffn=args.ffn_hidden_size,
        heads=heads,
        kv_heads=args.num_query_groups if args.group_query_attention else heads,
        head_dim=args.kv_channels,
        vocabulary=args.padded_vocab_size,
        vocabulary_multiple=1,
        gated=bool(args.swiglu or args.quick_geglu),
        tied=not args.untie_embeddings_and_output_weights,
        element_bytes=args.params_dtype.itemsize,
        layer_norm=args.normalization == "LayerNorm",
        bias=bool(args.add_bias_linear),
        qkv_bias=bool(args.add_qkv_bias),
        qk_norm=bool(args.qk_layernorm),
        positions=args.max_position_embeddings if args.position_embedding_type == "learned_absolute" else 0,
    )


def parallel_from_args(args: Any, config: HdpConfig, *, on_gpu: bool) -> Parallel:
    """How the flags spread the model, with the exchange that they name ("auto" included)."""
    columns = args.tensor_model_parallel_size * args.pipeline_model_parallel_size
    windows = set(windows_from_args(args))
    full = args.recompute_granularity == "full"
    block = full and args.recompute_method == "block"
    copy = 0 if args.params_dtype.itemsize == 4 else 4
    moments = 8 if args.optimizer == "adam" else 4 if args.sgd_momentum else 0
    selective = args.recompute_granularity == "selective"
    return Parallel(
        ranks=args.world_size // columns,
        tensor_parallel=args.tensor_model_parallel_size,
        sequence_parallel=bool(args.sequence_parallel),
        stages=args.pipeline_model_parallel_size,
        virtual_stages=args.virtual_pipeline_model_parallel_size or 1,
        distributed_optimizer=bool(args.use_distributed_optimizer),
        gradient_bytes=4 if args.accumulate_allreduce_grads_in_fp32 else args.params_dtype.itemsize,
        optimizer_bytes=copy + moments,
        recompute="full" if full else "none",
        recompute_attention=selective and "core_attn" in (getattr(args, "recompute_modules", None) or ["core_attn"]),
        recompute_layers=args.recompute_num_layers if block else None,
        recompute_group=(args.recompute_num_layers or 1) if full and not block else 1,
        fused_kernels=on_gpu and not _unfused(args),
        exchange=config.exchange,
        window=windows.pop() if len(windows) == 1 else None,
        loss_chunk=loss_chunk_from_args(args),
        reserve_bytes=RESERVE_BYTES if on_gpu else CPU_RESERVE_BYTES,
    )


def possible_exchanges(args: Any, config: HdpConfig, cost: CostModel) -> tuple[str, ...]:
    """What a plan may choose; the planner keeps the ring where all layers have one window."""
    if config.exchange != "auto":
        return (config.exchange,)
    windows = set(windows_from_args(args))
    if len(windows) == 1 and windows != {None}:
        return ("ring",)
    swaps = any(cost.swaps_heads(ranks) for ranks in range(2, (cost.heads or 1) + 1))
    return ("ring", "gather", "heads") if swaps else ("ring", "gather")


def upper_bounds(args: Any, on_gpu: bool) -> list[str]:
    """What makes a run need less than is counted; a measured layer, which agrees with the count, is none the lower."""
    found = []
    if args.recompute_granularity == "selective":
        found.append("what --recompute-granularity selective drops is not counted")
    if getattr(args, "distribute_saved_activations", False):
        found.append("--distribute-saved-activations is not counted")
    if on_gpu and _unfused(args):
        found.append("with --no-bias-swiglu-fusion or --no-rope-fusion all kernels are counted as not fused")
    return found


def _unfused(args: Any) -> bool:
    """Fusion was switched off, so that more is kept: by the user, as the CPU mode is `parallel_from_args`' own case."""
    apart = (args.swiglu and not args.bias_swiglu_fusion) or not args.apply_rope_fusion
    return bool(apart) and not cpu.is_enabled()
