"""HDP's own planning: what is tried for a batch, and which plan is taken."""

import dataclasses
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
from megatron_hdp.planner.exchange import choose_exchanges
from megatron_hdp.planner.frame import framed_span
from megatron_hdp.planner.host import host_peaks, most_in_flight
from megatron_hdp.planner.offload import Limits, fits, needed_fraction, share_of, smallest_rings
from megatron_hdp.planner.peers import RING
from megatron_hdp.planner.pp import plan_pp
from megatron_hdp.planner.sizes import Size, best_size
from megatron_hdp.planner.span import PHASES, microbatch_picoseconds, rank_ends
from megatron_hdp.planner.waves import best_waves, powers_of_two
from megatron_hdp.types import IntArray, Plan

FEW_SEQUENCES = 1024
"""Up to so many, plans of all baselines are tried as well."""
WORTH_IT = 64
"""They are taken if they are more than 1 / WORTH_IT shorter."""
OFFLOAD_TIMES = (2, 4, None)
"""Largest pieces that are tried with offload, in capacities; None for any."""
FEW_MICROBATCHES = 4
"""Ranks that have no more than so many, or than stages, if all are full, have few."""


def plan_hdp(
    lengths: IntArray,
    num_ranks: int,
    capacity: int,
    cost: CostModel,
    balance: str,
    layout: Layout,
    *,
    exchange: str = "ring",
    offload: bool = False,
    host_bytes: int | None = None,
) -> Plan:
    """Rings by what shortens the step, micro-batches by time. Offload only where the step is shorter with it.

    The arguments are those of `planner.plan`, checked; ``balance`` is "dp" or "pp". Without pipeline, experts and
    offload one plan of a large batch is made, and nothing else is timed.
    """
    batch = _Batch(lengths, num_ranks, capacity, cost, balance, layout)
    best, packs = batch.without_offload()
    best = batch.exchanging(best, exchange)
    if offload:
        for other in batch.with_offload(host_bytes, packs):
            exchanging = batch.exchanging(other, exchange)
            if batch.hides_copies(exchanging.plan):
                best = _shorter(best, exchanging)
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

    def without_offload(self) -> "tuple[_Timed, int]":
        """The best plan in which everything stays on the devices, and the tokens of packs that were best for it."""
        size = Size(min(self.capacity, int(self.lengths.max())), self.capacity)
        if self.balance == "pp":
            layout = self.layout
            few = int(self.lengths.sum()) <= self.num_ranks * self.capacity * max(FEW_MICROBATCHES, layout.stages)
            size = best_size(size, self.cost.pad_multiple, self._span_of, piped=layout.stages > 1, few=few)
        best = self.attempt(size)
        if self.lengths.size <= FEW_SEQUENCES:
            other = min(self.others(), key=lambda timed: timed.span)
            # rings that are wider than they need to be send more: what is gained by them must be worth it
            if other.span < best.span - best.span // WORTH_IT:
                best = other
        return best, size.pack

    def _span_of(self, size: Size) -> int | None:
        """Picoseconds of `attempt`; None where the pool does not hold its longest sequence with such pieces."""
        return self.attempt(size).span if size.piece * self.num_ranks >= int(self.lengths.max()) else None

    def with_offload(self, host_bytes: int | None, packs: int) -> "Iterator[_Timed]":
        """Some plans whose rings may be smaller than without; just what has to leaves. None where nothing can leave.

        Smaller rings send less and wait less, but make long micro-batches, which are harder to balance: so pieces of
        up to a few times the capacity are tried, and any that can be.
        """
        for times in OFFLOAD_TIMES:
            piece_tokens = None if times is None else times * self.capacity
            if piece_tokens is None or piece_tokens < int(self.lengths.max()):
                found = self._within_host(piece_tokens, host_bytes, packs)
                if found is not None:
                    yield found

    def _within_host(self, piece_tokens: int | None, host_bytes: int | None, packs: int) -> "_Timed | None":
        """A plan with offload whose ranks have at most ``host_bytes`` in host memory at a time; None for none.

        Tried without a limit of its own for each piece; then, as a pipeline's ranks have several micro-batches in
        flight, with the limit over half their number, and over their number, which always does.
        """
        stages, parts = self.layout.stages, self.layout.virtual_stages
        flight = most_in_flight(stages, parts)
        each: list[int | None] = [None]
        if host_bytes is not None:
            each += [host_bytes // number // parts * parts for number in dict.fromkeys((-(-flight // 2), flight))]
        for piece_bytes in each:
            timed = self._attempt_offload(Limits(piece_bytes, piece_tokens, parts), packs)
            if timed is None:
                return None
            if host_bytes is None or int(host_peaks(timed.plan, self.cost, stages, parts).max()) <= host_bytes:
                return timed
        return None

    def _attempt_offload(self, limits: Limits, packs: int) -> "_Timed | None":
        """A plan with offload; None if nothing may leave, or a piece does not hide its copies or fit where it lies."""
        cost, capacity = self.cost, self.capacity
        smallest, leaves = smallest_rings(self.lengths, self.num_ranks, capacity, cost, limits)
        if not leaves.any():
            return None
        plan = self._plan(packs, smallest, leaves).plan
        leaving = np.flatnonzero(plan.ring_size < -(-self.lengths // capacity))
        pieces = self.lengths[leaving], plan.ring_size[leaving]
        needed = needed_fraction(*pieces, capacity, cost)
        free = cost.largest_free_offload(*pieces, cost.tier(plan.ring_start[leaving], plan.ring_size[leaving]))
        if np.any(needed > free) or not np.all(fits(*pieces, needed, capacity, cost)):
            return None
        share = np.zeros(self.lengths.size)
        share[leaving] = share_of(needed, cost)
        return _Timed(dataclasses.replace(plan, offload=share), cost, self.layout)

    def exchanging(self, timed: "_Timed", exchange: str) -> "_Timed":
        """The same with its exchanges chosen, see `planner.exchange.choose_exchanges`."""
        plan = choose_exchanges(timed.plan, self.cost, exchange)
        return timed if plan is timed.plan else _Timed(plan, self.cost, self.layout)

    def hides_copies(self, plan: Plan) -> bool:
        """Do copies that hide behind a ring's passes hide behind those of the exchange as well?"""
        s = np.flatnonzero((plan.offload > 0) & (plan.exchange != RING))
        pieces = plan.lengths[s], plan.ring_size[s], self.cost.tier(plan.ring_start[s], plan.ring_size[s])
        return all(
            bool(
                np.all(
                    self.cost.exchange_picoseconds(*pieces, plan.exchange[s], plan.head_ranks[s], phase)
                    >= self.cost.picoseconds(*pieces, phase)
                )
            )
            for phase in (PHASES if s.size else ())
        )

    def attempt(self, size: Size) -> "_Timed":
        """A plan with pieces of rings and packs of at most this size, without offload; made once."""
        if size not in self._attempts:
            smallest, _ = smallest_rings(self.lengths, self.num_ranks, size.piece, self.cost)
            self._attempts[size] = self._plan(size.pack, smallest, None)
        return self._attempts[size]

    @cached_property
    def _attempts(self) -> "dict[Size, _Timed]":
        return {}

    def _plan(self, packs: int, smallest: IntArray, leaves: npt.NDArray[np.float64] | None) -> "_Timed":
        """A plan with rings of at least ``smallest`` ranks, with which such shares of the activations may leave.

        In a pipeline it gives way to waves if those are shorter. Nothing leaves in the plan that is returned yet.
        """
        lengths, ranks, cost, layout = self.lengths, self.num_ranks, self.cost, self.layout
        bound = lower_bound(
            lengths,
            ranks,
            self.capacity,
            cost,
            stages=layout.stages,
            virtual_stages=layout.virtual_stages,
            offload=leaves,
            free="none",  # rings are planned; other exchanges are chosen where they are faster still
        ).picoseconds
        smallest = demanded_rings(cost, lengths, smallest, ranks, bound // layout.stages)
        widest = widest_rings(cost, lengths, smallest, ranks)
        if self.balance == "dp":
            ways = [(widest, cost)]
            if cost.reduce_picoseconds:
                # the last pieces of rings that are no wider than they must be are long; ranks may as well end alike
                ways += [(smallest, cost), (widest, dataclasses.replace(cost, reduce_picoseconds=0))]
            found = [self._timed(plan_dp(lengths, smallest, w, ranks, self.capacity, c, bound)) for w, c in ways]
            return found[0] if len(found) == 1 else min(found, key=lambda timed: timed.span)
        timed = self._timed(plan_pp(lengths, smallest, widest, ranks, packs, cost, bound, layout))
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
        return self._timed(best_waves(self.lengths, self.num_ranks, self.capacity, self.cost, sizes, self.layout))

    def _timed(self, columns: Columns) -> "_Timed":
        plan = Plan(
            num_ranks=self.num_ranks,
            capacity=self.capacity,
            pad_multiple=self.cost.pad_multiple,
            lengths=self.lengths,
            offload=np.zeros(self.lengths.size),
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
        """Picoseconds; without pipeline stages with what gradients and parameters add, see `planner.frame`."""
        layout, cost = self.layout, self.cost
        ends = rank_ends(self.plan, cost, layout.stages, layout.virtual_stages, layout.expert_group)
        if layout.stages == 1 and (cost.gather_picoseconds or cost.reduce_picoseconds):
            return framed_span(self.plan, ends, *microbatch_picoseconds(self.plan, cost), cost)
        return int(ends.max())


def _shorter(first: _Timed, second: _Timed) -> _Timed:
    """The one with the least span, the first of equals."""
    return second if second.span < first.span else first
