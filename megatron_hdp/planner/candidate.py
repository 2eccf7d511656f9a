"""One candidate for a pipeline's plan: rings in two halves, local packs around them, and what slots come of it."""

from dataclasses import dataclass

import numpy as np

from megatron_hdp.cost import CostModel
from megatron_hdp.planner.columns import Columns, Layout
from megatron_hdp.planner.halves import Half
from megatron_hdp.planner.packs import Locals, Packs
from megatron_hdp.planner.units import PHASES, Units, arrange, cells, unit_ends
from megatron_hdp.types import IntArray


@dataclass(frozen=True)
class Candidate:
    """Micro-batches with their slots: a ring has the same slot on all its ranks. Arrays [num_units]."""

    start: IntArray
    size: IntArray
    slot: IntArray
    sequence: IntArray
    """Sequence of a ring, -1 for a pack."""
    packs: Packs
    counts: IntArray
    """Micro-batches of each rank, [num_ranks]."""


def assemble(front: Half, back: Half, packs: Packs, lead: int, layout: Layout) -> Candidate:
    """Slots for rings and packs.

    Every rank runs its front packs from small to large, the front half's rings from their last row to the first, the
    back half's rings, and its back packs from large to small. The front of a rank with fewer micro-batches begins with
    empty ones, so that row 0 has the same slot on all ranks.

    Args:
        front: rings of the front half.
        back: rings of the back half.
        packs: local packs of every rank.
        lead: share of a rank's packs that goes to the front beside what levels the front rings, of 1024.
        layout: constrains counts.
    """
    num_ranks = front.depth.size
    in_front = _deal(front, packs, lead)
    time = packs.forward + packs.backward
    order = np.lexsort((np.arange(time.size), -time, in_front, packs.rank))  # by rank: back, then front; falling
    place = np.empty_like(order)
    place[order] = np.arange(order.size) - _first_of(packs.rank[order] * 2 + in_front[order])
    number = np.bincount(packs.rank[in_front], minlength=num_ranks)
    middle = int((front.depth + number).max())
    slot = np.where(
        in_front,
        middle - 1 - front.depth[packs.rank] - place,
        middle + back.depth[packs.rank] + place,
    )
    start = np.concatenate([front.start, back.start, packs.rank])
    size = np.concatenate([front.size, back.size, np.ones_like(packs.rank)])
    slots = np.concatenate([middle - 1 - front.row, middle + back.row, slot])
    sequence = np.concatenate([front.sequence, back.sequence, np.full_like(packs.rank, -1)])
    return Candidate(start, size, slots, sequence, packs, _counts(start, size, slots, num_ranks, layout))


def _deal(front: Half, packs: Packs, lead: int) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Which packs run in front, bool [num_packs]: longest first to the side that has less of what it needs."""
    num_ranks = front.depth.size
    time = packs.forward + packs.backward
    total = np.zeros(num_ranks, dtype=np.int64)
    np.add.at(total, packs.rank, time)
    gap = np.minimum(front.height.max() - front.height, total)
    rest = total - gap
    need = gap + rest // 1024 * lead + rest % 1024 * lead // 1024  # rest * lead may leave int64
    order = np.lexsort((np.arange(time.size), -time, packs.rank))
    in_front = np.zeros(time.size, dtype=np.bool_)
    needs, totals = need.tolist(), total.tolist()
    rank_before, here, there = -1, 0, 0
    for pack, rank, work in zip(order.tolist(), packs.rank[order].tolist(), time[order].tolist(), strict=True):
        if rank != rank_before:
            rank_before, here, there = rank, 0, 0
        want_front = needs[rank]
        want_back = totals[rank] - want_front
        # where less of the need is met after this pack: (here + work) / want_front against (there + work) / want_back
        if (2 * here + work) * want_back <= (2 * there + work) * want_front and want_front > 0:
            in_front[pack] = True
            here += work
        else:
            there += work
    return in_front


def _first_of(keys: IntArray) -> IntArray:
    """Index at which the run of each key begins; ``keys`` are grouped."""
    begins = np.flatnonzero(np.diff(keys, prepend=-1) != 0)
    return np.repeat(begins, np.diff(np.append(begins, keys.size)))


def _counts(start: IntArray, size: IntArray, slot: IntArray, num_ranks: int, layout: Layout) -> IntArray:
    """Micro-batches of every rank: at least one, and what the layout demands."""
    rank = np.repeat(start, size) + np.arange(int(size.sum())) - np.repeat(np.cumsum(size) - size, size)
    counts = np.ones(num_ranks, dtype=np.int64)
    np.maximum.at(counts, rank, np.repeat(slot, size) + 1)
    counts = -(-counts // layout.count_multiple) * layout.count_multiple
    if layout.expert_group > 1:
        counts = np.repeat(counts.reshape(-1, layout.expert_group).max(axis=1), layout.expert_group)
    return counts


def units_of(candidate: Candidate, locals_: Locals, num_sequences: int) -> Units:
    """The candidate's micro-batches as units; their times are their slots."""
    rings = np.flatnonzero(candidate.sequence >= 0)
    of = np.zeros(num_sequences, dtype=np.int64)
    of[candidate.sequence[rings]] = rings
    of[locals_.sequence] = rings.size + candidate.packs.of
    return Units(of, candidate.start, candidate.size, candidate.slot)


def ends(candidate: Candidate, lengths: IntArray, cost: CostModel, layout: Layout) -> IntArray:
    """When each rank is done, picoseconds [num_ranks]; as `planner.span.rank_ends` of the finished plan."""
    rings = int((candidate.sequence >= 0).sum())
    length, size = lengths[candidate.sequence[:rings]], candidate.size[:rings]
    tier = cost.tier(candidate.start[:rings], size)
    forward, backward = (
        np.concatenate([cost.microbatch_picoseconds(phase) + cost.picoseconds(length, size, tier, phase), own])
        for phase, own in zip(PHASES, (candidate.packs.forward, candidate.packs.backward), strict=True)
    )
    units = Units(np.zeros(0, dtype=np.int64), candidate.start, candidate.size, candidate.slot)
    return unit_ends(units, candidate.counts, forward, backward, cost, layout)


def finish(candidate: Candidate, locals_: Locals, num_sequences: int) -> Columns:
    """The columns of the plan."""
    units = units_of(candidate, locals_, num_sequences)
    unit, _ = cells(units)
    return arrange(units, candidate.slot[unit], candidate.counts)
