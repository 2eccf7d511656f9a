"""Balance without pipeline stages: ranks run as many micro-batches as they have time for. C++ where built, else Python.

The method is explained where it is plain to read, in `megatron_hdp.planner.dp_python`.
"""

import numpy as np

from megatron_hdp.cost import CostModel
from megatron_hdp.cost.core import core_arguments
from megatron_hdp.errors import PlanError
from megatron_hdp.planner.columns import Columns
from megatron_hdp.planner.dp_python import plan_dp_python
from megatron_hdp.planner.frame import last_enough
from megatron_hdp.planner.native import _core
from megatron_hdp.planner.skyline import best_picoseconds
from megatron_hdp.types import IntArray

MOST_PICOSECONDS = 1 << 58
"""Bounds from here on are refused: schedules may end some times later, and sums of those must fit int64."""


def plan_dp(
    lengths: IntArray,
    smallest: IntArray,
    widest: IntArray,
    num_ranks: int,
    capacity: int,
    cost: CostModel,
    bound: int,
) -> Columns:
    """Plan with free counts; a pure function of its arguments.

    Args:
        lengths: real tokens of the sequences, int64 [num_sequences].
        smallest: ranks that each needs for its memory, int64 [num_sequences].
        widest: ranks up to which its ring hides its transfers, at least ``smallest``, int64 [num_sequences].
        num_ranks: ranks of the pool.
        capacity: tokens that one rank holds in one micro-batch.
        cost: what pieces cost.
        bound: lower bound on the span in picoseconds: what to aim at.

    Raises:
        PlanError: a step would take days, which the integers of the plan are not made for.
        ValueError: rings do not fit the pool.
    """
    if bound >= MOST_PICOSECONDS:
        raise PlanError(
            f"this batch of {int(lengths.sum())} tokens takes {num_ranks} ranks at least {bound / 3.6e15:.0f} hours, "
            f"more than {MOST_PICOSECONDS / 3.6e15:.0f}: check the units of profile {cost.profile.name}, or lower "
            "--global-batch-size or --hdp-batch-tokens"
        )
    if _core is None:
        return Columns(*plan_dp_python(lengths, smallest, widest, num_ranks, capacity, cost, bound))
    last = last_enough(cost, capacity)
    return Columns(*_core.plan_dp(lengths, smallest, widest, num_ranks, capacity, core_arguments(cost), bound, *last))


def widest_rings(cost: CostModel, lengths: IntArray, smallest: IntArray, num_ranks: int) -> IntArray:
    """Ranks up to which widening costs no waiting, at least ``smallest``; both and the result int64 [num_sequences]."""
    widest = smallest.copy()
    rings = np.flatnonzero(smallest > 1)
    if rings.size:
        long = lengths[rings]
        inside = cost.widest_hiding_ring(long, 0, max_ring=min(num_ranks, cost.ranks_per_node))
        across = cost.widest_hiding_ring(long, 1, max_ring=num_ranks)
        widest[rings] = np.maximum(np.maximum(inside, across), smallest[rings])
    return widest


def demanded_rings(cost: CostModel, lengths: IntArray, smallest: IntArray, num_ranks: int, limit: int) -> IntArray:
    """``smallest``, but rings for local sequences that would take longer than ``limit`` picoseconds on one rank.

    They get the smallest ring that takes no longer, or, if there is none, the widest that hides its transfers.
    """
    local = np.flatnonzero(smallest == 1)
    longest = lengths[local].max(keepdims=True, initial=1)
    if num_ranks < 2 or best_picoseconds(cost, longest, np.ones_like(longest))[0] <= limit:
        return smallest  # a shorter sequence takes no longer, so there is no need to look at all
    alone = best_picoseconds(cost, lengths[local], np.ones_like(local))
    late, alone = local[alone > limit], alone[alone > limit]
    long = lengths[late]
    high = widest_rings(cost, long, np.full_like(late, 2), num_ranks)
    low = np.full_like(late, 2)
    while np.any(low < high):  # time falls with the ring as far as transfers hide
        middle = (low + high) // 2
        good = best_picoseconds(cost, long, middle) <= limit
        low, high = np.where(good, low, np.minimum(middle + 1, high)), np.where(good, middle, high)
    result = smallest.copy()
    result[late] = np.where(best_picoseconds(cost, long, low) < alone, low, 1)
    return result
