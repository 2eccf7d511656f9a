"""The long rings, few and hard to place. Twin of csrc/coarse.cpp.

Rings go longest first, or in another order, onto the skyline (list scheduling). A ring is tried at both ends of every
segment: walking from there to the other side, the first place that is wide enough for the smallest ring that still ends
by the *target*. Of that place up to three sizes are weighed: the smallest one; the widest that hides its transfers; the
widest at all.

What a place costs is rank-time that is lost:

    idling below the ring + what widening adds to size x time + price x ranks left free beside it in the walked segments

The last term stands for ranks that later rings are too wide for. Its price (a share of the ring's time) and how ties
are broken are guesses, so `planner.dp_python` tries several, with several targets, and keeps what ends first. Where no
size ends by the target, the place and size with the earliest end wins.

Rings are widened up to the size that still hides transfers, since up to there rank-time grows by padding alone. Where
even that ring lasts longer than the target, all sizes up to the fastest one are allowed.

Sources: skylines and their lowest or tightest places are from strip packing (bottom-left: Baker, Coffman and Rivest
1980; best fit: Burke, Kendall and Whitwell 2004); tasks whose number of processors is chosen, sized by a common target
time and then list-scheduled: Turek, Wolf and Yu 1992.
"""

from bisect import bisect_left
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from megatron_hdp.cost import CostModel
from megatron_hdp.planner.skyline import (
    Place,
    Placement,
    Segment,
    best_picoseconds,
    crosses,
    crossing_picoseconds,
    ragged_ranges,
)
from megatron_hdp.types import IntArray

SCAN_SHARE = 32
"""The fastest ring is sought in steps of 1 / SCAN_SHARE of the size: it is flat there."""


class CoarseRing(NamedTuple):
    """A ring to place, with its time for every size."""

    smallest: int
    """Ranks that its memory needs."""
    widest: int
    """Widest ring that hides its transfers."""
    times: list[int]
    """Of rings of smallest + k ranks on the best links that such rings can have."""
    crossing: list[int]
    """The same for rings that leave a node, though the node could hold them: as long as such sizes go."""
    falling: list[int]
    """Negated ``times``, which `bisect` can search."""


class Trial(NamedTuple):
    """One way to place coarse rings."""

    target: int
    """All rings should end by this time, picoseconds."""
    tie: int
    """0: low places first, 1: high ones, 2: those that the ring fills."""
    share: int
    """Price of ranks left free beside a ring, in 1/1024 of its time."""


class Coarse(NamedTuple):
    """What one trial gave."""

    placed: Placement
    segments: list[Segment]
    end: int
    """When the last ring ends."""
    idle: int
    """Rank-time of waiting below rings."""
    area: int
    """Rank-time of rings and waiting."""


def times_by_size(
    cost: CostModel, lengths: IntArray, smallest: IntArray, widest: IntArray, num_ranks: int, target: int
) -> list[CoarseRing]:
    """The rings with their times by size; arguments int64 [num_rings], ``smallest`` <= ``widest`` <= ``num_ranks``."""
    if not lengths.size:
        return []
    last, hiding = widest.copy(), best_picoseconds(cost, lengths, widest)
    for i in np.flatnonzero(hiding > target).tolist():
        sizes = np.array([int(widest[i]), *_scan(int(widest[i]), num_ranks)], dtype=np.int64)
        last[i] = sizes[np.argmin(best_picoseconds(cost, lengths[i], sizes))]  # the first, if several are fastest
    offsets, row, size = ragged_ranges(smallest, last)
    times = best_picoseconds(cost, lengths[row], size).tolist()
    crossing = crossing_picoseconds(cost, lengths[row], size).tolist()
    rings = []
    for i, begin in enumerate(offsets[:-1].tolist()):
        own = times[begin : int(offsets[i + 1])]
        inside = max(0, min(cost.ranks_per_node, int(last[i])) - int(smallest[i]) + 1)
        rings.append(
            CoarseRing(int(smallest[i]), int(widest[i]), own, crossing[begin : begin + inside], [-time for time in own])
        )
    return rings


def _scan(size: int, num_ranks: int) -> Iterator[int]:
    while size < num_ranks:
        size = min(num_ranks, size + max(1, size // SCAN_SHARE))
        yield size


def place_coarse(
    cost: CostModel, rings: list[CoarseRing], num_ranks: int, trial: Trial, order: list[int] | None = None
) -> Coarse:
    """Place all rings in ``order``, indices into them; in theirs when None."""
    segments, placed = [Segment(0, num_ranks, 0)], Placement()
    for index in range(len(rings)) if order is None else order:
        ring = rings[index]
        place = _within(segments, ring, trial, cost.ranks_per_node) or _soonest(segments, ring, cost.ranks_per_node)
        segments = _raise(segments, place)
        placed.add(index, place)
    return Coarse(
        placed,
        segments,
        end=max((place.begin + place.time for place in placed.places), default=0),
        idle=sum(place.idle for place in placed.places),
        area=sum(segment.width * segment.height for segment in segments),
    )


def _within(segments: list[Segment], ring: CoarseRing, trial: Trial, per_node: int) -> Place | None:
    """The cheapest place that ends by the target; None if there is none.

    One long function of plain integers: it is most of the time of this twin.
    """
    target, tie, share = trial
    least, widest, times, crossing, falling = ring
    smallest_time, fastest_time, last, work = times[0], times[-1], len(times) - 1, least * times[0]
    best: tuple[int, int, int, int, int] | None = None
    found = None
    count = len(segments)
    for anchor in range(count):
        if segments[anchor][2] + fastest_time > target and segments[anchor][2] + smallest_time > target:
            continue
        for step in (1, -1):
            width = height = area = 0
            at = anchor
            while 0 <= at < count:
                _, segment_width, segment_height = segments[at]
                height = max(height, segment_height)
                room = target - height
                if smallest_time <= room:
                    smallest = least
                elif fastest_time > room:
                    break
                else:  # times fall but for padding: any size found is checked
                    smallest = least + bisect_left(falling, -room, 0, last)
                before = width
                width += segment_width
                if smallest > width:
                    area += segment_width * segment_height
                    at += step
                    continue
                hiding, most = min(width, widest), min(width, least + last)
                sizes = [smallest]
                if hiding > smallest:
                    sizes.append(hiding)
                if most > smallest and most != hiding:
                    sizes.append(most)
                for size in sizes:
                    start = segments[anchor][0] if step > 0 else segments[anchor][0] + segments[anchor][1] - size
                    near = size <= per_node and crosses(start, size, per_node)
                    time = crossing[size - least] if near else times[size - least]
                    if height + time > target:
                        continue
                    idle = height * before - area + (size - before) * (height - segment_height)
                    left = width - size
                    score = idle + max(size * time - work, 0) + left * (time * share >> 10)
                    rank = (height, left) if tie == 0 else (-height, left) if tie == 1 else (left, height)
                    key = (score, *rank, size, start)
                    if best is None or key < best:
                        best, found = key, Place(start, size, height, time, idle)
                break
    return found


def _soonest(segments: list[Segment], ring: CoarseRing, per_node: int) -> Place:
    """The place, and the widest ring in it, that ends first; the whole pool is such a place."""
    least, most = ring.smallest, ring.smallest + len(ring.times) - 1
    best: tuple[int, int, int, int, int] | None = None
    found = Place(0, 0, 0, 0)
    for anchor, first in enumerate(segments):
        for step, side in ((1, segments[anchor:]), (-1, segments[anchor::-1])):
            width = height = area = 0
            for segment in side:
                height = max(height, segment.height)
                before = width
                width += segment.width
                size = min(width, most)
                if least <= width and size > before:
                    start = first.start if step > 0 else first.start + first.width - size
                    near = size <= per_node and crosses(start, size, per_node)
                    time = ring.crossing[size - least] if near else ring.times[size - least]
                    idle = height * before - area + (size - before) * (height - segment.height)
                    key = (height + time, idle, width - size, size, start)
                    if best is None or key < best:
                        best, found = key, Place(start, size, height, time, idle)
                area += segment.width * segment.height
    return found


def _raise(segments: list[Segment], place: Place) -> list[Segment]:
    """The skyline with ``place`` on top of it; neighbours of equal height become one segment."""
    result: list[Segment] = []

    def add(start: int, width: int, height: int) -> None:
        if width <= 0:
            return
        if result and result[-1].height == height:
            result[-1] = Segment(result[-1].start, result[-1].width + width, height)
        else:
            result.append(Segment(start, width, height))

    end, done = place.start + place.size, False
    for start, width, height in segments:
        right = start + width
        add(start, min(right, place.start) - start, height)
        if not done and right > place.start:
            add(place.start, place.size, place.begin + place.time)
            done = True
        left = max(start, end)
        add(left, right - left, height)
    return result
