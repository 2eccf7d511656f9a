"""How long pieces of rings and packs of local sequences should be in a pipeline: less than the capacity, mostly.

Wider rings than memory asks make micro-batches more alike, and a pipeline waits for the longest; smaller packs fill and
drain it faster. Both cost constants and, beyond what hides, transfers. So some sizes are tried, from large to small, up
to the first that does not help; where ranks have few micro-batches also far smaller ones.
"""

from collections.abc import Callable
from typing import NamedTuple


class Size(NamedTuple):
    """Most tokens of a ring's piece and of a pack; a local sequence that is longer than a pack is alone."""

    piece: int
    pack: int


class Share(NamedTuple):
    """Part of the capacity, in twelfths."""

    piece: int
    pack: int


WHOLE, TWICE = Share(12, 12), Share(24, 12)
SHARES = (Share(12, 6), Share(8, 4), Share(6, 4))
STEP = 4
"""Where ranks have few micro-batches, a quarter of the capacity, a sixteenth, ... are tried, ..."""
MOST_MISSES = 2
"""... up to so many that do not help; then, beside the best of them, also twice that."""


def best_size(whole: Size, unit: int, span_of: Callable[[Size], int | None], *, piped: bool, few: bool) -> Size:
    """The size with the least span of those that are tried, the larger of equals.

    Args:
        whole: the largest, for which there is a plan.
        unit: sizes are multiples of this.
        span_of: picoseconds of the plan with pieces and packs of at most this size; None if there is none.
        piped: there are pipeline stages, so that smaller packs are sure to help.
        few: ranks have few micro-batches.
    """
    best, least = whole, -1

    def helps(share: Share, scale: int = 1) -> bool:
        nonlocal best, least
        size = Size(*(tokens * part // (12 * scale) // unit * unit for tokens, part in zip(whole, share, strict=True)))
        span = span_of(size) if min(size) > 0 else None
        if span is None or 0 <= least <= span:
            return False
        best, least = size, span
        return True

    if not (piped and helps(SHARES[0])):
        helps(WHOLE)
    scale, misses = 1, 0
    for power in range(1, 16) if few else ():
        if helps(SHARES[0], STEP**power):
            scale, misses = STEP**power, 0
        else:
            misses += 1
        if misses == MOST_MISSES:
            break
    if scale > 1 and helps(TWICE, scale):
        return best
    for share in SHARES[1:] if piped else SHARES:
        if not helps(share, scale):
            break
    return best
