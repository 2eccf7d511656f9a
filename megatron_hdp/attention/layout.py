"""Which rows of a micro-batch a rank computes on with whom. No torch.

A micro-batch's tensors hold its pieces one after the other, each as its low chunk then its high chunk. Padding lies
only at a sequence's tail, so the real rows of a piece are always its first rows; everything here speaks of those, and
padding never enters a kernel.

A piece is worked on in one of these ways:

alone   nothing to exchange: local pieces (`Share`), and what `heads` makes local
walk    keys and values walk round the ring (`attention.walk_layout`)
fetch   keys and values that the piece's chunks look back on come from their holders (`attention.fetch_layout`)
heads   rows are swapped for heads among some ranks, and one of the above follows (`attention.heads_layout`)
"""

from dataclasses import dataclass

import numpy as np

from megatron_hdp.attention.fetch_layout import Fetch, fetch_layout
from megatron_hdp.attention.heads_layout import HeadSwap, head_swap
from megatron_hdp.attention.segments import Segments
from megatron_hdp.attention.view import Rows, View, view_of
from megatron_hdp.attention.walk_layout import Walk, walk_layout
from megatron_hdp.errors import PlanError
from megatron_hdp.types import MicroBatch, Piece

MOST_SHARES = 8
"""Local work is cut into so many shares at most, to fill the waiting times of rings with."""
LEAST_SHARE_TOKENS = 2048
"""A kernel call for less is not worth its launch."""


@dataclass(frozen=True, slots=True)
class Share:
    """Some local pieces: one batched causal kernel call."""

    offsets: tuple[int, ...]
    """First row of each piece in the packed tensor."""
    real_tokens: tuple[int, ...]
    """Real rows of each piece, at least 1."""


@dataclass(frozen=True, slots=True)
class Alone:
    """A whole sequence that needs nothing of others; only inside `heads`."""

    view: View
    segments: Segments


type Inner = Alone | Walk | Fetch


@dataclass(frozen=True, slots=True)
class SharedPiece:
    """A piece whose sequence other ranks hold parts of."""

    sequence: int
    rows: Rows
    """Its real rows in the packed tensor."""
    swap: HeadSwap | None
    """Rows for heads, before and after ``inner``."""
    inner: Inner

    @property
    def waits(self) -> int:
        """How often the forward pass waits for an exchange."""
        own = 0 if isinstance(self.inner, Alone) else self.inner.waits
        return own + (2 if self.swap else 0)


@dataclass(frozen=True, slots=True)
class AttentionLayout:
    """Everything that the attention of one rank needs to know about one micro-batch."""

    tokens: int
    """Rows that the pieces fill, padding counted; tensors may be longer."""
    window: int | None
    """Tokens that a query sees, itself included; None for all before it."""
    shares: tuple[Share, ...]
    pieces: tuple[SharedPiece, ...]


def attention_layout(micro_batch: MicroBatch, rank: int, window: int | None = None) -> AttentionLayout:
    """Lay out the attention of ``micro_batch`` on pool rank ``rank``.

    Raises PlanError if a piece does not belong to this rank, or its exchange is impossible.
    """
    if window is not None and window < 1:
        raise PlanError(f"the window is {window} tokens: a query sees at least itself; use None for full attention")
    local: list[tuple[int, int]] = []
    shared: list[SharedPiece] = []
    offset = 0
    for piece in micro_batch.pieces:
        if piece.ring.position(rank) != piece.position:
            raise PlanError(
                f"the piece of sequence {piece.sequence} is for position {piece.position} of the ring of ranks "
                f"{piece.ring.ranks}, but was given to rank {rank}: pass the rank whose micro-batch this is"
            )
        if piece.ring.size > 1:
            shared.append(_shared_piece(piece, offset, window))
        elif piece.real_tokens > 0:
            local.append((offset, piece.real_tokens))
        offset += piece.tokens
    shares = _shares(local, sum(piece.waits for piece in shared), window)
    return AttentionLayout(offset, window, shares, tuple(shared))


def _shared_piece(piece: Piece, offset: int, window: int | None) -> SharedPiece:
    view = view_of(piece)
    rows = (offset, offset + piece.real_tokens)
    if piece.exchange != "heads":
        return SharedPiece(piece.sequence, rows, None, _inner(view, window, at_once=piece.exchange == "gather"))
    if piece.head_ranks < 2 or piece.ring.size % piece.head_ranks:
        raise PlanError(
            f"sequence {piece.sequence} swaps heads among {piece.head_ranks} ranks of a ring of {piece.ring.size}: it "
            "must be a divisor of the ring's size, and at least 2"
        )
    swap = head_swap(view, piece.head_ranks)
    return SharedPiece(piece.sequence, rows, swap, _inner(swap.view, window, at_once=False))


def _inner(view: View, window: int | None, *, at_once: bool) -> Inner:
    if window is not None and window >= view.length:
        window = None
    if view.size == 1:
        left = None if window is None else window - 1
        return Alone(view, Segments((view.length,), (view.length,), left=left, right=0))
    return fetch_layout(view, window, at_once=at_once) if at_once or window is not None else walk_layout(view)


def _shares(local: list[tuple[int, int]], waits: int, window: int | None) -> tuple[Share, ...]:
    """Local pieces in shares of about equal work, at most one per wait."""
    if not local:
        return ()
    length = np.array([real for _, real in local], dtype=np.int64)
    seen = length if window is None else np.minimum(length, window)
    work = np.cumsum(length * seen)
    number = max(1, min(waits, MOST_SHARES, int(length.sum()) // LEAST_SHARE_TOKENS))
    share_of = (work - 1) * number // work[-1]  # of the piece's last unit of work
    result = []
    for share in np.unique(share_of):
        chosen = [local[i] for i in np.flatnonzero(share_of == share)]
        result.append(Share(tuple(offset for offset, _ in chosen), tuple(real for _, real in chosen)))
    return tuple(result)
