"""Balance without pipeline stages: ranks run as many micro-batches as they have time for.

Rings go longest first onto the interval of ranks that is free soonest, as list scheduling does. What then idles before
a ring is a gap; local sequences fill gaps first and level the ranks' ends after.
"""

import bisect
from dataclasses import dataclass

import numpy as np

from megatron_hdp.planner.layout import Batch, Cells, build_plan, ring_cells, slots_of
from megatron_hdp.planner.load import ATTENTION_TOKENS
from megatron_hdp.planner.rooms import fill_rings, longest_rings, pack_groups, spread
from megatron_hdp.types import IntArray, Plan

GAP_SHARE = 4
"""Gaps shorter than the work of capacity / GAP_SHARE tokens stay idle: tiny micro-batches cost more than they save."""


@dataclass(frozen=True)
class _Placed:
    """Where the rings went: first rank of each ring [num_rings], turn of each ring cell on its rank [num_cells]."""

    start: IntArray
    turn: IntArray
    ends: IntArray
    """Time at which each rank has run its rings, gaps counted, shape [num_ranks]."""
    turns: IntArray
    """Rings of each rank, shape [num_ranks]."""
    gaps: tuple[tuple[int, int, int], ...]
    """(room in work, rank, turn of the ring that ends the gap)."""


def plan_dp(batch: Batch) -> Plan:
    """Plan with free counts; pure function of the batch."""
    rings = longest_rings(batch)
    cell_of, fill = fill_rings(batch, rings)
    size = batch.ring_size[rings]
    placed = _place(size, batch.cost[rings] + fill, batch.num_ranks, ATTENTION_TOKENS * batch.capacity // GAP_SHARE)
    ring_sequence, ring_rank = ring_cells(rings, placed.start, size)

    riding = np.flatnonzero(cell_of >= 0)
    local = np.flatnonzero((batch.ring_size == 1) & (cell_of < 0))
    rank, turn = _fill_gaps(batch.cost[local], placed)
    pack = pack_groups(batch.piece_tokens[local], _key(turn, rank, batch.num_ranks), batch.capacity)
    span = int(pack.max(initial=0)) + 2  # times of one turn: its local packs, then its ring
    cells = Cells.join(
        Cells(ring_sequence, ring_rank, placed.turn * span + span - 1),
        Cells(riding, ring_rank[cell_of[riding]], placed.turn[cell_of[riding]] * span + span - 1),
        Cells(local, rank, turn * span + pack),
    )
    slots = slots_of(cells)
    counts = np.zeros(batch.num_ranks, dtype=np.int64)
    np.maximum.at(counts, cells.rank, slots + 1)
    ring_start = np.zeros(batch.lengths.size, dtype=np.int64)
    ring_start[rings] = placed.start
    ring_start[riding], ring_start[local] = ring_rank[cell_of[riding]], rank
    return build_plan(batch, ring_start, cells, slots, counts)


def _place(size: IntArray, work: IntArray, num_ranks: int, least_gap: int) -> _Placed:
    """List scheduling of rings in the given order; each starts when the last rank of its interval is free."""
    ends = np.zeros(num_ranks, dtype=np.int64)
    turns = np.zeros(num_ranks, dtype=np.int64)
    starts, turn, gaps = [], [], []
    for ring_size, ring_work in zip(size.tolist(), work.tolist(), strict=True):
        start = _soonest(ends, ring_size)
        ranks = slice(start, start + ring_size)
        begin = int(ends[ranks].max())
        idle = begin - ends[ranks]
        for offset in np.flatnonzero(idle >= least_gap).tolist():
            gaps.append((int(idle[offset]), start + offset, int(turns[start + offset])))
        starts.append(start)
        turn.append(turns[ranks].copy())
        ends[ranks] = begin + ring_work
        turns[ranks] += 1
    empty = np.zeros(0, dtype=np.int64)
    return _Placed(np.array(starts, dtype=np.int64), np.concatenate([empty, *turn]), ends, turns, tuple(gaps))


def _soonest(ends: IntArray, size: int) -> int:
    """First rank of the interval that is free soonest; ties: least idling, then the lowest rank. O(N log size)."""
    latest, width = ends, 1
    while width < size:  # windows of `width` combine into wider ones
        step = min(width, size - width)
        latest = np.maximum(latest[: latest.size - step], latest[step:])
        width += step
    candidates = np.flatnonzero(latest == latest.min())
    total = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(ends)])
    return int(candidates[np.argmax(total[candidates + size] - total[candidates])])


def _fill_gaps(cost: IntArray, placed: _Placed) -> tuple[IntArray, IntArray]:
    """Rank and turn of every local sequence, both [num_local]: the tightest gap that holds it, else the soonest end.

    Turn t means before the rank's t-th ring; t = number of rings means after all of them.
    """
    rank = np.full(cost.size, -1, dtype=np.int64)
    turn = np.full(cost.size, -1, dtype=np.int64)
    gaps = sorted(placed.gaps)
    order = np.argsort(-cost, kind="stable")
    for item, work in zip(order.tolist(), cost[order].tolist(), strict=True):
        if not gaps:
            break
        found = bisect.bisect_left(gaps, (work, -1, -1))
        if found < len(gaps):
            room, rank[item], turn[item] = gaps.pop(found)
            bisect.insort(gaps, (room - work, int(rank[item]), int(turn[item])))
    rest = np.flatnonzero(rank < 0)
    rank[rest] = spread(cost[rest], placed.ends)
    turn[rest] = placed.turns[rank[rest]]
    return rank, turn


def _key(turn: IntArray, rank: IntArray, num_ranks: int) -> IntArray:
    return turn * num_ranks + rank
