"""Which ops every lane runs, in which order, and when each can start: the graph of a step, run."""

from dataclasses import dataclass

import numpy as np

from megatron_hdp.errors import PlanError
from megatron_hdp.planner.graph import Graph, groups, pipeline_graph, run, tie_experts, tied_slots
from megatron_hdp.planner.schedule import schedule
from megatron_hdp.simulator.durations import Durations
from megatron_hdp.simulator.job import Job
from megatron_hdp.types import IntArray, Plan


@dataclass(frozen=True)
class Ops:
    """All ops of a step, lane by lane, each lane's in the order in which it runs them; int64 [num_ops]."""

    offsets: IntArray
    """Ops of lane l are offsets[l] : offsets[l + 1], at least two; shape [num_lanes + 1]."""
    lane: IntArray
    microbatch: IntArray
    """Index into the plan's micro-batches."""
    slot: IntArray
    part: IntArray
    phase: IntArray


@dataclass(frozen=True)
class Groups:
    """Which micro-batches run together; int64 [num_microbatches]."""

    rings: IntArray
    """Linked by rings, directly or through others."""
    all: IntArray
    """Linked by rings or by shared experts."""


def ops_of(plan: Plan, job: Job) -> Ops:
    """Megatron's order of operations on every lane.

    Raises PlanError if counts of micro-batches do not suit the interleaved schedule.
    """
    counts = plan.microbatch_counts
    if job.virtual_stages > 1 and np.any(counts % job.stages):
        raise PlanError(
            f"counts: the interleaved schedule needs multiples of the {job.stages} pipeline stages: see planner.check"
        )
    kinds, of_rank = np.unique(counts, return_inverse=True)
    columns = [_column(int(count), job.stages, job.virtual_stages) for count in kinds]
    sizes = np.array([column[0].size for column in columns], dtype=np.int64)[of_rank]
    begin = np.cumsum(sizes) - sizes
    stage, slot, part, phase = (np.empty(int(sizes.sum()), dtype=np.int64) for _ in range(4))
    for kind, column in enumerate(columns):
        at = begin[of_rank == kind][:, None] + np.arange(column[0].size)
        for target, values in zip((stage, slot, part, phase), column, strict=True):
            target[at] = values
    rank = np.repeat(np.arange(plan.num_ranks), sizes)
    lane = rank * job.stages + stage
    offsets = np.searchsorted(lane, np.arange(plan.num_ranks * job.stages + 1))
    return Ops(offsets, lane, plan.rank_offsets[rank] + slot, slot, part, phase)


def _column(count: int, stages: int, virtual_stages: int) -> tuple[IntArray, ...]:
    """Stage, slot, part and phase of the ops of a column with ``count`` micro-batches, stage after stage."""
    rows = [
        (stage, op.slot, op.part, op.phase)
        for stage in range(stages)
        for op in schedule(count, stage, stages, virtual_stages)
    ]
    return tuple(np.array(rows, dtype=np.int64).reshape(-1, 4).T)


def groups_of(plan: Plan, expert_group: int) -> Groups:
    """Micro-batches that run together. Raises PlanError if two of one rank would have to."""
    columns = (plan.microbatch_offsets, plan.piece_sequence, plan.ring_size)
    rings = groups(plan.rank_offsets, *columns)
    every = rings
    if expert_group > 1:
        if np.any(plan.microbatch_counts.reshape(-1, expert_group) != plan.microbatch_counts[::expert_group, None]):
            raise PlanError("counts: ranks that share experts have unequal numbers of micro-batches: see planner.check")
        every = groups(plan.rank_offsets, *tie_experts(plan.rank_offsets, *columns, expert_group))
    tied = tied_slots(plan.rank_offsets, every)
    if tied is not None:
        raise PlanError(f"order: rings tie slot {tied[1]} of rank {tied[0]} to its slot {tied[2]}: see planner.check")
    return Groups(rings, every)


def node_of(ops: Ops, group: IntArray, job: Job) -> IntArray:
    """Node of each op in a graph of ``pipeline_graph`` over these groups, int64 [num_ops]."""
    places = job.stages * job.virtual_stages
    place = ops.part * job.stages + ops.lane % job.stages
    return (group[ops.microbatch] * places + place) * 2 + ops.phase


@dataclass(frozen=True)
class Run:
    """When things happen, picoseconds of each op, int64 [num_ops]."""

    ready: IntArray
    """The lane is free and what the op needs is there."""
    free: IntArray
    """The lane has ended the op before."""
    gate: IntArray
    """No sooner may the op start, because its parameters or tokens are under way."""
    end: IntArray


def later(ops: Ops, gates: IntArray, load: IntArray) -> IntArray:
    """The gates, and no lane starts ahead of ``load``, int64 [num_lanes]."""
    result = gates.copy()
    first = ops.offsets[:-1]
    result[first] = np.maximum(result[first], load)
    return result


def run_step(
    plan: Plan, job: Job, ops: Ops, together: Groups, spent: Durations, messages: IntArray, gate: IntArray
) -> Run:
    """Run all ops, each as early as it can.

    Args:
        plan: what is run.
        job: on what.
        ops: of all lanes.
        together: micro-batches that wait for each other.
        spent: how long micro-batches take on a stage, all model parts.
        messages: picoseconds from the end of a micro-batch's op to where the next stage has its result, int64
            [num_microbatches].
        gate: earliest start of each op, int64 [num_ops].

    Raises:
        PlanError: ranks would wait for each other forever.
    """
    total = spent.total
    graph = pipeline_graph(
        plan.rank_offsets, together.all, total[:, 0], total[:, 1], job.stages, job.virtual_stages, "free"
    )
    node = node_of(ops, together.all, job)
    assert np.array_equal(node, graph.queue_nodes)
    slowest = np.zeros(int(together.all.max(initial=-1)) + 1, dtype=np.int64)
    np.maximum.at(slowest, together.all, messages)
    ended = run(_gated(_delayed(graph, slowest, job), node, gate))
    end = ended[node]
    if np.any(end < 0):
        raise PlanError("order: ranks would wait for each other forever: see planner.check")
    free = np.concatenate([np.zeros(1, np.int64), end[:-1]])
    free[ops.offsets[:-1]] = 0
    came = _input_at(ops, ended, node, messages, job)
    return Run(np.maximum(np.maximum(free, came), gate), free, gate, end)


def _delayed(graph: Graph, delay: IntArray, job: Job) -> Graph:
    """Messages between stages as nodes of their own, on the edges of a pipeline; ``delay`` is of each group."""
    places = job.stages * job.virtual_stages
    if job.stages == 1 or not delay.any():
        return graph
    moves = graph.edge_from // 2 // places == graph.edge_to // 2 // places
    moves &= graph.edge_from // 2 != graph.edge_to // 2  # at the turn nothing leaves the stage
    source, target = graph.edge_from[moves], graph.edge_to[moves]
    between = graph.duration.size + np.arange(source.size)
    return Graph(
        graph.queue_offsets,
        graph.queue_nodes,
        np.concatenate([graph.edge_from[~moves], source, between]),
        np.concatenate([graph.edge_to[~moves], between, target]),
        np.concatenate([graph.duration, delay[source // 2 // places]]),
    )


def _gated(graph: Graph, node: IntArray, gate: IntArray) -> Graph:
    """With a node for each op that has a gate: alone in a queue of its own, and the op waits for it."""
    gated = np.flatnonzero(gate > 0)
    if not gated.size:
        return graph
    gates = graph.duration.size + np.arange(gated.size)
    return Graph(
        np.concatenate([graph.queue_offsets, graph.queue_offsets[-1] + 1 + np.arange(gated.size)]),
        np.concatenate([graph.queue_nodes, gates]),
        np.concatenate([graph.edge_from, gates]),
        np.concatenate([graph.edge_to, node[gated]]),
        np.concatenate([graph.duration, gate[gated]]),
    )


def _input_at(ops: Ops, ended: IntArray, node: IntArray, messages: IntArray, job: Job) -> IntArray:
    """When each op's input is there; 0 for the first forward of all."""
    places = job.stages * job.virtual_stages
    place = node // 2 % places
    forward = ops.phase == 0
    first, turn = forward & (place == 0), ~forward & (place == places - 1)
    before = np.where(turn, node - 1, np.where(forward, node - 2, node + 2))
    delay = messages[ops.microbatch] if places > 1 else 0
    return np.where(first, 0, ended[np.where(first, node, before)] + np.where(first | turn, 0, delay))
