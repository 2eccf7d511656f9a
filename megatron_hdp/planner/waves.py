"""Waves: all ranks run units of about the same time side by side, wave after wave.

Ranks that run in lockstep, because they share experts or because long rings tie them together slot by slot, lose what
the slots' times differ. Here rings are widened until none takes longer than a limit, and go heaviest first into the
first wave with room, in aligned blocks. Packs of local sequences fill what is left.
"""

import heapq
from collections.abc import Callable

import numpy as np

from megatron_hdp.cost import CostModel
from megatron_hdp.planner.packing import best_fit
from megatron_hdp.planner.units import Units, unit_picoseconds, units_plan
from megatron_hdp.types import IntArray, Plan, chunk_tokens

LIMITS = ((1, 1), (3, 4), (1, 2), (3, 8), (1, 4), (3, 16), (1, 8), (1, 16))
"""Fractions of the longest unit's time: rings are widened until no unit takes more, and the best fraction is used."""


def powers_of_two(num_ranks: int) -> IntArray:
    """Powers of two up to the pool, and the whole pool."""
    powers = 1 << np.arange(num_ranks.bit_length(), dtype=np.int64)
    return np.unique(np.append(powers, num_ranks))


def best_waves(
    lengths: IntArray,
    num_ranks: int,
    capacity: int,
    cost: CostModel,
    sizes: IntArray,
    span: Callable[[Plan], int],
    count_multiple: int = 1,
) -> Plan:
    """Of some limits of the longest rings, the plan with the least span. Counts are equal, slots of a ring too.

    Args:
        lengths: tokens of every sequence, int64 [num_sequences].
        num_ranks: ranks of the pool, which must hold the longest sequence.
        capacity: tokens that one rank holds in one micro-batch.
        cost: what units cost.
        sizes: sizes that rings may have, ascending from 1 to num_ranks.
        span: what is to be least.
        count_multiple: micro-batch counts are a multiple of this.
    """
    smallest = np.searchsorted(sizes, -(-lengths // capacity))
    rings = np.flatnonzero(smallest > 0)
    times = np.stack([cost.picoseconds(lengths[rings], d, cost.tier(0, d)) for d in sizes.tolist()])
    local = lengths[smallest == 0]
    longest = [times[smallest[rings], np.arange(rings.size)], np.atleast_1d(cost.picoseconds(local, 1, 0))]
    longest_time = int(np.concatenate(longest).max())
    best: tuple[int, Plan] | None = None
    tried: set[bytes] = set()
    for numerator, denominator in LIMITS:
        size = np.ones_like(lengths)
        size[rings] = sizes[_widen(smallest[rings], times, longest_time * numerator // denominator)]
        if size.tobytes() in tried:
            continue
        tried.add(size.tobytes())
        units = _waves(lengths, size, num_ranks, capacity, cost)
        plan = units_plan(
            lengths,
            num_ranks,
            capacity,
            cost.pad_multiple,
            units,
            equal_counts=True,
            count_multiple=count_multiple,
        )
        found = span(plan)
        if best is None or found < best[0]:
            best = found, plan
    assert best is not None
    return best[1]


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


def _waves(lengths: IntArray, size: IntArray, num_ranks: int, capacity: int, cost: CostModel) -> Units:
    """Rings heaviest first into the first wave with room, where ranks have the least work; then packs, balanced."""
    long = np.flatnonzero(size > 1)
    short = np.flatnonzero(size == 1)
    pack = best_fit(2 * chunk_tokens(lengths[short], np.int64(1), cost.pad_multiple), capacity)
    num_packs = int(pack.max(initial=-1)) + 1
    of = np.empty(lengths.size, dtype=np.int64)
    of[long], of[short] = num_packs + np.arange(long.size), pack
    sizes = np.concatenate([np.ones(num_packs, dtype=np.int64), size[long]])
    work = unit_picoseconds(cost, lengths, of, sizes)

    start, wave = np.empty_like(sizes), np.empty_like(sizes)
    loads = np.zeros(num_ranks, dtype=np.int64)
    free: list[np.typing.NDArray[np.bool_]] = []
    rings = num_packs + np.lexsort((np.arange(long.size), -sizes[num_packs:], -work[num_packs:]))
    for unit in rings.tolist():
        start[unit], wave[unit] = _place(free, loads, int(sizes[unit]))
        ranks = slice(int(start[unit]), int(start[unit] + sizes[unit]))
        loads[ranks] = loads[ranks].max() + work[unit]

    area = int(sizes.sum())
    while len(free) * num_ranks < area:  # so many waves that each rank has a place for its packs
        free.append(np.ones(num_ranks, dtype=bool))
    places = [np.flatnonzero([w[rank] for w in free]).tolist() for rank in range(num_ranks)]
    heap = [(load, rank) for rank, load in enumerate(loads.tolist()) if places[rank]]
    heapq.heapify(heap)
    for unit in np.argsort(-work[:num_packs], kind="stable").tolist():
        load, rank = heap[0]
        start[unit], wave[unit] = rank, places[rank].pop(0)
        if places[rank]:
            heapq.heapreplace(heap, (load + int(work[unit]), rank))
        else:
            heapq.heappop(heap)
    return Units(of, start, sizes, wave)


def _place(free: list[np.typing.NDArray[np.bool_]], loads: IntArray, size: int) -> tuple[int, int]:
    """First rank and wave of a ring: the first wave with a free block, there the block with the least work; marks it.

    Opens a wave if none has room.
    """
    blocks = loads.size // size
    load = loads[: blocks * size].reshape(blocks, size).max(axis=1)
    for wave in range(len(free) + 1):
        if wave == len(free):
            free.append(np.ones(loads.size, dtype=bool))
        room = np.flatnonzero(free[wave][: blocks * size].reshape(blocks, size).all(axis=1))
        if room.size:
            block = int(room[np.argmin(load[room])])
            free[wave][block * size : (block + 1) * size] = False
            return block * size, wave
    raise AssertionError("an empty wave has room for every ring")
