"""How little can overlap the longest sequence in a pipeline: a part of `planner.bound`.

Take a column on the ring of sequence s and its micro-batch j with a piece of s. From the start of j's first forward to
the end of j's last backward on stage 0, the *window*, j passes all P stages twice, one model part after the other: the
window lasts P (F_j + B_j) or more. Stage 0 runs one operation at a time, so

    span >= P (F_j + B_j) + all operations of other micro-batches on stage 0 that are not in the window.

What can be in it follows from `planner.schedule`:

* 1F1B. B_i comes right after F_(i + P - 1). So between F_j and B_j lie at most the forwards of j + 1 .. j + P - 1 and
  the backwards of j - P + 1 .. j - 1: P - 1 of either, none of the same micro-batch.
* Interleaved, V model parts. On stage 0 the k-th backward op comes right after forward op k + 2 (P - 1) + (V - 1) P.
  Let j be at place p of the P micro-batches that take turns. Its first forward is op k = turn P V + p of its phase, its
  last backward is op k + (V - 1) P, so between them lie at most forward ops k + 1 .. k + 2 P V - 2 and backward ops
  k - P V - P + 2 .. k + (V - 1) P - 1. Of those, P V + p - 1 forward ops are of later turns, P V + P - 2 - p backward
  ops of earlier turns, V of them to a micro-batch. The P - 1 others of the same turn may be in it entirely. So are all
  ops of j, but P (F_j + B_j) counts them.

A column with fewer micro-batches only has less in its window. A micro-batch holds at most the capacity C. Sum over the
d columns of s, and add the columns that s is not in, whose span is their own work at least. Of another sequence k, let
z, x, y be the fractions of its pieces that windows swallow entirely, of which they swallow the backward, the forward;
z + x + y <= 1. With W, WF, WB its least rank-times (both passes, forward, backward) and h the tokens that it keeps,

    ranks x span >= P d time_s(d) + sum over k of ((1 - z - x - y) W + x WF + y WB),
    sum z h <= d C mates,  sum x h <= d C earlier,  sum y h <= d C later.

For any prices z', x', y' >= 0 of a token, what windows swallow is at most

    d C (mates z' + earlier x' + later y') + sum over k of max(0, W - z' h, W - WF - x' h, W - WB - y' h).

It is linear in d, so one sum serves all d. The plan chooses d; the bound is the least over d. Prices are those at which
the longest sequences fill the windows of a ring of some d. The larger that d, the lower they are and the smaller is the
d that is least, so halving the range finds prices for the d that is least with them.

Constants of micro-batches: a column of s has P of j, which in 1F1B make up for those that its window swallows.
Interleaved, it swallows at most (P - 1) + P + (P - 2) / V <= 3 (P - 1) of them: 2 (P - 1) are taken off.
"""

from dataclasses import dataclass

from megatron_hdp.planner.bound_times import RingTimes

PRICE_BITS = 16
"""Prices are in 2^-16 picoseconds per token."""
LARGEST_PRICE = 1 << 62
"""Any price is valid; below this one, the C++ twin's products fit 128 bits."""


@dataclass(frozen=True, slots=True)
class Kinds:
    """Kinds of sequences that ascend by length; lists of equal size, one entry per kind."""

    counts: list[int]
    kept: list[int]
    """Tokens of a sequence that stay on devices, rounded down."""
    total: list[int]
    """Least rank-time, picoseconds."""
    forward: list[int]
    backward: list[int]

    def gains(self, i: int) -> tuple[int, int, int]:
        """Rank-time of kind i that is hidden where windows swallow all of it, its backward, its forward."""
        return self.total[i], self.total[i] - self.forward[i], self.total[i] - self.backward[i]


@dataclass(frozen=True, slots=True)
class Room:
    """Most micro-batches that one window swallows, each as `schedule` says; in model parts, ``parts`` to one."""

    parts: int
    mates: int
    """Entirely."""
    earlier: int
    """Their backward; with ``later``, for the place in its turn where this is most."""
    later: int
    """Their forward."""
    places: int
    """By how much the place in its turn moves room from ``earlier`` to ``later``."""

    def price(self, prices: tuple[int, int, int]) -> int:
        """Of a window of micro-batches of one token, at the place where it is highest."""
        whole, backward, forward = prices
        ends = max(
            self.earlier * backward + self.later * forward,
            (self.earlier - self.places) * backward + (self.later + self.places) * forward,
        )
        return -(-(self.mates * whole + ends) // self.parts)


def room_of(stages: int, parts: int) -> Room:
    """What fits a window on the first of ``stages``, of ``parts`` model parts each."""
    if parts == 1:
        return Room(1, 0, stages - 1, stages - 1, 0)
    turn = stages * parts
    return Room(parts, (stages - 1) * parts, turn + stages - 2, turn - 1, stages - 1)


def window(
    times: RingTimes, kinds: Kinds, length: int, ring: int, stages: int, capacity: int, constants: tuple[int, int]
) -> int:
    """The bound by the window of a longest sequence, picoseconds; see the module's text. 0 for one stage.

    Args:
        times: of one stage.
        kinds: all sequences; the last is the longest.
        length: of the longest, padded.
        ring: smallest of the longest.
        stages: pipeline stages.
        capacity: tokens that a rank holds in a micro-batch.
        constants: least number of micro-batches on all columns, and the least constant of each.
    """
    if stages == 1:
        return 0
    room = room_of(stages, times.parts)
    number, constant = constants
    last = len(kinds.total) - 1
    rest = sum(count * total for count, total in zip(kinds.counts, kinds.total)) - kinds.total[last]
    rest += number * constant
    spent = 0 if times.parts == 1 else 2 * (stages - 1) * constant
    widths = range(ring, times.ranks + 1)
    passed = [d * (stages * (int(times.piece(length, d, "total")) - times.trim) - spent) + rest for d in widths]
    best, low, tuned, high = 0, ring, times.ranks, times.ranks
    while low <= high:
        prices = _prices(kinds, room, tuned * capacity)
        each = capacity * room.price(prices)
        taken = _taken(kinds, room, prices)
        values = [(value << PRICE_BITS) - d * each - taken for d, value in zip(widths, passed)]
        least = min(values)
        best = max(best, -(-least // (times.ranks << PRICE_BITS)))
        found = ring + values.index(least)
        if found == tuned:
            break
        low, high = (low, tuned - 1) if found < tuned else (tuned + 1, high)
        tuned = (low + high) // 2
    return best


def _prices(kinds: Kinds, room: Room, tokens: int) -> tuple[int, int, int]:
    """Prices at which the longest fill the windows of micro-batches of ``tokens`` in all: mates, backward, forward."""
    rooms = [tokens * share // room.parts for share in (room.mates, room.earlier, room.later)]
    edges: list[int] = []
    left = rooms[0]
    for i in range(len(kinds.total) - 1, -1, -1):
        left -= _others(kinds, i) * kinds.kept[i]
        while left < 0 and len(edges) < 3:  # this kind no longer fits
            edges.append(i)
            left += rooms[len(edges)] if len(edges) < 3 else 0
        if len(edges) == 3:
            break
    prices = [0, 0, 0, 0]
    for level in range(len(edges) - 1, -1, -1):
        i = edges[level]
        gains = (*kinds.gains(i), 0)
        step = max(gains[level] - gains[level + 1], 0) << PRICE_BITS
        prices[level] = min(prices[level + 1] + step // kinds.kept[i], LARGEST_PRICE)
    return (prices[0], prices[1], prices[2])


def _taken(kinds: Kinds, room: Room, prices: tuple[int, int, int]) -> int:
    """What sequences gain in windows beyond these prices, in 2^-16 picoseconds."""
    first = 0 if room.mates else 1
    total = 0
    for i, kept in enumerate(kinds.kept):
        pairs = zip(kinds.gains(i)[first:], prices[first:])
        total += _others(kinds, i) * max(0, *((gain << PRICE_BITS) - price * kept for gain, price in pairs))
    return total


def _others(kinds: Kinds, i: int) -> int:
    """Sequences of kind i without the longest one."""
    return kinds.counts[i] - (i == len(kinds.total) - 1)
