"""What a step does besides its micro-batches: gathering parameters, reducing gradients, the optimizer, the plan.

A collective over N GPUs moves bytes (N - 1) / N through the slowest link, and takes ceil(log2 N) latencies. Its ring
crosses each node's border on all NICs that its members have there.
"""

import dataclasses
import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from megatron_hdp.cost import CostModel
from megatron_hdp.memory import Parallel, parameters
from megatron_hdp.simulator.job import Job
from megatron_hdp.simulator.order import Ops, Run
from megatron_hdp.types import IntArray

_PS = 10**12


@dataclass(frozen=True)
class Weights:
    """Parameters of one GPU, by pipeline stage."""

    dense: tuple[int, ...]
    """Those that all ranks of the pool have."""
    expert: tuple[int, ...]
    """Those that every expert group has once."""


def weights_of(job: Job, num_ranks: int) -> Weights:
    """Parameters by stage; zeros without a model. Experts have an MLP of the model's size each, and a router."""
    if job.model is None:
        return Weights((0,) * job.stages, (0,) * job.stages)
    model, tp = job.model, job.tensor_parallel
    parallel = Parallel(ranks=num_ranks, tensor_parallel=tp, stages=job.stages, virtual_stages=job.virtual_stages)
    if job.stages == 1:
        dense = [parameters(model, parallel, "only")]
    else:
        first, last = (parameters(model, parallel, stage) for stage in ("first", "last"))
        whole = parameters(dataclasses.replace(model, tied=False), parallel, "only")
        dense = [first, *[first + last - whole] * (job.stages - 2), last]
    if job.experts == 1:
        return Weights(tuple(dense), (0,) * job.stages)
    layers = job.cost.layers_per_stage
    mlp = layers * model.hidden * ((3 if model.gated else 2) * model.ffn // tp)
    router = layers * model.hidden * job.experts
    expert = mlp * job.experts // job.expert_group
    return Weights(tuple(part - mlp + router for part in dense), (expert,) * job.stages)


def collective(job: Job, num_bytes: int, members: int, per_node: int) -> int:
    """Picoseconds of a reduce-scatter or an all-gather of so many bytes over ``members`` GPUs, ``per_node`` a node."""
    if members < 2 or not num_bytes:
        return 0
    cluster = job.cluster
    if members <= per_node:
        bandwidth, latency = cluster.inside_bandwidth, cluster.inside_latency
    else:
        bandwidth, latency = min(cluster.inside_bandwidth, per_node * cluster.nic_share), cluster.nic_latency
        if cluster.leaf_uplink is not None:
            bandwidth = min(bandwidth, cluster.leaf_uplink / cluster.gpus_per_node * per_node)
    moved = Fraction(num_bytes) * (members - 1) / members / Fraction(bandwidth)
    return round((moved + Fraction(latency) * math.ceil(math.log2(members))) * _PS)


def over_pool(job: Job, num_ranks: int, weights: Weights, bytes_each: int) -> IntArray:
    """Picoseconds in which each stage reduces or gathers ``bytes_each`` of every parameter, int64 [stages]."""
    ranks = job.cluster.ranks_per_node(job.tensor_parallel)
    sharing = num_ranks // job.expert_group
    experts_per_node = max(1, ranks // job.expert_group)
    times = [
        collective(job, dense * bytes_each, num_ranks, ranks)
        + collective(job, expert * bytes_each, sharing, experts_per_node)
        for dense, expert in zip(weights.dense, weights.expert, strict=True)
    ]
    return np.array(times, dtype=np.int64)


def with_frame(cost: CostModel, job: Job, num_ranks: int) -> CostModel:
    """The model with the times of what runs beside the first and the last micro-batch, for the planner.

    ``job`` is the run; its own cost model is not looked at.
    """
    weights, sync = weights_of(job, num_ranks), job.sync

    def longest(beside: bool, bytes_each: int) -> int:
        return int(over_pool(job, num_ranks, weights, bytes_each).max()) if beside else 0

    return dataclasses.replace(
        cost,
        gather_picoseconds=longest(sync.overlap_param_gather, sync.parameter_bytes),
        reduce_picoseconds=longest(sync.overlap_grad_reduce, sync.gradient_bytes),
    )


def optimizer_picoseconds(job: Job, num_ranks: int, weights: Weights) -> int:
    """The update of a rank's part of the parameters, on the stage that has most; all wait for it."""
    if job.cluster.memory_bandwidth is None:
        return 0
    own = [
        -(-dense // num_ranks) + -(-expert * job.expert_group // num_ranks)
        for dense, expert in zip(weights.dense, weights.expert, strict=True)
    ]
    moved = Fraction(max(own) * job.sync.optimizer_bytes_per_parameter)
    return round(moved / Fraction(job.cluster.memory_bandwidth) * _PS)


def gates_of(ops: Ops, forward: IntArray, gather: IntArray, job: Job) -> IntArray:
    """Earliest start of every op that its parameters allow, picoseconds after gathering began; int64 [num_ops].

    Without overlap, all have to be there. With it, layers' parameters come one after the other, in the order of the
    model parts, and an op may start as soon as no layer will have to wait for its own; only the first op of each part
    can be held up.

    Args:
        ops: of all lanes.
        forward: how long each op takes, int64 [num_ops].
        gather: of all parameters of a stage, int64 [stages].
        job: what runs.
    """
    result = np.zeros(ops.lane.size, dtype=np.int64)
    first = np.flatnonzero((ops.phase == 0) & (ops.slot == 0))
    whole = gather[ops.lane[first] % job.stages]
    if not job.sync.overlap_param_gather:
        result[first] = whole
        return result
    layers = job.cost.layers_per_stage
    own = layers // job.virtual_stages
    before = ops.part[first] * own
    last = whole * (before + own) // layers - forward[first] * (own - 1) // own
    result[first] = np.maximum(whole * (before + 1) // layers, last)
    return result


def reduced_at(ops: Ops, run: Run, backward: IntArray, reduce: IntArray, job: Job) -> IntArray:
    """When the gradients of each stage are summed over the pool, picoseconds, int64 [stages].

    Sums start when all ranks have the gradients. With overlap each layer's gradients leave as soon as the last
    micro-batch has run backward through it, a share of the op's time for each layer; the sums take turns.
    """
    num_stages = job.stages
    ends = run.end[ops.offsets[1:] - 1].reshape(-1, num_stages).max(axis=0)
    if not job.sync.overlap_grad_reduce:
        return ends + reduce
    counts = np.diff(ops.offsets) // (2 * job.virtual_stages)
    last = np.flatnonzero((ops.phase == 1) & (ops.slot == counts[ops.lane] - 1))
    own = job.cost.layers_per_stage // job.virtual_stages
    left = np.arange(own - 1, -1, -1)  # layers that the op still has to run when one is done
    there = np.zeros((num_stages, job.virtual_stages, own), dtype=np.int64)
    for layer, ahead in enumerate(left.tolist()):
        at = run.end[last] - backward[last] * ahead // own
        np.maximum.at(there[:, :, layer], (ops.lane[last] % num_stages, ops.part[last]), at)
    there = np.sort(there.reshape(num_stages, -1), axis=1)
    done = np.zeros(num_stages, dtype=np.int64)
    share = reduce // there.shape[1]
    for bucket in there.T:
        done = np.maximum(done, bucket) + share
    return np.maximum(done, ends)
