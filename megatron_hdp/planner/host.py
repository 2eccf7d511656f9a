"""Host memory that a plan's offloaded activations take: of each rank, at its worst moment."""

from dataclasses import replace

import numpy as np

from megatron_hdp.cost import CostModel
from megatron_hdp.planner.schedule import FORWARD, Op, schedule
from megatron_hdp.types import IntArray, Plan


def most_in_flight(stages: int, virtual_stages: int) -> int:
    """Most micro-batches whose activations a rank may hold at a time, rounded up; those of the first stage."""
    if virtual_stages == 1:
        return stages
    return -(-(2 * (stages - 1) + (virtual_stages - 1) * stages + 1) // virtual_stages)


def host_peaks(plan: Plan, cost: CostModel, stages: int = 1, virtual_stages: int = 1) -> IntArray:
    """Most bytes that one process of each rank has in host memory at a time, int64 [num_ranks].

    The first stage of a pipeline holds most: with 1F1B up to ``stages`` micro-batches in a row, with the interleaved
    schedule what its order of operations holds, where a model part has an equal share of the stage's bytes.
    """
    peaks = np.zeros(plan.num_ranks, dtype=np.int64)
    if not plan.offload.any():
        return peaks
    if cost.pad_multiple != plan.pad_multiple:
        cost = replace(cost, pad_multiple=plan.pad_multiple)
    of_sequence = np.asarray(cost.host_bytes(plan.lengths, plan.ring_size, plan.offload), dtype=np.int64)
    ahead = np.concatenate([np.zeros(1, np.int64), np.cumsum(of_sequence[plan.piece_sequence])])
    held = np.diff(ahead[plan.microbatch_offsets])
    offsets = plan.rank_offsets
    if virtual_stages == 1:
        ahead = np.concatenate([np.zeros(1, np.int64), np.cumsum(held)])
        first = np.arange(held.size)
        end = np.minimum(first + stages, np.repeat(offsets[1:], np.diff(offsets)))
        np.maximum.at(peaks, np.repeat(np.arange(plan.num_ranks), np.diff(offsets)), ahead[end] - ahead[first])
        return peaks
    orders: dict[int, list[Op]] = {}
    for rank in range(plan.num_ranks):
        own = held[offsets[rank] : offsets[rank + 1]]
        if own.any():
            if own.size not in orders:
                orders[own.size] = schedule(own.size, 0, stages, virtual_stages)
            peaks[rank] = _interleaved_peak((-(-own // virtual_stages)).tolist(), orders[own.size])
    return peaks


def _interleaved_peak(of_part: list[int], order: list[Op]) -> int:
    """Largest sum while a stage runs its operations: forward brings what ``of_part`` says, backward takes it away."""
    most = now = 0
    for op in order:
        now += of_part[op.slot] if op.phase == FORWARD else -of_part[op.slot]
        most = max(most, now)
    return most
