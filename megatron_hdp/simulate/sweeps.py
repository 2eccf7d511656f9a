"""One step at other capacities, pools, contexts, bandwidths and amounts of host memory."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_hdp.errors import HdpError
from megatron_hdp.lengths import format_size
from megatron_hdp.memory import sized
from megatron_hdp.plan_flags import own_words
from megatron_hdp.simulate.runs import Progress
from megatron_hdp.simulate.setting import can_offload, check_machines, check_pool, memory_of, why_no_estimate
from megatron_hdp.simulator.strategies import MegatronPlanner, Setting, StrategyStep, run_strategy
from megatron_hdp.types import IntArray

_TIMES = (0.25, 0.5, 1.0, 2.0, 4.0)
_HOST_GIB = (8, 32, 128)
"""Host memory of a GPU that is tried where no limit is known."""

Row = dict[str, Any]
"""As in `megatron_hdp.simulator.files.Simulation.sweeps`."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a sweep varies, and what it runs."""

    setting: Setting
    lengths: Callable[[int], IntArray]
    """Context -> sequences of the first step."""
    longest: int
    """Tokens of the longest document of the data."""
    names: Sequence[str]
    """Strategies, hdp first."""
    megatron: MegatronPlanner | None
    device_bytes: int


@dataclass(frozen=True)
class _Point:
    """One value of what is swept."""

    value: float
    label: str
    setting: Setting


def sweep(name: str, asked: Asked, progress: Callable[[int], Progress]) -> tuple[Row, ...]:
    """Rows of a sweep, ascending: value, label, strategy -> seconds or None, and a note where there is one.

    Args:
        name: of `megatron_hdp.simulate.flags.SWEEPS`.
        asked: see `Asked`.
        progress: number of simulations -> whom to tell of them.

    Raises:
        ConfigError: no such sweep can be made of this setting.
    """
    points = _POINTS[name](asked)
    told = progress(len(points) * len(asked.names))
    return tuple(_row(name, point, asked, told) for point in points)


def _row(name: str, point: _Point, asked: Asked, told: Progress) -> Row:
    """One value: every strategy, and what hdp's plan needs of a GPU."""
    row: Row = {"value": point.value, "label": point.label} | dict.fromkeys(asked.names)
    setting, longest = point.setting, min(asked.longest, point.setting.context)
    held = setting.ranks * setting.tokens_per_rank
    if held < longest:
        return row | {"note": f"the pool holds {held:,} tokens, the longest sequence has {longest:,}"}
    try:
        check_machines(setting)
        check_pool(longest, setting)
        lengths = asked.lengths(setting.context)
    except HdpError as error:
        return row | {"note": own_words(str(error))}
    notes = []
    for strategy in asked.names:
        told.step(f"{name} {point.label}, {strategy}")
        try:
            step = run_strategy(strategy, lengths, setting, longest=longest, megatron=asked.megatron)
        except HdpError as error:
            notes.append(f"{strategy}: {own_words(str(error))}")
            continue
        row[strategy] = step.result.seconds
        if strategy == asked.names[0]:
            notes += _memory_note(step, setting, longest, asked.device_bytes)
    return row | ({"note": "; ".join(notes)} if notes else {})


def _memory_note(step: StrategyStep, setting: Setting, longest: int, device_bytes: int) -> list[str]:
    """That it does not fit the GPU's memory, if so."""
    if why_no_estimate(setting) is not None:
        return []
    needed = memory_of(setting, step.plan, longest).device
    return [f"needs {sized(needed)} of a GPU"] if needed > device_bytes else []


def _capacities(asked: Asked) -> list[_Point]:
    setting = asked.setting
    pad, capacity = setting.cost.pad_multiple, setting.tokens_per_rank
    values = sorted({max(pad, int(capacity * times) // pad * pad) for times in _TIMES})
    return [_Point(value, format_size(value), dataclasses.replace(setting, tokens_per_rank=value)) for value in values]


def _pools(asked: Asked) -> list[_Point]:
    setting = asked.setting
    column, group = setting.tensor_parallel * setting.stages, setting.expert_group
    pools = sorted({max(1, int(setting.ranks * times) // group) * group for times in _TIMES})
    return [
        _Point(ranks, f"{ranks:,} ({ranks * column:,} GPUs)", dataclasses.replace(setting, gpus=ranks * column))
        for ranks in pools
    ]


def _contexts(asked: Asked) -> list[_Point]:
    setting = asked.setting
    values = sorted({max(1, int(setting.context * times)) for times in (0.125, *_TIMES[:-1])})
    values = [value for value in values if value <= setting.context or value // 2 < asked.longest]
    return [_Point(value, format_size(value), dataclasses.replace(setting, context=value)) for value in values]


def _bandwidths(asked: Asked) -> list[_Point]:
    setting = asked.setting
    machines = setting.machines
    points = []
    for times in _TIMES:
        bandwidth = machines.nic_bandwidth * times
        cluster = dataclasses.replace(machines, nic_bandwidth=bandwidth)
        per_gpu = bandwidth * machines.nics_per_node / machines.gpus_per_node
        label = f"{8e-9 * per_gpu:,.0f} Gb/s a GPU"
        points.append(_Point(per_gpu, label, dataclasses.replace(setting, cluster=cluster)))
    return points


def _offloads(asked: Asked) -> list[_Point]:
    setting = asked.setting
    points = [_Point(0, "none", dataclasses.replace(setting, offload=False))]
    if not can_offload(setting):
        return points
    limit = setting.host_bytes
    sizes = [gib << 30 for gib in _HOST_GIB] if limit is None else sorted({int(limit * times) for times in _TIMES})
    for size in sizes:
        if size:
            changed = dataclasses.replace(setting, offload=True, host_bytes=size)
            points.append(_Point(size / 2**30, sized(size), changed))
    return points


_POINTS: dict[str, Callable[[Asked], list[_Point]]] = {
    "tokens-per-rank": _capacities,
    "ranks": _pools,
    "context": _contexts,
    "bandwidth": _bandwidths,
    "offload": _offloads,
}
