"""Rings of powers of two in equal counts: the idea of Megatron-LM's dynamic context parallelism (its dev branch).

Every rank runs one micro-batch per wave, all the same number of waves; a ring has a power of two of ranks, an aligned
block, or is the whole pool. Rings may be wider than memory asks, to fill gaps and to shorten the longest sequences.
Written from the idea, not from that code: placement is by this package's cost model, packs are local, and the width
to which the longest rings go is searched. That code itself is run by `megatron_hdp.seams.scheduler`.
"""

import dataclasses

import numpy as np

from megatron_hdp.cost import CostModel
from megatron_hdp.planner.columns import Layout
from megatron_hdp.planner.offload import smallest_rings
from megatron_hdp.planner.waves import best_waves, powers_of_two
from megatron_hdp.types import IntArray, Plan


def plan_pow2(
    lengths: IntArray,
    num_ranks: int,
    capacity: int,
    pad_multiple: int,
    *,
    cost: CostModel,
    count_multiple: int = 1,
    equal_counts: bool = True,
    offload: bool = False,
) -> Plan:
    """Waves of aligned rings of powers of two; of some widths of the longest rings, the one with the least span.

    The span is that without pipeline stages if ``count_multiple`` is 1, else of an interleaved schedule of that many.

    Args:
        lengths: tokens of every sequence, int64 [num_sequences].
        num_ranks: ranks of the pool.
        capacity: tokens that one rank holds in one micro-batch.
        pad_multiple: pieces are multiples of this.
        cost: what units cost.
        count_multiple: micro-batch counts are a multiple of this.
        equal_counts: no choice here, counts are equal; in the signature of all baselines.
        offload: no choice here, nothing is offloaded.

    Raises:
        PlanError: a sequence does not fit in the pool.
    """
    smallest_rings(lengths, num_ranks, capacity, cost)  # refuses what the pool cannot hold
    if cost.pad_multiple != pad_multiple:
        cost = dataclasses.replace(cost, pad_multiple=pad_multiple)
    layout = Layout(count_multiple, 2) if count_multiple > 1 else Layout()
    columns = best_waves(lengths, num_ranks, capacity, cost, powers_of_two(num_ranks), layout)
    return Plan(
        num_ranks=num_ranks,
        capacity=capacity,
        pad_multiple=pad_multiple,
        lengths=lengths,
        offload=np.zeros(lengths.size),
        **columns._asdict(),
    )
