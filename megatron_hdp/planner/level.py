"""Levelling what ranks run after their last ring. Twin of a part of csrc/sand.cpp.

Longest processing time first (`planner.sand`) ends within one short sequence of the best where ranks have many, but
with five or ten a rank it can leave some percent. Two remedies, both bounded in time:

1. *Exchange*: ranks over the goal, the most loaded first, each give a sequence to one of the least loaded ranks and
   take a shorter one, or none, in return, so that the two end as close as can be. Each round pairs other ranks.
2. *Fit*, where that leaves more than 1/128 and ranks have few sequences: first fit decreasing for a falling end
   (MULTIFIT: Coffman, Garey and Johnson 1978), ranks whose rings end last first.

The goal is never below the longest of these sequences or the end of the last ring: nothing here moves those.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass

from megatron_hdp.planner.skyline import Placement

SHIFTS = (0, 1, 3, 7, 15, 31, 63, 127, 0, 5, 11, 23)
"""By how many places the least loaded ranks are shifted against the most loaded ones, round by round."""
MOST_IDLE = 2
"""Rounds without an exchange before giving up."""
FEW_ITEMS = 16
"""Sequences a rank, on average, up to which they are fitted anew."""
MOST_FITS = 4
FIT_SHARE = 128
"""1 / FIT_SHARE over the goal is worth fitting, ..."""
FITTED_SHARE = 512
"""... 1 / FITTED_SHARE is not."""


@dataclass(slots=True)
class Tails:
    """What ranks run after their last ring; sequences as indices into the times, which do not rise."""

    items: list[list[int]]
    """Of every rank, rising."""
    all: list[int]
    """Of all ranks, rising."""
    ends: list[int]
    """When each rank's last ring ends, with the rank's reserve, picoseconds."""
    loads: list[int]
    """The same with the tail."""
    turns: list[int]
    """Number of each rank's rings."""


def level_tails(
    placed: Placement, times: list[int], rank: list[int], turn: list[int], num_ranks: int, goal: int
) -> int:
    """Change rank and turn of local sequences so that ranks end by ``goal`` if they can.

    Args:
        placed: the rings.
        times: of the local sequences, picoseconds, not rising.
        rank: of each, changed in place.
        turn: number of rings that the rank runs before it, changed in place.
        num_ranks: of the pool.
        goal: picoseconds.

    Returns:
        When the last rank is done.
    """
    tails = _tails(placed, times, rank, turn, num_ranks)
    goal = max(goal, *tails.ends, *(times[item] for item in tails.all[:1]))
    exchange_tails(times, goal, tails)
    fit_tails(times, goal, tails)
    for own_rank, items in enumerate(tails.items):
        for item in items:
            rank[item], turn[item] = own_rank, tails.turns[own_rank]
    return max(tails.loads)


def _tails(placed: Placement, times: list[int], rank: list[int], turn: list[int], num_ranks: int) -> Tails:
    """The tails of ranks; ``turn`` has the number of all their rings."""
    ends, turns = [0] * num_ranks, [0] * num_ranks
    for start, size, begin, time, _ in placed.places:
        for own in range(start, start + size):
            ends[own] = begin + time
            turns[own] += 1
    for own, reserve in enumerate(placed.reserve):
        ends[own] += reserve
    tails = Tails([[] for _ in range(num_ranks)], [], ends, ends.copy(), turns)
    for item, (own, own_turn) in enumerate(zip(rank, turn)):
        if own_turn == turns[own]:
            tails.items[own].append(item)
            tails.all.append(item)
            tails.loads[own] += times[item]
    return tails


def exchange_tails(times: list[int], goal: int, tails: Tails) -> None:
    """Ranks over the goal exchange with the least loaded ones, each round with others."""
    num_ranks, idle = len(tails.loads), 0
    half = num_ranks // 2
    for shift in SHIFTS:
        order = sorted(range(num_ranks), key=lambda rank: (tails.loads[rank], rank))
        moved, pairs = False, 0
        while pairs < half and tails.loads[order[num_ranks - 1 - pairs]] > goal:
            moved |= _exchange(times, tails, order[num_ranks - 1 - pairs], order[(pairs + shift) % half])
            pairs += 1
        idle = 0 if moved else idle + 1
        if pairs == 0 or idle == MOST_IDLE:
            return


def _exchange(times: list[int], tails: Tails, high: int, low: int) -> bool:
    """Exchange a sequence of ``high`` for a shorter one of ``low`` or for none, so that both end as close as can be."""
    more, less = tails.items[high], tails.items[low]
    gap = tails.loads[high] - tails.loads[low]
    best, give, take, at = gap, -1, -1, 0  # best: what is left of the gap
    for item in more:
        if best <= 0:
            break
        wanted = 2 * times[item] - gap  # twice the time to take in return
        while at < len(less) and 2 * times[less[at]] > wanted:
            at += 1
        for other in [*less[max(at - 1, 0) : at + 1], *([-1] if at == len(less) else [])]:
            left = abs(wanted - (2 * times[other] if other >= 0 else 0))
            if left < best:
                best, give, take = left, item, other
    if give < 0:
        return False
    _move(times, tails, give, high, low)
    if take >= 0:
        _move(times, tails, take, low, high)
    return True


def _move(times: list[int], tails: Tails, item: int, source: int, target: int) -> None:
    """Move a sequence from one rank to another."""
    items = tails.items[source]
    items.pop(bisect_left(items, item))
    insort(tails.items[target], item)
    tails.loads[source] -= times[item]
    tails.loads[target] += times[item]


def fit_tails(times: list[int], goal: int, tails: Tails) -> None:
    """First fit decreasing for falling ends."""
    num_ranks, low, most = len(tails.ends), goal, max(tails.loads)
    if most <= goal + goal // FIT_SHARE or len(tails.all) > FEW_ITEMS * num_ranks:
        return
    order = sorted(range(num_ranks), key=lambda rank: (tails.ends[rank], rank), reverse=True)
    for _ in range(MOST_FITS):
        if most <= low + low // FITTED_SHARE:
            break
        end = low + (most - low) // 2
        rooms = _first_fit([times[item] for item in tails.all], [max(end - tails.ends[rank], 0) for rank in order])
        if rooms is None:
            low = end + 1
            continue
        tails.loads, tails.items = tails.ends.copy(), [[] for _ in order]
        for item, room in zip(tails.all, rooms):
            tails.items[order[room]].append(item)
            tails.loads[order[room]] += times[item]
        most = max(tails.loads)


def _first_fit(sizes: list[int], rooms: list[int]) -> list[int] | None:
    """The first room that holds each size, in the order of sizes; None if some size finds none."""
    leaves = 1 << (len(rooms) - 1).bit_length()
    most = [-1] * leaves + rooms + [-1] * (leaves - len(rooms))  # a tree: the larger of the two below
    for node in range(leaves - 1, 0, -1):
        most[node] = max(most[2 * node], most[2 * node + 1])
    taken = []
    for size in sizes:
        if most[1] < size:
            return None
        node = 1
        while node < leaves:
            node = 2 * node + (most[2 * node] < size)
        taken.append(node - leaves)
        most[node] -= size
        while node > 1:
            node //= 2
            larger = max(most[2 * node], most[2 * node + 1])
            if larger == most[node]:
                break
            most[node] = larger
    return taken
