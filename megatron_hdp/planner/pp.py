"""Balance with pipeline stages or experts: a ring has the same slot on all its ranks.

Then all ranks of a stage run the same sequence of operations as far as they go, whatever their counts, so rings meet
under 1F1B and interleaved schedules alike. Where pipelines lose time is known only when all has a place, so several
ways are tried and timed: what a rank loses to bubbles is then taken off the local work that it gets.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_hdp.cost import CostModel
from megatron_hdp.planner.candidate import finish
from megatron_hdp.planner.candidate_times import Ends, Pair, Task, build, candidate_times
from megatron_hdp.planner.columns import Columns, Layout
from megatron_hdp.planner.halves import Rings, place_half, rings_of
from megatron_hdp.planner.packs import Locals
from megatron_hdp.planner.units import order_by
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


WAYS = tuple(Way(deal, level) for deal in ("odd", "even", "none", "but 8", "top 2") for level in (60, 75, 90))
FLAT_WAYS = (Way("none", 100), Way("none", 90))
"""Without stages there is nothing to fill or drain."""
FIRST_ENDS = (Ends(4, 0), Ends(4, 512))
RAMPS = (5, 6, 0, 8)
LEADS = (0, 128, 384, 576)
MOST_TRIED = 4
"""Placements of rings for which local work is spread again."""


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
    task, rings = _read(lengths, smallest, widest, num_ranks, capacity, cost, layout)
    if layout.stages == 1:
        found = [trial for pair in _pairs(task, rings, FLAT_WAYS) for trial in _try(task, pair, None, (Ends(0, 0),))]
        return _finish(task, min(found, key=_span))
    ways = WAYS if rings.sequence.size else WAYS[:1]
    found = [trial for pair in _pairs(task, rings, ways) for trial in _try(task, pair, None, FIRST_ENDS)]
    found.sort(key=_span)
    if rings.sequence.size:
        found = [again for trial in found[:MOST_TRIED] for again in (trial, *_again(task, trial))]
    best = min(found, key=_span)
    best = _better(task, best, bound, [Ends(ramp, best.end.lead) for ramp in RAMPS])
    best = _better(task, best, bound, [Ends(best.end.ramp, lead) for lead in LEADS])
    if rings.sequence.size and best.span > _enough(bound):
        best = min(best, *_again(task, best), key=_span)
    return _finish(task, best)


def _read(
    lengths: IntArray,
    smallest: IntArray,
    widest: IntArray,
    num_ranks: int,
    capacity: int,
    cost: CostModel,
    layout: Layout,
) -> tuple[Task, Rings]:
    ring = np.flatnonzero(smallest > 1)
    ring = ring[np.lexsort((ring, -lengths[ring], -smallest[ring]))]
    local = np.flatnonzero(smallest == 1)
    local = local[order_by(-lengths[local], local)]
    forward, backward = (
        np.asarray(cost.picoseconds(lengths[local], 1, 0, phase), dtype=np.int64) for phase in ("forward", "backward")
    )
    locals_ = Locals(local, np.asarray(cost.piece_tokens(lengths[local], 1)), forward, backward)
    rings = rings_of(ring, lengths[ring], smallest[ring], widest[ring], cost)
    return Task(lengths, locals_, num_ranks, capacity, cost, layout), rings


@dataclass(frozen=True)
class Trial:
    """A candidate: what it is made of, and when it is done."""

    span: int
    pair: Pair
    lost: IntArray
    """Picoseconds that bubbles were expected to take from each rank, [num_ranks]."""
    found: IntArray
    """What they took."""
    end: Ends


def _span(trial: Trial) -> int:
    return trial.span


def _enough(bound: int) -> int:
    return bound + bound // GOOD_ENOUGH


def _try(task: Task, pair: Pair, lost: IntArray | None, choices: Sequence[Ends], enough: int = -1) -> list[Trial]:
    """Candidates with these rings, see `candidate_times`; nothing is expected to be lost when None."""
    lost = np.zeros(task.num_ranks, dtype=np.int64) if lost is None else lost
    times = candidate_times(task, pair, lost, choices, enough)
    return [Trial(span, pair, lost, found, end) for (span, found), end in zip(times, choices, strict=False)]


def _better(task: Task, best: Trial, bound: int, choices: Sequence[Ends]) -> Trial:
    """The best of ``best`` and the same with other ends, up to the first that is good enough."""
    if best.span <= _enough(bound):
        return best
    return min(best, *_try(task, best.pair, best.lost, choices, _enough(bound)), key=_span)


def _again(task: Task, trial: Trial) -> Iterator[Trial]:
    """The same with local work spread again for what bubbles took, round by round."""
    for _ in range(ROUNDS):
        lost = (trial.lost + trial.found) // 2 if np.any(trial.lost) else trial.found
        (trial,) = _try(task, trial.pair, lost, (trial.end,))
        yield trial


def _finish(task: Task, trial: Trial) -> Columns:
    """The columns of the plan."""
    candidate, _ = build(task, trial.pair, trial.lost, trial.end)
    return finish(candidate, task.locals, task.lengths.size)


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


def _pairs(task: Task, rings: Rings, ways: Sequence[Way]) -> Iterator[Pair]:
    """Rings with their places, way by way; each half gets its share of the time by its work."""
    local = int((task.locals.forward + task.locals.backward).sum())
    mean = (rings.work + local) // task.num_ranks
    everything = np.arange(rings.sequence.size)
    dealt = {deal: [rings.take(part, task.cost) for part in _deal(everything, deal)] for deal in {w.deal for w in ways}}
    for way in ways:
        halves = dealt[way.deal]
        total = max(1, sum(half.work for half in halves))
        front, back = (
            place_half(half, task.num_ranks, task.cost, max(1, mean * half.work // total * way.level // 100), LOW_FIRST)
            for half in halves
        )
        yield Pair(front, back, task.lengths)
