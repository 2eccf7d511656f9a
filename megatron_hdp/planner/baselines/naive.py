"""Naive HDP: ByteScale's Algorithm 1 (SIGCOMM 2025, doi 10.1145/3718958.3754352), rings just large enough."""

import numpy as np

from megatron_hdp.cost import CostModel
from megatron_hdp.planner.offload import Limits, smallest_rings
from megatron_hdp.planner.packing import best_fit
from megatron_hdp.planner.units import Units, units_plan
from megatron_hdp.types import IntArray, Plan, chunk_tokens


def plan_naive(
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
    """Long sequences on the fewest ranks that hold them, short ones in packs, dealt out without looking at their work.

    The algorithm says "assign sequences to the ranks" and no more. Here ranks are dealt out in waves of one micro-batch
    per rank: long sequences in the order of the batch take the next ranks of the wave; where one does not fit in
    what is left of a wave, packs take the rest and the next wave begins; then packs, a rank each.

    Args:
        lengths: tokens of every sequence, int64 [num_sequences].
        num_ranks: ranks of the pool.
        capacity: tokens that one rank holds in one micro-batch.
        pad_multiple: pieces are multiples of this.
        cost: sets the offloaded fraction, see `smallest_rings`; unused without offload.
        count_multiple: micro-batch counts are a multiple of this.
        equal_counts: equal counts and slots, as pipelines need.
        offload: let activations of long sequences leave for host memory.

    Raises:
        PlanError: a sequence does not fit in the pool.
    """
    size, fraction = smallest_rings(lengths, num_ranks, capacity, cost, Limits() if offload else None)
    long = np.flatnonzero(lengths > capacity)
    short = np.flatnonzero(lengths <= capacity)
    pack = best_fit(2 * chunk_tokens(lengths[short], np.int64(1), pad_multiple), capacity)
    num_packs = int(pack.max(initial=-1)) + 1
    of = np.empty(lengths.size, dtype=np.int64)
    of[long] = num_packs + np.arange(long.size)
    of[short] = pack

    sizes = np.concatenate([np.ones(num_packs, dtype=np.int64), size[long]])
    start, wave = np.empty_like(sizes), np.empty_like(sizes)
    turn, begin, dealt = 0, 0, 0  # the wave, its next free rank, packs that have a rank
    for unit in range(num_packs, sizes.size):
        if begin + int(sizes[unit]) > num_ranks:
            filled = min(num_ranks - begin, num_packs - dealt)
            start[dealt : dealt + filled], wave[dealt : dealt + filled] = begin + np.arange(filled), turn
            dealt, turn, begin = dealt + filled, turn + 1, 0
        start[unit], wave[unit] = begin, turn
        begin += int(sizes[unit])
    place = turn * num_ranks + begin + np.arange(num_packs - dealt)
    start[dealt:num_packs], wave[dealt:num_packs] = place % num_ranks, place // num_ranks
    return units_plan(
        lengths,
        num_ranks,
        capacity,
        pad_multiple,
        Units(of, start, sizes, wave),
        offload=fraction,
        equal_counts=equal_counts,
        count_multiple=count_multiple,
    )
