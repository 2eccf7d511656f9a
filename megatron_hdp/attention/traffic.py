"""How many bytes attention sends, from the plan alone. No torch.

Every number has a closed form per (sequence, position), so that plans of thousands of rings cost milliseconds. A
sequence of ``length`` tokens on d positions is cut into 2d chunks of c tokens; position p holds chunks p and 2d-1-p.
Padding never travels. A window of w tokens (w - 1 keys before the query's own) makes chunk i need the last

    reach(j) = clip(w - 1 - (j - 1) c, 0, c)    rows of chunk i - j,    min(w - 1, J c) rows of the J chunks before it

if it holds a real token; all chunks before it are then full.
"""

from dataclasses import dataclass

import numpy as np

from megatron_hdp.errors import ConfigError, PlanError
from megatron_hdp.types import EXCHANGES, IntArray, Plan

_NO_WINDOW = 2**62
"""Reaches further back than any sequence."""


def exchange_bytes(
    plan: Plan,
    heads: int,
    kv_heads: int,
    head_dim: int,
    bytes_per_element: int,
    *,
    window: int | None = None,
    backward: bool = True,
) -> IntArray:
    """Bytes that every rank sends for one attention layer of one plan, shape [num_ranks].

    ``heads`` and ``kv_heads`` are those of one tensor-parallel rank; ``window`` is how many tokens a query sees, itself
    included (None: all before it). Forward and backward, or forward alone; recomputing the forward pass costs another
    forward. Gradients of keys and values travel in fp32 (fp64 for fp64 inputs).

    Raises ConfigError for head counts that do not divide and windows below 1, PlanError if a sequence's `head_ranks` do
    not suit the heads.
    """
    if heads < 1 or kv_heads < 1 or heads % kv_heads:
        raise ConfigError(f"{heads} query heads with {kv_heads} key/value heads: the second must divide the first")
    if window is not None and window < 1:
        raise ConfigError(f"a window of {window} tokens: a query sees itself, so at least 1 (None for no window)")
    shape = _Shape(heads, kv_heads, head_dim, bytes_per_element, backward)
    sent = np.zeros(plan.num_ranks, dtype=np.int64)
    shared = plan.ring_size > 1
    for index, name in enumerate(EXCHANGES):
        sequences = np.flatnonzero(shared & (plan.exchange == index))
        if sequences.size == 0:
            continue
        pieces = _pieces(plan, sequences)
        if name == "heads":
            ranks = plan.head_ranks[sequences]
            _check_head_ranks(sequences, ranks, plan.ring_size[sequences], shape)
            counted = _heads_bytes(pieces, np.repeat(ranks, plan.ring_size[sequences]), shape, window)
        else:
            rows = _gather_rows(pieces, window) if name == "gather" else _ring_rows(pieces, window)
            counted = shape.kv_bytes(*rows, kv_heads)
        np.add.at(sent, np.repeat(plan.ring_start[sequences], plan.ring_size[sequences]) + pieces.offset, counted)
    return sent


@dataclass(frozen=True, slots=True)
class _Shape:
    """Heads of one tensor-parallel rank, and what is counted."""

    heads: int
    kv_heads: int
    head_dim: int
    element: int
    """Bytes."""
    backward: bool

    @property
    def gradient(self) -> int:
        """Bytes of one number of a gradient that is added up on its way."""
        return max(4, self.element)

    def kv_bytes(self, rows: IntArray, gradient_rows: IntArray, kv_heads: int | IntArray) -> IntArray:
        """Bytes of rows of keys and values: once each way, and of rows of their gradients."""
        forward = rows * self.element
        total = 2 * forward + gradient_rows * self.gradient if self.backward else forward
        return np.asarray(total * (2 * self.head_dim) * kv_heads, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class _Pieces:
    """Columns with one entry per position of every ring, ring after ring."""

    length: IntArray
    chunk: IntArray
    """Tokens of one chunk."""
    size: IntArray
    position: IntArray

    @property
    def offset(self) -> IntArray:
        """Pool rank less the ring's first: even ones up, odd ones down, as `Ring.ranks`."""
        up = 2 * self.position
        return np.where(up < self.size, up, 2 * (self.size - self.position) - 1)

    @property
    def high(self) -> IntArray:
        """The later one of the two chunks."""
        return 2 * self.size - 1 - self.position

    def is_real(self, chunk_index: IntArray) -> IntArray:
        """1 where that chunk holds a real token, else 0."""
        return np.asarray(chunk_index * self.chunk < self.length, dtype=np.int64)

    def at(self, position: IntArray) -> "_Pieces":
        """The pieces at other positions of the same rings."""
        return _Pieces(self.length, self.chunk, self.size, position)

    def grouped(self, ranks: IntArray) -> "_Pieces":
        """The pieces of groups of ``ranks`` neighbouring positions."""
        return _Pieces(self.length, self.chunk * ranks, self.size // ranks, self.position // ranks)

    @property
    def real_rows(self) -> IntArray:
        """Real tokens of every piece."""
        low = np.clip(self.length - self.position * self.chunk, 0, self.chunk)
        return low + np.clip(self.length - self.high * self.chunk, 0, self.chunk)


def _pieces(plan: Plan, sequences: IntArray) -> _Pieces:
    size = plan.ring_size[sequences]
    first = np.cumsum(size) - size
    columns = (plan.lengths[sequences], plan.chunk_tokens[sequences], size, first)
    length, chunk, size, first = (np.repeat(column, size) for column in columns)
    return _Pieces(length, chunk, size, np.arange(first.size) - first)


def _ring_rows(pieces: _Pieces, window: int | None) -> tuple[IntArray, IntArray]:
    """Rows of keys and values that every position sends in forward, and rows of gradients that it sends in backward.

    Without a window each slice goes all the way round but for the last hop, and its gradients all the way. With one,
    the rows that a chunk needs come hop by hop from the neighbour that holds the chunk before it: for low chunks that
    is the position before, for high chunks the one after, as far as the position itself does not have them. Sequences
    that fit into the window walk like those without one.
    """
    following = pieces.at((pieces.position + 1) % pieces.size)
    round_rows = pieces.length - following.real_rows
    if window is None:
        return round_rows, pieces.length
    low_here, high_here = _hops(pieces, window)
    low_next, _ = _hops(pieces.at(pieces.position + 1), window)
    _, high_before = _hops(pieces.at(pieces.position - 1), window)
    sent = np.where(pieces.position + 1 < pieces.size, low_next, 0) + np.where(pieces.position > 0, high_before, 0)
    whole = window >= pieces.length  # the window never binds
    return np.where(whole, round_rows, sent), np.where(whole, pieces.length, low_here + high_here)


def _hops(pieces: _Pieces, window: int) -> tuple[IntArray, IntArray]:
    """Rows that come from the position before for the low chunk, and from the one after for the high chunk."""
    low = np.minimum(window - 1, pieces.position * pieces.chunk) * pieces.is_real(pieces.position)
    between = pieces.high - 1 - pieces.position
    return low, np.minimum(window - 1, between * pieces.chunk) * pieces.is_real(pieces.high)


def _gather_rows(pieces: _Pieces, window: int | None) -> tuple[IntArray, IntArray]:
    """As `_ring_rows`: every owner sends each other position, once, the rows that one of its two chunks needs."""
    before = _NO_WINDOW if window is None else window - 1
    # What a position needs reaches it as if by hops: low and high lane together hold each row once.
    low, high = _hops(pieces, before + 1)
    sent = _gathered(pieces, pieces.position, before) + _gathered(pieces, pieces.high, before)
    own = _reach(pieces, pieces.high - pieces.position, before) * pieces.is_real(pieces.high)
    return sent - own, low + high


def _gathered(pieces: _Pieces, chunk_index: IntArray, before: int) -> IntArray:
    """Rows of one chunk that all positions together need, each position counted once per row."""
    last = (pieces.length - 1) // pieces.chunk
    single = _reach_all(pieces, last - chunk_index, before)
    # Positions whose low chunk lies behind this one count twice what their high chunk needs too.
    highest = np.minimum(last, 2 * pieces.size - 2 - chunk_index)
    to_highest = _reach_all(pieces, highest - chunk_index, before)
    to_lows = _reach_all(pieces, pieces.size - 1 - chunk_index, before)
    return single - np.where(highest >= pieces.size, to_highest - to_lows, 0)


def _reach(pieces: _Pieces, distance: IntArray, before: int) -> IntArray:
    """Rows of a chunk that the chunk ``distance`` after it needs."""
    return np.asarray(np.clip(before - (distance - 1) * pieces.chunk, 0, pieces.chunk), dtype=np.int64)


def _reach_all(pieces: _Pieces, count: IntArray, before: int) -> IntArray:
    """Rows of a chunk that the ``count`` chunks after it need, added up; 0 for a negative count."""
    return np.minimum(before, np.maximum(count, 0) * pieces.chunk)


def _heads_bytes(pieces: _Pieces, ranks: IntArray, shape: _Shape, window: int | None) -> IntArray:
    """Bytes of sequences whose ranks swap rows for heads in groups of ``ranks``, the groups forming a ring."""
    group = pieces.grouped(ranks)
    kv_heads = np.maximum(shape.kv_heads // ranks, 1)
    own, others = pieces.real_rows, group.real_rows - pieces.real_rows
    own_to_all = own * (ranks - 1)
    query = shape.heads // ranks * (shape.head_dim * shape.element)
    kv = 2 * kv_heads * shape.head_dim
    total = own_to_all * (query + kv * shape.element) + others * query
    if shape.backward:
        # Copies of a key/value head on several ranks have their gradients added up at the owner, so in full precision.
        kv_gradient = np.where(ranks > shape.kv_heads, shape.gradient, shape.element)
        total = total + own_to_all * query + others * (query + kv * kv_gradient)
    rows, gradient_rows = _ring_rows(group, window)
    between = shape.kv_bytes(rows, gradient_rows, kv_heads)
    return np.asarray(total + np.where(group.size > 1, between, 0), dtype=np.int64)


def _check_head_ranks(sequences: IntArray, ranks: IntArray, sizes: IntArray, shape: _Shape) -> None:
    """Groups must cut the ring evenly, and so must the heads."""
    unfit = (ranks < 1) | (sizes % np.maximum(ranks, 1) != 0)
    if unfit.any():
        at = int(np.argmax(unfit))
        raise PlanError(
            f"sequence {sequences[at]} swaps heads among {ranks[at]} ranks on a ring of {sizes[at]}: "
            "head_ranks must be a divisor of the ring's size"
        )
    uneven = (shape.heads % ranks != 0) | ((shape.kv_heads % ranks != 0) & (ranks % shape.kv_heads != 0))
    if uneven.any():
        at = int(np.argmax(uneven))
        raise PlanError(
            f"sequence {sequences[at]} swaps heads among {ranks[at]} ranks, but each has {shape.heads} query heads and "
            f"{shape.kv_heads} key/value heads: head_ranks must divide the first, and divide the second or be a "
            "multiple of it; plan with fewer head ranks"
        )
