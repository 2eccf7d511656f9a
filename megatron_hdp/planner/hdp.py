"""HDP's own planning: what is tried for a batch, and which plan is taken."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from megatron_hdp.cost import CostModel
from megatron_hdp.planner.baselines import BASELINES
from megatron_hdp.planner.bound import lower_bound
from megatron_hdp.planner.columns import Columns, Layout
from megatron_hdp.planner.dp import demanded_rings, plan_dp, widest_rings
from megatron_hdp.planner.pp import plan_pp
from megatron_hdp.planner.span import rank_ends
from megatron_hdp.planner.units import smallest_rings
from megatron_hdp.planner.waves import best_waves, powers_of_two
from megatron_hdp.types import IntArray, Plan

FEW_SEQUENCES = 1024
"""Up to so many, plans of all baselines are tried as well."""
WORTH_IT = 64
"""They are taken if they are more than 1 / WORTH_IT shorter."""
MOST_MISSES = 2
"""A pipeline is planned with a quarter of the capacity, a sixteenth, ... until that many do not help."""


def plan_hdp(
    lengths: IntArray,
    num_ranks: int,
    capacity: int,
    cost: CostModel,
    balance: str,
    layout: Layout,
    *,
    offload: bool = False,
) -> Plan:
    """Rings by what shortens the step, micro-batches by time. Offload only where the step is shorter with it.

    The arguments are those of `planner.plan`, checked; ``balance`` is "dp" or "pp". Without pipeline, experts and
    offload one plan of a large batch is made, and nothing else is timed.
    """
    batch = _Batch(lengths, num_ranks, capacity, cost, balance, layout)
    best = batch.attempt(capacity, offload=False)
    if offload:
        best = _shorter(best, batch.attempt(capacity, offload=True))
    held, misses = min(capacity, int(lengths.max())), 0
    while balance == "pp" and misses < MOST_MISSES:
        # wider rings than memory asks make micro-batches more alike, and a pipeline waits for the longest
        held = held // 4 // cost.pad_multiple * cost.pad_multiple
        if num_ranks * held < int(lengths.max()):
            break
        other = batch.attempt(held, offload=False)
        misses = 0 if other.span < best.span else misses + 1
        best = _shorter(best, other)
    if lengths.size <= FEW_SEQUENCES:
        other = min(batch.others(), key=lambda timed: timed.span)
        # rings that are wider than they need to be send more: what is gained by them must be worth it
        if other.span < best.span - best.span // WORTH_IT:
            best = other
    return best.plan


@dataclass(frozen=True)
class _Batch:
    """What is planned; see `plan_hdp`."""

    lengths: IntArray
    num_ranks: int
    capacity: int
    cost: CostModel
    balance: str
    layout: Layout

    def attempt(self, held: int, *, offload: bool) -> "_Timed":
        """A plan with pieces of at most ``held`` tokens of the capacity, and offload wherever it is free, or without.

        In a pipeline it gives way to waves if those are shorter.
        """
        lengths, ranks, cost, layout = self.lengths, self.num_ranks, self.cost, self.layout
        smallest, leaves = smallest_rings(lengths, ranks, held, cost.pad_multiple, cost, offload=offload)
        bound = lower_bound(
            lengths,
            ranks,
            self.capacity,
            cost,
            stages=layout.stages,
            virtual_stages=layout.virtual_stages,
            offload=leaves if offload else None,
        ).picoseconds
        smallest = demanded_rings(cost, lengths, smallest, ranks, bound // layout.stages)
        widest = widest_rings(cost, lengths, smallest, ranks)
        if self.balance == "dp":
            return self._timed(plan_dp(lengths, smallest, widest, ranks, self.capacity, cost, bound), leaves)
        timed = self._timed(plan_pp(lengths, smallest, widest, ranks, held, cost, bound, layout), leaves)
        return _shorter(timed, self._waves) if np.any(timed.plan.ring_size > 1) else timed

    def others(self) -> "Iterator[_Timed]":
        """What others do: of a few sequences the order in which they are placed is much, and all is soon tried."""
        for plan_other in BASELINES.values():
            plan = plan_other(
                self.lengths,
                self.num_ranks,
                self.capacity,
                self.cost.pad_multiple,
                cost=self.cost,
                count_multiple=self.layout.count_multiple,
                equal_counts=self.balance == "pp",
            )
            yield _Timed(plan, self.cost, self.layout)

    @cached_property
    def _waves(self) -> "_Timed":
        sizes = powers_of_two(self.num_ranks)
        columns = best_waves(self.lengths, self.num_ranks, self.capacity, self.cost, sizes, self.layout)
        return self._timed(columns, np.zeros(self.lengths.size))

    def _timed(self, columns: Columns, leaves: npt.NDArray[np.float64]) -> "_Timed":
        """``leaves``: share of the activations that leaves if the smallest ring is used, [num_sequences]."""
        kept = columns.ring_size >= -(-self.lengths // self.capacity)  # wide enough to keep everything after all
        plan = Plan(
            num_ranks=self.num_ranks,
            capacity=self.capacity,
            pad_multiple=self.cost.pad_multiple,
            lengths=self.lengths,
            offload=np.where(kept, 0.0, leaves),
            **columns._asdict(),
        )
        return _Timed(plan, self.cost, self.layout)


@dataclass(frozen=True)
class _Timed:
    """A plan, whose span is computed where it is asked for, once."""

    plan: Plan
    cost: CostModel
    layout: Layout

    @cached_property
    def span(self) -> int:
        """Picoseconds."""
        layout = self.layout
        return int(rank_ends(self.plan, self.cost, layout.stages, layout.virtual_stages, layout.expert_group).max())


def _shorter(first: _Timed, second: _Timed) -> _Timed:
    """The one with the least span, the first of equals."""
    return second if second.span < first.span else first
