"""When is each rank done? The one evaluator of plans. C++ where built, else Python."""

import numpy as np

from megatron_hdp.cost import CostModel, Phase
from megatron_hdp.errors import PlanError
from megatron_hdp.planner.graph import groups, pipeline_graph, run_python, tie_experts, tied_slots, whole_graph
from megatron_hdp.planner.native import _core
from megatron_hdp.types import IntArray, Plan

PHASES: tuple[Phase, Phase] = ("forward", "backward")


def microbatch_picoseconds(plan: Plan, cost: CostModel) -> tuple[IntArray, IntArray]:
    """Forward and backward time of every micro-batch on one pipeline stage, picoseconds.

    The constant of a micro-batch plus the `CostModel.picoseconds` of its pieces, by their exchange; an empty one costs
    the constant.

    Returns:
        forward int64 [num_microbatches], backward int64 [num_microbatches].
    """
    tier = cost.tier(plan.ring_start, plan.ring_size)
    rings, pieces, result = not plan.exchange.any(), (plan.lengths, plan.ring_size, tier), []
    for phase in PHASES:
        if rings:
            times = cost.picoseconds(*pieces, phase)
        else:
            times = cost.exchange_picoseconds(*pieces, plan.exchange, plan.head_ranks, phase)
        of_sequence = np.asarray(times, dtype=np.int64)
        ahead = np.zeros(plan.piece_sequence.size + 1, dtype=np.int64)
        np.cumsum(of_sequence[plan.piece_sequence], out=ahead[1:])
        result.append(np.diff(ahead[plan.microbatch_offsets]) + cost.microbatch_picoseconds(phase))
    return result[0], result[1]


def rank_ends(plan: Plan, cost: CostModel, stages: int = 1, virtual_stages: int = 1, expert_group: int = 1) -> IntArray:
    """When each rank is done with all its stages, int64 picoseconds [num_ranks]; the span is the largest.

    See `ends_of_columns` for what is simulated. Ranks that share experts (``expert_group`` consecutive ones) also wait
    for each other in every slot.

    Raises:
        PlanError: ranks would wait for each other forever.
    """
    forward, backward = microbatch_picoseconds(plan, cost.with_stages(stages))
    columns = (plan.microbatch_offsets, plan.piece_sequence, plan.ring_size)
    if expert_group > 1:
        columns = tie_experts(plan.rank_offsets, *columns, expert_group)
    return ends_of_columns(plan.rank_offsets, *columns, forward, backward, stages, virtual_stages)


def ends_of_columns(
    rank_offsets: IntArray,
    microbatch_offsets: IntArray,
    piece_sequence: IntArray,
    ring_size: IntArray,
    forward: IntArray,
    backward: IntArray,
    stages: int = 1,
    virtual_stages: int = 1,
) -> IntArray:
    """`rank_ends` of raw arrays, so that planners can try candidates cheaply; int64 [num_ranks], picoseconds.

    Every rank (a column: all its stages) runs Megatron's order of operations on each stage (`planner.schedule`).
    Forward of a micro-batch needs forward of the model part before, backward needs backward of the part after.
    Micro-batches linked by shared rings, directly or through others, form a group: all members of its op at one model
    part and phase start together when the last is ready, and last as long as the costliest. An op of one of
    ``virtual_stages`` model parts lasts cost // virtual_stages. Messages between stages take no time.

    Args:
        rank_offsets: as in `Plan`, [num_ranks + 1].
        microbatch_offsets: as in `Plan`, [num_microbatches + 1].
        piece_sequence: as in `Plan`, [num_pieces].
        ring_size: as in `Plan`, [num_sequences].
        forward: picoseconds of each micro-batch on one stage, int64 [num_microbatches].
        backward: the same for backward.
        stages: pipeline stages.
        virtual_stages: model parts per stage; with more than one, counts are multiples of ``stages``.

    Raises:
        PlanError: ranks would wait for each other forever.
    """
    if _core is not None:
        found: IntArray = _core.rank_ends(
            rank_offsets, microbatch_offsets, piece_sequence, ring_size, forward, backward, stages, virtual_stages
        )
        if found.size:
            return found
    return ends_of_columns_python(
        rank_offsets, microbatch_offsets, piece_sequence, ring_size, forward, backward, stages, virtual_stages
    )


def ends_of_columns_python(
    rank_offsets: IntArray,
    microbatch_offsets: IntArray,
    piece_sequence: IntArray,
    ring_size: IntArray,
    forward: IntArray,
    backward: IntArray,
    stages: int = 1,
    virtual_stages: int = 1,
) -> IntArray:
    """Twin of the C++ `rank_ends`; see `ends_of_columns`."""
    counts = np.diff(rank_offsets)
    if virtual_stages > 1 and np.any(counts % stages):
        r = int(np.flatnonzero(counts % stages)[0])
        raise PlanError(
            f"counts: rank {r} has {counts[r]} micro-batches, the interleaved schedule needs a multiple of the "
            f"{stages} pipeline stages"
        )
    group = groups(rank_offsets, microbatch_offsets, piece_sequence, ring_size)
    tied = tied_slots(rank_offsets, group)
    if tied is not None:
        raise PlanError(f"order: rings tie slot {tied[1]} of rank {tied[0]} to its slot {tied[2]}: see planner.check")
    if stages == 1:
        graph = whole_graph(rank_offsets, group, forward, backward)
    else:
        graph = pipeline_graph(rank_offsets, group, forward, backward, stages, virtual_stages)
    ended = run_python(graph)[graph.queue_nodes]
    if np.any(ended < 0):
        raise PlanError("order: ranks would wait for each other forever: see planner.check")
    if not ended.size:
        return np.zeros(counts.size, dtype=np.int64)
    cuts = graph.queue_offsets
    return np.where(np.diff(cuts) > 0, ended[cuts[1:] - 1], 0).reshape(-1, stages).max(axis=1)
