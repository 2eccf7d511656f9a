"""Rings as rendezvous: micro-batches that must run together, and the graph of what waits for what."""

from dataclasses import dataclass

import numpy as np

from megatron_hdp.planner.native import _core
from megatron_hdp.planner.schedule import Exchange, Messages, Op, next_place, previous_place, steps
from megatron_hdp.types import IntArray


@dataclass(frozen=True)
class Graph:
    """Nodes that run in the order of queues; a node starts when all queues that hold it have come to it."""

    queue_offsets: IntArray
    """Queue q is queue_nodes[queue_offsets[q] : queue_offsets[q + 1]]; shape [num_queues + 1]."""
    queue_nodes: IntArray
    """A node may be in many queues, but not twice in one."""
    edge_from: IntArray
    """Node edge_to[e] also waits for the end of node edge_from[e]; shapes [num_edges]."""
    edge_to: IntArray
    duration: IntArray
    """Picoseconds of each node, shape [num_nodes]."""


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

    # a pack on a ring links its micro-batches once for each sequence
    links = np.unique(microbatch[by_ring[same]] * num + microbatch[by_ring[same + 1]])
    for a, b in zip((links // num).tolist(), (links % num).tolist(), strict=True):
        a, b = root(a), root(b)
        parent[max(a, b)] = min(a, b)
    _, group = np.unique([root(x) for x in range(num)], return_inverse=True)
    return group.astype(np.int64)


def tie_experts(
    rank_offsets: IntArray,
    microbatch_offsets: IntArray,
    piece_sequence: IntArray,
    ring_size: IntArray,
    expert_group: int,
) -> tuple[IntArray, IntArray, IntArray]:
    """The columns of a plan in which ranks that share experts also share a ring in every slot.

    Tokens go to experts and back in every layer, so the ranks of a group run their micro-batches in lockstep. Each
    micro-batch gets one more piece, of a sequence that stands for its group and slot. Counts must be equal in a group.

    Returns:
        microbatch_offsets, piece_sequence and ring_size with those pieces and sequences.
    """
    counts = np.diff(rank_offsets)
    first = np.repeat(rank_offsets[:-1:expert_group], expert_group)  # of the first rank of each rank's group
    slot = np.arange(int(rank_offsets[-1])) - np.repeat(rank_offsets[:-1], counts)
    shared = ring_size.size + np.repeat(first, counts) + slot
    pieces = np.insert(piece_sequence, microbatch_offsets[1:], shared)
    sizes = np.concatenate([ring_size, np.full(slot.size, expert_group, dtype=np.int64)])
    return microbatch_offsets + np.arange(microbatch_offsets.size), pieces, sizes


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


def whole_graph(rank_offsets: IntArray, group: IntArray, forward: IntArray, backward: IntArray) -> Graph:
    """Without a pipeline: one node per group, forward and backward in one, because all members go on together.

    Queue r is rank r. ``forward`` and ``backward``: picoseconds of each micro-batch, shape [num_microbatches].
    """
    none = np.zeros(0, dtype=np.int64)
    duration = _group_maximum(group, forward) + _group_maximum(group, backward)
    return Graph(rank_offsets, group, none, none, duration)


def pipeline_graph(
    rank_offsets: IntArray,
    group: IntArray,
    forward: IntArray,
    backward: IntArray,
    stages: int,
    virtual_stages: int,
    messages: Messages = "free",
) -> Graph:
    """With a pipeline: one node per group, model part and phase; queue r * stages + p is stage p of rank r.

    Node (group, place, phase) is number (group * stages * virtual_stages + place) * 2 + phase, where the model part
    ``place`` lies on stage place % stages. Unless ``messages`` are free (they take no time, their senders wait for
    nobody), every exchange of messages is a node too, behind those.
    """
    places = stages * virtual_stages
    both = np.stack([_group_maximum(group, forward), _group_maximum(group, backward)], axis=1) // virtual_stages
    counts = np.diff(rank_offsets)
    templates = {int(n): _template(int(n), stages, virtual_stages, messages) for n in np.unique(counts)}
    num_ops = both.shape[0] * places * 2
    sizes = np.array([templates[n].place.size for n in counts.tolist()], dtype=np.int64)
    begin = np.cumsum(sizes) - sizes
    queue_nodes = np.empty(int(sizes.sum()), dtype=np.int64)
    lengths = np.empty((counts.size, stages), dtype=np.int64)
    edges = [_next_parts(both.shape[0], places)]
    for count, template in templates.items():
        ranks = np.flatnonzero(counts == count)
        at = begin[ranks][:, None] + np.arange(template.place.size)
        of_group = group[rank_offsets[ranks][:, None] + template.slot]
        ops = (of_group * places + template.place) * 2 + template.phase
        nodes = np.where(template.phase < 0, num_ops + at, ops)  # an exchange is numbered by where it stands
        queue_nodes[at] = nodes
        lengths[ranks] = template.lengths
        edges.append(nodes[:, template.edges].transpose(1, 0, 2).reshape(2, -1))
    edge_from, edge_to = np.concatenate(edges, axis=1)
    duration = np.repeat(both, places, axis=0).reshape(-1)
    if messages != "free":
        duration = np.concatenate([duration, np.zeros(queue_nodes.size, dtype=np.int64)])
    offsets = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths.reshape(-1))])
    return Graph(offsets, queue_nodes, edge_from, edge_to, duration)


@dataclass(frozen=True)
class _Template:
    """The steps of one column on all its stages, stage after stage; shape [num_steps] where not said otherwise."""

    slot: IntArray
    """0 for an exchange."""
    place: IntArray
    phase: IntArray
    """-1 for an exchange."""
    lengths: IntArray
    """Steps of each stage, shape [stages]."""
    edges: IntArray
    """Steps that other steps wait for: from, to; shape [2, num_edges]."""


def _template(count: int, stages: int, virtual_stages: int, messages: Messages) -> _Template:
    """Steps of a column with ``count`` micro-batches; an exchange waits for what stands before its counterparts."""
    columns: list[tuple[int, int, int]] = []
    lengths: list[int] = []
    exchanges: list[tuple[int, int, Exchange]] = []
    sent: dict[tuple[int, Op] | None, int] = {}  # stage and op -> exchange in which its result leaves
    asked: dict[tuple[int, Op] | None, int] = {}  # stage and op -> exchange in which its input may come
    for stage in range(stages):
        order = steps(count, stage, stages, virtual_stages, messages)
        lengths.append(len(order))
        for step in order:
            at = len(columns)
            if isinstance(step, Op):
                columns.append((step.slot, step.part * stages + stage, step.phase))
                continue
            columns.append((0, 0, -1))
            exchanges.append((at, stage, step))
            sent.update({(stage, op): at for op in step.sends})
            asked.update({(stage, op): at for op in step.asks})
    firsts = set(np.cumsum([0, *lengths]).tolist())
    edges = []
    for at, stage, exchange in exchanges:
        others = [asked[next_place(op, stage, stages, virtual_stages)] for op in exchange.sends]
        if exchange.waits:
            others += [sent[previous_place(op, stage, stages, virtual_stages)] for op in exchange.asks]
        edges += [(other - 1, at) for other in others if other not in firsts]
    slot, place, phase = np.array(columns, dtype=np.int64).reshape(-1, 3).T
    both = np.array(edges, dtype=np.int64).reshape(-1, 2).T
    return _Template(slot, place, phase, np.array(lengths, dtype=np.int64), both)


def _next_parts(num_groups: int, places: int) -> IntArray:
    """Edges from each op to the one that takes over its micro-batch, shape [2, num_edges].

    Next part in forward, the same part at the turn, previous part in backward.
    """
    place = np.arange(places)
    one_from = np.concatenate([2 * place, 2 * place[1:] + 1])
    one_to = np.concatenate([2 * place[1:], [2 * places - 1], 2 * place[:-1] + 1])
    base = 2 * places * np.arange(num_groups)[:, None]
    return np.stack([(base + one_from).reshape(-1), (base + one_to).reshape(-1)])


def _group_maximum(group: IntArray, values: IntArray) -> IntArray:
    """Largest value of each group's members, int64 [num_groups]."""
    result = np.zeros(int(group.max(initial=-1)) + 1, dtype=np.int64)
    np.maximum.at(result, group, values)
    return result


def run(graph: Graph) -> IntArray:
    """When each node ends if every node starts as early as it can; -1 if it never runs. int64 [num_nodes].

    Nodes in a cycle, and those that wait for them, never run.
    """
    if _core is None:
        return run_python(graph)
    ended: IntArray = _core.run_graph(
        graph.queue_offsets, graph.queue_nodes, graph.edge_from, graph.edge_to, graph.duration
    )
    return ended


def run_python(graph: Graph) -> IntArray:
    """Twin of the C++ `run_graph`: longest paths in Kahn's order."""
    num = graph.duration.size
    waits = (np.bincount(graph.queue_nodes, minlength=num) + np.bincount(graph.edge_to, minlength=num)).tolist()
    later: list[list[int]] = [[] for _ in range(num)]  # who hears of a node's end: next nodes of its queues, and edges
    heads = np.zeros(graph.queue_nodes.size, dtype=bool)
    heads[graph.queue_offsets[:-1][np.diff(graph.queue_offsets) > 0]] = True
    follows = np.flatnonzero(~heads)
    for a, b in zip(graph.queue_nodes[follows - 1].tolist(), graph.queue_nodes[follows].tolist(), strict=True):
        later[a].append(b)
    for a, b in zip(graph.edge_from.tolist(), graph.edge_to.tolist(), strict=True):
        later[a].append(b)
    duration, ready_at, ended = graph.duration.tolist(), [0] * num, [-1] * num
    ready: list[int] = []
    for node in graph.queue_nodes[heads].tolist():
        waits[node] -= 1
        if not waits[node]:
            ready.append(node)
    while ready:
        node = ready.pop()
        end = ended[node] = ready_at[node] + duration[node]
        for next_ in later[node]:
            ready_at[next_] = max(ready_at[next_], end)
            waits[next_] -= 1
            if not waits[next_]:
                ready.append(next_)
    return np.array(ended, dtype=np.int64)
