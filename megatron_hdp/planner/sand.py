"""Local sequences between and after the rings, and the columns of the plan. Twin of csrc/sand.cpp.

Local sequences are many and short, so they fill what rings leave, as sand does. Longest first: each goes into the
tightest gap before a ring that holds it (best fit), else onto the rank that is done soonest (longest processing time
first, Graham 1969). What ranks run after their last ring is then levelled (`planner.level`). What a rank runs between
two rings is packed into micro-batches by best fit (Johnson 1973).

Gradients are summed over the pool while each rank's last micro-batch runs backward, and parameters gathered while its
first runs forward. So ranks begin and end with long micro-batches where that is free. Of what a rank has left after its
last ring the first pack runs last, which is full and has the longest sequences; but a ring that is the last of all its
ranks runs after all of that, if it takes longer than these packs.
"""

from bisect import bisect_left, insort
from heapq import heapify, heapreplace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megatron_hdp.planner.level import level_tails
from megatron_hdp.planner.skyline import Placement
from megatron_hdp.types import IntArray

Columns = tuple[IntArray, IntArray, IntArray, IntArray, IntArray]
"""``ring_start``, ``ring_size``, ``rank_offsets``, ``microbatch_offsets``, ``piece_sequence`` of a `Plan`."""


class Locals(NamedTuple):
    """Sequences that one rank holds alone, longest first; all int64 [num_local]."""

    sequence: IntArray
    tokens: IntArray
    """Padding counted."""
    time: IntArray
    """Picoseconds, with a share of the micro-batch's constant."""


class Spread(NamedTuple):
    """Where the local sequences run: before the ``turn``-th ring of ``rank``, in the order of `Locals`."""

    rank: list[int]
    turn: list[int]
    span: int
    """When the last rank is done with its reserve, picoseconds."""


def spread_locals(placed: Placement, times: list[int], num_ranks: int) -> Spread:
    """Rank and turn of local sequences of ``times``, which do not rise."""
    ends, turns = [0] * num_ranks, [0] * num_ranks
    least = times[-1] if times else 1
    gaps: list[tuple[int, int, int]] = []  # (room, rank, turn of the ring that ends the gap)
    for start, size, begin, time, _ in placed.places:
        for rank in range(start, start + size):
            if begin - ends[rank] >= least:
                gaps.append((begin - ends[rank], rank, turns[rank]))
            ends[rank] = begin + time
            turns[rank] += 1
    for rank, reserve in enumerate(placed.reserve):
        ends[rank] += reserve
    gaps.sort()
    loads = [end * num_ranks + rank for rank, end in enumerate(ends)]  # one number orders like (end, rank)
    heapify(loads)
    ranks, turn_of = [], []
    for time in times:
        if gaps and gaps[-1][0] >= time:
            room, rank, turn = gaps.pop(bisect_left(gaps, (time, -1, -1)))
            if room - time >= least:
                insort(gaps, (room - time, rank, turn))
        else:
            rank = loads[0] % num_ranks
            heapreplace(loads, loads[0] + time * num_ranks)
            turn = turns[rank]
        ranks.append(rank)
        turn_of.append(turn)
    return Spread(ranks, turn_of, max(loads) // num_ranks)


def level_locals(placed: Placement, times: list[int], num_ranks: int, goal: int, spread: Spread) -> Spread:
    """``spread`` with the ranks' ends brought down to ``goal`` picoseconds, as far as that can be."""
    if spread.span <= goal:
        return spread
    rank, turn = spread.rank.copy(), spread.turn.copy()
    return Spread(rank, turn, level_tails(placed, times, rank, turn, num_ranks, goal))


def pack_falling(sizes: list[int], capacity: int) -> list[int]:
    """Bins of sizes that do not rise, by best fit, as `planner.packing.best_fit`; fast where bins are few."""
    if sum(sizes) <= capacity:
        return [0] * len(sizes)
    many = len(sizes)
    rooms: list[int] = []  # room x many + bin of the open bins, rising
    bins, num_bins = [], 0
    for size in sizes:
        found = bisect_left(rooms, size * many)
        if found < len(rooms):
            entry = rooms.pop(found) - size * many
        else:
            entry = (capacity - size) * many + num_bins
            num_bins += 1
        if entry >= many:
            insort(rooms, entry)
        bins.append(entry % many)
    return bins


def build_columns(
    ring_sequence: IntArray, placed: Placement, local: Locals, spread: Spread, num_ranks: int, capacity: int
) -> Columns:
    """The plan: a rank runs, for every turn, its packs of local sequences and then the ring; see above for its last.

    ``ring_sequence`` int64 [num_rings] is the sequence of every ring. Pieces of a micro-batch ascend by sequence. A
    rank with nothing to run gets one empty micro-batch.
    """
    num_sequences = ring_sequence.size + local.sequence.size
    ring_start, ring_size = np.zeros(num_sequences, dtype=np.int64), np.ones(num_sequences, dtype=np.int64)
    local_rank = np.array(spread.rank, dtype=np.int64)
    ring_start[local.sequence] = local_rank
    if placed.places:
        places = np.array([place[:2] for place in placed.places], dtype=np.int64)
        rings = ring_sequence[np.array(placed.rings, dtype=np.int64)]
        ring_start[rings], ring_size[rings] = places.T
    else:
        places, rings = np.zeros((0, 2), dtype=np.int64), ring_sequence
    cell_ring, cell_rank = _cells(places)
    cell_turn, cells_of = _turns(cell_rank, num_ranks)
    first_group = np.cumsum(cells_of + 1) - cells_of - 1  # a group: what a rank runs in one turn
    turn = np.array(spread.turn, dtype=np.int64)
    tail = turn == cells_of[local_rank]
    group = first_group[local_rank] + turn
    bins = _pack(group, local.tokens, capacity)
    longest = np.zeros(num_ranks, dtype=np.int64)
    np.add.at(longest, local_rank[tail & (bins == 0)], local.time[tail & (bins == 0)])
    last_of_all = _ends_with_ring(placed, cell_ring, cell_rank, longest)
    if np.any(last_of_all):
        tail &= ~last_of_all[local_rank]
        group -= last_of_all[local_rank] & (turn == cells_of[local_rank])
        bins = _pack(group, local.tokens, capacity)
    most = int(bins.max(initial=-1)) + 2
    bins[tail & (bins == 0)] = most - 1
    slot = np.concatenate([group * most + bins, (first_group[cell_rank] + cell_turn) * most + most - 1])
    rank = np.concatenate([local_rank, cell_rank])
    sequence = np.concatenate([local.sequence, rings[cell_ring]])
    order = np.lexsort((sequence, slot))
    return ring_start, ring_size, *_offsets(slot[order], rank[order], num_ranks), sequence[order]


def _cells(places: IntArray) -> tuple[IntArray, IntArray]:
    """(index of the ring, rank) of every rank of every ring; ``places`` int64 [num_rings, (start, size)]."""
    place = np.repeat(np.arange(len(places), dtype=np.int64), places[:, 1])
    first = np.cumsum(places[:, 1]) - places[:, 1]
    return place, np.arange(place.size, dtype=np.int64) - first[place] + places[place, 0]


def _ends_with_ring(
    placed: Placement, cell_ring: IntArray, cell_rank: IntArray, longest: IntArray
) -> npt.NDArray[np.bool_]:
    """Ranks whose last ring is the last of all its ranks and takes longer than the ``longest`` pack after it of each.

    Cells are in the order of placing; ``longest`` is int64 [num_ranks], picoseconds, the result bool [num_ranks]. All
    of them have the same time left after the ring, so it may as well run at the end of that.
    """
    last = np.full(longest.size, -1, dtype=np.int64)
    np.maximum.at(last, cell_rank, cell_ring)
    sizes, times = (np.array([place[k] for place in placed.places], dtype=np.int64) for k in (1, 3))
    late = np.bincount(last[last >= 0], minlength=sizes.size) == sizes
    after = np.zeros_like(sizes)
    np.maximum.at(after, cell_ring, longest[cell_rank])
    found: npt.NDArray[np.bool_] = np.isin(last, np.flatnonzero(late & (times > after)))
    return found


def _turns(rank: IntArray, num_ranks: int) -> tuple[IntArray, IntArray]:
    """(how many entries of the same rank come before, [num_entries]; entries of each rank, [num_ranks]), int64."""
    counts = np.bincount(rank, minlength=num_ranks)
    order = np.argsort(rank, kind="stable")
    turn = np.empty_like(rank)
    turn[order] = np.arange(rank.size) - np.repeat(np.cumsum(counts) - counts, counts)
    return turn, counts


def _pack(group: IntArray, tokens: IntArray, capacity: int) -> IntArray:
    """Bin of every local sequence inside its group, int64 [num_local]."""
    bins = np.zeros(group.size, dtype=np.int64)
    order = np.argsort(group, kind="stable")  # inside a group still longest first
    cuts = np.flatnonzero(np.diff(group[order])) + 1
    sizes = tokens[order].tolist()
    packed: list[int] = []
    for begin, end in zip([0, *cuts.tolist()], [*cuts.tolist(), len(sizes)]):
        packed += pack_falling(sizes[begin:end], capacity)
    bins[order] = packed
    return bins


def _offsets(slot: IntArray, rank: IntArray, num_ranks: int) -> tuple[IntArray, IntArray]:
    """``rank_offsets`` and ``microbatch_offsets`` of pieces that are sorted by ``slot``, one micro-batch each."""
    first = np.flatnonzero(np.diff(slot, prepend=-1))
    counts = np.bincount(rank[first], minlength=num_ranks)
    empty = counts == 0
    rank_offsets = np.zeros(num_ranks + 1, dtype=np.int64)
    np.cumsum(np.maximum(counts, 1), out=rank_offsets[1:])
    pieces = np.zeros(int(rank_offsets[-1]), dtype=np.int64)
    pieces[np.arange(first.size) + np.cumsum(empty)[rank[first]]] = np.diff(first, append=slot.size)
    return rank_offsets, np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(pieces)])
