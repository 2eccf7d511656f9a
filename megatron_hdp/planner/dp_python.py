"""Balance without pipeline stages, in Python: the same plans as csrc/plan_dp.cpp, and where the method is explained.

Ranks run unequal numbers of micro-batches, so a plan is good when all ranks are done at the same time, as close as can
be to the lower bound on the span. Sequences are of three kinds, from few and long to many and short:

1. *Coarse rings*, at most 64: those that last a good part of the bound or take a good part of the pool. They decide how
   well the rest can lie, so they are placed in several ways (`planner.coarse`): targets from the bound to 8 % above it,
   and for each some ways of breaking ties and of pricing free ranks. A way *promises* its own end, or the mean of all
   work and of the waiting that local sequences cannot fill, whichever is later.
2. *Fine rings*, all others: lowest segment of the skyline first, longest ring that fits it (`planner.fine`).
3. *Local sequences*, sand that fills the gaps below rings and levels the ranks' ends (`planner.sand`).

The ways that promise most, up to three, are planned to their end; the first within 1/512 of the bound stops the search,
and the one that ends first becomes the plan. A ring is a micro-batch of its own. Its ranks may be more than its memory
needs: widening up to the size that still hides its transfers costs next to nothing, and beyond that it is done only
where the target cannot be met otherwise.

Everything is list scheduling, whose order never lets rings wait for each other in a circle: on every rank they run in
the order in which they were placed. All numbers are integers, so that every rank of a run finds the same plan.
"""

from typing import NamedTuple

import numpy as np

from megatron_hdp.cost import CostModel, Tier
from megatron_hdp.planner.coarse import Coarse, CoarseRing, Trial, place_coarse, times_by_size
from megatron_hdp.planner.fine import FineRings, place_fine
from megatron_hdp.planner.sand import Columns, Locals, Spread, build_columns, spread_locals
from megatron_hdp.planner.skyline import Placement, best_picoseconds
from megatron_hdp.types import IntArray

MOST_COARSE = 64
COARSE_SHARE = 16
"""Coarse rings last at least 1 / COARSE_SHARE of the bound, or ..."""
COARSE_WIDTH = 8
"""... take 1 / COARSE_WIDTH of the pool."""
SLACK = (0, 4, 10, 20, 41, 82)
"""Targets over the bound, in 1/1024 of it."""
WAYS = ((0, 20), (2, 0), (1, 20), (0, 0), (0, 102), (2, 102))
"""(tie, share) of `Trial`, tried for each target."""
MOST_FINISHED = 3
"""Ways that are planned to their end."""
NEAR = 512
"""1 / NEAR over the bound is good enough."""


class Task(NamedTuple):
    """What is to be placed, coarse rings before fine ones."""

    ring_sequence: IntArray
    """Sequence of every ring, int64 [num_rings]."""
    coarse: list[CoarseRing]
    fine: FineRings
    local: Locals
    local_work: int


def plan_dp_python(
    lengths: IntArray,
    smallest: IntArray,
    widest: IntArray,
    num_ranks: int,
    capacity: int,
    cost: CostModel,
    bound: int,
) -> Columns:
    """Twin of the C++ ``plan_dp``: the columns of the plan, all int64; see `planner.dp.plan_dp` for the arguments."""
    return plan_and_span(lengths, smallest, widest, num_ranks, capacity, cost, bound)[0]


def plan_and_span(
    lengths: IntArray,
    smallest: IntArray,
    widest: IntArray,
    num_ranks: int,
    capacity: int,
    cost: CostModel,
    bound: int,
) -> tuple[Columns, int]:
    """`plan_dp_python`, and the span that it promises: the true one but for what micro-batches are not full."""
    task = read(lengths, smallest, widest, num_ranks, capacity, cost, bound)
    times = task.local.time.tolist()
    best: tuple[Placement, Spread] | None = None
    for promised, trial in sorted(_trials(task, num_ranks, cost, bound), key=lambda found: found[0])[:MOST_FINISHED]:
        if best is not None and promised >= best[1].span:
            break
        coarse = place_coarse(cost, task.coarse, num_ranks, trial)
        place_fine(task.fine, trial.target, coarse)
        spread = spread_locals(coarse.placed, times, num_ranks)
        if best is None or spread.span < best[1].span:
            best = coarse.placed, spread
        if best[1].span <= bound + bound // NEAR:
            break
    assert best is not None  # there is always a first trial
    placed, spread = best
    return build_columns(task.ring_sequence, placed, task.local, spread, num_ranks, capacity), spread.span


def read(
    lengths: IntArray,
    smallest: IntArray,
    widest: IntArray,
    num_ranks: int,
    capacity: int,
    cost: CostModel,
    bound: int,
) -> Task:
    """The three kinds of sequences: rings by smallest size and then length, locals by length, all falling."""
    rings = np.flatnonzero(smallest > 1)
    rings = rings[np.lexsort((-lengths[rings], -smallest[rings]))]
    coarse, fine = choose_coarse(lengths[rings], smallest[rings], widest[rings], num_ranks, cost, bound)
    local = _locals(np.flatnonzero(smallest <= 1), lengths, capacity, cost)
    return Task(rings, coarse, fine, local, sum(local.time.tolist()))


def choose_coarse(
    lengths: IntArray, smallest: IntArray, widest: IntArray, num_ranks: int, cost: CostModel, bound: int
) -> tuple[list[CoarseRing], FineRings]:
    """Cut rings, by smallest size and then length, both falling, behind the last coarse one; int64 [num_rings] each."""
    widest, number = np.minimum(widest, num_ranks), 0
    if lengths.size:
        times = best_picoseconds(cost, lengths[:MOST_COARSE], smallest[:MOST_COARSE]).tolist()
        for time, least in zip(times, smallest.tolist()):
            if time * COARSE_SHARE < bound and least * COARSE_WIDTH < num_ranks:
                break
            number += 1
    return (
        times_by_size(cost, lengths[:number], smallest[:number], widest[:number], num_ranks, bound),
        FineRings(cost, lengths[number:], smallest[number:], widest[number:]),
    )


def place_rings_python(
    lengths: IntArray,
    smallest: IntArray,
    widest: IntArray,
    num_ranks: int,
    cost: CostModel,
    num_coarse: int,
    target: int,
    tie: int,
    share: int,
) -> tuple[IntArray, IntArray, IntArray, IntArray, IntArray]:
    """Twin of the C++ ``place_rings``: rings alone, in the given order, onto ranks that are free at once.

    ``lengths``, ``smallest`` and ``widest`` are int64 [num_rings], by smallest size and then length, both falling; the
    first ``num_coarse`` are placed as coarse rings. For ``target``, ``tie`` and ``share`` see `Trial`.

    Returns:
        ring, start, size, begin and time of every ring in the order in which they were placed, int64 [num_rings].
    """
    widest = np.minimum(widest, num_ranks)
    head, tail = slice(0, max(num_coarse, 0)), slice(max(num_coarse, 0), None)
    coarse = times_by_size(cost, lengths[head], smallest[head], widest[head], num_ranks, target)
    found = place_coarse(cost, coarse, num_ranks, Trial(target, tie, share))
    place_fine(FineRings(cost, lengths[tail], smallest[tail], widest[tail]), target, found)
    places = [place[:4] for place in found.placed.places]
    start, size, begin, time = np.array(places, dtype=np.int64).reshape(-1, 4).T.copy()
    return np.array(found.placed.rings, dtype=np.int64), start, size, begin, time


def _locals(sequence: IntArray, lengths: IntArray, capacity: int, cost: CostModel) -> Locals:
    """The local sequences, longest first, ties by sequence."""
    sequence = sequence[np.argsort(-lengths[sequence], kind="stable")]
    tokens = np.asarray(cost.piece_tokens(lengths[sequence], 1), dtype=np.int64)
    time = cost.picoseconds(lengths[sequence], 1, int(Tier.INSIDE_NODE))
    return Locals(sequence, tokens, time + cost.microbatch_picoseconds() * tokens // capacity)


def _trials(task: Task, num_ranks: int, cost: CostModel, bound: int) -> list[tuple[int, Trial]]:
    """(promise, way) of the ways to place coarse rings, up to the first that is good enough."""
    found = []
    for extra in SLACK:
        for tie, share in WAYS:
            trial = Trial(bound + bound * extra // 1024, tie, share)
            promised = _promise(task, place_coarse(cost, task.coarse, num_ranks, trial), num_ranks)
            found.append((promised, trial))
            if promised <= bound + bound // NEAR or not task.coarse:
                return found
    return found


def _promise(task: Task, coarse: Coarse, num_ranks: int) -> int:
    """Its end, or the mean of all work and of waiting that no local sequence fills."""
    rest = task.fine.work + max(task.local_work, coarse.idle) - coarse.idle
    return max(coarse.end, (coarse.area + rest) // num_ranks)
