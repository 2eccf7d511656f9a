"""The many shorter rings: the lowest segment takes the longest ring that it holds. Twin of csrc/fine.cpp.

Best fit on a skyline (Burke, Kendall and Whitwell 2004): take the lowest segment, leftmost of equals; of the rings that
it is wide enough for, place the one that needs most ranks, the longest of equals. If it is too narrow for all that is
left, its ranks wait for the lower of its neighbours, and the two become one segment: that gap is for local sequences.

A ring that would end after the target is widened, up to the size that still hides its transfers, if some such size ends
in time. If none does, it keeps its smallest size or takes the widest: both are tried where it matters. Inside the
segment it lies within a node if it can, else beside the higher neighbour, which keeps the free ranks of the segment
together and next to ranks that are free soon.

A placement takes O(n log n) for n rings and segments.
"""

from bisect import bisect_left
from heapq import heapify, heappop, heappush

import numpy as np

from megatron_hdp.cost import CostModel
from megatron_hdp.planner.coarse import Coarse
from megatron_hdp.planner.skyline import Place, best_picoseconds, crosses, crossing_picoseconds, ragged_ranges
from megatron_hdp.types import IntArray

BLOCK_TIMES = 1 << 15
"""Times of rings by size are computed for about so many sizes at a time, when first asked for."""
WALL = (1 << 63) - 1
"""Height of what lies beside the pool."""


class FineRings:
    """Rings by smallest size and then length, both falling, and their times by size.

    ``lengths``, ``smallest`` and ``widest``, which is at least ``smallest``, are int64 [num_rings].
    """

    def __init__(self, cost: CostModel, lengths: IntArray, smallest: IntArray, widest: IntArray) -> None:
        self.smallest: list[int] = smallest.tolist()
        self.widest: list[int] = widest.tolist()
        self.ranks_per_node = cost.ranks_per_node
        self.work = 0
        """Rank-time of all rings at their smallest size."""
        self._cost, self._lengths = cost, lengths
        self._best: list[int] = []
        self._crossing: list[int] = []
        if lengths.size:
            self._best = best_picoseconds(cost, lengths, smallest).tolist()
            self.work = sum(time * size for time, size in zip(self._best, self.smallest))
            self._crossing = crossing_picoseconds(cost, lengths, smallest).tolist()
        self._block = (np.cumsum(widest - smallest + 1) // BLOCK_TIMES).tolist()
        self._blocks: dict[int, tuple[int, list[int], list[int], list[int]]] = {}

    def time(self, ring: int, size: int, start: int) -> int:
        """Picoseconds of a ring of ``size`` ranks from ``start``."""
        near = size <= self.ranks_per_node and crosses(start, size, self.ranks_per_node)
        if size == self.smallest[ring]:
            return self._crossing[ring] if near else self._best[ring]
        at, falling, crossing = self._row(ring)
        at += size - self.smallest[ring]
        return crossing[at] if near else -falling[at]

    def size_within(self, ring: int, limit: int, room: int, late_widest: bool) -> int:
        """The smallest ring of at most ``limit`` ranks that ends within ``room``; if none, its smallest or widest."""
        low = self.smallest[ring]
        high = min(limit, self.widest[ring])
        if high <= low or self._best[ring] <= room:
            return low
        at, falling, _ = self._row(ring)
        if -falling[at + high - low] > room:
            return high if late_widest else low
        return low + bisect_left(falling, -room, at, at + high - low) - at

    def _row(self, ring: int) -> tuple[int, list[int], list[int]]:
        """(where its times begin, negated times on the best links, times across nodes) of a ring, by size."""
        block = self._block[ring]
        if block not in self._blocks:
            first, end = bisect_left(self._block, block), bisect_left(self._block, block + 1)
            low, high = (np.array(sizes[first:end], dtype=np.int64) for sizes in (self.smallest, self.widest))
            offsets, row, size = ragged_ranges(low, high)
            lengths = self._lengths[first:end][row]
            falling = (-best_picoseconds(self._cost, lengths, size)).tolist()
            crossing = crossing_picoseconds(self._cost, lengths, size).tolist()
            self._blocks[block] = first, offsets.tolist(), falling, crossing
        first, begins, falling, crossing = self._blocks[block]
        return begins[ring - first], falling, crossing


class _Waiting:
    """Rings still to place; those placed are skipped by a union-find that points at the next one."""

    def __init__(self, smallest: list[int]) -> None:
        self._negated = [-size for size in smallest]
        self._next = list(range(len(smallest) + 1))

    def longest(self, width: int) -> int:
        """The first ring that needs at most ``width`` ranks; the number of rings if none does."""
        at, after = bisect_left(self._negated, -width), self._next
        while after[at] != at:
            after[at] = after[after[at]]
            at = after[at]
        return at

    def take(self, ring: int) -> None:
        """The ring is placed."""
        self._next[ring] = ring + 1


class _Hills:
    """The skyline as a linked list, with a heap to find its lowest segment; -1 is what lies beside the pool."""

    def __init__(self, coarse: Coarse) -> None:
        count = len(coarse.segments)
        self.start = [segment.start for segment in coarse.segments]
        self.width = [segment.width for segment in coarse.segments]
        self.height = [segment.height for segment in coarse.segments]
        self._before = list(range(-1, count - 1))
        self._after = [*range(1, count), -1]
        self._heap = [(segment.height, segment.start, index) for index, segment in enumerate(coarse.segments)]
        heapify(self._heap)

    def lowest(self) -> int:
        """Index of the lowest segment, leftmost of equals. Entries of segments that changed since are dropped."""
        while True:
            height, start, index = self._heap[0]
            if self.width[index] > 0 and self.height[index] == height and self.start[index] == start:
                return index
            heappop(self._heap)

    def beside(self, index: int) -> tuple[int, int]:
        """Heights of the neighbours on the left and on the right."""
        before, after = self._before[index], self._after[index]
        return (self.height[before] if before >= 0 else WALL), (self.height[after] if after >= 0 else WALL)

    def raise_to(self, index: int, height: int) -> None:
        """Set the height of a whole segment and merge it with neighbours of that height."""
        self.height[index] = height
        for other in (self._before[index], self._after[index]):
            if other >= 0 and self.height[other] == height:
                self.start[index] = min(self.start[index], self.start[other])
                self.width[index] += self.width[other]
                self.width[other] = 0
                self._link(self._before[other], self._after[other])
        heappush(self._heap, (height, self.start[index], index))

    def cut(self, index: int, start: int, size: int) -> None:
        """Shrink a segment to ``size`` ranks from ``start``; what is left of it becomes segments beside it."""
        first, end, height = self.start[index], self.start[index] + self.width[index], self.height[index]
        self.start[index], self.width[index] = start, size
        if start > first:
            self._add(first, start - first, height, self._before[index], index)
        if end > start + size:
            self._add(start + size, end - start - size, height, index, self._after[index])

    def _add(self, start: int, width: int, height: int, before: int, after: int) -> None:
        index = len(self.start)
        self.start.append(start)
        self.width.append(width)
        self.height.append(height)
        self._before.append(before)
        self._after.append(after)
        self._link(before, index)
        self._link(index, after)
        heappush(self._heap, (height, start, index))

    def _link(self, before: int, after: int) -> None:
        if before >= 0:
            self._after[before] = after
        if after >= 0:
            self._before[after] = before


def place_fine(rings: FineRings, target: int, coarse: Coarse, *, late_widest: bool = False) -> None:
    """Place all ``rings`` onto the skyline of ``coarse`` and append them to its placement, numbered after its own.

    ``late_widest``: rings that end after ``target`` with any size get the widest that fits, else their smallest.
    """
    waiting, hills, number = _Waiting(rings.smallest), _Hills(coarse), len(coarse.placed.rings)
    left = len(rings.smallest)
    while left:
        index = hills.lowest()
        height, width = hills.height[index], hills.width[index]
        ring = waiting.longest(width)
        if ring == len(rings.smallest):
            hills.raise_to(index, min(hills.beside(index)))
            continue
        waiting.take(ring)
        left -= 1
        size = rings.size_within(ring, width, target - height, late_widest)
        start = _start(hills, index, size, rings.ranks_per_node)
        time = rings.time(ring, size, start)
        hills.cut(index, start, size)
        hills.raise_to(index, height + time)
        coarse.placed.add(number + ring, Place(start, size, height, time))


def _start(hills: _Hills, index: int, size: int, ranks_per_node: int) -> int:
    """Where in a segment a ring lies: inside a node if it can, else beside the higher neighbour."""
    before, after = hills.beside(index)
    left = hills.start[index]
    right = left + hills.width[index] - size
    first, second = (left, right) if before >= after else (right, left)
    if size > ranks_per_node or not crosses(first, size, ranks_per_node):
        return first
    if not crosses(second, size, ranks_per_node):
        return second
    node = -(-left // ranks_per_node) * ranks_per_node
    return node if node <= right else first
