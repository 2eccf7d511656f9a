"""Balance with pipeline stages or experts: a ring has the same slot on all its ranks.

Then all ranks of a stage run the same sequence of operations as far as they go, whatever their counts, so rings meet
under 1F1B and interleaved schedules alike. Where pipelines lose time is known only when all has a place, so several
ways are tried and timed: what a rank loses to bubbles is then taken off the local work that it gets.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from megatron_hdp.cost import CostModel
from megatron_hdp.planner.candidate import Candidate, assemble, ends, finish
from megatron_hdp.planner.columns import Columns, Layout
from megatron_hdp.planner.halves import Half, Rings, place_half, rings_of
from megatron_hdp.planner.packs import Locals, make_packs, ramp_rooms, spread
from megatron_hdp.types import IntArray

ROUNDS = 3
"""How often local work is spread again for what bubbles took."""
GOOD_ENOUGH = 64
"""A span of 1 + 1 / GOOD_ENOUGH of the bound ends the search."""


@dataclass(frozen=True)
class Way:
    """One way to lay out a pipeline's plan."""

    hill: bool
    """Rings in two halves, longest in the middle; else longest first."""
    level: int
    """How high rings are stacked on the same ranks, % of the mean."""
    tie: int
    """See `planner.coarse`."""
    ramp: int
    """Small packs at each end of a rank, in pipeline stages."""


@dataclass(frozen=True)
class _Task:
    lengths: IntArray
    rings: Rings
    locals: Locals
    num_ranks: int
    capacity: int
    cost: CostModel
    layout: Layout
    mean: int
    """Rank-time over ranks, picoseconds."""


def plan_pp(
    lengths: IntArray,
    smallest: IntArray,
    widest: IntArray,
    num_ranks: int,
    capacity: int,
    cost: CostModel,
    bound: int,
    layout: Layout,
) -> Columns:
    """Plan with rings in equal slots; a pure function of its arguments. See `planner.dp.plan_dp` for the others."""
    task = _read(lengths, smallest, widest, num_ranks, capacity, cost, layout)
    best: tuple[int, Candidate] | None = None
    for way in ways(layout.stages, bool(task.rings.sequence.size)):
        for span, candidate in _try(task, way):
            if best is None or span < best[0]:
                best = (span, candidate)
        if best is not None and best[0] <= bound + bound // GOOD_ENOUGH:
            break
    assert best is not None  # there is always a way
    return finish(best[1], task.locals, lengths.size)


def ways(stages: int, any_rings: bool) -> tuple[Way, ...]:
    """The ways that are tried, in order."""
    if stages == 1:
        return (Way(False, 100, 0, 0), Way(False, 90, 2, 0))
    ramps = (2, 3, 1)
    if not any_rings:
        return tuple(Way(True, 100, 0, ramp) for ramp in ramps)
    return tuple(
        Way(hill, level, tie, ramp)
        for ramp in ramps[:2]
        for hill in (True, False)
        for level in (60, 90)
        for tie in (0, 1)
    )


def _read(
    lengths: IntArray,
    smallest: IntArray,
    widest: IntArray,
    num_ranks: int,
    capacity: int,
    cost: CostModel,
    layout: Layout,
) -> _Task:
    ring = np.flatnonzero(smallest > 1)
    ring = ring[np.lexsort((ring, -lengths[ring], -smallest[ring]))]
    rings = rings_of(ring, lengths[ring], smallest[ring], widest[ring], cost)
    local = np.flatnonzero(smallest == 1)
    local = local[np.argsort(-lengths[local], kind="stable")]
    forward, backward = (
        np.asarray(cost.picoseconds(lengths[local], 1, 0, phase), dtype=np.int64) for phase in ("forward", "backward")
    )
    locals_ = Locals(local, np.asarray(cost.piece_tokens(lengths[local], 1)), forward, backward)
    mean = (rings.work + int((forward + backward).sum())) // num_ranks
    return _Task(lengths, rings, locals_, num_ranks, capacity, cost, layout, mean)


def _try(task: _Task, way: Way) -> Iterator[tuple[int, Candidate]]:
    """Span and candidate, round by round."""
    front, back = _halves(task, way)
    steps = way.ramp * task.layout.stages
    rooms = ramp_rooms(steps, task.capacity, task.cost.pad_multiple)
    height = front.height + back.height
    work = task.locals.forward + task.locals.backward
    lost = np.zeros(task.num_ranks, dtype=np.int64)
    constants = (task.cost.microbatch_picoseconds("forward"), task.cost.microbatch_picoseconds("backward"))
    for _ in range(ROUNDS if task.layout.stages > 1 and task.rings.sequence.size else 1):
        rank = spread(work, height + lost)
        packs = make_packs(task.locals, rank, task.num_ranks, task.capacity, rooms, constants)
        candidate = assemble(front, back, packs, 512 if way.hill else 0, task.layout)
        ended = ends(candidate, task.lengths, task.cost, task.layout)
        yield int(ended.max()), candidate
        load = height.copy()
        np.add.at(load, rank, work)
        lost = ended - load if not np.any(lost) else (lost + ended - load) // 2


def _halves(task: _Task, way: Way) -> tuple[Half, Half]:
    """Front and back rings with their places."""
    every = np.arange(task.rings.sequence.size)
    deal = (every[1::2], every[0::2]) if way.hill else (every[:0], every)
    halves = [task.rings.take(part, task.cost) for part in deal]
    total = max(1, sum(half.work for half in halves))
    front, back = (
        place_half(half, task.num_ranks, task.cost, max(1, task.mean * half.work // total * way.level // 100), way.tie)
        for half in halves
    )
    return front, back
