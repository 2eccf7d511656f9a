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

LOW_FIRST = 0
"""See `planner.coarse`."""
ROUNDS = 3
"""How often local work is spread again for what bubbles took."""
GOOD_ENOUGH = 64
"""A span of 1 + 1 / GOOD_ENOUGH of the bound ends the search."""


@dataclass(frozen=True)
class Way:
    """One way to place rings."""

    deal: str
    """Which rings run in the front half, see `_deal`."""
    level: int
    """How high rings are stacked on the same ranks, % of the mean."""


@dataclass(frozen=True)
class Ends:
    """How a rank begins and ends."""

    ramp: int
    """Small packs at each end, in halves of the number of stages."""
    lead: int
    """Share of local packs that run ahead of the longest micro-batches, of 1024."""


WAYS = tuple(Way(deal, level) for deal in ("odd", "even", "none", "but 8", "top 2") for level in (60, 75, 90))
FLAT_WAYS = (Way("none", 100), Way("none", 90))
"""Without stages there is nothing to fill or drain."""
FIRST_ENDS = (Ends(4, 0), Ends(4, 512))
RAMPS = (5, 6, 0, 8)
LEADS = (0, 128, 384, 576)
MOST_TRIED = 4
"""Placements of rings for which local work is spread again."""


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
    if layout.stages == 1:
        nothing = np.zeros(num_ranks, dtype=np.int64)
        found = [_time(task, *_halves(task, way), nothing, Ends(0, 0)) for way in FLAT_WAYS]
        return finish(min(found, key=_span).candidate, task.locals, lengths.size)
    rings = task.rings.sequence.size > 0
    nothing = np.zeros(num_ranks, dtype=np.int64)
    found = []
    for way in WAYS if rings else WAYS[:1]:
        front, back = _halves(task, way)
        found += [_time(task, front, back, nothing, end) for end in FIRST_ENDS]
    found.sort(key=_span)
    if rings:
        found = [again for trial in found[:MOST_TRIED] for again in (trial, *_again(task, trial))]
    best = min(found, key=_span)
    for ramp in RAMPS:
        best = _better(task, best, bound, Ends(ramp, best.end.lead))
    for lead in LEADS:
        best = _better(task, best, bound, Ends(best.end.ramp, lead))
    if rings and best.span > _enough(bound):
        best = min(best, *_again(task, best), key=_span)
    return finish(best.candidate, task.locals, lengths.size)


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


@dataclass(frozen=True)
class Trial:
    """A candidate, what it is made of, and when it is done."""

    span: int
    candidate: Candidate
    front: Half
    back: Half
    lost: IntArray
    """Picoseconds that bubbles were expected to take from each rank, [num_ranks]."""
    found: IntArray
    """What they took."""
    end: Ends


def _span(trial: Trial) -> int:
    return trial.span


def _enough(bound: int) -> int:
    return bound + bound // GOOD_ENOUGH


def _better(task: _Task, best: Trial, bound: int, end: Ends) -> Trial:
    """The better of ``best`` and the same with other ends."""
    if best.span <= _enough(bound):
        return best
    return min(best, _time(task, best.front, best.back, best.lost, end), key=_span)


def _again(task: _Task, trial: Trial) -> Iterator[Trial]:
    """The same with local work spread again for what bubbles took, round by round."""
    for _ in range(ROUNDS):
        lost = (trial.lost + trial.found) // 2 if np.any(trial.lost) else trial.found
        trial = _time(task, trial.front, trial.back, lost, trial.end)
        yield trial


def _time(task: _Task, front: Half, back: Half, lost: IntArray, end: Ends) -> Trial:
    """Local work onto ranks that have their rings and lose ``lost``, and the time of it all."""
    height = front.height + back.height
    work = task.locals.forward + task.locals.backward
    rank = spread(work, height + lost)
    steps = end.ramp * task.layout.stages // 2
    rooms = ramp_rooms(steps, _short(task.locals.tokens), task.capacity, task.cost.pad_multiple)
    constants = (task.cost.microbatch_picoseconds("forward"), task.cost.microbatch_picoseconds("backward"))
    packs = make_packs(task.locals, rank, task.num_ranks, task.capacity, rooms, constants)
    candidate = assemble(front, back, packs, end.lead, task.layout)
    ended = ends(candidate, task.lengths, task.cost, task.layout)
    load = height.copy()
    np.add.at(load, rank, work)
    return Trial(int(ended.max()), candidate, front, back, lost, ended - load, end)


def _short(tokens: IntArray) -> int:
    """Tokens of a short local sequence: a tenth are shorter. ``tokens`` fall, [num_locals]."""
    return int(tokens[tokens.size * 9 // 10]) if tokens.size else 0


def _deal(rings: IntArray, deal: str) -> tuple[IntArray, IntArray]:
    """Rings, longest first, for the front and for the back half.

    odd, even: every other one; none: all in the back half; but N: as even without the longest N, which are at the
    back; top N: as odd, and the longest N in front.
    """
    if deal == "none":
        return rings[:0], rings
    if deal == "odd":
        return rings[1::2], rings[0::2]
    if deal == "even":
        return rings[0::2], rings[1::2]
    where, number = deal.split()
    top, rest = rings[: int(number)], rings[int(number) :]
    if where == "but":
        return rest[0::2], np.concatenate([top, rest[1::2]])
    return np.concatenate([top, rest[1::2]]), rest[0::2]


def _halves(task: _Task, way: Way) -> tuple[Half, Half]:
    """Front and back rings with their places."""
    deal = _deal(np.arange(task.rings.sequence.size), way.deal)
    halves = [task.rings.take(part, task.cost) for part in deal]
    total = max(1, sum(half.work for half in halves))
    front, back = (
        place_half(
            half, task.num_ranks, task.cost, max(1, task.mean * half.work // total * way.level // 100), LOW_FIRST
        )
        for half in halves
    )
    return front, back
