"""Do rings meet? The no-pipeline schedule of a plan as a graph, and when each rank would be done."""

from dataclasses import dataclass

import numpy as np

from megatron_hdp.errors import PlanError
from megatron_hdp.types import IntArray, Plan


@dataclass(frozen=True)
class _Joint:
    """Micro-batches with ring pieces, grouped: linked by a ring means same group; arrays in the plan's order."""

    microbatch: list[int]
    rank: list[int]
    group: list[int]


def execute(plan: Plan, cost: IntArray) -> IntArray:
    """Time at which each rank is done when rings are rendezvous and nothing else waits; shape [num_ranks].

    Micro-batches that share a ring, directly or through others, start together and end together: their rings take
    turns in every layer. So a group starts when its last rank arrives and lasts as long as its costliest micro-batch.

    Args:
        plan: a plan with consistent columns.
        cost: time of every micro-batch alone, shape [num_microbatches].

    Raises:
        PlanError: ranks would wait for each other forever; names a cycle of them.
    """
    joint = _join(plan)
    _refuse_two_slots(plan, joint)
    begin = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(cost)])
    num_groups = max(joint.group, default=-1) + 1
    members: list[list[int]] = [[] for _ in range(num_groups)]
    queues: list[list[int]] = [[] for _ in range(plan.num_ranks)]
    for node, (rank, group) in enumerate(zip(joint.rank, joint.group, strict=True)):
        members[group].append(node)
        queues[rank].append(node)
    before = begin[joint.microbatch].tolist()  # cost of everything ahead of the micro-batch, all ranks in one row
    after = begin[np.array(joint.microbatch, dtype=np.int64) + 1].tolist()
    time = [0] * plan.num_ranks
    done_to = begin[plan.rank_offsets[:-1]].tolist()
    turn = [0] * plan.num_ranks
    arrived = [0] * num_groups
    ready: list[int] = []

    def arrive(rank: int) -> None:
        if turn[rank] < len(queues[rank]):
            group = joint.group[queues[rank][turn[rank]]]
            arrived[group] += 1
            if arrived[group] == len(members[group]):
                ready.append(group)

    for rank in range(plan.num_ranks):
        arrive(rank)
    while ready:
        nodes = members[ready.pop()]
        start = max(time[joint.rank[node]] + before[node] - done_to[joint.rank[node]] for node in nodes)
        end = start + max(after[node] - before[node] for node in nodes)
        for node in nodes:
            rank = joint.rank[node]
            time[rank], done_to[rank] = end, after[node]
            turn[rank] += 1
            arrive(rank)
    stuck = [rank for rank in range(plan.num_ranks) if turn[rank] < len(queues[rank])]
    if stuck:
        raise PlanError(_explain(plan, joint, queues, turn, members, stuck[0]))
    tail: IntArray = begin[plan.rank_offsets[1:]] - np.array(done_to, dtype=np.int64)
    return np.array(time, dtype=np.int64) + tail


def _join(plan: Plan) -> _Joint:
    """Groups of micro-batches that share rings."""
    microbatch = np.repeat(np.arange(plan.microbatch_offsets.size - 1), np.diff(plan.microbatch_offsets))
    shared = np.flatnonzero(plan.ring_size[plan.piece_sequence] > 1)
    nodes, node = np.unique(microbatch[shared], return_inverse=True)
    sequence = plan.piece_sequence[shared]
    by_ring = np.argsort(sequence, kind="stable")
    same = np.flatnonzero(np.diff(sequence[by_ring]) == 0)
    links = zip(node[by_ring[same]].tolist(), node[by_ring[same + 1]].tolist(), strict=True)
    parent = list(range(nodes.size))

    def root(x: int) -> int:
        while parent[x] != x:
            parent[x] = parent[parent[x]]
            x = parent[x]
        return x

    for a, b in links:
        a, b = root(a), root(b)
        if a != b:
            parent[max(a, b)] = min(a, b)
    _, group = np.unique([root(x) for x in range(nodes.size)], return_inverse=True)
    rank = np.searchsorted(plan.rank_offsets, nodes, side="right") - 1
    return _Joint(nodes.tolist(), rank.tolist(), group.tolist())


def _refuse_two_slots(plan: Plan, joint: _Joint) -> None:
    """A group with two micro-batches of one rank can never start: the rank runs them one after the other."""
    seen: dict[tuple[int, int], int] = {}
    for microbatch, rank, group in zip(joint.microbatch, joint.rank, joint.group, strict=True):
        other = seen.setdefault((rank, group), microbatch)
        if other != microbatch:
            base = int(plan.rank_offsets[rank])
            raise PlanError(
                f"order: rings tie slot {other - base} of rank {rank} to its slot {microbatch - base} through other "
                "ranks' micro-batches, so both would have to run at once"
            )


def _explain(
    plan: Plan, joint: _Joint, queues: list[list[int]], turn: list[int], members: list[list[int]], rank: int
) -> str:
    """Follow who waits for whom from a stuck rank until a rank repeats."""
    trail: dict[int, str] = {}
    while rank not in trail:
        node = queues[rank][turn[rank]]
        blocker = next(
            joint.rank[m] for m in members[joint.group[node]] if queues[joint.rank[m]][turn[joint.rank[m]]] != m
        )
        slot = joint.microbatch[node] - int(plan.rank_offsets[rank])
        begin, end = plan.microbatch_offsets[joint.microbatch[node] : joint.microbatch[node] + 2]
        pieces = plan.piece_sequence[begin:end]
        shared = pieces[plan.ring_size[pieces] > 1].tolist()
        trail[rank] = f"rank {rank} waits in slot {slot} (sequence {', '.join(map(str, shared))}) for rank {blocker}"
        rank = blocker
    ranks = list(trail)
    return "order: deadlock: " + "; ".join(trail[r] for r in ranks[ranks.index(rank) :])
