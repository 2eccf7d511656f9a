"""When a pipeline's candidates are done: what planning tries most. C++ where built, else Python."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megatron_hdp.cost import CostModel
from megatron_hdp.cost.core import core_arguments
from megatron_hdp.planner.candidate import Candidate, assemble, ends
from megatron_hdp.planner.columns import Layout
from megatron_hdp.planner.halves import Half
from megatron_hdp.planner.native import _core
from megatron_hdp.planner.packs import Locals, make_packs, ramp_rooms, spread
from megatron_hdp.types import IntArray


@dataclass(frozen=True)
class Ends:
    """How a rank begins and ends."""

    ramp: int
    """Small packs at each end, in halves of the number of stages."""
    lead: int
    """Share of local packs that run ahead of the longest micro-batches, 0 .. 1024 of 1024."""


@dataclass(frozen=True)
class Task:
    """What all candidates of a batch have in common."""

    lengths: IntArray
    """Real tokens of all sequences."""
    locals: Locals
    num_ranks: int
    capacity: int
    cost: CostModel
    layout: Layout

    @cached_property
    def arguments(self) -> IntArray:
        """The cost model for C++."""
        return core_arguments(self.cost)

    @cached_property
    def local_table(self) -> IntArray:
        """Tokens, forward and backward of local sequences, [3, num_locals]."""
        return np.stack([self.locals.tokens, self.locals.forward, self.locals.backward])

    @cached_property
    def short(self) -> int:
        """Tokens of a short local sequence: a tenth are shorter."""
        tokens = self.locals.tokens
        return int(tokens[tokens.size * 9 // 10]) if tokens.size else 0

    def rooms(self, ramp: int) -> IntArray:
        """Rooms of the packs of ``Ends.ramp``, see `planner.packs.ramp_rooms`."""
        return ramp_rooms(ramp * self.layout.stages // 2, self.short, self.capacity, self.cost.pad_multiple)


@dataclass(frozen=True)
class Pair:
    """Rings with their place."""

    front: Half
    back: Half
    lengths: IntArray
    """Real tokens of all sequences."""

    @cached_property
    def tables(self) -> tuple[IntArray, IntArray, IntArray, IntArray]:
        """Of front and then back: start, size, row, length [4, num_rings]; depth, height [2, num_ranks]."""
        front, back = (
            (
                np.stack([half.start, half.size, half.row, self.lengths[half.sequence]]),
                np.stack([half.depth, half.height]),
            )
            for half in (self.front, self.back)
        )
        return (*front, *back)


def candidate_times(
    task: Task, pair: Pair, lost: IntArray, choices: Sequence[Ends], enough: int = -1
) -> list[tuple[int, IntArray]]:
    """Spans of candidates that differ in their ends, and what bubbles take from their ranks.

    Args:
        task: the batch.
        pair: rings.
        lost: picoseconds that each rank is expected to lose to bubbles, int64 [num_ranks].
        choices: ends to try.
        enough: ends after the first with a span of at most this are not tried, picoseconds.

    Returns:
        for each that was tried, the span in picoseconds, and int64 [num_ranks]: when each rank is done, less its work.
    """
    if _core is None:
        return candidate_times_python(task, pair, lost, choices, enough)
    rooms = [task.rooms(end.ramp) for end in choices]
    cuts = np.cumsum([0, *(room.size for room in rooms)], dtype=np.int64)
    leads = np.array([end.lead for end in choices], dtype=np.int64)
    layout = (task.layout.stages, task.layout.virtual_stages, task.layout.expert_group)
    spans, found = _core.candidate_times(
        task.arguments,
        *pair.tables,
        task.local_table,
        lost,
        task.capacity,
        *layout,
        np.concatenate(rooms),
        cuts,
        leads,
        enough,
    )
    return list(zip(spans.tolist(), found.reshape(-1, task.num_ranks), strict=True))


def candidate_times_python(
    task: Task, pair: Pair, lost: IntArray, choices: Sequence[Ends], enough: int = -1
) -> list[tuple[int, IntArray]]:
    """Twin of the C++ `candidate_times`: builds every candidate and runs it through the evaluator of plans."""
    tried: list[tuple[int, IntArray]] = []
    for end in choices:
        candidate, load = build(task, pair, lost, end)
        ended = ends(candidate, task.lengths, task.cost, task.layout)
        tried.append((int(ended.max()), ended - load))
        if tried[-1][0] <= enough:
            break
    return tried


def build(task: Task, pair: Pair, lost: IntArray, end: Ends) -> tuple[Candidate, IntArray]:
    """The candidate: local work onto ranks that have their rings and lose ``lost``. And each rank's work, [num_ranks].

    Work is picoseconds of local sequences, and of rings with the waiting that their order alone brings.
    """
    height = pair.front.height + pair.back.height
    work = task.locals.forward + task.locals.backward
    rank = spread(work, height + lost)
    constants = (task.cost.microbatch_picoseconds("forward"), task.cost.microbatch_picoseconds("backward"))
    packs = make_packs(task.locals, rank, task.num_ranks, task.capacity, task.rooms(end.ramp), constants)
    np.add.at(height, rank, work)
    return assemble(pair.front, pair.back, packs, end.lead, task.layout), height
