"""A plan in a few numbers, for logs, metrics and the command line."""

import dataclasses
from dataclasses import dataclass

import numpy as np

from megatron_hdp.cost import CostModel, Tier
from megatron_hdp.planner.bound import Bound, lower_bound
from megatron_hdp.planner.check import peers
from megatron_hdp.planner.entry import DEFAULT_HEADS, default_cost
from megatron_hdp.planner.peers import RING
from megatron_hdp.planner.span import microbatch_picoseconds, rank_ends
from megatron_hdp.types import EXCHANGES, IntArray, Plan

PICOSECOND = 1e-12
"""In seconds."""
BOUND_PARTS = tuple(field.name for field in dataclasses.fields(Bound) if field.name != "picoseconds")
"""Parts of `megatron_hdp.planner.bound.Bound`; where two are equal, the first is named."""


@dataclass(frozen=True)
class PlanSummary:
    """What a plan does. Seconds are those of the cost model, see docs/cost-model.md."""

    sequences: int
    tokens: int
    """Real tokens of the batch."""
    padding_tokens: int
    padding_fraction: float
    """Padding over all tokens that ranks hold."""
    ring_sizes: dict[int, int]
    """Ring size -> number of sequences, ascending sizes."""
    microbatches_min: int
    """Micro-batches of the rank that has the fewest."""
    microbatches_max: int
    imbalance: float
    """Work of the busiest rank, waiting not counted, over the mean of all. At least 1."""
    span_seconds: float
    """Until the last rank is done, waiting in rings and pipelines counted."""
    bound_seconds: float
    """No plan of this batch can have a shorter span."""
    bound_parts: dict[str, float]
    """Seconds that each argument for the bound gives; the largest is the bound."""
    peers_max: int
    """Ranks that one rank exchanges attention data with, most; at most 4 along rings."""
    exchanges: dict[str, int]
    """Exchange -> number of sequences on more than one rank that use it, all of `EXCHANGES`."""
    exchange_saving: float
    """Share of rank-time that the sequences with gather or heads save over the ring; negative if they lose."""
    exchanges_leave_nodes: bool
    """Does a sequence with gather or heads lie on ranks of several nodes?"""
    tokens_per_rank_max: int
    """Tokens, padding counted, of the rank that holds the most over the whole plan."""
    tokens_per_rank_mean: float

    @property
    def efficiency(self) -> float:
        """Bound over span, at most 1: the best plan may be better than this one by no more than this factor."""
        return self.bound_seconds / self.span_seconds

    @property
    def binding(self) -> str:
        """The part that is the bound."""
        return max(self.bound_parts, key=self.bound_parts.__getitem__)


def summarize(
    plan: Plan,
    cost: CostModel | None = None,
    *,
    stages: int = 1,
    virtual_stages: int = 1,
    expert_group: int = 1,
) -> PlanSummary:
    """Summary of a plan that passes `check`.

    Args:
        plan: the plan.
        cost: what pieces cost on one pipeline stage; `default_cost` when None, with the heads of its LLaMA-7B where
            the plan uses other exchanges than the ring.
        stages: pipeline stages of the run.
        virtual_stages: model parts per stage.
        expert_group: consecutive ranks that share experts.

    Raises:
        ConfigError: the plan uses other exchanges than the ring, and the given cost does not know the heads.
        PlanError: a sequence is longer than the cost model's integers allow, or the heads cannot be cut as planned.
    """
    if cost is None:
        cost = default_cost(stages)
        if plan.exchange.any():
            cost = dataclasses.replace(cost, heads=DEFAULT_HEADS[0], kv_heads=DEFAULT_HEADS[1])
    if cost.pad_multiple != plan.pad_multiple:
        cost = dataclasses.replace(cost, pad_multiple=plan.pad_multiple)
    cost = cost.with_stages(stages)
    piece_tokens = 2 * plan.chunk_tokens
    held = int((piece_tokens * plan.ring_size).sum())
    per_rank = _sum_by_rank(plan, np.diff(_ahead(piece_tokens[plan.piece_sequence])[plan.microbatch_offsets]))
    forward, backward = microbatch_picoseconds(plan, cost)
    work = _sum_by_rank(plan, forward + backward)
    ends = rank_ends(plan, cost, stages, virtual_stages, expert_group)
    bound = bound_of(plan, cost, stages=stages, virtual_stages=virtual_stages)
    shared = plan.exchange[plan.ring_size > 1]
    sizes, counts = np.unique(plan.ring_size, return_counts=True)
    return PlanSummary(
        sequences=plan.num_sequences,
        tokens=plan.tokens,
        padding_tokens=held - plan.tokens,
        padding_fraction=(held - plan.tokens) / held,
        ring_sizes=dict(zip(sizes.tolist(), counts.tolist(), strict=True)),
        microbatches_min=int(plan.microbatch_counts.min()),
        microbatches_max=int(plan.microbatch_counts.max()),
        imbalance=float(work.max() / work.mean()),
        span_seconds=PICOSECOND * int(ends.max()),
        bound_seconds=PICOSECOND * bound.picoseconds,
        bound_parts={name: PICOSECOND * getattr(bound, name) for name in BOUND_PARTS},
        peers_max=int(peers(plan).max()),
        exchanges=dict(zip(EXCHANGES, np.bincount(shared, minlength=len(EXCHANGES)).tolist(), strict=True)),
        exchange_saving=_exchange_saving(plan, cost),
        exchanges_leave_nodes=_leave_nodes(plan, cost),
        tokens_per_rank_max=int(per_rank.max()),
        tokens_per_rank_mean=held / plan.num_ranks,
    )


def bound_of(plan: Plan, cost: CostModel, *, stages: int = 1, virtual_stages: int = 1) -> Bound:
    """`lower_bound` of the plan's batch, pool and offloaded fractions; ``cost`` with the plan's padding."""
    return lower_bound(
        plan.lengths,
        plan.num_ranks,
        plan.capacity,
        cost,
        stages=stages,
        virtual_stages=virtual_stages,
        offload=plan.offload if np.any(plan.offload) else None,
        free="all" if _leave_nodes(plan, cost) else None,
    )


def _leave_nodes(plan: Plan, cost: CostModel) -> bool:
    """Does a sequence with another exchange than the ring lie on ranks of several nodes?"""
    tier = cost.tier(plan.ring_start, plan.ring_size)
    return bool(np.any((plan.exchange != RING) & (tier == Tier.ACROSS_NODES)))


def _exchange_saving(plan: Plan, cost: CostModel) -> float:
    """See `PlanSummary.exchange_saving`."""
    chosen = np.flatnonzero(plan.exchange != RING)
    if not chosen.size:
        return 0.0
    size = plan.ring_size[chosen]
    pieces = (plan.lengths[chosen], size, cost.tier(plan.ring_start[chosen], size))
    with_rings = float((cost.picoseconds(*pieces) * size.astype(float)).sum())
    times = cost.exchange_picoseconds(*pieces, plan.exchange[chosen], plan.head_ranks[chosen])
    return 1 - float((times * size.astype(float)).sum()) / with_rings


def _ahead(values: IntArray) -> IntArray:
    """Sums of all values ahead of each, and of all; int64 [n + 1]."""
    sums = np.zeros(values.size + 1, dtype=np.int64)
    np.cumsum(values, out=sums[1:])
    return sums


def _sum_by_rank(plan: Plan, values: IntArray) -> IntArray:
    """Sums of [num_microbatches] values over each rank's micro-batches, int64 [num_ranks]."""
    return np.diff(_ahead(values)[plan.rank_offsets])
