"""Units: what all baselines are made of. A unit is sequences that share one ring of ranks and one micro-batch."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron_hdp.cost import CostModel, Phase
from megatron_hdp.planner.columns import Columns, Layout
from megatron_hdp.planner.graph import tie_experts
from megatron_hdp.planner.span import ends_of_columns
from megatron_hdp.types import IntArray, Plan

FloatArray = npt.NDArray[np.float64]

PHASES: tuple[Phase, Phase] = ("forward", "backward")
_NEVER = np.iinfo(np.int64).max // 2
"""Later than any rank is free, and twice it still fits."""


@dataclass(frozen=True)
class Units:
    """Who shares a micro-batch and where it runs. All but ``of`` have the shape [num_units]."""

    of: IntArray
    """Unit of every sequence, shape [num_sequences]."""
    start: IntArray
    """First rank of the unit's ring."""
    size: IntArray
    """Ranks of the ring, 1 for a local pack."""
    time: IntArray
    """Ranks run their units in order of time; units that share a rank have different times."""


def units_plan(
    lengths: IntArray,
    num_ranks: int,
    capacity: int,
    pad_multiple: int,
    units: Units,
    *,
    offload: FloatArray | None = None,
    same_slots: bool = False,
    equal_counts: bool = False,
    count_multiple: int = 1,
) -> Plan:
    """The plan that runs every unit as one micro-batch on each rank of its ring.

    One time for all ranks of a unit is a common order of all rings, so they cannot wait for each other in a circle.

    Args:
        lengths: tokens of every sequence, int64 [num_sequences].
        num_ranks: ranks of the pool.
        capacity: tokens that one rank holds in one micro-batch.
        pad_multiple: pieces are multiples of this.
        units: the units.
        offload: fraction of each sequence's activations that leaves, [num_sequences]; zeros when None.
        same_slots: a unit has the same slot on all its ranks, as pipelines need; ranks wait in empty micro-batches.
        equal_counts: all ranks have equal counts, and the same slots; empty micro-batches fill up.
        count_multiple: counts are a multiple of this.
    """
    unit, rank = cells(units)
    slots = _same_slots(units, num_ranks)[unit] if same_slots or equal_counts else _next_slots(units.time[unit], rank)
    counts = np.ones(num_ranks, dtype=np.int64)
    np.maximum.at(counts, rank, slots + 1)
    if equal_counts:
        counts[:] = counts.max()
    counts = -(-counts // count_multiple) * count_multiple

    columns = arrange(units, slots, counts)
    return Plan(
        num_ranks=num_ranks,
        capacity=capacity,
        pad_multiple=pad_multiple,
        lengths=lengths,
        offload=np.zeros(lengths.size) if offload is None else offload,
        **columns._asdict(),
    )


def arrange(units: Units, slots: IntArray, counts: IntArray) -> Columns:
    """The columns of the plan in which cell i of `cells` runs in ``slots[i]`` and rank r has ``counts[r]`` slots."""
    unit, rank = cells(units)
    rank_offsets = offsets(counts)
    members = order_by(units.of, np.arange(units.of.size))  # the sequences of unit 0, then those of unit 1, ...
    number = np.bincount(units.of, minlength=units.size.size)
    first = np.cumsum(number) - number
    pieces = number[unit]  # of every cell
    inside = np.arange(int(pieces.sum())) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    sequence = members[np.repeat(first[unit], pieces) + inside]
    microbatch = np.repeat(rank_offsets[rank] + slots, pieces)
    order = order_by(microbatch, sequence)
    return Columns(
        ring_start=units.start[units.of],
        ring_size=units.size[units.of],
        rank_offsets=rank_offsets,
        microbatch_offsets=offsets(np.bincount(microbatch, minlength=int(rank_offsets[-1]))),
        piece_sequence=sequence[order],
    )


def unit_ends(
    units: Units, counts: IntArray, forward: IntArray, backward: IntArray, cost: CostModel, layout: Layout
) -> IntArray:
    """When each rank is done, picoseconds [num_ranks]; as `planner.span.rank_ends` of the plan that `arrange` makes.

    Args:
        units: units whose times are their slots; ``of`` is not looked at.
        counts: micro-batches of each rank, int64 [num_ranks].
        forward: picoseconds of every unit on one stage, int64 [num_units].
        backward: the same for backward.
        cost: what empty micro-batches cost.
        layout: how the model is cut.
    """
    unit, rank = cells(units)
    rank_offsets = offsets(counts)
    microbatch = rank_offsets[rank] + units.time[unit]
    times = []
    for phase, of_unit in zip(PHASES, (forward, backward), strict=True):
        time = np.full(int(rank_offsets[-1]), cost.microbatch_picoseconds(phase), dtype=np.int64)
        time[microbatch] = of_unit[unit]
        times.append(time)
    shared = np.flatnonzero(units.size[unit] > 1)  # only rings make ranks wait for each other
    shared = shared[np.argsort(microbatch[shared], kind="stable")]
    held = np.bincount(microbatch[shared], minlength=int(rank_offsets[-1]))
    columns = (offsets(held), unit[shared], units.size)
    if layout.expert_group > 1:
        columns = tie_experts(rank_offsets, *columns, layout.expert_group)
    return ends_of_columns(rank_offsets, *columns, times[0], times[1], layout.stages, layout.virtual_stages)


def order_by(first: IntArray, second: IntArray) -> IntArray:
    """Indices that sort by ``first`` and then by ``second``; pairs differ, 0 <= second, and products fit int64.

    One key sorts several times as fast as `numpy.lexsort`.
    """
    return np.argsort(first * (int(second.max(initial=0)) + 1) + second)


def cells(units: Units) -> tuple[IntArray, IntArray]:
    """Unit and rank of every micro-batch, unit by unit; shapes [sum of size]."""
    unit = np.repeat(np.arange(units.size.size), units.size)
    offset = np.arange(unit.size) - np.repeat(np.cumsum(units.size) - units.size, units.size)
    return unit, units.start[unit] + offset


def _next_slots(time: IntArray, rank: IntArray) -> IntArray:
    """Slot of every cell when each rank numbers its cells 0, 1, 2, ... in order of time."""
    order = np.lexsort((time, rank))
    before = np.searchsorted(rank[order], rank[order])  # cells of lower ranks
    slots = np.empty_like(order)
    slots[order] = np.arange(order.size) - before
    return slots


def _same_slots(units: Units, num_ranks: int) -> IntArray:
    """Slot of every unit, in order of time: the first that is free on all its ranks and after what they have."""
    following = np.zeros(num_ranks, dtype=np.int64)
    slots = np.empty_like(units.size)
    for unit in np.argsort(units.time, kind="stable").tolist():
        ranks = slice(int(units.start[unit]), int(units.start[unit] + units.size[unit]))
        slots[unit] = following[ranks].max()
        following[ranks] = slots[unit] + 1
    return slots


def offsets(sizes: IntArray) -> IntArray:
    """Running sums from 0: where each of a list of groups begins, and the end."""
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(sizes, dtype=np.int64)])


def unit_picoseconds(cost: CostModel, lengths: IntArray, of: IntArray, size: IntArray) -> IntArray:
    """Time of a micro-batch of every unit, forward and backward, int64 [num_units]; rings at their usual tier."""
    ring = size[of]
    total = np.full(size.size, cost.microbatch_picoseconds(), dtype=np.int64)
    np.add.at(total, of, cost.picoseconds(lengths, ring, cost.tier(0, ring)))
    return total


def soonest(ends: IntArray, size: int, allowed: npt.NDArray[np.bool_] | None = None) -> int | None:
    """First rank of the interval of ``size`` ranks that is free soonest; ties: least idling, then the lowest rank.

    Args:
        ends: when each rank is free, int64 [num_ranks].
        size: ranks of the interval.
        allowed: ranks that may be used, [num_ranks]; all when None.

    Returns:
        None if no interval of allowed ranks is that wide.
    """
    if size > ends.size:
        return None
    latest = ends if allowed is None else np.where(allowed, ends, _NEVER)
    width = 1
    while width < size:  # windows of `width` combine into wider ones
        step = min(width, size - width)
        latest = np.maximum(latest[: latest.size - step], latest[step:])
        width += step
    best = int(latest.min())
    if best == _NEVER:
        return None
    candidates = np.flatnonzero(latest == best)
    if size == 1:
        return int(candidates[0])
    total = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(ends)])
    return int(candidates[np.argmax(total[candidates + size] - total[candidates])])
