"""A span below which no plan can be, so that a plan can say how far from the best it is at most. C++, else Python.

Every part is proved for the evaluator of `planner.span` and any plan that `planner.check` lets pass; what is used of
the cost model stands in `planner.bound_times`.
"""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from megatron_hdp.cost import CostModel, Phase
from megatron_hdp.cost.core import core_arguments
from megatron_hdp.errors import PlanError
from megatron_hdp.planner.bound_times import RingTimes
from megatron_hdp.planner.bound_window import Kinds, window
from megatron_hdp.planner.native import _core
from megatron_hdp.types import IntArray

OFFLOAD_ONE = 1 << 20
"""Offload fractions are rounded up to multiples of 2^-20: float products with those are exact below 2^33 tokens."""
MOST_SIDE_BY_SIDE = 8
LONGEST_TRIED = 4
TOLERANCE_BITS = 12
"""The search for the best threshold stops where less than 2^-12 of the bound can be gained."""


@dataclass(frozen=True, slots=True)
class Bound:
    """No plan has a span below ``picoseconds``, the largest of the parts."""

    picoseconds: int
    work: int
    """All rank-time, shared out evenly: see `_Search.work`."""
    longest: int
    """The longest sequence alone: see `_Search.longest`."""
    pipeline: int
    """Long sequences, and how long pipelines fill and drain for them: see `_Search.pipeline`. 0 for one stage."""
    crowded: int
    """Rings too wide to run side by side: see `_Search.crowded`. 0 where an estimate shows that it is not largest."""
    window: int
    """How little can overlap the longest sequence in a pipeline: see `planner.bound_window`. 0 for one stage."""


def lower_bound(
    lengths: IntArray,
    num_ranks: int,
    capacity: int,
    cost: CostModel,
    *,
    stages: int = 1,
    virtual_stages: int = 1,
    offload: npt.NDArray[np.float64] | None = None,
    free: Literal["none", "inside", "all"] | None = None,
) -> Bound:
    """A bound on the span of every plan of a batch.

    Args:
        lengths: real tokens of the sequences, int64 [num_sequences], in any order.
        num_ranks: ranks (columns) of the pool.
        capacity: tokens that one rank holds in one micro-batch.
        cost: of one pipeline stage.
        stages: pipeline stages.
        virtual_stages: model parts per stage.
        offload: as `Plan.offload`, float64 [num_sequences]; None if nothing leaves the device.
        free: links that other exchanges than the ring may use, and that the bound takes to cost no time: "none" for
            plans of rings alone, "inside" if gather and heads stay inside nodes, "all" if they do not. When None,
            "inside" if the model knows the heads, else "none", for without heads only rings can be timed.

    Raises:
        PlanError: no plan is possible (a sequence does not fit the pool), or an argument is out of range.
    """
    lengths = np.ascontiguousarray(lengths, dtype=np.int64)
    if min(num_ranks, capacity, stages, virtual_stages) < 1:
        raise PlanError(
            f"num_ranks {num_ranks}, capacity {capacity}, stages {stages} and virtual_stages {virtual_stages} must all "
            "be at least 1"
        )
    if capacity < cost.pad_multiple:
        raise PlanError(
            f"a capacity of {capacity} tokens does not hold the smallest piece, {cost.pad_multiple} tokens: raise "
            "--hdp-tokens-per-rank"
        )
    if lengths.size and not 1 <= int(lengths.min()) <= int(lengths.max()) <= cost.max_length:
        wrong = int(lengths.min()) if lengths.min() < 1 else int(lengths.max())
        raise PlanError(f"length is {wrong}, must be in 1 .. {cost.max_length} for this profile")
    shares = np.zeros(0, dtype=np.int64) if offload is None else _shares(offload, lengths.size)
    if lengths.size:
        all_shares = shares if shares.size else np.zeros(1, dtype=np.int64)
        some = lengths if shares.size else lengths.max(keepdims=True)  # without offload the longest needs most ranks
        rings = _smallest_rings(some, all_shares, capacity, cost.pad_multiple)
        if np.any(rings > num_ranks):
            s = int(np.argmax(rings))
            raise PlanError(
                f"a sequence of {some[s]} tokens needs {rings[s]} ranks of {capacity} tokens, the pool has "
                f"{num_ranks}: raise --hdp-tokens-per-rank or the number of ranks, or lower --seq-length"
            )
    numbers = (num_ranks, capacity, stages, virtual_stages)
    cost = cost.with_stages(stages)
    free = free or ("none" if cost.heads is None else "inside")
    cost = cost if free == "none" else cost.with_free_links(free)
    if _core is not None and hasattr(_core, "lower_bound"):
        return Bound(*_core.lower_bound(core_arguments(cost), lengths, shares, *numbers).tolist())
    return lower_bound_python(lengths, shares, cost, *numbers)


def lower_bound_python(
    lengths: IntArray,
    shares: IntArray,
    cost: CostModel,
    num_ranks: int,
    capacity: int,
    stages: int,
    virtual_stages: int,
) -> Bound:
    """Twin of the C++ `lower_bound`: looks at every ring size. ``shares``: offload in 2^-20, empty for none."""
    return _Search(lengths, shares, cost, num_ranks, capacity, stages, virtual_stages).bound()


def _shares(offload: npt.NDArray[np.float64], number: int) -> IntArray:
    """Offload fractions in 2^-20, rounded up: no plan keeps less on its devices."""
    if offload.shape != (number,) or not np.all((offload >= 0) & (offload <= 1)):
        raise PlanError(f"offload must be {number} fractions from 0 to 1, one per sequence")
    return np.ascontiguousarray(np.ceil(offload * OFFLOAD_ONE), dtype=np.int64)


def _smallest_rings(lengths: IntArray, shares: IntArray, capacity: int, pad: int) -> IntArray:
    """Fewest ranks on which a piece of each sequence fits: of t tokens at least t (1 - offload) stay, int64."""
    stays = OFFLOAD_ONE - shares
    tokens = np.where(stays > 0, capacity * OFFLOAD_ONE // np.maximum(stays, 1), np.int64(1 << 62))
    units = tokens // pad
    needed = -(-lengths // pad)
    return np.asarray(-(-needed // units), dtype=np.int64)


class _Search(RingTimes):
    """One batch, reduced to kinds of sequences that ascend by (length, offload)."""

    def __init__(
        self, lengths: IntArray, shares: IntArray, cost: CostModel, ranks: int, capacity: int, stages: int, parts: int
    ) -> None:
        super().__init__(cost, ranks, parts if stages > 1 else 1)
        self.capacity, self.stages = capacity, stages
        pad = cost.pad_multiple
        self.constant = max(cost.microbatch_picoseconds() - self.trim, 0)
        rows = np.stack([-(-lengths // pad) * pad, shares if shares.size else 0 * lengths], axis=1)
        kinds, first = np.unique(rows, axis=0, return_inverse=True) if rows.size else (rows, np.zeros(0, np.int64))
        self.counts = np.bincount(first.ravel(), minlength=len(kinds))
        self.lengths, offload = kinds[:, 0], kinds[:, 1]
        self.rings = _smallest_rings(self.lengths, offload, capacity, pad)
        most = np.full_like(offload, offload.max(initial=0))
        self.freest = _smallest_rings(self.lengths, most, capacity, pad)
        self.offload = offload
        held = [-(-int(n) * (OFFLOAD_ONE - int(o)) // OFFLOAD_ONE) for n, o in kinds]
        self.each = [self.rank_time(int(n), int(d)) for n, d in zip(self.lengths, self.rings)]
        self.held, self.ahead = _ahead(held, self.counts), _ahead(self.each, self.counts)

    def bound(self) -> Bound:
        """All parts; crowding is looked at last, because it can be skipped where others are larger."""
        work, longest, pipeline, windows = self.work(), self.longest(), self.pipeline(), self.window()
        best, crowded = max(work, longest, pipeline, windows), 0
        for side in range(1, MOST_SIDE_BY_SIDE + 1):
            ring = self.ranks // (side + 1) + 1
            if self.ranks // ring == side and ring > 1:
                crowded = max(crowded, self.crowded(ring, side, best))
        return Bound(max(best, crowded), work, longest, pipeline, crowded, windows)

    # Parts

    def work(self) -> int:
        """Rank-time of all sequences and micro-batches, divided by the ranks.

        Proof: on any stage a column's operations do not overlap, so the span is at least the largest column's sum,
        which is at least the mean. Sequences add `rank_time` or more. Each rank has a micro-batch (a whole round of
        ``stages`` if interleaved), none holds more than the capacity, and each costs its constant. With a pipeline the
        last stage also waits for stages - 1 forward passes before its first, and stages - 1 backward passes follow its
        last; they cost a constant or more.
        """
        empty = sum(self.cost.microbatch_picoseconds(phase) // self.parts for phase in ("forward", "backward"))
        return -(-(self.ahead[0] + self.microbatches() * self.constant) // self.ranks) + (self.stages - 1) * empty

    def microbatches(self) -> int:
        """Least number on all ranks together."""
        least = self.ranks * (self.stages if self.parts > 1 else 1)
        return max(-(-self.held[0] // self.capacity), least)

    def longest(self) -> int:
        """The longest sequences, each alone on its best ring.

        Proof: the micro-batch of one of its pieces runs forward and backward through all stages, one after the other.
        Pieces of longer sequences are never shorter, so the longest decides (the few longest, if they offload).
        """
        found = 0
        for i in range(max(self.lengths.size - LONGEST_TRIED, 0), self.lengths.size):
            piece = self.least(i, int(self.rings[i]), self.ranks, "total")
            found = max(found, self.stages * (piece + self.constant - self.trim))
        return found

    def pipeline(self) -> int:
        """Work of the sequences of at least x tokens, plus the least time to fill and drain; the largest over x.

        Proof: call those sequences big. Some column has at least 1 / num_ranks of big work, on every stage. On its last
        stage none of it begins before a big micro-batch passed the stages - 1 parts ahead, and after the last of it
        that micro-batch goes back through as many: each takes a big piece's forward or backward or more. In an
        interleaved schedule an operation is 1 / virtual_stages of that, and on the last stage every other operation of
        a micro-batch lies between forward of its first part and backward of its first part, so the same holds.
        """
        if self.stages == 1 or not self.lengths.size:
            return 0

        def value(i: int) -> int:
            number = max(-(-self.held[i] // self.capacity), self.ranks)  # a column with big work has a big micro-batch
            return -(-(self.ahead[i] + number * self.constant) // self.ranks)

        return self.threshold(self.lengths.size, value, lambda i: self.ramp(i, 1))

    def window(self) -> int:
        """See `planner.bound_window`."""
        if self.stages == 1 or not self.lengths.size:
            return 0
        lengths, rings = self.lengths.tolist(), self.rings.tolist()
        forward, backward = (
            [self.rank_time(n, d, phase) for n, d in zip(lengths, rings)] for phase in ("forward", "backward")
        )
        kept = (self.lengths * (OFFLOAD_ONE - self.offload) // OFFLOAD_ONE).tolist()
        kinds = Kinds(self.counts.tolist(), kept, self.each, forward, backward)
        constants = (self.microbatches(), self.constant)
        return window(self, kinds, lengths[-1], rings[-1], self.stages, self.capacity, constants)

    def crowded(self, ring: int, side: int, found: int) -> int:
        """Rings of at least ``ring`` ranks, of which ``side`` fit side by side; 0 if surely not above ``found``.

        Proof: ranks ring - 1, 2 ring - 1, .. are ``side`` many. An interval of d ranks contains at least d // ring of
        them, so on these ranks together a sequence takes `covering` or more, and one of them has the mean. It has at
        least one micro-batch. With a pipeline fill and drain come to this as in `pipeline`.
        """
        wide = np.flatnonzero(self.rings >= ring).tolist()
        if not wide:
            return 0

        def value(total: int) -> int:
            return -(-(total + side * self.constant) // side)

        estimate = sum(
            int(self.rings[i]) // ring * self.trimmed(i, int(self.rings[i]), int(self.rings[i])) * int(self.counts[i])
            for i in wide
        )
        if value(estimate) + self.ramp(wide[-1], ring) <= found:
            return 0
        ahead = _ahead([self.covering(i, ring) for i in wide], self.counts[wide])
        return self.threshold(len(wide), lambda i: value(ahead[i]), lambda i: self.ramp(wide[i], ring))

    # What they are made of

    def least(self, i: int, low: int, high: int, phase: Phase) -> int:
        """Least time of one rank's piece of kind i on rings of low .. high ranks."""
        length, rings = int(self.lengths[i]), np.arange(low, high + 1, dtype=np.int64)
        return int(self.piece(length, rings, phase).min())

    def trimmed(self, i: int, low: int, high: int) -> int:
        """`least` of both passes, less what rounding to model parts may take."""
        return max(self.least(i, low, high, "total") - self.trim, 0)

    def covering(self, i: int, ring: int) -> int:
        """Least time that kind i takes on all ranks that are ``ring`` apart together: times x its piece."""
        smallest = int(self.rings[i])
        return min(
            times * self.trimmed(i, max(smallest, times * ring), min(self.ranks, (times + 1) * ring - 1))
            for times in range(smallest // ring, self.ranks // ring + 1)
        )

    def ramp(self, i: int, ring: int) -> int:
        """Least time to fill and to drain a pipeline with kind i or longer ones, on rings of at least ``ring``.

        A longer sequence's pieces are never shorter and its smallest ring is never smaller, if all may offload as much
        as the one that offloads most.
        """
        if self.stages == 1:
            return 0
        total = 0
        phases: tuple[Phase, Phase] = ("forward", "backward")
        for phase in phases:
            piece = self.least(i, max(int(self.freest[i]), ring), self.ranks, phase)
            total += (piece + self.cost.microbatch_picoseconds(phase)) // self.parts
        return (self.stages - 1) * total

    def threshold(self, number: int, value: Any, rise: Any) -> int:
        """Largest value(i) + rise(i) for i in 0 .. number - 1 but for 2^-12 of it; value falls with i, rise rises.

        Any i gives a valid bound. Between two i, none is above the first's value and the second's rise.
        """
        if self.stages == 1:
            return int(value(0))
        top = rise(number - 1)
        best = max(value(0) + rise(0), value(number - 1) + top)
        ranges = [(0, number - 1, top)]
        while ranges:
            low, high, high_rise = ranges.pop()
            if high - low < 2 or value(low + 1) + high_rise <= best + (best >> TOLERANCE_BITS):
                continue
            middle = (low + high) // 2
            middle_rise = rise(middle)
            best = max(best, value(middle) + middle_rise)
            ranges += [(low, middle, middle_rise), (middle, high, high_rise)]
        return int(best)


def _ahead(values: list[int], counts: IntArray) -> list[int]:
    """Sums of value x count over each kind and all longer ones; one more entry, 0. They may not fit int64."""
    total, result = 0, [0]
    for value, count in zip(reversed(values), reversed(counts.tolist())):
        total += value * count
        result.append(total)
    return result[::-1]
