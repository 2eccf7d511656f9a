"""Which capacity and offload setting makes the shortest step that fits a GPU's memory."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron_hdp.errors import HdpError
from megatron_hdp.lengths import format_size
from megatron_hdp.measured_layer import choose
from megatron_hdp.memory import largest_capacity, sized
from megatron_hdp.plan_flags import own_words
from megatron_hdp.planner.host import host_peaks
from megatron_hdp.simulate.runs import Progress
from megatron_hdp.simulate.setting import can_offload, memory_of, parallel, why_no_estimate
from megatron_hdp.simulator.strategies import Setting, StrategyStep, run_strategy
from megatron_hdp.types import IntArray

STATIC = "static"
_SMALLEST = 1024
"""Smaller capacities are not tried: nobody trains with them."""
_UNKNOWN_TIMES = 4
"""Without an estimate of memory, capacities up to so many times the asked one are tried."""
_GRAIN = 1024
"""The largest capacity that fits is rounded down to a multiple."""
WORTH = 0.01
"""A setting is better than one that needs less memory if its step is shorter by more than this part."""


@dataclass(frozen=True, kw_only=True)
class Tried:
    """One step with one capacity, with or without offload."""

    tokens_per_rank: int
    offload: bool
    seconds: float | None
    """Of hdp's step; None if it cannot be planned."""
    static_seconds: float | None
    """Of static context parallelism, which offloads nothing; None if it was not asked for, or cannot."""
    device_bytes: int | None
    """Peak of a GPU with hdp's plan; None without an estimate."""
    host_bytes: int
    """Most that a process has in host memory."""
    fits: bool | None
    """In the memory of a GPU; None without an estimate."""
    failed: str | None = None


@dataclass(frozen=True)
class Search:
    """What was tried, and what is best."""

    rows: tuple[Tried, ...]
    device_bytes: int
    """Memory of a GPU."""
    source: str
    """Who says so."""
    estimated: str | None
    """None if memory was estimated, else why not."""

    @property
    def best(self) -> Tried | None:
        """The shortest step of those that fit; of settings that are nearly as good the one with least memory.

        None where nothing fits, or where nobody knows what fits.
        """
        good = [row for row in self.rows if row.seconds is not None and row.fits]
        if not good:
            return None
        shortest = min(row.seconds for row in good if row.seconds is not None)
        near = [row for row in good if row.seconds is not None and row.seconds <= shortest * (1 + WORTH)]
        return min(near, key=lambda row: (row.offload, row.tokens_per_rank))

    @property
    def best_static(self) -> Tried | None:
        """The same for static context parallelism, which has hdp's memory without offload."""
        good = [row for row in self.rows if row.static_seconds is not None and row.fits and not row.offload]
        return min(good, key=lambda row: row.static_seconds or 0.0, default=None)


def search_rows(found: Search) -> tuple[dict[str, Any], ...]:
    """As a sweep for `megatron_hdp.simulator.files.Simulation`."""
    with_static = any(row.static_seconds is not None for row in found.rows)
    rows = []
    for row in found.rows:
        label = f"{format_size(row.tokens_per_rank)}{', offload' if row.offload else ''}"
        data: dict[str, Any] = {"value": row.tokens_per_rank, "label": label, "hdp": row.seconds}
        data |= {STATIC: row.static_seconds} if with_static else {}
        needs = "" if row.device_bytes is None else f"{sized(row.device_bytes)} of a GPU"
        notes = [row.failed or "", needs, "does not fit" if row.fits is False else ""]
        notes += ["best"] if row is found.best else []
        rows.append(data | {"note": ", ".join(note for note in notes if note)})
    return tuple(rows)


def candidates(setting: Setting, longest: int, device_bytes: int) -> list[int]:
    """Capacities to try, ascending: the asked one, powers of two from what the pool needs to what fits a GPU, and the
    largest that fits."""
    pad, asked = setting.cost.pad_multiple, setting.tokens_per_rank
    least = -(-longest // (setting.ranks * pad)) * pad
    if why_no_estimate(setting) is None:
        shape, spread = setting.spec.shape, parallel(setting)
        measured = choose(shape, spread, asked, setting.cost).measured
        most = largest_capacity(
            shape,
            spread,
            device_bytes,
            longest=longest,
            cost=setting.cost,
            measured=measured,
            pad_multiple=pad,
        )
    else:
        most = _UNKNOWN_TIMES * asked
    grain = -(-_GRAIN // pad) * pad
    largest = most // grain * grain if most >= grain else most
    powers = [1 << bits for bits in range(31) if (1 << bits) % pad == 0 and 1 << bits >= _SMALLEST]
    found = {power for power in powers if least <= power <= most} | {asked}
    if largest >= least and largest < longest:  # from the longest sequence on, more tokens change little
        found.add(largest)
    return sorted(value for value in found if value < 2 * longest or value == asked)


def search(
    lengths: IntArray,
    setting: Setting,
    memory: tuple[int, str],
    *,
    longest: int,
    with_static: bool,
    progress: Callable[[int], Progress],
) -> Search:
    """Try capacities, each with and without offload, on one step.

    Args:
        lengths: its sequences, int64 [num_sequences].
        setting: the run; its ``tokens_per_rank`` and ``offload`` are varied.
        memory: bytes of a GPU, and who says so.
        longest: tokens of the longest sequence of the run.
        with_static: also run static context parallelism.
        progress: number of simulations -> whom to tell of them.
    """
    device, source = memory
    capacities, offloads = candidates(setting, longest, device), (False, True) if can_offload(setting) else (False,)
    told = progress(len(capacities) * (len(offloads) + with_static))
    rows = []
    for capacity in capacities:
        for offload in offloads:
            tried = dataclasses.replace(setting, tokens_per_rank=capacity, offload=offload)
            told.step(f"{capacity:,} tokens per rank{', offload' if offload else ''}")
            row = _tried(lengths, tried, device, longest)
            if with_static and not offload:
                told.step(f"static, {capacity:,} tokens per rank")
                row = dataclasses.replace(row, static_seconds=_static_seconds(lengths, tried, longest))
            rows.append(row)
    return Search(tuple(rows), device, source, why_no_estimate(setting))


def _tried(lengths: IntArray, setting: Setting, device: int, longest: int) -> Tried:
    """One step of hdp."""
    capacity, offload = setting.tokens_per_rank, setting.offload
    empty = Tried(
        tokens_per_rank=capacity,
        offload=offload,
        seconds=None,
        static_seconds=None,
        device_bytes=None,
        host_bytes=0,
        fits=None,
    )
    try:
        step: StrategyStep = run_strategy("hdp", lengths, setting, longest=longest)
    except HdpError as error:
        return dataclasses.replace(empty, failed=own_words(str(error)))
    host = int(host_peaks(step.plan, setting.cost, setting.stages, setting.virtual_stages).max())
    row = dataclasses.replace(empty, seconds=step.result.seconds, host_bytes=host)
    if why_no_estimate(setting) is not None:
        return row
    found = memory_of(setting, step.plan, longest)
    fits = found.device <= device
    return dataclasses.replace(row, device_bytes=found.device, fits=fits)


def _static_seconds(lengths: IntArray, setting: Setting, longest: int) -> float | None:
    try:
        return run_strategy(STATIC, lengths, setting, longest=longest).result.seconds
    except HdpError:
        return None
