"""Core attention of one rank's piece by exchange, transfers included: picoseconds of one pass over a stage, int64.

Everything broadcasts; formulas and reasons are in docs/cost-model.md. Directions are 0 for forward, 1 for backward. A
piece is two chunks of c tokens, t = 2 c; one *step* is what t queries compute with t keys of a causal sequence that is
cut over the ring, d of them to a piece.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_hdp.cost.area import busiest_area, chunk_area
from megatron_hdp.cost.fixed import FRACTION_BITS, scaled
from megatron_hdp.cost.stage import StageCoefficients
from megatron_hdp.types import IntArray


@dataclass(frozen=True, slots=True)
class Pieces:
    """Pieces of sequences; numbers or int64 arrays that broadcast."""

    length: Any
    """Real tokens of the whole sequence."""
    tokens: Any
    """Tokens of a piece, padding counted."""
    ring: Any
    """Ranks that share the sequence."""
    tier: Any
    """Links of the ring, a `Tier`."""


def ring_attention(stage: StageCoefficients, window: int | None, pieces: Pieces, direction: int) -> Any:
    """Keys and values walk round the ring; with a window that binds they come hop by hop, no farther than needed.

    On one rank the window counts for the padding as well: a local sequence costs no less than a shorter one does.
    """
    a, chunk = stage.attention[direction], pieces.tokens // 2
    step = scaled(4 * chunk * chunk, a)
    walk = _walk(stage, step, pieces.tokens, pieces.ring, pieces.tier, direction)
    if window is None:
        return walk
    rounds, rows = hops(window, chunk, pieces.ring)
    own, total = _windowed(window, chunk, pieces.ring, a)
    halo = _fetched(stage, own, total, rounds, rows, pieces.tier, direction)
    return np.where(window >= np.where(pieces.ring < 2, pieces.tokens, pieces.length), walk, halo)


def gather_attention(stage: StageCoefficients, window: int | None, pieces: Pieces, direction: int) -> Any:
    """All keys and values that a rank needs come at once from their owners, and their gradients go back at once."""
    a, chunk, ring = stage.attention[direction], pieces.tokens // 2, pieces.ring
    step = scaled(4 * chunk * chunk, a)
    rows = (ring - 1) * pieces.tokens
    whole = _fetched(stage, step, ring * step, 1 * (rows > 0), rows, pieces.tier, direction)
    if window is None:
        return whole
    rows = needed(window, chunk, ring)
    own, total = _windowed(window, chunk, ring, a)
    cut = _fetched(stage, own, total, 1 * (rows > 0), rows, pieces.tier, direction)
    return np.where(window >= pieces.length, whole, cut)


def heads_attention(
    stage: StageCoefficients,
    window: int | None,
    pieces: Pieces,
    direction: int,
    head_ranks: Any,
    counts: tuple[int, int],
) -> Any:
    """Groups of ``head_ranks`` ranks swap rows for heads; the groups are a ring of pieces that are so much longer.

    ``counts``: query heads and key/value heads of one tensor-parallel rank.
    """
    a, chunk, kv_heads = stage.attention[direction], pieces.tokens // 2, counts[1]
    own_heads = np.maximum(kv_heads // head_ranks, 1)  # key/value heads of each rank after the swap
    size, group_chunk = pieces.ring // head_ranks, head_ranks * chunk
    step = head_ranks * scaled(4 * chunk * chunk, a)  # longer pieces, fewer heads
    moved = pieces.tokens * head_ranks * own_heads // kv_heads
    inner = _walk(stage, step, moved, size, pieces.tier, direction)
    if window is not None:
        rounds, rows = hops(window, group_chunk, size)
        own, total = (part // head_ranks for part in _windowed(window, group_chunk, size, a))
        rows = -(-rows * own_heads // kv_heads)
        halo = _fetched(stage, own, total, rounds, rows, pieces.tier, direction)
        inner = np.where(window >= pieces.length, inner, halo)
    return inner + swaps(stage, pieces, direction, head_ranks, counts)


def swaps(stage: StageCoefficients, pieces: Pieces, direction: int, head_ranks: Any, counts: tuple[int, int]) -> Any:
    """Rows for heads, and back: one exchange ahead of attention and one after it, neither hidden.

    Forward q, k and v leave and the output comes back; backward the output's gradient leaves and those of q, k and v
    come back, of k and v in fp32 where several ranks hold the same head. A unit is one head's keys or values.
    """
    heads, kv_heads = counts
    queries, own_heads = heads // head_ranks, np.maximum(kv_heads // head_ranks, 1)
    rows = (head_ranks - 1) * pieces.tokens
    latency = stage.latency[pieces.tier] >> FRACTION_BITS

    def moved(units: Any, time: IntArray) -> Any:
        return scaled(-(-rows * units // (2 * kv_heads)), time[pieces.tier])

    if direction == 0:
        parts = moved(queries + 2 * own_heads, stage.kv_time) + moved(queries, stage.kv_time)
    else:
        alone = moved(queries + 2 * own_heads, stage.kv_time)
        replicated = moved(queries, stage.kv_time) + moved(2 * own_heads, stage.gradient_time)
        parts = moved(queries, stage.kv_time) + np.where(head_ranks > kv_heads, replicated, alone)
    return 2 * latency + parts + called(stage, direction)


def hides(stage: StageCoefficients, window: int | None, pieces: Pieces, direction: int) -> Any:
    """Does every transfer of `ring_attention` that runs beside compute end within it? bool; true for local pieces."""
    a, chunk = stage.attention[direction], pieces.tokens // 2
    kv, both, gradient = transfers(stage, pieces.tokens, pieces.tier, direction)
    step = scaled(4 * chunk * chunk, a)
    hidden = (step >= kv) & (step >= gradient) & ((step >= both) | (pieces.ring < 3))
    if window is not None:
        rounds, rows = hops(window, chunk, pieces.ring)
        own, _ = _windowed(window, chunk, pieces.ring, a)
        fetch = rounds * (stage.latency[pieces.tier] >> FRACTION_BITS) + scaled(rows, stage.kv_time[pieces.tier])
        hidden = np.where(window >= pieces.length, hidden, own >= fetch)
    return hidden | (pieces.ring < 2)


def transfers(stage: StageCoefficients, tokens: Any, tier: Any, direction: int) -> tuple[Any, Any, Any]:
    """Picoseconds in which slices of ``tokens`` move: K/V; K/V and gradients; gradients (none in forward)."""
    latency = stage.latency[tier] >> FRACTION_BITS
    kv = latency + scaled(tokens, stage.kv_time[tier])
    if direction == 0:
        return kv, kv, 0 * kv
    return kv, latency + scaled(tokens, stage.both_time[tier]), latency + scaled(tokens, stage.gradient_time[tier])


def _walk(stage: StageCoefficients, step: Any, tokens: Any, ring: Any, tier: Any, direction: int) -> Any:
    """Closed form of d equal steps beside slices of ``tokens``; one step where the ring is 1.

    Forward: K/V of step k + 1 move during step k. Backward: K/V of step k + 1 and gradients of step k - 1 move
    during step k, and after the last step the gradients make one more hop, home, that nothing hides.
    """
    kv, both, gradient = transfers(stage, tokens, tier, direction)
    middle = (ring - 2) * np.maximum(step, both)
    walk = np.maximum(step, kv) + middle + np.maximum(step, gradient) + gradient
    return np.where(ring > 1, walk + (ring - 1) * called(stage, direction), step)


def called(stage: StageCoefficients, direction: int) -> int:
    """What an exchange takes beside its transfers, once for every step after the first."""
    return stage.ring_step[direction] >> FRACTION_BITS


def _fetched(stage: StageCoefficients, own: Any, total: Any, rounds: Any, rows: Any, tier: Any, direction: int) -> Any:
    """``rows`` come in so many ``rounds`` beside the ``own`` part of the ``total`` compute.

    In backward their gradients go back the same way after it.
    """
    latency = rounds * (stage.latency[tier] >> FRACTION_BITS)
    result = total + np.maximum(latency + scaled(rows, stage.kv_time[tier]) - own, 0)
    result = result + np.minimum(rounds, 1) * called(stage, direction)
    return result + latency + scaled(rows, stage.gradient_time[tier]) if direction else result


def _windowed(window: int, chunk: Any, ring: Any, a: int) -> tuple[Any, Any]:
    """Compute with a window: of a piece's two diagonal blocks, which wait for nobody, and of the busiest piece in all.

    A rank may have less of either, but then no less between them: what waits at most is charged to what computes most.
    """
    return scaled(2 * chunk_area(chunk, window, 0 * chunk), a), scaled(busiest_area(chunk, window, ring), a)


def hops(window: int, chunk: Any, ring: Any) -> tuple[Any, Any]:
    """Rounds in which a ring fetches what windows reach back on, and tokens that the busiest rank gets in all of them.

    In round j each position gets chunk i - j for each of its chunks i, if the window reaches it: the low one from the
    position before, the high one from the position after. A window of w tokens reaches w - 1 back. The first chunk
    of all is 2 d - 2 hops from the last; rounds up to a third of that may bring two chunks to one rank.
    """
    most = 2 * ring - 2
    back = np.minimum(window - 1, most * chunk)
    return -(-back // chunk), back + np.minimum(window - 1, most // 3 * chunk)


def needed(window: int, chunk: Any, ring: Any) -> Any:
    """Most tokens of others that the window of one piece's two chunks reaches back on.

    At position p that is min(w - 1, p c) ahead of the low chunk and min(w - 1, (2 d - 2 - 2 p) c) between the two. The
    sum rises with p while the second is w - 1 and falls after, so the largest is at either side of that place.
    """
    back, between = window - 1, 2 * ring - 2
    turn = np.clip((between - -(-back // chunk)) // 2, 0, ring - 1)

    def at(position: Any) -> Any:
        return np.minimum(back, position * chunk) + np.minimum(back, (between - 2 * position) * chunk)

    return np.maximum(at(turn), at(np.minimum(turn + 1, ring - 1)))
