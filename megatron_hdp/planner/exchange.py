"""How each ring shares its sequence's attention: chosen by cost after the plan is made, or forced."""

import dataclasses

import numpy as np

from megatron_hdp.cost import CostModel, Tier
from megatron_hdp.errors import ConfigError
from megatron_hdp.planner.peers import GATHER, HEADS, RING
from megatron_hdp.types import EXCHANGES, IntArray, Plan

CHOICES = ("auto", *EXCHANGES)


def choose_exchanges(plan: Plan, cost: CostModel, exchange: str = "auto") -> Plan:
    """The plan with the columns `Plan.exchange` and `Plan.head_ranks` decided; a pure function.

    Args:
        plan: a sound plan.
        cost: of the run; with `CostModel.heads`, without which every sequence keeps the ring.
        exchange: "auto" takes for each ring inside a node what is fastest, if neither its forward nor its backward is
            longer than the ring's: then no rank ends later. Of equals the ring stays. With a window all keep the ring,
            which then fetches no more than is needed. "ring", "gather" and "heads" force one for all sequences on more
            than one rank, across nodes too; "heads" with the most ranks that their heads can be cut over.

    Raises:
        ConfigError: no such choice; gather or heads are forced and the model does not know the heads.
    """
    require_choice(exchange, cost)
    kind, head_ranks = np.full_like(plan.ring_size, RING), np.ones_like(plan.ring_size)
    if exchange == "gather":
        kind[plan.ring_size > 1] = GATHER
    elif exchange == "heads":
        head_ranks = _most_head_ranks(plan.ring_size, cost)
        kind[head_ranks > 1] = HEADS
    elif exchange == "auto" and cost.heads is not None and cost.window is None:
        chosen = _waiting(plan, cost)
        if chosen.size:
            kind[chosen], head_ranks[chosen] = _fastest(plan.lengths[chosen], plan.ring_size[chosen], cost)
    if np.array_equal(kind, plan.exchange) and np.array_equal(head_ranks, plan.head_ranks):
        return plan
    return dataclasses.replace(plan, exchange=kind, head_ranks=head_ranks)


def require_choice(exchange: str, cost: CostModel) -> None:
    """Raise ConfigError for a choice that is none, or that needs numbers of heads which the model lacks."""
    if exchange not in CHOICES:
        raise ConfigError(f"--hdp-exchange is {exchange!r}: choose one of {', '.join(CHOICES)}")
    if exchange in ("gather", "heads") and cost.heads is None:
        raise ConfigError(
            f"--hdp-exchange is {exchange!r}, whose cost depends on the numbers of heads of one tensor-parallel rank: "
            "give CostModel heads and kv_heads"
        )


def _most_head_ranks(rings: IntArray, cost: CostModel) -> IntArray:
    """Most ranks of each ring that can swap rows for heads, a divisor of its size; 1 where none can."""
    most = np.ones_like(rings)
    for ranks in _head_ranks(int(rings.max()), cost):
        most[rings % ranks == 0] = ranks
    return most


def _head_ranks(limit: int, cost: CostModel) -> list[int]:
    """Numbers of ranks from 2 to ``limit`` over which the heads can be cut, ascending."""
    return [ranks for ranks in range(2, min(limit, cost.heads or 1) + 1) if cost.swaps_heads(ranks)]


def _waiting(plan: Plan, cost: CostModel) -> IntArray:
    """Sequences whose ring lies inside a node and waits for transfers: where it does not, nothing is faster.

    Not those whose activations leave: their copies hide behind the ring's passes, and shorter ones might not hide them.
    """
    shared: IntArray = np.flatnonzero((plan.ring_size > 1) & (plan.offload == 0))
    tokens = cost.piece_tokens(plan.lengths[shared], plan.ring_size[shared])
    shared = shared[tokens < cost.narrowest_hiding_piece(Tier.INSIDE_NODE)]
    if not shared.size:
        return shared
    tier = cost.tier(plan.ring_start[shared], plan.ring_size[shared])
    inside: IntArray = shared[tier == Tier.INSIDE_NODE]
    return inside


def _fastest(lengths: IntArray, rings: IntArray, cost: CostModel) -> tuple[IntArray, IntArray]:
    """Exchange and head ranks of the least total time among those that lengthen no pass, int64, shaped as given."""
    tier = int(Tier.INSIDE_NODE)
    forward, backward = (cost.picoseconds(lengths, rings, tier, phase) for phase in ("forward", "backward"))
    kind, head_ranks, best = np.full_like(rings, RING), np.ones_like(rings), forward + backward
    ways = [(GATHER, 1), *((HEADS, ranks) for ranks in _head_ranks(int(rings.max()), cost))]
    for exchange, ranks in ways:
        rows = np.flatnonzero(rings % ranks == 0)
        passes = [
            cost.exchange_picoseconds(lengths[rows], rings[rows], tier, exchange, ranks, phase)
            for phase in ("forward", "backward")
        ]
        better = (passes[0] <= forward[rows]) & (passes[1] <= backward[rows]) & (sum(passes) < best[rows])
        rows = rows[better]
        kind[rows], head_ranks[rows], best[rows] = exchange, ranks, sum(passes)[better]
    return kind, head_ranks
