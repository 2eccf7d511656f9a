"""Words shared by the two ways in which rings are placed, `planner.coarse` and `planner.fine`.

Time runs upward, ranks lie side by side. The *skyline* is the time at which each rank has run the rings that it has so
far, as segments of neighbouring ranks of equal height. A ring is a rectangle: as wide as its ranks, as high as its
time. It starts at the highest segment that it covers, because its ranks wait for each other; what lies below it idles,
until local sequences fill it (`planner.sand`). So placing rings is strip packing whose rectangles may be reshaped.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from megatron_hdp.cost import CostModel, Tier
from megatron_hdp.types import IntArray


class Segment(NamedTuple):
    """Neighbouring ranks ``start .. start + width - 1`` that are done at the same time ``height``."""

    start: int
    width: int
    height: int


class Place(NamedTuple):
    """Where and when a ring runs: ``size`` ranks from ``start``, ``time`` picoseconds from ``begin``."""

    start: int
    size: int
    begin: int
    time: int
    idle: int = 0
    """Rank-time that waits below it."""


@dataclass(slots=True)
class Placement:
    """Rings in the order in which they were placed: index of the ring, and its place."""

    rings: list[int] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)
    reserve: list[int] = field(default_factory=list)
    """Picoseconds that each rank should be done ahead of the others, see `planner.frame`; empty for none."""

    def add(self, ring: int, place: Place) -> None:
        """Append one ring."""
        self.rings.append(ring)
        self.places.append(place)


def best_picoseconds(cost: CostModel, lengths: IntArray, sizes: IntArray) -> IntArray:
    """Time of rings of ``sizes`` ranks on the best links that such rings can have; int64, broadcast."""
    tier: Any = np.where(sizes > cost.ranks_per_node, int(Tier.ACROSS_NODES), int(Tier.INSIDE_NODE))
    return np.asarray(cost.picoseconds(lengths, sizes, tier), dtype=np.int64) + cost.microbatch_picoseconds()


def crossing_picoseconds(cost: CostModel, lengths: IntArray, sizes: IntArray) -> IntArray:
    """The same for rings that cross nodes, int64 [num_rings]."""
    time = cost.picoseconds(lengths, sizes, int(Tier.ACROSS_NODES))
    return np.asarray(time, dtype=np.int64) + cost.microbatch_picoseconds()


def crosses(start: int, size: int, ranks_per_node: int) -> bool:
    """Does the ring of ``size`` ranks from ``start`` leave its node?"""
    return start // ranks_per_node != (start + size - 1) // ranks_per_node


def ragged_ranges(first: IntArray, last: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """The numbers ``first[i] .. last[i]`` of every row i, one row after the other.

    Returns:
        offsets int64 [num_rows + 1] of the rows, row int64 [num_numbers], number int64 [num_numbers].
    """
    counts = last - first + 1
    offsets = np.zeros(counts.size + 1, dtype=np.int64)
    np.cumsum(counts, out=offsets[1:])
    row = np.repeat(np.arange(counts.size, dtype=np.int64), counts)
    return offsets, row, np.arange(row.size, dtype=np.int64) - offsets[row] + first[row]
