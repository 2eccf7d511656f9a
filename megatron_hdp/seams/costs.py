"""From Megatron's model flags to what planner and log need to know of the model."""

import math
import os
from typing import Any

from megatron.core.transformer.utils import is_layer_window_attention

from megatron_hdp.config import MOST_GIB, HdpConfig
from megatron_hdp.cost import CostModel, load_profile
from megatron_hdp.errors import ConfigError
from megatron_hdp.profiler.match import layer_name

_PLANNED_SHARE = 0.9
"""Of the arena; the profile's bytes of a layer are close to the true ones, not equal to them."""
_LEAST_SHARE = 1 << 20
"""Bytes of host memory; a profile that says less for a process has another unit in mind."""


def cost_from_args(args: Any, config: HdpConfig) -> CostModel:
    """What pieces cost on one stage of this run: by the profile's layer that has the model's name, else its default.

    Raises `ConfigError` for a profile that cannot be read or used.
    """
    heads, kv_heads = heads_from_args(args)
    windows = set(windows_from_args(args))
    profile = load_profile(config.profile)
    layer = layer_of_args(args)
    try:
        return CostModel(
            profile,
            layers_per_stage=max(1, args.num_layers // args.pipeline_model_parallel_size),
            layer=layer if layer in profile.layers else None,
            recompute="full" if args.recompute_granularity == "full" else "none",
            pad_multiple=pad_multiple_from_args(args),
            # where layers differ, planned as if all saw everything: no piece costs more than planned
            window=windows.pop() if len(windows) == 1 else None,
            heads=heads,
            kv_heads=kv_heads,
        )
    except ConfigError as error:
        raise ConfigError(f"this model's cost by --hdp-profile {config.profile}: {error}") from error


def layer_of_args(args: Any) -> str:
    """The layer's name for `match.check_profile`."""
    heads, kv_heads = args.num_attention_heads, args.num_query_groups
    latent = args.multi_latent_attention
    experts = getattr(args, "num_experts", None)
    return layer_name(
        hidden=args.hidden_size,
        ffn=(args.moe_ffn_hidden_size if experts else None) or args.ffn_hidden_size,
        heads=heads,
        kv_heads=kv_heads if args.group_query_attention and not latent else heads,
        head_size=head_size_from_args(args),
        latent=(args.q_lora_rank, args.kv_lora_rank) if latent else None,
        gated=bool(args.swiglu),
        experts=(experts, args.moe_router_topk) if experts else None,
        element_bytes=args.params_dtype.itemsize,
        tensor_parallel=args.tensor_model_parallel_size,
    )


def pad_multiple_from_args(args: Any) -> int:
    """What tokens of a piece are a multiple of: two chunks, and the tensor-parallel ranks that cut its rows."""
    return math.lcm(2, args.tensor_model_parallel_size) if args.sequence_parallel else 2


def arena_bytes(config: HdpConfig) -> int:
    """Host memory that one process takes for activations with --hdp-offload.

    Without --hdp-offload-gib its part of what the profile says of a node. A node with more processes than the profile
    knows is cut into as many parts; nodes are taken to have equally many, as all ranks must make the same plan.

    Raises `ConfigError` where neither the flag nor the profile says how much, or the profile says what cannot be.
    """
    if config.offload_gib is not None:
        return int(config.offload_gib * 2**30)
    profile = load_profile(config.profile)
    if profile.host_memory is None:
        raise ConfigError(
            f"--hdp-offload needs --hdp-offload-gib, the host memory of each process for activations: the profile "
            f"{config.profile} does not say what a node has"
        )
    processes = max(profile.gpus_per_node, local_processes(profile.gpus_per_node))
    share = profile.host_memory / processes
    if not _LEAST_SHARE <= share <= MOST_GIB * 2**30:
        raise ConfigError(
            f"--hdp-offload: field host_memory of --hdp-profile {config.profile} is {profile.host_memory:g} bytes, for "
            f"{processes} processes of a node {share:g} bytes each: it must be 1 MiB to {MOST_GIB:,} GiB; correct the "
            "field, or say it with --hdp-offload-gib"
        )
    return int(share)


def local_processes(default: int) -> int:
    """Processes that torchrun started on this machine; ``default`` without torchrun. No process group need exist."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", default))


def planned_host_bytes(config: HdpConfig) -> int:
    """What a plan may have in the arena of one process at a time: what it will be is estimated, so a part is left."""
    return int(_PLANNED_SHARE * arena_bytes(config))


def stages_from_args(args: Any) -> tuple[int, int]:
    """Pipeline stages, and model parts per stage."""
    return args.pipeline_model_parallel_size, args.virtual_pipeline_model_parallel_size or 1


def heads_from_args(args: Any) -> tuple[int, int]:
    """Query heads and key/value heads of one process; Megatron repeats the latter where there are fewer than ranks.

    Latent attention has keys and values of its own for every head once they are unpacked, as attention sees them.
    """
    grouped = args.group_query_attention and not args.multi_latent_attention
    groups = args.num_query_groups if grouped else args.num_attention_heads
    ranks = args.tensor_model_parallel_size
    return args.num_attention_heads // ranks, max(1, groups // ranks)


def head_size_from_args(args: Any) -> int:
    """Size of a head as attention sees it; of latent attention the part without and the part with positions."""
    if args.multi_latent_attention:
        return int(args.qk_head_dim + args.qk_pos_emb_head_dim)
    return int(args.kv_channels)


def windows_from_args(args: Any) -> tuple[int | None, ...]:
    """What a query of each layer sees, see `window_tokens`; one entry per layer of the model, None where it is all."""
    size, skip = args.window_size, args.window_attn_skip_freq
    windows = (window_tokens(size, skip, layer) for layer in range(1, args.num_layers + 1))
    return tuple(None if window is None or window >= args.seq_length else window for window in windows)


def window_tokens(window_size: tuple[int, int] | None, skip_freq: Any, layer_number: int) -> int | None:
    """Tokens that a query sees in a layer (counted from 1 over the whole model), itself included; None for all before.

    ``window_size`` is Megatron's (left, right): tokens before and after the query, -1 for no limit. As attention is
    causal, right may be 0 or -1, which then mean the same. ``skip_freq``: which layers have no window, as in
    Megatron's --window-attn-skip-freq.

    Raises `ConfigError` for a window that looks ahead.
    """
    if not is_layer_window_attention(window_size, skip_freq, layer_number):
        return None
    assert window_size is not None
    check_window(window_size)
    left = window_size[0]
    return None if left < 0 else left + 1


def check_window(window_size: Any) -> None:
    """Raise `ConfigError` unless ``window_size`` is (left, right) with a right that causal attention can have."""
    if len(window_size) != 2 or window_size[0] < -1 or window_size[1] not in (0, -1):
        raise ConfigError(
            f"--window-size {','.join(map(str, window_size))}: give LEFT,0, the tokens before a query that it sees (-1 "
            "for all). Attention is causal with --hdp, so none after it can be seen"
        )


def listed(value: Any) -> list[Any]:
    """The values of an option that takes one or many."""
    return [] if value is None else list(value) if isinstance(value, list | tuple) else [value]


def router_counts_from_args(args: Any) -> int:
    """Choices of experts that are counted for balance losses: experts x layers of experts; 0 without such losses."""
    coefficients, kinds = listed(args.moe_aux_loss_coeff), listed(args.moe_router_load_balancing_type)
    if not args.num_experts or not any(c and kind != "none" for c, kind in zip(coefficients, kinds)):
        return 0
    frequency = args.moe_layer_freq
    pattern = frequency if isinstance(frequency, list) else [i % frequency == 0 for i in range(args.num_layers)]
    return int(args.num_experts * sum(map(bool, pattern)))


def recomputed_from_args(args: Any) -> tuple[bool, ...]:
    """Layers whose attention runs forward a second time, in the backward pass; one entry per layer of the model."""
    layers, granularity = int(args.num_layers), args.recompute_granularity
    if granularity == "full" and args.recompute_method == "block":
        stages, virtual_stages = stages_from_args(args)
        part = max(1, layers // (stages * virtual_stages))  # every model part recomputes its first layers
        first = int(args.recompute_num_layers)
        return tuple(layer % part < first for layer in range(layers))
    modules = getattr(args, "recompute_modules", None) or ["core_attn"]
    again = granularity == "full" or (granularity == "selective" and "core_attn" in modules)
    return (again,) * layers
