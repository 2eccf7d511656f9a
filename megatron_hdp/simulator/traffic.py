"""Bytes of a step by link, and how busy the NICs are."""

import numpy as np

from megatron_hdp.simulator.durations import Durations
from megatron_hdp.simulator.job import Job
from megatron_hdp.simulator.lanes import PICOSECONDS
from megatron_hdp.simulator.links import RingLinks
from megatron_hdp.simulator.messages import crossings, message_bytes
from megatron_hdp.simulator.sent import Sent
from megatron_hdp.simulator.sync import Weights
from megatron_hdp.types import Plan

LINKS = ("inside_node", "across_nodes", "to_host", "from_host")


def attention_bytes(sent: Sent, job: Job) -> dict[str, int]:
    """Bytes by link of all rings, gathers and swaps of the step, all layers and GPUs."""
    times = job.cost.layers_per_stage * job.stages * job.tensor_parallel
    total, across = round(float(sent.all.sum()) * times), round(float(sent.across.sum()) * times)
    return {"inside_node": total - across, "across_nodes": across}


def host_bytes(plan: Plan, job: Job) -> int:
    """Bytes that leave for host memory in a step, all GPUs; as many come back."""
    leaving = np.flatnonzero(plan.offload > 0)
    if not leaving.size:
        return 0
    cost = job.stage_cost(plan)
    each = cost.host_bytes(plan.lengths[leaving], plan.ring_size[leaving], plan.offload[leaving])
    return int((each * plan.ring_size[leaving]).sum()) * job.stages * job.tensor_parallel


def sync_bytes(plan: Plan, job: Job, weights: Weights) -> dict[str, int]:
    """Bytes by link of reducing gradients and gathering parameters, all GPUs; collectives are rings over nodes."""
    total = {"inside_node": 0, "across_nodes": 0}
    each = job.sync.gradient_bytes + job.sync.parameter_bytes
    ranks = job.cluster.ranks_per_node(job.tensor_parallel)
    groups = ((sum(weights.dense), 1), (sum(weights.expert), job.expert_group))
    for number, apart in groups:
        members = plan.num_ranks // apart
        moved = number * each * (members - 1) * apart * job.tensor_parallel  # by all members of all such groups
        per_node = min(max(1, ranks // apart), members)
        crossing = moved // per_node if members > per_node else 0
        total["across_nodes"] += crossing
        total["inside_node"] += moved - crossing
    return total


def moved_between_stages(plan: Plan, job: Job) -> dict[str, int]:
    """Bytes by link of activations and their gradients between pipeline stages, all GPUs."""
    sent = message_bytes(plan, job)
    ahead = np.concatenate([np.zeros(1, np.int64), np.cumsum(sent)])
    of_rank = ahead[plan.rank_offsets[1:]] - ahead[plan.rank_offsets[:-1]]
    outside = crossings(plan, job)
    moves = job.stages * job.virtual_stages - 1
    both = 2 * job.tensor_parallel
    across = int((of_rank * outside).sum()) * both
    return {"inside_node": int(of_rank.sum()) * moves * both - across, "across_nodes": across}


def bytes_by_link(plan: Plan, job: Job, sent: Sent, weights: Weights) -> dict[str, int]:
    """All bytes of a step, each once, where it is sent."""
    total = dict.fromkeys(LINKS, 0)
    for part in (attention_bytes(sent, job), moved_between_stages(plan, job), sync_bytes(plan, job, weights)):
        for link, number in part.items():
            total[link] += number
    total["to_host"] = total["from_host"] = host_bytes(plan, job)
    return total


_PEAK_PICOSECONDS = 10**10
"""10 ms"""


def nic_peak(plan: Plan, job: Job, sent: Sent, over: RingLinks, times: Durations) -> float:
    """Most bytes per second that attention makes one NIC send over any 10 ms of micro-batches.

    A layer's transfers are spread over its attention, and that over at least 10 ms, or over the layer if that is
    shorter.
    """
    leaving = over.leaves[sent.sequence]
    if not leaving.any():
        return 0.0
    sequence, layers = sent.sequence[leaving], job.cost.layers_per_stage
    gpus = max(1, job.cluster.gpus_per_node // job.cluster.nics_per_node)
    flows = np.where(over.nic_flows > 0, over.nic_flows, gpus)[sequence]
    microbatch = np.repeat(np.arange(plan.microbatch_offsets.size - 1), np.diff(plan.microbatch_offsets))
    layer = np.zeros((plan.num_sequences, 2), dtype=np.int64)
    layer[plan.piece_sequence] = times.total[microbatch] // layers  # of one of the micro-batches that hold it
    spread = np.maximum(times.attention // layers, np.minimum(layer, _PEAK_PICOSECONDS))[sequence]
    rate = sent.of_sender[leaving] * flows[:, None] / np.maximum(spread, 1)
    return float(np.max(rate)) * PICOSECONDS / max(1, job.cluster.nics_per_node // job.cluster.gpus_per_node)
