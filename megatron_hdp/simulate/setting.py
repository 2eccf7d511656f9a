"""From the flags of `megatron-hdp simulate` to a setting that can be simulated, or an error with the flag to change."""

import dataclasses
from typing import Any, Literal

from megatron_hdp.cost import load_profile
from megatron_hdp.errors import ConfigError
from megatron_hdp.lengths import format_size
from megatron_hdp.measured_layer import choose
from megatron_hdp.memory import MemoryEstimate, Parallel, estimate
from megatron_hdp.plan_flags import host_bytes
from megatron_hdp.simulate.flags import SimulateFlags
from megatron_hdp.simulator import Cluster, cluster_names, load_cluster
from megatron_hdp.simulator.models import Model
from megatron_hdp.simulator.strategies import Setting
from megatron_hdp.types import Plan

ASSUMED_DEVICE_BYTES = 80 * 10**9
"""Memory of a GPU where nobody says."""
SMALLEST_PART = 3
"""Layers that a model part needs for offload: two stay."""


def read_setting(flags: SimulateFlags) -> Setting:
    """The run, checked as far as can be without its data.

    Raises:
        ConfigError: sizes that do not fit each other, a profile or a cluster that cannot be used.
    """
    capacity, context, _ = flags.sizes()
    profile = load_profile(flags.profile)
    model = flags.model.model_of(profile)
    setting = Setting(
        model=model,
        gpus=flags.gpus,
        **_layout(flags, model),
        tokens_per_rank=capacity,
        context=context,
        hardware=profile,
        cluster=_cluster(flags),
        recompute=flags.recompute,
        offload=flags.offload,
    )
    check_machines(setting)
    _check_costs(setting)
    _check_capacity(setting)
    return dataclasses.replace(
        setting, host_bytes=host_bytes(flags.host_gib, flags.offload or flags.search, setting.cost.profile)
    )


def _cluster(flags: SimulateFlags) -> Cluster | None:
    """The one that is named, or that ships under the name of a shipped profile; else the profile says all."""
    name = flags.profile if flags.cluster is None and flags.profile in cluster_names() else flags.cluster
    return None if name is None else load_cluster(name)


def _layout(flags: SimulateFlags, model: Model) -> dict[str, Any]:
    """Sizes that flags give, or the model; refuses GPUs, layers and experts that they do not divide."""
    sizes = {
        "--tp": model.tensor_parallel if flags.tp is None else flags.tp,
        "--stages": model.stages if flags.stages is None else flags.stages,
        "--virtual-stages": model.virtual_stages if flags.virtual_stages is None else flags.virtual_stages,
        "--expert-group": model.expert_group if flags.expert_group is None else flags.expert_group,
    }
    for flag, value in sizes.items():
        if value < 1:
            raise ConfigError(f"{flag} is {value}: it must be at least 1")
    tp, stages, parts, group = sizes.values()
    layers, heads = model.shape.layers, model.shape.heads
    if heads % tp:
        raise ConfigError(f"--tp is {tp}, which does not divide the {heads} heads of {model.name}: use {_some(heads)}")
    if model.shape.ffn % tp:
        raise ConfigError(
            f"--tp is {tp}, which does not divide the MLP of {model.name}, {model.shape.ffn} wide: change --ffn or --tp"
        )
    if parts > 1 and stages == 1:
        raise ConfigError(f"--virtual-stages is {parts} with one stage: interleaving needs --stages 2 or more")
    if layers % (stages * parts):
        cut = f"{stages}" if parts == 1 else f"{stages} x {parts}"
        raise ConfigError(
            f"--stages{' x --virtual-stages' * (parts > 1)} is {cut}, which does not divide the {layers} layers of "
            f"{model.name}: use {_some(layers)}"
        )
    column = tp * stages
    if flags.gpus % column:
        near = [value for value in (flags.gpus // column * column, -(-flags.gpus // column) * column) if value]
        raise ConfigError(
            f"--gpus is {flags.gpus:,}, and a rank has {tp} x {stages} GPUs (--tp x --stages): use a multiple of "
            f"{column}, such as {' or '.join(map(str, near))}, or other sizes"
        )
    ranks = flags.gpus // column
    if ranks % group:
        raise ConfigError(
            f"--expert-group is {group}, which does not divide the pool of {ranks:,} ranks ({flags.gpus:,} GPUs / "
            f"({tp} x {stages})): use {_some(ranks)}"
        )
    return {"tensor_parallel": tp, "stages": stages, "virtual_stages": parts, "expert_group": group}


def _some(number: int) -> str:
    """Divisors, the eight smallest and the number itself."""
    found = [value for value in range(1, number + 1) if number % value == 0]
    shown = found if len(found) <= 9 else [*found[:8], "...", found[-1]]
    return ", ".join(map(str, shown))


def _count(number: int, what: str) -> str:
    """ "1 node", "2 nodes"."""
    return f"{number:,} {what}{'s' * (number != 1)}"


def check_machines(setting: Setting) -> None:
    """Refuse more GPUs than the cluster has, and tensor parallelism that leaves its nodes."""
    cluster, gpus = setting.machines, setting.gpus
    if setting.tensor_parallel > cluster.gpus_per_node or cluster.gpus_per_node % setting.tensor_parallel:
        raise ConfigError(
            f"--tp is {setting.tensor_parallel}, and nodes of {cluster.name} have "
            f"{_count(cluster.gpus_per_node, 'GPU')}: use {_some(cluster.gpus_per_node)}"
        )
    if cluster.nodes is not None and gpus > cluster.nodes * cluster.gpus_per_node:
        held = cluster.nodes * cluster.gpus_per_node
        raise ConfigError(
            f"--gpus is {gpus:,}, and cluster {cluster.name} has {_count(cluster.nodes, 'node')} of "
            f"{cluster.gpus_per_node}, {_count(held, 'GPU')}: use at most {held:,}, or raise `nodes` in the cluster's "
            f"file to {-(-gpus // cluster.gpus_per_node):,}"
        )


def _check_costs(setting: Setting) -> None:
    """Refuse sizes, profiles and clusters whose times are too long to count."""
    try:
        setting.cost  # noqa: B018, it is made here and kept
    except ConfigError as error:
        raise ConfigError(f"{error}: check the model's sizes, --profile and --cluster") from error


def _check_capacity(setting: Setting) -> None:
    """Refuse a capacity that is no multiple of the padding, and offload that has no layers to work with."""
    capacity, pad = setting.tokens_per_rank, setting.cost.pad_multiple
    if capacity % pad:
        near = [value for value in (capacity // pad * pad, (capacity // pad + 1) * pad) if value]
        raise ConfigError(
            f"--tokens-per-rank is {capacity}: pieces are multiples of {pad} tokens (lcm(2, --tp)), so use "
            f"{' or '.join(map(str, near))}"
        )
    if capacity > setting.cost.max_length:
        raise ConfigError(
            f"--tokens-per-rank is {capacity:,}: costs of this profile with {setting.cost.layers_per_stage} layers a "
            f"stage are counted up to {setting.cost.max_length:,} tokens: use less"
        )
    if setting.offload and not can_offload(setting):
        raise ConfigError(
            f"--offload with {setting.spec.shape.layers} layers in {setting.stages} x {setting.virtual_stages} parts: "
            f"a model part needs {SMALLEST_PART} layers or more, use fewer --stages or --virtual-stages"
        )


def can_offload(setting: Setting) -> bool:
    """Has a model part enough layers, of which two stay?"""
    return setting.spec.shape.layers // (setting.stages * setting.virtual_stages) >= SMALLEST_PART


def check_pool(longest: int, setting: Setting) -> None:
    """Refuse a pool that does not hold the longest sequence of the data, ``longest`` tokens before it is cut.

    Raises `ConfigError` with the numbers and what to change.
    """
    sequence, ranks, capacity = min(longest, setting.context), setting.ranks, setting.tokens_per_rank
    column, pad = setting.tensor_parallel * setting.stages, setting.cost.pad_multiple
    if sequence > ranks * capacity:
        raise ConfigError(
            f"the longest sequence has {sequence:,} tokens, and {setting.gpus:,} GPUs are {_count(ranks, 'rank')} of "
            f"{setting.tensor_parallel} x {setting.stages} GPUs (--tp x --stages) with {format_size(capacity)} tokens "
            f"each, which hold {ranks * capacity:,}: set --gpus to at least {-(-sequence // capacity) * column:,}, "
            f"--tokens-per-rank to at least {-(-sequence // (pad * ranks)) * pad:,}, or --context to at most "
            f"{ranks * capacity:,}"
        )
    if sequence > setting.cost.max_length:
        raise ConfigError(
            f"the longest sequence has {sequence:,} tokens, costs of this profile with "
            f"{setting.cost.layers_per_stage} layers a stage are counted up to {setting.cost.max_length:,}: lower "
            "--context"
        )


def device_memory(flags: SimulateFlags, setting: Setting) -> tuple[int, str]:
    """Bytes of a GPU, and who says so."""
    if flags.device_gib is not None:
        return int(flags.device_gib * 2**30), "--device-gib"
    cluster, profile = setting.machines, setting.cost.profile
    for memory, source in (
        (cluster.device_memory, f"cluster {cluster.name}"),
        (profile.device_memory, f"profile {profile.name}"),
    ):
        if memory is not None:
            return int(memory), source
    return ASSUMED_DEVICE_BYTES, "80 GB, assumed; --device-gib says it"


def parallel(setting: Setting) -> Parallel:
    """How the model is spread, for the memory estimate; sequence parallelism with tensor parallelism."""
    recompute: Literal["none", "full"] = setting.recompute
    return Parallel(
        ranks=setting.ranks,
        tensor_parallel=setting.tensor_parallel,
        sequence_parallel=setting.tensor_parallel > 1,
        stages=setting.stages,
        virtual_stages=setting.virtual_stages,
        recompute=recompute,
    )


def why_no_estimate(setting: Setting) -> str | None:
    """Why a GPU's memory cannot be estimated; None if it can."""
    if setting.spec.experts > 1:
        return "models with experts have no estimate of memory (docs/memory.md)"
    return None


def memory_of(setting: Setting, plan: Plan, longest: int) -> MemoryEstimate:
    """What a GPU needs for a plan of a dense model."""
    shape, spread, cost = setting.spec.shape, parallel(setting), setting.cost
    measured = choose(shape, spread, setting.tokens_per_rank, cost).measured
    return estimate(shape, spread, setting.tokens_per_rank, longest=longest, cost=cost, plan=plan, measured=measured)
