"""Which block of attention a rank computes at which step, and where its rows lie. No torch.

A micro-batch's tensors hold its pieces one after the other, each as its low chunk then its high chunk. Padding lies
only at a sequence's tail, so the real rows of a piece are always its first ``real_tokens`` rows; everything below
speaks of those and padding never enters a kernel.

Ring schedule (zigzag ring attention): the K/V slices travel along the walking order, so that at step j the rank at
position p holds the slice of position o = (p - j) mod d. With p holding chunks p and 2d-1-p:

    o == p   own low and high chunk against themselves, causal
    o <  p   all own queries against the source's low chunk, full: its high chunk lies after all own queries
    o >  p   own high chunk against the source's low and high chunk, full: both lie after the own low chunk
"""

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from megatron_hdp.errors import PlanError
from megatron_hdp.types import IntArray, MicroBatch, Piece

Rows = tuple[int, int]
"""Rows [begin, end)."""


@dataclass(frozen=True, slots=True)
class LocalGroup:
    """Local pieces of equal real length: one batched causal kernel call."""

    real_tokens: int
    """Real tokens of each piece."""
    offsets: tuple[int, ...]
    """First row of each piece in the packed tensor."""


@dataclass(frozen=True, slots=True)
class Block:
    """One block of attention of a ring piece: some own queries against some keys of the slice at hand."""

    step: int
    source: int
    """Ring position whose K/V slice is at hand."""
    queries: Rows
    """Rows of the own piece."""
    keys: Rows
    """Rows of the source's slice."""
    causal: bool

    @property
    def empty(self) -> bool:
        """Nothing to compute: only padding on one side."""
        return self.queries[0] >= self.queries[1] or self.keys[0] >= self.keys[1]


@dataclass(frozen=True, slots=True)
class RingPiece:
    """A piece shared with other ranks: where it lies, whom it talks to, and its blocks in order."""

    sequence: int
    offset: int
    """First row of the piece in the packed tensor."""
    position: int
    size: int
    previous: int
    """Pool rank that slices come from."""
    next: int
    """Pool rank that slices go to."""
    slice_tokens: tuple[int, ...]
    """Real rows of every position's slice: what a message holds."""
    blocks: tuple[Block, ...]
    """One per step, 0 .. size - 1."""

    @property
    def real_tokens(self) -> int:
        """Real rows of the own piece."""
        return self.slice_tokens[self.position]

    def source(self, step: int) -> int:
        """Ring position whose slice is at hand at ``step``; step d is the owner again."""
        return (self.position - step) % self.size


@dataclass(frozen=True, slots=True)
class AttentionLayout:
    """Everything that the attention of one rank needs to know about one micro-batch."""

    tokens: int
    """Rows that the pieces fill, padding counted; tensors may be longer."""
    groups: tuple[LocalGroup, ...]
    rings: tuple[RingPiece, ...]


def attention_layout(micro_batch: MicroBatch, rank: int) -> AttentionLayout:
    """Lay out the attention of ``micro_batch`` on pool rank ``rank``.

    Raises PlanError if a piece does not belong to this rank.
    """
    same_length: dict[int, list[int]] = defaultdict(list)
    rings: list[RingPiece] = []
    offset = 0
    for piece in micro_batch.pieces:
        if piece.ring.position(rank) != piece.position:
            raise PlanError(
                f"the piece of sequence {piece.sequence} is for position {piece.position} of the ring of ranks "
                f"{piece.ring.ranks}, but was given to rank {rank}: pass the rank whose micro-batch this is"
            )
        if piece.ring.size > 1:
            rings.append(_ring_piece(piece, rank, offset))
        elif piece.real_tokens > 0:
            same_length[piece.real_tokens].append(offset)
        offset += piece.tokens
    groups = tuple(LocalGroup(length, tuple(offsets)) for length, offsets in same_length.items())
    return AttentionLayout(offset, groups, tuple(rings))


def slice_tokens(length: int, ring_size: int, chunk_tokens: int) -> IntArray:
    """Real tokens that each position of a ring holds, shape [ring_size]."""
    return slice_tokens_of_many(np.array([length]), np.array([chunk_tokens]), ring_size).reshape(-1)


def slice_tokens_of_many(lengths: IntArray, chunks: IntArray, ring_size: int) -> IntArray:
    """`slice_tokens` of many sequences with rings of one size, shape [num_sequences, ring_size]."""
    position = np.arange(ring_size)
    low = np.clip(lengths[:, None] - position * chunks[:, None], 0, chunks[:, None])
    high = np.clip(lengths[:, None] - (2 * ring_size - 1 - position) * chunks[:, None], 0, chunks[:, None])
    return np.asarray(low + high, dtype=np.int64)


def _ring_piece(piece: Piece, rank: int, offset: int) -> RingPiece:
    held = tuple(slice_tokens(piece.length, piece.ring.size, piece.chunk_tokens).tolist())
    previous, following = piece.ring.neighbours(rank)
    blocks = tuple(_block(piece, step, held) for step in range(piece.ring.size))
    return RingPiece(piece.sequence, offset, piece.position, piece.ring.size, previous, following, held, blocks)


def _block(piece: Piece, step: int, held: tuple[int, ...]) -> Block:
    """The block of one step; see the table at the top of the module."""
    own, chunk = piece.position, piece.chunk_tokens
    source = (own - step) % piece.ring.size
    if source == own:
        return Block(step, source, (0, held[own]), (0, held[own]), True)
    if source < own:
        return Block(step, source, (0, held[own]), (0, min(chunk, held[source])), False)
    return Block(step, source, (chunk, held[own]), (0, held[source]), False)
