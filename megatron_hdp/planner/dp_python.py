"""Balance without pipeline stages, in Python: the same plans as csrc/plan_dp.cpp, and where the method is explained.

Ranks run unequal numbers of micro-batches, so a plan is good when all ranks are done at the same time, as close as can
be to the lower bound on the span. Sequences are of three kinds, from few and long to many and short:

1. *Coarse rings*, at most 64: those that last a good part of the bound or take a good part of the pool. They decide how
   well the rest can lie, so they are placed in several ways (`planner.coarse`): targets from the bound to 8 % above it,
   and for each some ways of breaking ties and of pricing free ranks. A way *promises* its own end, or the mean of all
   work and of the waiting that local sequences cannot fill, whichever is later. Where the best promise is more than
   1/64 over the bound, hill climbing changes the order in which rings are placed: it moves one ring at a time.
2. *Fine rings*, all others: lowest segment of the skyline first, longest ring that fits it (`planner.fine`).
3. *Local sequences*, sand that fills the gaps below rings (`planner.sand`) and levels ranks' ends (`planner.level`).

The ways that promise most, up to three, are planned to their end; within 1/512 of the bound nothing more is tried, and
the one that ends first becomes the plan. A ring is a micro-batch of its own. Its ranks may be more than its memory
needs: widening up to the size that still hides its transfers costs next to nothing, and beyond that it is done only
where the target cannot be met otherwise.

A plan that ends more than 1/64 over the bound is worth a *second look*, with more coarse rings, and with rings for
local sequences that are too long for the bound or too many: one more than there are ranks would double the step. The
better plan is kept.

Everything is list scheduling, whose order never lets rings wait for each other in a circle: on every rank they run in
the order in which they were placed. All numbers are integers, so that every rank of a run finds the same plan.
"""

from bisect import insort_right
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from megatron_hdp.cost import CostModel, Tier
from megatron_hdp.planner.coarse import CoarseRing, Trial, place_coarse, times_by_size
from megatron_hdp.planner.fine import FineRings, place_fine
from megatron_hdp.planner.frame import LastEnough, last_enough, reserves
from megatron_hdp.planner.sand import Columns, Locals, Spread, build_columns, level_locals, spread_locals
from megatron_hdp.planner.skyline import Placement, best_picoseconds
from megatron_hdp.types import IntArray


class Look(NamedTuple):
    """How closely rings are looked at."""

    most_coarse: int
    coarse_share: int
    """Coarse rings last at least 1 / coarse_share of the bound, or take 1 / COARSE_WIDTH of the pool."""
    split: bool
    """Local sequences that are too long or too many for the bound get rings."""


FIRST_LOOK, SECOND_LOOK = Look(64, 16, False), Look(256, 64, True)
COARSE_WIDTH = 8
SLACK = (0, 4, 10, 20, 41, 82)
"""Targets over the bound, in 1/1024 of it."""
WAYS = ((0, 20), (2, 0), (1, 20), (0, 0), (0, 102), (2, 102))
"""(tie, share) of `Trial`, tried for each target."""
MOST_ROUNDS = 8
"""Local sequences a rank, up to which too many are looked for."""
MOST_FINISHED = 3
"""Ways that are planned to their end."""
MOST_CLIMBS = 64
"""Other orders that are tried for up to as many coarse rings; fewer of more."""
NEAR = 512
"""1 / NEAR over the bound is good enough."""
FAR = 64
"""1 / FAR over the bound is worth another look."""


class Task(NamedTuple):
    """What is to be placed, coarse rings before fine ones."""

    ring_sequence: IntArray
    """Sequence of every ring, int64 [num_rings]."""
    coarse: list[CoarseRing]
    fine: FineRings
    local: Locals
    local_work: int


class Tried(NamedTuple):
    """A way to place coarse rings that was tried."""

    promise: int
    trial: Trial
    order: list[int]


class Candidate(NamedTuple):
    """Rings and local sequences, placed."""

    placed: Placement
    spread: Spread


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
    require(lengths, smallest, widest, num_ranks, cost)
    if capacity < 1:
        raise ValueError(f"capacity is {capacity}, must be at least 1")
    arguments = (lengths, smallest, widest, num_ranks, capacity, cost, bound)
    task = read(*arguments, FIRST_LOOK)
    last = last_enough(cost, capacity)
    best = search(task, num_ranks, cost, bound, last)
    if best.spread.span > bound + bound // FAR:
        closer = read(*arguments, SECOND_LOOK)
        if len(closer.coarse) > len(task.coarse) or closer.ring_sequence.size > task.ring_sequence.size:
            other = search(closer, num_ranks, cost, bound, last)
            if other.spread.span < best.spread.span:
                task, best = closer, other
    columns = build_columns(task.ring_sequence, best.placed, task.local, best.spread, num_ranks, capacity)
    return columns, best.spread.span


def require(lengths: IntArray, smallest: IntArray, widest: IntArray, num_ranks: int, cost: CostModel) -> None:
    """Refuse what would never end or index outside, with a ValueError."""
    if not lengths.size == smallest.size == widest.size or num_ranks < 1:
        raise ValueError(
            f"{lengths.size} lengths, {smallest.size} smallest and {widest.size} widest rings, {num_ranks} ranks: "
            "there must be one of each per length, and at least one rank"
        )
    wrong = (lengths < 1) | (lengths > cost.max_length) | (smallest < 1) | (smallest > num_ranks) | (widest < smallest)
    if wrong.any():
        s = int(np.argmax(wrong))
        raise ValueError(
            f"sequence {s} of {lengths[s]} tokens has rings of {smallest[s]} to {widest[s]} ranks: lengths must be in "
            f"1 .. {cost.max_length}, smallest rings in 1 .. {num_ranks} and not above widest ones"
        )


def read(
    lengths: IntArray,
    smallest: IntArray,
    widest: IntArray,
    num_ranks: int,
    capacity: int,
    cost: CostModel,
    bound: int,
    look: Look,
) -> Task:
    """The three kinds of sequences: rings by smallest size and then length, locals by length, all falling."""
    if look.split and num_ranks > 1:
        smallest = smallest.copy()
        for sequence, size in _split_locals(lengths, smallest, num_ranks, cost, bound):
            smallest[sequence] = size
        widest = np.maximum(smallest, widest)
    rings = np.flatnonzero(smallest > 1)
    rings = rings[np.lexsort((-lengths[rings], -smallest[rings]))]
    own = lengths[rings], smallest[rings], widest[rings]
    coarse, fine = choose_coarse(*own, num_ranks, capacity, cost, bound, look)
    local = _locals(np.flatnonzero(smallest <= 1), lengths, capacity, cost)
    return Task(rings, coarse, fine, local, sum(local.time.tolist()))


def _split_locals(
    lengths: IntArray, smallest: IntArray, num_ranks: int, cost: CostModel, bound: int
) -> Iterator[tuple[int, int]]:
    """(sequence, size) of local sequences that get rings.

    Those that would end after the bound, but sooner on two ranks; and of those that ranks have no room for, because a
    rank runs at most k that take more than 1 / (k + 1) of the bound, the longest.
    """
    local = np.flatnonzero(smallest <= 1)
    local = local[np.argsort(-lengths[local], kind="stable")]
    alone = best_picoseconds(cost, lengths[local], np.ones_like(local))
    many = max(int(np.count_nonzero((k + 1) * alone > bound)) - k * num_ranks for k in range(1, MOST_ROUNDS + 1))
    for i in range(max(many, int(np.count_nonzero(alone > bound)))):
        length, time = lengths[local[i]], int(alone[i])
        if time <= bound:
            size = _cheap_ring(length, time, num_ranks, cost)
        else:
            size = 2 if int(best_picoseconds(cost, length, np.array(2))) < time else 1
        if size > 1:
            yield int(local[i]), size


def _cheap_ring(length: IntArray, alone: int, num_ranks: int, cost: CostModel) -> int:
    """The widest ring of 2, 4, 8, .. ranks of a node whose rank-time is at most 1 / 8 above that of one rank, or 1."""
    sizes = [1 << i for i in range(1, min(num_ranks, cost.ranks_per_node).bit_length())]
    cheap = [size for size in sizes if size * int(best_picoseconds(cost, length, np.array(size))) <= alone + alone // 8]
    return max(cheap, default=1)


def choose_coarse(
    lengths: IntArray,
    smallest: IntArray,
    widest: IntArray,
    num_ranks: int,
    capacity: int,
    cost: CostModel,
    bound: int,
    look: Look,
) -> tuple[list[CoarseRing], FineRings]:
    """Cut rings, by smallest size and then length, both falling, behind the last coarse one; int64 [num_rings] each."""
    widest, number = np.minimum(widest, num_ranks), 0
    if lengths.size:
        head = slice(0, look.most_coarse)
        times = best_picoseconds(cost, lengths[head], smallest[head]).tolist()
        for time, length, least in zip(times, lengths.tolist(), smallest.tolist()):
            short = time * look.coarse_share < bound and least * COARSE_WIDTH < num_ranks
            if short or (length <= capacity and least <= cost.ranks_per_node):  # those that one rank holds may be many
                break
            number += 1
    return (
        times_by_size(cost, lengths[:number], smallest[:number], widest[:number], num_ranks, bound),
        FineRings(cost, lengths[number:], smallest[number:], widest[number:]),
    )


def search(task: Task, num_ranks: int, cost: CostModel, bound: int, last: LastEnough) -> Candidate:
    """The best of several ways."""
    tried = _try_ways(task, num_ranks, cost, bound)
    _climb(task, num_ranks, cost, bound, tried)
    times = task.local.time.tolist()
    best: Candidate | None = None
    for promised, trial, order in tried:
        for late_widest in (False, True):
            enough = bound + bound // (FAR if late_widest else NEAR)
            if best is not None and best.spread.span <= max(enough, promised):
                continue
            if late_widest and not task.fine.smallest:
                continue
            coarse = place_coarse(cost, task.coarse, num_ranks, trial, order)
            place_fine(task.fine, trial.target, coarse, late_widest=late_widest)
            coarse.placed.reserve = reserves(coarse.placed, num_ranks, bound, times[-1] if times else 1, last)
            spread = spread_locals(coarse.placed, times, num_ranks)
            if best is None or spread.span < best.spread.span:
                best = Candidate(coarse.placed, spread)
    assert best is not None  # there is always a first way
    spread = level_locals(best.placed, times, num_ranks, bound + bound // NEAR, best.spread)
    return Candidate(best.placed, spread)


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

    Raises:
        ValueError: rings are in another order, or their sizes do not fit the pool.

    Returns:
        ring, start, size, begin and time of every ring in the order in which they were placed, int64 [num_rings].
    """
    require(lengths, smallest, widest, num_ranks, cost)
    if np.any(np.diff(smallest) > 0):
        at = int(np.argmax(np.diff(smallest) > 0)) + 1
        raise ValueError(
            f"ring {at} needs {smallest[at]} ranks, the one before it {smallest[at - 1]}: rings must come by falling "
            "smallest size"
        )
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


def _try_ways(task: Task, num_ranks: int, cost: CostModel, bound: int) -> list[Tried]:
    """The ways that promise most, those tried first where equal, up to the first that is good enough."""
    tried: list[Tried] = []
    order = list(range(len(task.coarse)))
    for extra in SLACK:
        for tie, share in WAYS:
            trial = Trial(bound + bound * extra // 1024, tie, share)
            _keep_best(tried, Tried(_promise(task, trial, order, num_ranks, cost), trial, order))
            if tried[0].promise <= bound + bound // NEAR or not task.coarse:
                return tried
    return tried


def _keep_best(tried: list[Tried], following: Tried) -> None:
    insort_right(tried, following, key=lambda way: way.promise)
    del tried[MOST_FINISHED:]


def _climb(task: Task, num_ranks: int, cost: CostModel, bound: int, tried: list[Tried]) -> None:
    """Hill climbing from the best way: move one ring to another place in the order, keep what is not worse."""
    number, best = len(task.coarse), tried[0]
    if number < 2:
        return
    random = _xorshift()
    for _ in range(min(MOST_CLIMBS, MOST_CLIMBS * MOST_CLIMBS // number)):
        if best.promise <= bound + bound // FAR:
            break
        order = best.order.copy()
        source, target = next(random) % number, next(random) % number
        order.insert(target, order.pop(source))
        promised = _promise(task, best.trial, order, num_ranks, cost)
        if promised <= best.promise:
            best = Tried(promised, best.trial, order)
    if best.promise < tried[0].promise:
        _keep_best(tried, best)


def _xorshift() -> Iterator[int]:
    """Numbers in no order (Marsaglia 2003), the same on every rank."""
    value, mask = 88172645463325252, (1 << 64) - 1
    while True:
        value ^= value << 13 & mask
        value ^= value >> 7
        value ^= value << 17 & mask
        yield value


def _promise(task: Task, trial: Trial, order: list[int], num_ranks: int, cost: CostModel) -> int:
    """The end of coarse rings, or the mean of all work and of waiting that no local sequence fills."""
    coarse = place_coarse(cost, task.coarse, num_ranks, trial, order)
    rest = task.fine.work + max(task.local_work, coarse.idle) - coarse.idle
    return max(coarse.end, (coarse.area + rest) // num_ranks)
