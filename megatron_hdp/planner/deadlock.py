"""Would the ranks of a plan wait for each other forever? If so, who waits where for whom, in words."""

import numpy as np

from megatron_hdp.errors import PlanError
from megatron_hdp.planner.graph import Graph, groups, pipeline_graph, run, tied_slots, whole_graph
from megatron_hdp.planner.schedule import FORWARD, Messages, Op, next_place, steps
from megatron_hdp.types import IntArray, Plan


def require_order(plan: Plan, stages: int = 1, virtual_stages: int = 1) -> None:
    """Return if every rank comes to the end of its schedule; rings are rendezvous, and so are messages between stages.

    Micro-batches linked by rings count as one rendezvous per model part and phase, which is stricter than what runs:
    their rings meet one by one, in ascending order, in every layer. Rings that have the same slot on all their ranks
    need no look: all columns' orders are then cut from one order (see `schedule`).

    Args:
        plan: a plan with consistent columns and pieces.
        stages: pipeline stages.
        virtual_stages: model parts per stage; with more than one, counts are multiples of ``stages``.

    Raises:
        PlanError: names a cycle of ranks that wait for each other.
    """
    if stages > 1 and same_slots(plan):
        return
    group = groups(plan.rank_offsets, plan.microbatch_offsets, plan.piece_sequence, plan.ring_size)
    tied = tied_slots(plan.rank_offsets, group)
    if tied is not None:
        rank, first, second = tied
        raise PlanError(
            f"order: rings tie slot {first} of rank {rank} to its slot {second} through other ranks' micro-batches, so "
            "both would have to run at once"
        )
    nothing = np.zeros(group.size, dtype=np.int64)
    ways: tuple[Messages, ...] = (
        ("free",) if stages == 1 else ("together",) if virtual_stages == 1 else ("together", "apart")
    )
    for messages in ways:
        if stages == 1:
            graph = whole_graph(plan.rank_offsets, group, nothing, nothing)
        else:
            graph = pipeline_graph(plan.rank_offsets, group, nothing, nothing, stages, virtual_stages, messages)
        ended = run(graph)
        if np.any(ended[graph.queue_nodes] < 0):
            raise PlanError(_Stuck(plan, graph, ended, group, stages, virtual_stages, messages).explain())


def same_slots(plan: Plan) -> bool:
    """Has every ring the same slot on all its ranks?"""
    slot_of_microbatch = np.arange(plan.microbatch_offsets.size - 1) - np.repeat(
        plan.rank_offsets[:-1], np.diff(plan.rank_offsets)
    )
    slot = np.repeat(slot_of_microbatch, np.diff(plan.microbatch_offsets))
    slot_of = np.zeros(plan.num_sequences, dtype=np.int64)
    slot_of[plan.piece_sequence] = slot
    return bool(np.all(slot == slot_of[plan.piece_sequence]))


class _Stuck:
    """A graph that did not run to its end, read back as ranks, stages and slots."""

    def __init__(
        self,
        plan: Plan,
        graph: Graph,
        ended: IntArray,
        group: IntArray,
        stages: int,
        virtual_stages: int,
        messages: Messages,
    ) -> None:
        self._plan, self._graph, self._group = plan, graph, group
        self._stages, self._parts, self._messages = stages, virtual_stages, messages
        cuts = graph.queue_offsets
        ran = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(ended[graph.queue_nodes] >= 0)])
        self._at = cuts[:-1] + ran[cuts[1:]] - ran[cuts[:-1]]  # where each queue stands: what ran is its beginning
        self._ended = ended

    def explain(self) -> str:
        """Follow who waits for whom from a stuck queue until a queue repeats."""
        queue = int(np.flatnonzero(self._at < self._graph.queue_offsets[1:])[0])
        trail: dict[int, str] = {}
        while queue not in trail:
            blocker = self._blocker(queue)
            trail[queue] = f"{self._name(queue)} waits {self._doing(queue, blocker)} for {self._name(blocker)}"
            queue = blocker
        queues = list(trail)
        return "order: deadlock: " + "; ".join(trail[q] for q in queues[queues.index(queue) :])

    def _blocker(self, queue: int) -> int:
        """A queue that has yet to run what this queue's next node waits for, or to come to that node itself."""
        nodes = self._graph.queue_nodes
        node = nodes[self._at[queue]]
        needed = self._graph.edge_from[self._graph.edge_to == node]
        places = np.flatnonzero(np.isin(nodes, needed[self._ended[needed] < 0]))
        holders = np.searchsorted(self._graph.queue_offsets, places, side="right") - 1
        own = holders[holders // self._stages == queue // self._stages]  # messages pass inside a column
        if own.size:
            return int(own[0])
        places = np.flatnonzero(nodes == node)
        holders = np.searchsorted(self._graph.queue_offsets, places, side="right") - 1
        return int(holders[self._at[holders] < places][0])

    def _name(self, queue: int) -> str:
        rank, stage = divmod(queue, self._stages)
        return f"rank {rank}" if self._stages == 1 else f"rank {rank}, stage {stage}"

    def _doing(self, queue: int, blocker: int) -> str:
        """What the queue stands at: slot and sequences, or the messages that pass between its stage and the next."""
        rank, stage = divmod(queue, self._stages)
        at = int(self._at[queue] - self._graph.queue_offsets[queue])
        if self._stages == 1:
            return f"in slot {at}{self._sequences(rank, at)}"
        count = int(self._plan.microbatch_counts[rank])
        order = steps(count, stage, self._stages, self._parts, self._messages)
        step = order[at]
        if isinstance(step, Op):
            return f"in {_words(step, self._parts)}{self._sequences(rank, step.slot)}"
        other = blocker % self._stages
        for op in step.sends:
            there = next_place(op, stage, self._stages, self._parts)
            if there is not None and there[0] == other:
                return f"to pass on {_words(op, self._parts)}"
        return "for the input of " + " and of ".join(_words(op, self._parts) for op in step.asks)

    def _sequences(self, rank: int, slot: int) -> str:
        """The sequences that the micro-batch shares with other ranks."""
        microbatch = int(self._plan.rank_offsets[rank]) + slot
        begin, end = self._plan.microbatch_offsets[microbatch : microbatch + 2]
        pieces = self._plan.piece_sequence[begin:end]
        shared = pieces[self._plan.ring_size[pieces] > 1].tolist()
        return f" (sequence {', '.join(map(str, shared))})" if shared else ""


def _words(op: Op, parts: int) -> str:
    phase = "forward" if op.phase == FORWARD else "backward"
    return f"{phase} of slot {op.slot}" + (f", model part {op.part}" if parts > 1 else "")
