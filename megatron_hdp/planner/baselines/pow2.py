"""Rings of powers of two in equal counts: the idea of Megatron-LM's dynamic context parallelism (its dev branch).

Every rank runs one micro-batch per wave, all the same number of waves; a ring has a power of two of ranks, an aligned
block, or is the whole pool. Rings may be wider than memory asks, to fill gaps and to shorten the longest sequences.
Written from the idea, not from that code: placement is by this package's cost model, packs are local, and the width
to which the longest rings go is searched. That code itself is run by `megatron_hdp.seams.scheduler`.
"""

import heapq

import numpy as np

from megatron_hdp.cost import CostModel
from megatron_hdp.errors import PlanError
from megatron_hdp.planner.packing import best_fit
from megatron_hdp.planner.span import rank_ends
from megatron_hdp.planner.units import Units, unit_picoseconds, units_plan
from megatron_hdp.types import IntArray, Plan, chunk_tokens

LIMITS = ((1, 1), (3, 4), (1, 2), (3, 8), (1, 4), (3, 16), (1, 8), (1, 16))
"""Fractions of the longest unit's time: rings are widened until no unit takes more, and the best fraction is used."""


def plan_pow2(
    lengths: IntArray,
    num_ranks: int,
    capacity: int,
    pad_multiple: int,
    *,
    cost: CostModel,
    count_multiple: int = 1,
    equal_counts: bool = True,
    offload: bool = False,
) -> Plan:
    """Waves of aligned rings of powers of two; of some widths of the longest rings, the one with the least span.

    The span is that without pipeline stages.

    Args:
        lengths: tokens of every sequence, int64 [num_sequences].
        num_ranks: ranks of the pool.
        capacity: tokens that one rank holds in one micro-batch.
        pad_multiple: pieces are multiples of this.
        cost: what units cost.
        count_multiple: micro-batch counts are a multiple of this.
        equal_counts: no choice here, counts are equal; in the signature of all baselines.
        offload: no choice here, nothing is offloaded.

    Raises:
        PlanError: a sequence does not fit in the pool.
    """
    sizes = ring_sizes(num_ranks)
    needed = -(-lengths // capacity)
    if int(needed.max()) > num_ranks:
        longest = int(np.argmax(needed))
        raise PlanError(
            f"sequence {longest} has {int(lengths[longest])} tokens and needs {int(needed[longest])} ranks of "
            f"{capacity} tokens, the pool has {num_ranks}: raise --hdp-tokens-per-rank or use more ranks"
        )
    smallest = np.searchsorted(sizes, needed)
    times = np.stack([cost.picoseconds(lengths, d, cost.tier(0, d)) for d in sizes.tolist()])
    longest_time = int(times[smallest, np.arange(lengths.size)].max())
    best: tuple[int, Plan] | None = None
    tried: set[bytes] = set()
    for numerator, denominator in LIMITS:
        width = _widen(smallest, times, longest_time * numerator // denominator)
        if width.tobytes() in tried:
            continue
        tried.add(width.tobytes())
        units = _waves(lengths, sizes[width], num_ranks, capacity, pad_multiple, cost)
        plan = units_plan(
            lengths, num_ranks, capacity, pad_multiple, units, equal_counts=True, count_multiple=count_multiple
        )
        span = int(rank_ends(plan, cost).max())
        if best is None or span < best[0]:
            best = span, plan
    assert best is not None
    return best[1]


def ring_sizes(num_ranks: int) -> IntArray:
    """Sizes a ring may have: powers of two up to the pool, and the whole pool."""
    powers = 1 << np.arange(num_ranks.bit_length(), dtype=np.int64)
    return np.unique(np.append(powers, num_ranks))


def _widen(smallest: IntArray, times: IntArray, limit: int) -> IntArray:
    """Index of the ring size of every sequence [num_sequences]: the smallest that takes ``limit`` or less.

    Only rings are widened, one size at a time and only while that is faster at all. ``times`` has the shape
    [num_sizes, num_sequences].
    """
    width = smallest.copy()
    column = np.arange(width.size)
    while True:
        wider = np.minimum(width + 1, times.shape[0] - 1)
        now = times[width, column]
        grows = (smallest > 0) & (now > limit) & (times[wider, column] < now)
        if not np.any(grows):
            return width
        width = np.where(grows, wider, width)


def _waves(
    lengths: IntArray, size: IntArray, num_ranks: int, capacity: int, pad_multiple: int, cost: CostModel
) -> Units:
    """Rings heaviest first into the first wave with room, where ranks have the least work; then packs, balanced."""
    long = np.flatnonzero(size > 1)
    short = np.flatnonzero(size == 1)
    pack = best_fit(2 * chunk_tokens(lengths[short], np.int64(1), pad_multiple), capacity)
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
