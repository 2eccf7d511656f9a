"""Activations and their gradients between pipeline stages."""

from fractions import Fraction

import numpy as np

from megatron_hdp.simulator.job import Job
from megatron_hdp.types import IntArray, Plan

_PS = 10**12


def piece_tokens(plan: Plan) -> IntArray:
    """Tokens that each rank of a sequence's ring holds, padding counted, int64 [num_sequences]."""
    return 2 * plan.chunk_tokens


def sum_by_microbatch(plan: Plan, of_sequence: IntArray) -> IntArray:
    """Sum over the pieces of each micro-batch, int64 [num_microbatches]."""
    ahead = np.concatenate([np.zeros(1, np.int64), np.cumsum(of_sequence[plan.piece_sequence])])
    return np.diff(ahead[plan.microbatch_offsets])


def message_bytes(plan: Plan, job: Job) -> IntArray:
    """Bytes that one GPU sends of each micro-batch from one model part to the next, int64 [num_microbatches].

    Each GPU of a tensor-parallel group sends its share of the tokens' hidden states, as Megatron does with sequence
    parallelism. Zeros without a pipeline or a model.
    """
    tokens = sum_by_microbatch(plan, piece_tokens(plan))
    if job.stages == 1 or job.model is None:
        return 0 * tokens
    return tokens * (job.model.hidden * job.model.element_bytes) // job.tensor_parallel


def crossings(plan: Plan, job: Job) -> IntArray:
    """How many of a rank's moves from one model part to the next leave the node, int64 [num_ranks].

    Process numbers count tensor ranks first, then pool ranks, then stages.
    """
    places = np.arange(job.stages * job.virtual_stages) % job.stages
    process = (places[:, None] * plan.num_ranks + np.arange(plan.num_ranks)) * job.tensor_parallel
    node = process // job.cluster.gpus_per_node
    return np.asarray((node[1:] != node[:-1]).sum(axis=0), dtype=np.int64)


def message_picoseconds(plan: Plan, job: Job) -> IntArray:
    """From the end of a micro-batch's op to where the next stage has its result, int64 [num_microbatches].

    All ranks of a node may send at the same time, so each GPU gets its share of the NICs, and of a leaf's uplinks. A
    rank that sends across nodes at any stage is taken to do so at all.
    """
    sent = message_bytes(plan, job)
    if not sent.any():
        return sent
    cluster = job.cluster
    outside = cluster.nic_share
    if cluster.leaf_uplink is not None and cluster.nodes_per_leaf is not None:
        outside = min(outside, cluster.leaf_uplink / (cluster.nodes_per_leaf * cluster.gpus_per_node))
    leaves = np.repeat(crossings(plan, job) > 0, plan.microbatch_counts)
    links = [(cluster.inside_latency, cluster.inside_bandwidth), (cluster.nic_latency, outside)]
    latency, each = (
        np.array([round(Fraction(value) * _PS) for value in pair])[leaves * 1]
        for pair in (
            [latency for latency, _ in links],
            [Fraction(1 << 20) / Fraction(bandwidth) for _, bandwidth in links],  # of a MiB, so that it is exact enough
        )
    )
    return np.asarray(latency + (sent * each >> 20), dtype=np.int64)
