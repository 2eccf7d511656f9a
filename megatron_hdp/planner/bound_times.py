"""Least times of sequences on rings of any size: what the proofs of `planner.bound` stand on.

What is used of the cost model, per pass over a stage, with A = a s^2 the attention of the whole sequence, X(b) =
latency + b s / d a transfer, and pieces of t >= s / d tokens (s rounded up to the padding: d t is a multiple of it and
at least s):

    d x time(d) >= A + linear s + constant d + waits(d)
    waits(d) = (1 - 1/d) (d^2 X(kv) - A)^+                                      forward
    waits(d) = ((d^2 X(kv) - A)^+ + (d - 2) (d^2 X(both) - A)^+ + (d^2 X(grad) - A)^+) / d + d X(grad)   backward, d > 1

because a step computes A / d^2 on each rank and max(x, y) = x + (y - x)^+. d^2 X(b) = latency d^2 + b s d rises with d,
and so do 1 - 1/d, (d - 2)/d and latency d^2 / d; (b s d - A)/d rises too. So no term falls: *rank-time never falls when
a ring is widened*, nor where it leaves its node, whose links are taken as the better of both kinds. What each step
takes besides (`LayerProfile.ring_step_forward`), d (d - 1) times on all ranks, rises as well and is only charged on the
smallest ring. With a window only compute is charged: A is then the area of the whole mask, which the d ranks must cover
between them, and the busiest, whose time counts, has A / d or more; waits(d) is taken as 0, because a halo comes in
fewer transfers than the ring's walk, and how it is hidden depends on the chunks. Again no term falls.

Other exchanges than the ring compute the same: gather d steps of A / d^2 like the ring, heads as many with 1/a of the
heads on pieces that are a times as long. What they wait for is another sum. So where they may be used, `lower_bound`
takes links and steps to cost no time (``free``): then waits(d) is 0 there, and so is what is charged of any exchange.

Integers: each of at most 2 d + 4 terms of a pass is rounded down, so the integer time is less than that below the real
one; `RingTimes.lost` is what a ring can lose by it, and it is taken off whenever the real formula is used. Gather and
heads round the same d steps down, and what else they add is not negative.
"""

from dataclasses import replace
from typing import Any

import numpy as np

from megatron_hdp.cost import CostModel, Phase, Tier
from megatron_hdp.cost.area import own_area
from megatron_hdp.cost.fixed import FRACTION_BITS, scaled
from megatron_hdp.types import IntArray


class RingTimes:
    """Times of one cost model on a pool of ``ranks``, whose stages run as ``parts`` model parts each."""

    def __init__(self, cost: CostModel, ranks: int, parts: int) -> None:
        self.cost, self.ranks, self.parts = _with_best_links(cost, ranks), ranks, parts
        self.trim = 2 * (parts - 1)
        """A micro-batch's passes last parts x (cost // parts) each: at most this is rounded away in both together."""

    def rank_time(self, length: int, ring: int, phase: Phase = "total") -> int:
        """Least rank-time of a sequence: exact on its smallest ring; for all wider ones at least that of the next.

        See the module's text: unpadded rank-time never falls, and beyond the next ring each further rank adds at least
        the constant per sequence. What rounding takes off is convex in the ring, so its worst is at one of the ends.
        Rounding to model parts may make a pass's time negative; that of both is at least 0.
        """
        piece = int(self.piece(length, ring, phase))
        at_once = ring * (piece - self.trim)
        least = at_once
        if ring < self.ranks:
            following, each = ring + 1, self.per_sequence(phase)
            ideal = piece + each if ring == 1 else int(self.unpadded(length, following, phase) >> FRACTION_BITS)
            slack = min(
                -following * self.lost(following, phase),
                each * (self.ranks - following) - self.ranks * self.lost(self.ranks, phase),
            )
            least = min(at_once, ideal + slack)
        return max(least, 0) if phase == "total" else least

    def per_sequence(self, phase: Phase) -> int:
        """What each rank of a ring adds at least."""
        return sum(self.cost._stage.sequence[direction] >> FRACTION_BITS for direction in self.cost._directions(phase))

    def lost(self, ring: int, phase: Phase = "total") -> int:
        """At most this many picoseconds are rounded away from one rank's piece."""
        return len(self.cost._directions(phase)) * (2 * ring + 4) + self.trim

    def unpadded(self, length: int, d: int, phase: Phase = "total") -> int:
        """Rank-time of a ring of d > 1 whose pieces are exactly length / d, in units of the coefficients."""
        s, tier = self.cost._stage, self.tier(d)
        wait, kv, both, gradient = (int(x[tier]) for x in (s.latency, s.kv_time, s.both_time, s.gradient_time))

        def one_pass(direction: int) -> int:
            area = int(own_area(length // 2, self.cost.window)) * s.attention[direction]
            rest = s.linear[direction] * length + s.sequence[direction] * d
            if self.cost.window is not None:
                return area + rest
            home = wait * d + gradient * length if direction else 0
            moves = [(1, kv), (d - 2, both), (1, gradient)] if direction else [(d - 1, kv)]
            transfers = [(number, wait * d * d + per_token * length * d) for number, per_token in moves]
            return area + sum(number * max(time - area, 0) for number, time in transfers) // d + home + rest

        return sum(one_pass(direction) for direction in self.cost._directions(phase))

    def tier(self, ring: Any) -> Any:
        """A ring that fits a node may lie in one."""
        return np.where(np.asarray(ring) > self.cost.ranks_per_node, Tier.ACROSS_NODES, Tier.INSIDE_NODE).astype(int)

    def piece(self, length: int, ring: int | IntArray, phase: Phase) -> Any:
        """At most the time of one rank's piece on the better links: that of the cost model, if there is no window.

        With a window, on rings of two or more, it is what a piece computes if all are equally busy: the busiest has
        no less. Unlike the busiest one's time this surely rises with the length.
        """
        exact = self.cost.picoseconds(min(length, self.cost.max_length), ring, self.tier(ring), phase)  # padded again
        if self.cost.window is None:
            return exact
        s, rings, area = self.cost._stage, np.asarray(ring), own_area(length // 2, self.cost.window)
        evenly = 0 * rings
        for direction in self.cost._directions(phase):
            compute = scaled(area // rings, s.attention[direction]) - rings  # each of d steps is rounded down
            evenly = evenly + np.maximum(compute, 0)
            evenly = evenly + scaled(length // rings, s.linear[direction]) + (s.sequence[direction] >> FRACTION_BITS)
        return np.where(rings == 1, exact, evenly)


def _with_best_links(cost: CostModel, num_ranks: int) -> CostModel:
    """The model with links inside a node at least as good as those across, so that time never falls at its border."""
    if num_ranks <= cost.ranks_per_node:
        return cost
    inside, across = cost.profile.inside_node, cost.profile.across_nodes
    best = replace(
        inside, latency=min(inside.latency, across.latency), bandwidth=max(inside.bandwidth, across.bandwidth)
    )
    return cost if best == inside else replace(cost, profile=replace(cost.profile, inside_node=best))
