"""Rings of a pipeline's plan: two skylines back to back, and rows in which all ranks of a ring meet.

In a pipeline a long micro-batch among short ones makes all stages wait while it passes through them. The order that
waits least has the longest in the middle and falls off to both sides (a hill), so rings are dealt out to two halves;
each is placed as `planner.coarse` does, longest first, and the front half then runs backwards in time.
"""

from dataclasses import dataclass

import numpy as np

from megatron_hdp.cost import CostModel
from megatron_hdp.cost.core import core_arguments
from megatron_hdp.planner.dp_python import place_rings_python
from megatron_hdp.planner.native import _core
from megatron_hdp.types import IntArray

MOST_COARSE = 128
"""Rings that are placed one by one with care; the others go to the lowest ranks."""
SHARE = 20
"""Price of ranks left free beside a ring, of 1024; see `planner.coarse`."""


@dataclass(frozen=True)
class Rings:
    """Sequences that need rings, by smallest ring and then length, both falling; arrays [num_rings]."""

    sequence: IntArray
    length: IntArray
    smallest: IntArray
    widest: IntArray
    work: int
    """Rank-time of all at their smallest rings."""

    def take(self, index: IntArray, cost: CostModel) -> "Rings":
        """Those with these indices."""
        return rings_of(self.sequence[index], self.length[index], self.smallest[index], self.widest[index], cost)


def rings_of(sequence: IntArray, length: IntArray, smallest: IntArray, widest: IntArray, cost: CostModel) -> Rings:
    """`Rings` of these columns."""
    tier = np.where(smallest > cost.ranks_per_node, 1, 0)
    work = int((cost.picoseconds(length, smallest, tier) * smallest).sum()) if length.size else 0
    return Rings(sequence, length, smallest, widest, work)


@dataclass(frozen=True)
class Half:
    """Rings with their place; row 0 is where both halves meet. Arrays [num_rings] in the order of placing."""

    sequence: IntArray
    start: IntArray
    size: IntArray
    row: IntArray
    depth: IntArray
    """Rows that each rank's rings reach, int64 [num_ranks]."""
    height: IntArray
    """When each rank has run its rings, waiting counted, int64 [num_ranks]."""


def place_half(rings: Rings, num_ranks: int, cost: CostModel, target: int, tie: int) -> Half:
    """Place one half's rings; all should end by ``target`` picoseconds. ``tie``: see `planner.coarse`."""
    if not rings.sequence.size:
        empty, zeros = np.zeros(0, dtype=np.int64), np.zeros(num_ranks, dtype=np.int64)
        return Half(empty, empty, empty, empty, zeros, zeros)
    arguments = (rings.length, rings.smallest, rings.widest, num_ranks)
    if _core is None:
        placed = place_rings_python(*arguments, cost, MOST_COARSE, target, tie, SHARE)
    else:
        placed = _core.place_rings(*arguments, core_arguments(cost), MOST_COARSE, target, tie, SHARE)
    ring, start, size, begin, time = placed
    row, depth, height = stack_rings(start, size, begin + time, num_ranks)
    return Half(rings.sequence[ring], start, size, row, depth, height)


def stack_rings(start: IntArray, size: IntArray, end: IntArray, num_ranks: int) -> tuple[IntArray, IntArray, IntArray]:
    """Rows of rings: each is above all rows that its ranks have.

    Args:
        start: first rank of each ring, int64 [num_rings].
        size: its ranks, int64 [num_rings].
        end: when it ends, int64 [num_rings].
        num_ranks: ranks of the pool.

    Returns:
        row of each ring; rows that each rank reaches, and when its last ring ends, int64 [num_ranks].
    """
    return (stack_rings_python if _core is None else _core.stack_rings)(start, size, end, num_ranks)


def stack_rings_python(
    start: IntArray, size: IntArray, end: IntArray, num_ranks: int
) -> tuple[IntArray, IntArray, IntArray]:
    """Twin of the C++ `stack_rings`."""
    row, depth, height = np.empty_like(start), np.zeros(num_ranks, dtype=np.int64), np.zeros(num_ranks, dtype=np.int64)
    for i, (first, ranks, time) in enumerate(zip(start.tolist(), size.tolist(), end.tolist(), strict=True)):
        members = slice(first, first + ranks)
        row[i] = depth[members].max()
        depth[members] = row[i] + 1
        height[members] = time
    return row, depth, height
