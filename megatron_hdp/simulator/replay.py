"""A step with given seconds of compute for every micro-batch, measured ones for example; ranks wait as simulated."""

from dataclasses import dataclass, replace

import numpy as np

from megatron_hdp.errors import PlanError
from megatron_hdp.planner.graph import pipeline_graph, run
from megatron_hdp.simulator.job import Job
from megatron_hdp.simulator.lanes import PICOSECONDS
from megatron_hdp.simulator.order import Ops, groups_of, node_of, ops_of
from megatron_hdp.simulator.result import KINDS, Seconds, Timeline
from megatron_hdp.types import IntArray, Plan

_LONGEST = 1e6
"""Seconds of one micro-batch; sums of many still fit into 64 bits of picoseconds."""


@dataclass(frozen=True, eq=False)
class Replayed:
    """What a step would have taken if nothing but compute took time, and waiting for those who compute."""

    lane_ends: Seconds
    """When each lane is done with its micro-batches, [num_ranks x stages]."""
    timeline: Timeline
    """Bars of micro-batches only. As in a simulated one they begin when the lane is ready for them."""

    @property
    def span_seconds(self) -> float:
        """From the start of the first micro-batch to the end of the last."""
        return float(self.lane_ends.max())


def replay(plan: Plan, job: Job, forward: Seconds, backward: Seconds) -> Replayed:
    """Run ``plan`` with micro-batches that compute as long as told, in the rendezvous of `simulate_step`.

    Micro-batches that share rings (or experts) start together and last as long as the costliest of them, in every model
    part; stages run Megatron's order of operations. Transfers and messages take no time of their own.

    Args:
        plan: who runs what.
        job: only its stages, model parts and expert groups count.
        forward: seconds of each micro-batch in each model part, [num_microbatches, stages x virtual_stages]; the second
            index is the part's place, part x stages + stage.
        backward: the same for the backward pass.

    Raises:
        PlanError: times of another shape, or below zero; or ranks would wait for each other forever.
    """
    shape = (int(plan.rank_offsets[-1]), job.stages * job.virtual_stages)
    for name, values in (("forward", forward), ("backward", backward)):
        if values.shape != shape:
            raise PlanError(f"replay: {name} has the shape {list(values.shape)}, must be {list(shape)}")
        if not np.all((values >= 0) & (values < _LONGEST)):
            raise PlanError(f"replay: {name} has times that are negative, above {_LONGEST:,.0f} seconds, or no numbers")
    ops, together = ops_of(plan, job), groups_of(plan, job.expert_group)
    place = ops.part * job.stages + ops.lane % job.stages
    own = np.rint(PICOSECONDS * np.stack([forward, backward])[ops.phase, ops.microbatch, place]).astype(np.int64)
    by_ring, by_all = (node_of(ops, group, job) for group in (together.rings, together.all))
    zeros = np.zeros(shape[0], dtype=np.int64)  # durations of its own are the same in all places
    graph = pipeline_graph(plan.rank_offsets, together.all, zeros, zeros, job.stages, job.virtual_stages)
    ended = run(replace(graph, duration=_largest(by_all, own, graph.duration.size)))
    if np.any(ended < 0):
        raise PlanError("order: ranks would wait for each other forever: see planner.check")
    end = ended[by_all]
    free = np.concatenate([np.zeros(1, np.int64), end[:-1]])
    free[ops.offsets[:-1]] = 0
    came = _largest(graph.edge_to, ended[graph.edge_from], graph.duration.size)[by_all]
    return _as_bars(ops, np.maximum(free, came), end, own, by_ring)


def _largest(node: IntArray, values: IntArray, num_nodes: int) -> IntArray:
    """The largest value at each node, 0 where there is none; int64 [num_nodes]."""
    most = np.zeros(num_nodes, dtype=np.int64)
    np.maximum.at(most, node, values)
    return most


def _as_bars(ops: Ops, ready: IntArray, end: IntArray, own: IntArray, by_ring: IntArray) -> Replayed:
    """One bar for every op; all arguments are of ops, picoseconds but for the nodes ``by_ring``, int64 [num_ops]."""
    num_nodes = int(by_ring.max()) + 1
    ring = (_largest(by_ring, ready, num_nodes) + _largest(by_ring, own, num_nodes))[by_ring]
    zeros = np.zeros(own.size)
    timeline = Timeline(
        lane=ops.lane,
        kind=(KINDS.index("forward") + ops.phase).astype(np.int8),
        slot=ops.slot,
        part=ops.part.astype(np.int8),
        start=ready / PICOSECONDS,
        end=end / PICOSECONDS,
        compute=own / PICOSECONDS,
        ring=zeros,
        partner=(ring - ready - own) / PICOSECONDS,
        expert=(end - ring) / PICOSECONDS,
        copy=zeros,
    )
    return Replayed(timeline.end[ops.offsets[1:] - 1], timeline)
