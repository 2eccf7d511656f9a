"""Waves: all ranks run units of about the same time side by side, wave after wave.

Ranks that run in lockstep, because they share experts or because long rings tie them together slot by slot, lose what
the slots' times differ. Here rings are widened until none takes longer than a limit, and go heaviest first into the
first wave with room, in aligned blocks. Packs of local sequences fill what is left. C++ where built, else Python.
"""

import heapq
from dataclasses import dataclass

import numpy as np

from megatron_hdp.cost import CostModel
from megatron_hdp.planner.columns import Columns, Layout
from megatron_hdp.planner.native import _core
from megatron_hdp.planner.packing import best_fit
from megatron_hdp.planner.units import PHASES, Units, arrange, cells, unit_ends
from megatron_hdp.types import IntArray

LIMITS = ((1, 1), (3, 4), (1, 2), (3, 8), (1, 4), (3, 16), (1, 8), (1, 16))
"""Fractions of the longest unit's time: rings are widened until no unit takes more, and the best fraction is used."""


def powers_of_two(num_ranks: int) -> IntArray:
    """Powers of two up to the pool, and the whole pool."""
    powers = 1 << np.arange(num_ranks.bit_length(), dtype=np.int64)
    return np.unique(np.append(powers, num_ranks))


@dataclass(frozen=True)
class _Batch:
    """What stays the same whatever the rings' sizes."""

    lengths: IntArray
    rings: IntArray
    """Sequences that need rings, [num_rings]."""
    pack: IntArray
    """Pack of each of the others, [num_locals]."""
    locals: IntArray
    forward: IntArray
    """Picoseconds of every pack, [num_packs], like the next."""
    backward: IntArray
    num_ranks: int


def best_waves(
    lengths: IntArray, num_ranks: int, capacity: int, cost: CostModel, sizes: IntArray, layout: Layout
) -> Columns:
    """The plan with the least span, of some limits of the longest rings. Counts are equal, slots of a ring too.

    Args:
        lengths: tokens of every sequence, int64 [num_sequences].
        num_ranks: ranks of the pool, which must hold the longest sequence.
        capacity: tokens that one rank holds in one micro-batch.
        cost: what units cost.
        sizes: sizes that rings may have, ascending from 1 to num_ranks.
        layout: what is timed; counts are a multiple as it demands.
    """
    smallest = np.searchsorted(sizes, -(-lengths // capacity))
    batch = _read(lengths, smallest, num_ranks, capacity, cost)
    long, width = lengths[batch.rings], smallest[batch.rings]
    times = np.stack([cost.picoseconds(long, d, cost.tier(0, d)) for d in sizes.tolist()])
    local_times = np.atleast_1d(cost.picoseconds(lengths[batch.locals], 1, 0))
    longest = int(np.concatenate([times[width, np.arange(long.size)], local_times]).max())
    best: tuple[int, Units] | None = None
    tried: set[bytes] = set()
    for numerator, denominator in LIMITS:
        size = sizes[_widen(width, times, longest * numerator // denominator)]
        if size.tobytes() not in tried:
            tried.add(size.tobytes())
            units, span = _time(batch, size, cost, layout)
            if best is None or span < best[0]:
                best = span, units
    assert best is not None
    units = best[1]
    unit, _ = cells(units)
    return arrange(units, units.time[unit], _counts(units, num_ranks, layout))


def _read(lengths: IntArray, smallest: IntArray, num_ranks: int, capacity: int, cost: CostModel) -> _Batch:
    """Local sequences in packs, by best fit."""
    short = np.flatnonzero(smallest == 0)
    pack = best_fit(np.asarray(cost.piece_tokens(lengths[short], 1), dtype=np.int64), capacity)
    times = []
    for phase in PHASES:
        total = np.full(int(pack.max(initial=-1)) + 1, cost.microbatch_picoseconds(phase), dtype=np.int64)
        np.add.at(total, pack, cost.picoseconds(lengths[short], 1, 0, phase))
        times.append(total)
    return _Batch(lengths, np.flatnonzero(smallest > 0), pack, short, times[0], times[1], num_ranks)


def _time(batch: _Batch, size: IntArray, cost: CostModel, layout: Layout) -> tuple[Units, int]:
    """Units whose times are their waves, and the span. ``size``: of every ring, [num_rings]."""
    units = _waves(batch, size, cost)
    long = batch.lengths[batch.rings]
    tier = cost.tier(units.start[batch.forward.size :], size)
    forward, backward = (
        np.concatenate([packs, cost.microbatch_picoseconds(phase) + cost.picoseconds(long, size, tier, phase)])
        for phase, packs in zip(PHASES, (batch.forward, batch.backward), strict=True)
    )
    counts = _counts(units, batch.num_ranks, layout)
    return units, int(unit_ends(units, counts, forward, backward, cost, layout).max())


def _counts(units: Units, num_ranks: int, layout: Layout) -> IntArray:
    """Equal counts: all waves, and what the layout demands."""
    count = -(-(int(units.time.max()) + 1) // layout.count_multiple) * layout.count_multiple
    return np.full(num_ranks, count, dtype=np.int64)


def _widen(smallest: IntArray, times: IntArray, limit: int) -> IntArray:
    """Index of the size of every ring [num_rings]: the smallest that takes ``limit`` or less.

    One size at a time, and only while that is faster at all. ``times`` has the shape [num_sizes, num_rings].
    """
    width = smallest.copy()
    column = np.arange(width.size)
    while True:
        wider = np.minimum(width + 1, times.shape[0] - 1)
        now = times[width, column]
        grows = (now > limit) & (times[wider, column] < now)
        if not np.any(grows):
            return width
        width = np.where(grows, wider, width)


def _waves(batch: _Batch, size: IntArray, cost: CostModel) -> Units:
    """Rings heaviest first into the first wave with room, where ranks have the least work; then packs, balanced.

    Units are packs and then rings; their times are their waves.
    """
    num_packs, num_ranks = batch.forward.size, batch.num_ranks
    of = np.empty(batch.lengths.size, dtype=np.int64)
    of[batch.rings], of[batch.locals] = num_packs + np.arange(size.size), batch.pack
    sizes = np.concatenate([np.ones(num_packs, dtype=np.int64), size])
    long = batch.lengths[batch.rings]
    ring_work = cost.microbatch_picoseconds() + cost.picoseconds(long, size, cost.tier(0, size))
    work = np.concatenate([batch.forward + batch.backward, ring_work])
    start, wave = place_units(sizes, work, num_packs, num_ranks)
    return Units(of, start, sizes, wave)


def place_units(size: IntArray, work: IntArray, num_packs: int, num_ranks: int) -> tuple[IntArray, IntArray]:
    """First rank and wave of every unit, int64 [num_units] each.

    Args:
        size: ranks of each unit, at most ``num_ranks``; packs come first and have one.
        work: picoseconds of each.
        num_packs: units that are packs.
        num_ranks: ranks of the pool.
    """
    if _core is None:
        return place_units_python(size, work, num_packs, num_ranks)
    start, wave = _core.place_units(size, work, num_packs, num_ranks)
    return start, wave


def place_units_python(size: IntArray, work: IntArray, num_packs: int, num_ranks: int) -> tuple[IntArray, IntArray]:
    """Twin of the C++ `place_units`."""
    start, wave = np.empty_like(size), np.empty_like(size)
    loads = np.zeros(num_ranks, dtype=np.int64)
    free, used = _Free(num_ranks), 0
    ring_size, ring_work = size[num_packs:], work[num_packs:]
    rings = num_packs + np.lexsort((np.arange(ring_size.size), -ring_size, -ring_work))
    for unit in rings.tolist():
        start[unit], wave[unit] = free.place(loads, int(size[unit]))
        used = max(used, int(wave[unit]) + 1)
        ranks = slice(int(start[unit]), int(start[unit] + size[unit]))
        loads[ranks] = loads[ranks].max() + work[unit]

    used = max(used, -(-int(size.sum()) // num_ranks))  # so many waves that each rank has a place for its packs
    free.open(used)
    places = [np.flatnonzero(free.ranks[:used, rank]).tolist() for rank in range(num_ranks)]
    heap = [(load, rank) for rank, load in enumerate(loads.tolist()) if places[rank]]
    heapq.heapify(heap)
    for unit in np.argsort(-work[:num_packs], kind="stable").tolist():
        load, rank = heap[0]
        start[unit], wave[unit] = rank, places[rank].pop(0)
        if places[rank]:
            heapq.heapreplace(heap, (load + int(work[unit]), rank))
        else:
            heapq.heappop(heap)
    return start, wave


class _Free:
    """Which ranks are free in which wave."""

    def __init__(self, num_ranks: int) -> None:
        self.ranks = np.ones((1, num_ranks), dtype=np.bool_)  # [waves, ranks]
        self.first: dict[int, int] = {}
        """Size -> waves before this one have no free block of it, and never will: nothing gets free again."""

    def open(self, waves: int) -> None:
        """Open more waves, up to ``waves`` in all."""
        more = waves - self.ranks.shape[0]
        if more > 0:
            self.ranks = np.concatenate([self.ranks, np.ones((more, self.ranks.shape[1]), dtype=np.bool_)])

    def place(self, loads: IntArray, size: int) -> tuple[int, int]:
        """First rank and wave of a ring: the first wave with a free block, there the block with the least work."""
        blocks = loads.size // size
        wave = self.first.get(size, 0)
        while wave < self.ranks.shape[0]:
            free = np.flatnonzero(self.ranks[wave, : blocks * size].reshape(blocks, size).all(axis=1))
            if free.size:
                break
            wave += 1
        else:
            self.open(2 * wave)
            free = np.arange(blocks)
        self.first[size] = wave
        load = loads[: blocks * size].reshape(blocks, size)[free].max(axis=1)
        block = int(free[np.argmin(load)])
        self.ranks[wave, block * size : (block + 1) * size] = False
        return block * size, wave
