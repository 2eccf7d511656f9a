"""Costs of packs that travel a ring as one, for plans of systems that send a pack's keys and values in one slice."""

import numpy as np

from megatron_hdp.cost import CostModel, Tier
from megatron_hdp.cost.model import Phase
from megatron_hdp.planner.graph import tie_experts
from megatron_hdp.planner.span import ends_of_columns, microbatch_picoseconds
from megatron_hdp.types import IntArray, Plan


def packed_picoseconds(plan: Plan, cost: CostModel) -> tuple[IntArray, IntArray]:
    """`microbatch_picoseconds`, but pieces of one micro-batch with the same ring walk it together.

    Their attention then costs `CostModel.packed_attention_picoseconds` instead of the sum over sequences.

    Returns:
        forward int64 [num_microbatches], backward int64 [num_microbatches].
    """
    forward, backward = (part.copy() for part in microbatch_picoseconds(plan, cost))
    saved: dict[tuple[int, ...], tuple[int, int]] = {}  # all ranks of a ring hold the same pack
    for microbatch in range(forward.size):
        pieces = plan.piece_sequence[plan.microbatch_offsets[microbatch] : plan.microbatch_offsets[microbatch + 1]]
        starts, sizes = plan.ring_start[pieces], plan.ring_size[pieces]
        for start, size in sorted(set(zip(starts.tolist(), sizes.tolist(), strict=True))):
            pack = pieces[(starts == start) & (sizes == size)]
            if size > 1 and pack.size > 1:
                key = (start, size, *pack.tolist())
                if key not in saved:
                    saved[key] = _saved(plan.lengths[pack], size, Tier(int(cost.tier(start, size))), cost)
                forward[microbatch] -= saved[key][0]
                backward[microbatch] -= saved[key][1]
    return forward, backward


def _saved(lengths: IntArray, ring: int, tier: Tier, cost: CostModel) -> tuple[int, int]:
    """What walking together saves in forward and backward, picoseconds."""
    phases: tuple[Phase, Phase] = ("forward", "backward")
    apart = [int(np.sum(cost.attention_picoseconds(lengths, ring, tier, phase))) for phase in phases]
    together = [cost.packed_attention_picoseconds(lengths, ring, tier, phase) for phase in phases]
    return apart[0] - together[0], apart[1] - together[1]


def packed_rank_ends(
    plan: Plan, cost: CostModel, stages: int = 1, virtual_stages: int = 1, expert_group: int = 1
) -> IntArray:
    """`megatron_hdp.planner.span.rank_ends` with the costs of `packed_picoseconds`; int64 [num_ranks]."""
    forward, backward = packed_picoseconds(plan, cost)
    columns = (plan.microbatch_offsets, plan.piece_sequence, plan.ring_size)
    if expert_group > 1:
        columns = tie_experts(plan.rank_offsets, *columns, expert_group)
    return ends_of_columns(plan.rank_offsets, *columns, forward, backward, stages, virtual_stages)
