"""Keys and values that walk round a ring: which block is computed when. No torch.

Zigzag ring attention: the slices travel along the walking order, so that at step j the rank at position p holds the
slice of position o = (p - j) mod d. With p holding chunks p and 2d-1-p:

    o == p   own low and high chunk against themselves, causal
    o <  p   all own queries against the source's low chunk, full: its high chunk lies after all own queries
    o >  p   own high chunk against the source's low and high chunk, full: both lie after the own low chunk
"""

from dataclasses import dataclass

from megatron_hdp.attention.segments import Segments
from megatron_hdp.attention.view import Rows, View


@dataclass(frozen=True, slots=True)
class Block:
    """Attention of some own queries against some keys of the slice at hand, in one step."""

    step: int
    source: int
    """Position whose slice is at hand."""
    queries: Rows
    """Rows of the own piece."""
    keys: Rows
    """Rows of the source's slice."""
    segments: Segments | None
    """None if there is nothing to compute: only padding on one side."""


@dataclass(frozen=True, slots=True)
class Walk:
    """The whole walk of one piece."""

    view: View
    slice_tokens: tuple[int, ...]
    """Real rows of every position's slice: what a message holds."""
    blocks: tuple[Block, ...]
    """One per step, 0 .. size - 1."""

    @property
    def previous(self) -> int:
        """Pool rank that slices come from."""
        return self.view.ranks[self.view.position - 1]

    @property
    def next(self) -> int:
        """Pool rank that slices go to."""
        return self.view.ranks[(self.view.position + 1) % self.view.size]

    @property
    def waits(self) -> int:
        """Exchanges of the forward pass."""
        return self.view.size - 1

    def source(self, step: int) -> int:
        """Position whose slice is at hand at ``step``; step d is the owner again."""
        return (self.view.position - step) % self.view.size


def walk_layout(view: View) -> Walk:
    """The walk of the rank at ``view.position``; full causal attention."""
    held = tuple(view.held(position) for position in range(view.size))
    blocks = tuple(_block(view, step, held) for step in range(view.size))
    return Walk(view, held, blocks)


def _block(view: View, step: int, held: tuple[int, ...]) -> Block:
    """The block of one step; see the table at the top of the module."""
    own = view.position
    source = (own - step) % view.size
    right = None
    if source == own:
        queries, keys, right = (0, held[own]), (0, held[own]), 0
    elif source < own:
        queries, keys = (0, held[own]), (0, min(view.chunk, held[source]))
    else:
        queries, keys = (view.chunk, held[own]), (0, held[source])
    rows, seen = queries[1] - queries[0], keys[1] - keys[0]
    segments = Segments((rows,), (seen,), right=right) if rows > 0 and seen > 0 else None
    return Block(step, source, queries, keys, segments)
