"""A sequence cut over ranks in zigzag, as one of them sees it. No torch."""

from dataclasses import dataclass

from megatron_hdp.types import Piece

type Rows = tuple[int, int]
"""Rows [begin, end)."""


@dataclass(frozen=True, slots=True)
class View:
    """A sequence of ``length`` tokens in 2 ``size`` chunks; position p holds chunks p and 2 ``size`` - 1 - p."""

    sequence: int
    length: int
    """Real tokens; the last chunks may be padding, wholly or in part."""
    chunk: int
    """Tokens of a chunk, padding counted."""
    position: int
    """Whose view this is."""
    ranks: tuple[int, ...]
    """Pool rank of every position."""

    @property
    def size(self) -> int:
        """Positions."""
        return len(self.ranks)

    def span(self, chunk: int) -> Rows:
        """Real token positions of a chunk; empty if it is padding."""
        begin = min(chunk * self.chunk, self.length)
        return begin, min(begin + self.chunk, self.length)

    def chunks(self, position: int) -> tuple[int, int]:
        """The low and the high chunk of a position."""
        return position, 2 * self.size - 1 - position

    def holder(self, chunk: int) -> int:
        """Position that holds a chunk."""
        return min(chunk, 2 * self.size - 1 - chunk)

    def halves(self, position: int) -> tuple[int, int]:
        """Real tokens of the low and of the high chunk of a position."""
        low, high = (self.span(chunk) for chunk in self.chunks(position))
        return low[1] - low[0], high[1] - high[0]

    def held(self, position: int) -> int:
        """Real tokens that a position holds."""
        return sum(self.halves(position))


def view_of(piece: Piece) -> View:
    """The view of the rank whose piece this is."""
    return View(piece.sequence, piece.length, piece.chunk_tokens, piece.position, piece.ring.ranks)
