"""Core attention of a pack that shares one exchange: many sequences over the same ranks, all sent together.

That is how systems with a fixed mesh of ranks run a pack: one slice per ring step, one gather, one swap of rows for
heads. As `megatron_hdp.cost.attention` but for the sum over sequences: compute adds up, latency counts once. With a
window all ring steps are walked, and a gather fetches everything.
"""

from dataclasses import dataclass

import numpy as np

from megatron_hdp.cost.area import busiest_area, chunk_area, own_area, step_area
from megatron_hdp.cost.attention import Pieces, called, swaps, transfers
from megatron_hdp.cost.fixed import scaled
from megatron_hdp.cost.stage import StageCoefficients
from megatron_hdp.types import IntArray


@dataclass(frozen=True, slots=True)
class Pack:
    """Sequences that are cut over the same ring."""

    tokens: IntArray
    """Tokens of each one's piece, padding counted, [num_sequences]."""
    ring: int
    tier: int
    swap_tier: int
    """Links between the ranks that swap rows for heads: inside a node where so many ranks share one, because such
    systems number their ranks that way."""


def packed_walk(stage: StageCoefficients, window: int | None, pack: Pack, direction: int) -> int:
    """Keys and values walk the ring, in one slice per step; a dull loop."""
    return _walk(stage, window, pack, direction, 1, int(pack.tokens.sum()))


def packed_gather(stage: StageCoefficients, window: int | None, pack: Pack, direction: int) -> int:
    """All other pieces come at once beside a rank's own blocks, and their gradients go back at once."""
    a, chunk = stage.attention[direction], pack.tokens // 2
    if pack.ring == 1:
        return int(scaled(own_area(chunk, window), a).sum())
    if window is None:
        own = scaled(4 * chunk * chunk, a)
        total = pack.ring * own
    else:
        own, total = (
            scaled(2 * chunk_area(chunk, window, 0 * chunk), a),
            scaled(busiest_area(chunk, window, pack.ring), a),
        )
    kv, _, gradient = transfers(stage, (pack.ring - 1) * pack.tokens.sum(), pack.tier, direction)
    result = int(total.sum()) + max(0, int(kv) - int(own.sum()))
    return result + int(gradient) + called(stage, direction)


def packed_heads(
    stage: StageCoefficients,
    window: int | None,
    pack: Pack,
    direction: int,
    head_ranks: int,
    counts: tuple[int, int],
) -> int:
    """Groups of ``head_ranks`` ranks swap all rows for heads at once; the groups are a ring of longer pieces.

    ``counts``: query heads and key/value heads of one tensor-parallel rank.
    """
    tokens = int(pack.tokens.sum())
    own_heads = max(counts[1] // head_ranks, 1)
    moved = tokens * head_ranks * own_heads // counts[1]
    inner = _walk(stage, window, pack, direction, head_ranks, moved)
    together = Pieces(tokens * pack.ring, np.int64(tokens), pack.ring, pack.swap_tier)
    return inner + int(swaps(stage, together, direction, head_ranks, counts))


def _walk(stage: StageCoefficients, window: int | None, pack: Pack, direction: int, head_ranks: int, moved: int) -> int:
    """A ring of groups of ranks, each with so many times the rows and fewer heads; slices of ``moved`` tokens."""
    a, chunk, size = stage.attention[direction], head_ranks * pack.tokens // 2, pack.ring // head_ranks

    def compute(area: IntArray) -> int:
        return head_ranks * int(scaled(area // head_ranks**2, a).sum())  # longer pieces, fewer heads

    if window is None:
        steps = [compute(own_area(chunk, None))] * size  # all are alike
    else:
        steps = [compute(own_area(chunk, window))]
        steps += [compute(step_area(chunk, window, min(step, size - step))) for step in range(1, size)]
    kv, both, gradient = (int(x) for x in transfers(stage, np.int64(moved), pack.tier, direction))
    sent = [kv] + [both] * (size - 2) if size > 1 else []
    total = sum(max(compute, transfer) for compute, transfer in zip(steps, sent))
    total += (size - 1) * called(stage, direction)
    return total + (max(steps[-1], gradient) + gradient if size > 1 else steps[0])
