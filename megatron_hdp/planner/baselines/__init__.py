"""What HDP is compared with: other ways to plan the same batch, as plans that one evaluator scores.

`BASELINES` holds those that are written here. Megatron-LM's own schedulers run in `megatron_hdp.seams.scheduler`, which
turns their answers into plans with `plan_rounds`.
"""

import functools
from typing import Protocol

from megatron_hdp.cost import CostModel
from megatron_hdp.planner.baselines.bytescale import plan_bytescale
from megatron_hdp.planner.baselines.naive import plan_naive
from megatron_hdp.planner.baselines.packed import packed_picoseconds, packed_rank_ends
from megatron_hdp.planner.baselines.pow2 import plan_pow2
from megatron_hdp.planner.baselines.rounds import plan_rounds
from megatron_hdp.planner.baselines.static import plan_static, plan_static_smallest
from megatron_hdp.types import IntArray, Plan

__all__ = [
    "BASELINES",
    "Baseline",
    "packed_picoseconds",
    "packed_rank_ends",
    "plan_bytescale",
    "plan_naive",
    "plan_pow2",
    "plan_rounds",
    "plan_static",
    "plan_static_smallest",
]


class Baseline(Protocol):
    """A planner of one batch; a pure function of its arguments."""

    def __call__(
        self,
        lengths: IntArray,
        num_ranks: int,
        capacity: int,
        pad_multiple: int,
        *,
        cost: CostModel,
        count_multiple: int = 1,
        equal_counts: bool = False,
        offload: bool = False,
    ) -> Plan:
        """Plan a batch.

        Args:
            lengths: tokens of every sequence, int64 [num_sequences], each at least 1.
            num_ranks: ranks of the pool.
            capacity: tokens that one rank holds in one micro-batch, a multiple of ``pad_multiple``.
            pad_multiple: pieces are multiples of this.
            cost: what pieces cost.
            count_multiple: micro-batch counts are a multiple of this.
            equal_counts: all ranks have equal counts and a ring has the same slot on all its ranks. Some baselines are
                always like that.
            offload: let activations leave for host memory, where the baseline can.

        Raises:
            PlanError: the batch cannot be planned.
        """
        ...


BASELINES: dict[str, Baseline] = {
    "static": plan_static,
    "static-smallest": plan_static_smallest,
    "naive": plan_naive,
    "bytescale": plan_bytescale,
    "bytescale-pp": functools.partial(plan_bytescale, strategy="pp"),
    "pow2": plan_pow2,
}
"""Name -> planner. "static" has one ring over the whole pool; "bytescale-pp" is for runs with pipeline stages."""
