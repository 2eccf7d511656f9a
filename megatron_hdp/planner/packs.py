"""Local sequences in a pipeline: onto ranks by load, into packs whose sizes ramp up and down. C++ where built.

A pipeline fills and drains in the time of its first and last micro-batches, so each rank gets a few small packs for
its beginning and its end, and a long micro-batch waits less between packs that are not much shorter.
"""

import heapq
from dataclasses import dataclass

import numpy as np

from megatron_hdp.planner.native import _core
from megatron_hdp.types import IntArray


@dataclass(frozen=True)
class Locals:
    """Sequences that one rank holds alone, longest first; arrays [num_locals]."""

    sequence: IntArray
    tokens: IntArray
    """Padding counted."""
    forward: IntArray
    """Picoseconds on one stage."""
    backward: IntArray


@dataclass(frozen=True)
class Packs:
    """Micro-batches of local sequences; arrays [num_packs] but for the first."""

    of: IntArray
    """Pack of every local sequence, [num_locals]."""
    rank: IntArray
    forward: IntArray
    backward: IntArray


def spread(work: IntArray, loads: IntArray) -> IntArray:
    """Rank of every item, in the given order onto the least loaded rank (LPT, Graham 1969, if work falls).

    Args:
        work: of each item, int64 [num_items].
        loads: what each rank already has, int64 [num_ranks].

    Returns:
        int64 [num_items]; ties go to the lowest rank.
    """
    return spread_python(work, loads) if _core is None else _core.spread(work, loads)


def spread_python(work: IntArray, loads: IntArray) -> IntArray:
    """Twin of the C++ `spread`."""
    heap = [(load, rank) for rank, load in enumerate(loads.tolist())]
    heapq.heapify(heap)
    ranks = []
    for item in work.tolist():
        load, rank = heap[0]
        ranks.append(rank)
        heapq.heapreplace(heap, (load + item, rank))
    return np.array(ranks, dtype=np.int64)


def pack_ranks(rank: IntArray, size: IntArray, num_ranks: int, capacity: int, rooms: IntArray) -> IntArray:
    """Bin of every item inside its rank by best fit.

    Args:
        rank: of each item, int64 [num_items].
        size: of each item, falling inside a rank, int64 [num_items].
        num_ranks: ranks.
        capacity: room of a new bin; an item larger than that (its activations leave) has one alone.
        rooms: bins that a rank has from the start, if its items are at least as large together.

    Returns:
        int64 [num_items]; bins of a rank count from 0, those of ``rooms`` first.
    """
    if _core is None:
        return pack_ranks_python(rank, size, num_ranks, capacity, rooms)
    return _core.pack_ranks(rank, size, num_ranks, capacity, rooms)


def pack_ranks_python(rank: IntArray, size: IntArray, num_ranks: int, capacity: int, rooms: IntArray) -> IntArray:
    """Twin of the C++ `pack_ranks`."""
    total = np.zeros(num_ranks, dtype=np.int64)
    np.add.at(total, rank, size)
    wanted, enough = rooms.tolist(), (total >= int(rooms.sum())).tolist()
    left = [list(wanted) if enough[r] else [] for r in range(num_ranks)]
    bins = []
    for r, tokens in zip(rank.tolist(), size.tolist(), strict=True):
        open_ = left[r]
        fits = [(room, b) for b, room in enumerate(open_) if room >= tokens]
        if fits:
            best = min(fits)[1]
        else:
            best = len(open_)
            open_.append(capacity)
        open_[best] -= tokens
        bins.append(best)
    return np.array(bins, dtype=np.int64)


def ramp_rooms(steps: int, least: int, capacity: int, pad_multiple: int) -> IntArray:
    """Rooms of the packs that lead up to full ones, and down again: ``steps`` even steps each, int64 [2 steps].

    ``least``: tokens of the first, which should be such that there are enough sequences as short as that.
    """
    step = np.arange(steps, dtype=np.int64)
    rooms = (least + (capacity - least) * step // max(steps, 1)) // pad_multiple * pad_multiple
    return np.repeat(np.maximum(rooms, pad_multiple), 2)


def make_packs(
    locals_: Locals, rank: IntArray, num_ranks: int, capacity: int, rooms: IntArray, constants: tuple[int, int]
) -> Packs:
    """Packs of every rank. ``rank``: of each local sequence; ``rooms``: see `pack_ranks`.

    ``constants``: picoseconds of every micro-batch in forward and in backward.
    """
    if not rank.size:
        empty = np.zeros(0, dtype=np.int64)
        return Packs(empty, empty, empty, empty)
    bins = pack_ranks(rank, locals_.tokens, num_ranks, capacity, rooms)
    width = int(bins.max()) + 1
    key = rank * width + bins
    keys = np.flatnonzero(np.bincount(key))
    of = np.searchsorted(keys, key)
    forward, backward = (np.full(keys.size, constant, dtype=np.int64) for constant in constants)
    np.add.at(forward, of, locals_.forward)
    np.add.at(backward, of, locals_.backward)
    return Packs(of, keys // width, forward, backward)
