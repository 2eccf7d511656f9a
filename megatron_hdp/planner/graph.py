"""Rings as rendezvous: micro-batches that must run together, and the graph of what waits for what."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from megatron_hdp.planner.schedule import FORWARD, schedule
from megatron_hdp.types import IntArray


@dataclass(frozen=True)
class Graph:
    """Nodes that run in the order of queues; a node starts when all queues that hold it have come to it."""

    queues: Sequence[Sequence[int]]
    """Nodes of each queue in order. A node may be in many queues, but not twice in one."""
    after: Sequence[Sequence[int]]
    """Nodes that also wait for this node to end, shape [num_nodes]."""
    duration: Sequence[int]
    """Picoseconds of each node, shape [num_nodes]."""


@dataclass(frozen=True)
class Run:
    """How a graph ran: when each queue ended, and how far it came."""

    ends: list[int]
    turn: list[int]
    """Nodes of each queue that ran; fewer than the queue has if the graph has a cycle."""
    ended: list[int]
    """When each node ended, -1 if it never ran."""


def groups(
    rank_offsets: IntArray, microbatch_offsets: IntArray, piece_sequence: IntArray, ring_size: IntArray
) -> IntArray:
    """Group of every micro-batch, int64 [num_microbatches], numbered in order of their first micro-batch.

    Micro-batches that share a ring of two or more ranks, directly or through others, are one group: their rings take
    turns in every layer, so all run together. The arguments are the plan's columns.
    """
    num = int(rank_offsets[-1])
    microbatch = np.repeat(np.arange(num), np.diff(microbatch_offsets))
    shared = np.flatnonzero(ring_size[piece_sequence] > 1)
    by_ring = shared[np.argsort(piece_sequence[shared], kind="stable")]
    same = np.flatnonzero(np.diff(piece_sequence[by_ring]) == 0)
    parent = list(range(num))

    def root(x: int) -> int:
        while parent[x] != x:
            parent[x] = parent[parent[x]]
            x = parent[x]
        return x

    for a, b in zip(microbatch[by_ring[same]].tolist(), microbatch[by_ring[same + 1]].tolist(), strict=True):
        a, b = root(a), root(b)
        parent[max(a, b)] = min(a, b)
    _, group = np.unique([root(x) for x in range(num)], return_inverse=True)
    return group.astype(np.int64)


def tied_slots(rank_offsets: IntArray, group: IntArray) -> tuple[int, int, int] | None:
    """Two micro-batches of one rank in one group, as (rank, slot, slot), or None: such a group could never start."""
    rank = np.repeat(np.arange(rank_offsets.size - 1), np.diff(rank_offsets))
    order = np.lexsort((np.arange(group.size), group, rank))
    twice = np.flatnonzero((np.diff(rank[order]) == 0) & (np.diff(group[order]) == 0))
    if not twice.size:
        return None
    first, second = order[twice[0]], order[twice[0] + 1]
    r = rank[first]
    return int(r), int(first - rank_offsets[r]), int(second - rank_offsets[r])


def group_maximum(group: IntArray, values: IntArray) -> IntArray:
    """Largest value of each group's members, int64 [num_groups]."""
    result = np.zeros(int(group.max()) + 1, dtype=np.int64)
    np.maximum.at(result, group, values)
    return result


def whole_graph(rank_offsets: IntArray, group: IntArray, forward: IntArray, backward: IntArray) -> Graph:
    """Without a pipeline: one node per group, forward and backward in one, because all members go on together.

    Queue r is rank r. ``forward`` and ``backward``: picoseconds of each micro-batch, shape [num_microbatches].
    """
    duration = group_maximum(group, forward) + group_maximum(group, backward)
    return Graph(_per_rank(rank_offsets, group), [()] * duration.size, duration.tolist())


def pipeline_graph(
    rank_offsets: IntArray,
    group: IntArray,
    forward: IntArray,
    backward: IntArray,
    stages: int,
    virtual_stages: int,
) -> Graph:
    """With a pipeline: one node per group, model part and phase; queue r * stages + p is stage p of rank r.

    Node (group, place, phase) is number (group * stages * virtual_stages + place) * 2 + phase, where the model part
    ``place`` lies on stage place % stages. Messages between stages take no time and wait for nobody.
    """
    places = stages * virtual_stages
    both = np.stack([group_maximum(group, forward), group_maximum(group, backward)], axis=1) // virtual_stages
    duration = np.repeat(both, places, axis=0).reshape(-1)
    ranks = _per_rank(rank_offsets, group)
    orders = {
        (count, stage): schedule(count, stage, stages, virtual_stages)
        for count in {len(mine) for mine in ranks}
        for stage in range(stages)
    }
    queues = [
        [(mine[op.slot] * places + op.part * stages + stage) * 2 + op.phase for op in orders[len(mine), stage]]
        for mine in ranks
        for stage in range(stages)
    ]
    return Graph(queues, [_next_part(node, places) for node in range(duration.size)], duration.tolist())


def _next_part(node: int, places: int) -> tuple[int, ...]:
    """The node that takes over the micro-batch: next part in forward, the same at the turn, previous in backward."""
    place, phase = node // 2 % places, node % 2
    if phase == FORWARD:
        return (node + 2,) if place + 1 < places else (node + 1,)
    return (node - 2,) if place > 0 else ()


def _per_rank(rank_offsets: IntArray, group: IntArray) -> list[list[int]]:
    flat, cuts = group.tolist(), rank_offsets.tolist()
    return [flat[begin:end] for begin, end in pairwise(cuts)]


def run(graph: Graph) -> Run:
    """Let every node start as early as it can (longest path, Kahn's order); stops where nothing can start."""
    num = len(graph.duration)
    waits = [0] * num
    holders: list[list[int]] = [[] for _ in range(num)]
    for q, nodes in enumerate(graph.queues):
        for node in nodes:
            holders[node].append(q)
            waits[node] += 1
    for nodes in graph.after:
        for node in nodes:
            waits[node] += 1
    ready_at, ended = [0] * num, [-1] * num
    turn, ends = [0] * len(graph.queues), [0] * len(graph.queues)
    ready: list[int] = []

    def reach(node: int, time: int) -> None:
        ready_at[node] = max(ready_at[node], time)
        waits[node] -= 1
        if waits[node] == 0:
            ready.append(node)

    for nodes in graph.queues:
        if nodes:
            reach(nodes[0], 0)
    while ready:
        node = ready.pop()
        end = ended[node] = ready_at[node] + graph.duration[node]
        for q in holders[node]:
            ends[q] = end
            turn[q] += 1
            if turn[q] < len(graph.queues[q]):
                reach(graph.queues[q][turn[q]], end)
        for later in graph.after[node]:
            reach(later, end)
    return Run(ends, turn, ended)
