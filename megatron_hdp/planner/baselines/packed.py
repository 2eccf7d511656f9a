"""Costs of packs that are exchanged as one, for plans of systems that send a pack's keys and values together."""

import numpy as np

from megatron_hdp.cost import CostModel, Tier
from megatron_hdp.planner.graph import tie_experts
from megatron_hdp.planner.span import PHASES, ends_of_columns, microbatch_picoseconds
from megatron_hdp.types import IntArray, Plan


def packed_picoseconds(plan: Plan, cost: CostModel) -> tuple[IntArray, IntArray]:
    """`microbatch_picoseconds`, but pieces of one micro-batch on the same ranks share one exchange.

    Their attention then costs `CostModel.packed_attention_picoseconds` instead of the sum over sequences.

    Returns:
        forward int64 [num_microbatches], backward int64 [num_microbatches].
    """
    forward, backward = (part.copy() for part in microbatch_picoseconds(plan, cost))
    of_pack: dict[bytes, tuple[int, int]] = {}  # all ranks of a ring hold the same packs
    offsets = plan.microbatch_offsets.tolist()
    for microbatch in range(forward.size):
        begin, end = offsets[microbatch : microbatch + 2]
        if end - begin > 1:
            pieces = plan.piece_sequence[begin:end]
            key = pieces.tobytes()
            if key not in of_pack:
                of_pack[key] = _saved_by_all(plan, pieces, cost)
            forward[microbatch] -= of_pack[key][0]
            backward[microbatch] -= of_pack[key][1]
    return forward, backward


def _saved_by_all(plan: Plan, pieces: IntArray, cost: CostModel) -> tuple[int, int]:
    """What a micro-batch of these sequences saves in forward and backward, picoseconds."""
    columns = [column[pieces] for column in (plan.ring_start, plan.ring_size, plan.exchange, plan.head_ranks)]
    forward = backward = 0
    for start, size, exchange, head_ranks in sorted(set(zip(*(own.tolist() for own in columns), strict=True))):
        alike = np.all([own == value for own, value in zip(columns, (start, size, exchange, head_ranks))], axis=0)
        pack = pieces[alike]
        if size > 1 and pack.size > 1:
            tier = Tier(int(cost.tier(start, size)))
            saved = _saved(plan.lengths[pack], size, tier, exchange, head_ranks, cost)
            forward, backward = forward + saved[0], backward + saved[1]
    return forward, backward


def _saved(
    lengths: IntArray, ring: int, tier: Tier, exchange: int, head_ranks: int, cost: CostModel
) -> tuple[int, int]:
    """What moving together saves in forward and backward, picoseconds."""
    saved = []
    for phase in PHASES:
        each = cost.exchange_picoseconds(lengths, ring, tier, exchange, head_ranks, phase)
        besides = cost.picoseconds(lengths, ring, tier, phase) - cost.attention_picoseconds(lengths, ring, tier, phase)
        together = cost.packed_attention_picoseconds(lengths, ring, tier, phase, exchange, head_ranks)
        saved.append(int(np.sum(each - besides)) - together)
    return saved[0], saved[1]


def packed_rank_ends(
    plan: Plan, cost: CostModel, stages: int = 1, virtual_stages: int = 1, expert_group: int = 1
) -> IntArray:
    """`megatron_hdp.planner.span.rank_ends` with the costs of `packed_picoseconds`; int64 [num_ranks]."""
    forward, backward = packed_picoseconds(plan, cost.with_stages(stages))
    columns = (plan.microbatch_offsets, plan.piece_sequence, plan.ring_size)
    if expert_group > 1:
        columns = tie_experts(plan.rank_offsets, *columns, expert_group)
    return ends_of_columns(plan.rank_offsets, *columns, forward, backward, stages, virtual_stages)
