"""What a step has around its micro-batches, as far as plans differ in it: parameters that come, gradients that go.

Gradients of a layer are summed over the pool once every rank has them. While the last micro-batch of all ranks runs
backward, that costs nothing; where a rank ends with a short one, it has had the gradients of few layers for long enough
when it ends, and all wait. So ranks should end with micro-batches whose backward is as long as the sums, or end sooner.
"""

from typing import NamedTuple

import numpy as np

from megatron_hdp.cost import CostModel
from megatron_hdp.planner.skyline import Placement
from megatron_hdp.types import IntArray, Plan

SHARE_BITS = 10


class LastEnough(NamedTuple):
    """How long the last micro-batch of a rank should be, and what it costs if it is not."""

    time: int
    """Picoseconds, forward and backward; 0: it does not matter."""
    share: int
    """Of that, backward, in 2^-10: for each picosecond less, all ranks wait so long."""


def last_enough(cost: CostModel, capacity: int) -> LastEnough:
    """See `LastEnough`; no more than a full micro-batch has, as ranks cannot do better."""
    if not cost.reduce_picoseconds:
        return LastEnough(0, 0)
    backward, total = (
        int(cost.picoseconds(capacity, phase=phase)) + cost.microbatch_picoseconds(phase)
        for phase in ("backward", "total")
    )
    backward = max(backward, 1)
    return LastEnough(min(cost.reduce_picoseconds, backward) * total // backward, (backward << SHARE_BITS) // total)


def reserves(placed: Placement, num_ranks: int, target: int, least: int, last: LastEnough) -> list[int]:
    """How much sooner than the others each rank should be done, because what it runs last is short; picoseconds.

    A rank that still has room before ``target`` gets local sequences, and ends with the longest pack of those. One that
    has none, or whose last ring is the last of all its ranks, may end with that ring. Twin of the C++ ``reserves``.

    Args:
        placed: all rings.
        num_ranks: of the pool.
        target: when ranks should be done, picoseconds.
        least: time of the shortest local sequence.
        last: how long is enough.
    """
    if not last.time:
        return []
    ring = [-1] * num_ranks  # the last one, as index of its place
    for index, (start, size, *_) in enumerate(placed.places):
        ring[start : start + size] = [index] * size
    result = []
    for index in ring:
        room, longest = target, 0
        if index >= 0:
            start, size, begin, time, _ = placed.places[index]
            room -= begin + time
            if room < least or all(other == index for other in ring[start : start + size]):
                longest = time
        if room >= least:
            longest = max(longest, min(room, last.time))
        result.append((max(last.time - longest, 0) >> SHARE_BITS) * last.share)
    return result


def framed_span(plan: Plan, ends: IntArray, forward: IntArray, backward: IntArray, cost: CostModel) -> int:
    """When gradients are summed and every rank is done, without pipeline stages, picoseconds.

    Layers' parameters and gradients travel one after the other and in equal parts. What is late grows with the layer,
    or falls, so the first and the last of them decide.

    Args:
        plan: what ranks run.
        ends: when each rank is done if parameters are there at once, int64 [num_ranks].
        forward: picoseconds of every micro-batch, int64 [num_microbatches].
        backward: the same for backward.
        cost: of the model.
    """
    layers, gather, reduce = cost.layers_per_stage, cost.gather_picoseconds, cost.reduce_picoseconds
    first, last = plan.rank_offsets[:-1], plan.rank_offsets[1:] - 1
    late = np.maximum(gather // layers, gather - forward[first] * (layers - 1) // layers)
    done = ends + late
    begun = done - backward[last] * (layers - 1) // layers  # the gradients of the model's last layer are there
    return max(int(done.max()) + reduce // layers, int(begun.max()) + reduce)
