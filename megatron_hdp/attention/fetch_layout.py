"""Keys and values that are fetched before they are used: which rows come from where, in which round. No torch.

What a piece needs besides its own rows is what its two chunks look back on: with a window of w tokens the w - 1 ahead
of each chunk, without one everything ahead. It is kept in a *store*, one or two stretches of the sequence, to which
each chunk's queries then attend in one block, after their own chunk.

at once    one round, every owner sends straight to whoever needs its rows (d - 1 peers)
in hops    chunk i's rows come by the holder of chunk i - 1: round j brings the chunk that lies j ahead. The holders of
           neighbouring chunks are neighbours on the ring, so no rank talks to anyone but those two. Low chunks are
           filled by the previous position. High chunks by the next one, but for rows that are the rank's own or that
           its low chunk has got before: chunks up to its position.

In backward the rounds are walked in reverse: gradients of fetched rows go back to where the rows came from, and are
added there to what that rank has for them.
"""

from dataclasses import dataclass

from megatron_hdp.attention.segments import Segments
from megatron_hdp.attention.view import Rows, View


@dataclass(frozen=True, slots=True)
class Transfer:
    """Rows of one chunk, exchanged with one rank."""

    peer: int
    """Pool rank."""
    own: bool
    """Of the own piece, or of the store."""
    rows: Rows


@dataclass(frozen=True, slots=True)
class Round:
    """What is under way at the same time. Transfers with the same peer are one message."""

    sends: tuple[Transfer, ...]
    receives: tuple[Transfer, ...]


@dataclass(frozen=True, slots=True)
class FetchBlock:
    """Own queries against rows of the store."""

    queries: Rows
    keys: Rows
    segments: Segments


@dataclass(frozen=True, slots=True)
class Fetch:
    """All that one piece fetches, and what it computes."""

    view: View
    store_rows: int
    copies: tuple[tuple[Rows, Rows], ...]
    """Rows of the store that are the rank's own, and the same rows of its piece."""
    rounds: tuple[Round, ...]
    diagonal: Segments | None
    """Both own chunks against themselves; None if the piece is all padding."""
    blocks: tuple[FetchBlock, ...]

    @property
    def waits(self) -> int:
        """Exchanges of the forward pass."""
        return len(self.rounds)


@dataclass(frozen=True, slots=True)
class _Store:
    """Where rows of the sequence lie at one position."""

    view: View
    stretches: tuple[Rows, ...]
    """Token positions, ascending, disjoint."""

    def row(self, token: int) -> int:
        """Row of the store that holds a token."""
        ahead = 0
        for begin, end in self.stretches:
            if begin <= token < end:
                return ahead + token - begin
            ahead += end - begin
        raise AssertionError(f"token {token} is not in the store {self.stretches}")

    def transfer(self, peer: int, chunk: int, tokens: Rows) -> Transfer:
        """Tokens of one chunk, wherever this position has them."""
        begin, end = tokens
        if chunk in self.view.chunks(self.view.position):
            _, high = self.view.chunks(self.view.position)
            first = begin - self.view.span(chunk)[0] + (self.view.chunk if chunk == high else 0)
            return Transfer(peer, True, (first, first + end - begin))
        first = self.row(begin)
        return Transfer(peer, False, (first, first + end - begin))


def fetch_layout(view: View, window: int | None, *, at_once: bool) -> Fetch:
    """What the rank at ``view.position`` fetches and computes. ``window``: tokens a query sees, itself included."""
    store = _Store(view, _stretches(view, window))
    rounds = _at_once(view, window, store) if at_once else _in_hops(view, window, store)
    halves = [rows for rows in view.halves(view.position) if rows]
    left = None if window is None else window - 1
    diagonal = Segments(tuple(halves), tuple(halves), left=left, right=0) if halves else None
    blocks = []
    ahead = 0
    for chunk, rows in zip(view.chunks(view.position), view.halves(view.position)):
        begin, end = looked_back_on(view, chunk, window)
        if end > begin:
            seeing = rows if window is None else min(rows, window - 1)  # later rows see their own chunk only
            keys = (store.row(begin), store.row(end - 1) + 1)
            limit = None if window is None else window - 1 - (end - begin)
            blocks.append(FetchBlock((ahead, ahead + seeing), keys, Segments((seeing,), (end - begin,), left=limit)))
        ahead += rows
    size = sum(end - begin for begin, end in store.stretches)
    return Fetch(view, size, _copies(view, store), rounds, diagonal, tuple(blocks))


def looked_back_on(view: View, chunk: int, window: int | None) -> Rows:
    """Tokens ahead of a chunk that its queries see; empty if the chunk is padding."""
    begin, end = view.span(chunk)
    if begin == end:
        return begin, begin
    return (0 if window is None else max(0, begin - (window - 1))), begin


def _stretches(view: View, window: int | None) -> tuple[Rows, ...]:
    """What both chunks look back on; in one stretch, own low chunk included, where the high chunk reaches that far."""
    low, high = (looked_back_on(view, chunk, window) for chunk in view.chunks(view.position))
    if low[0] < low[1] and high[0] < high[1] and high[0] <= view.span(view.position)[1]:
        return ((min(low[0], high[0]), high[1]),)
    return tuple(stretch for stretch in (low, high) if stretch[0] < stretch[1])


def _copies(view: View, store: _Store) -> tuple[tuple[Rows, Rows], ...]:
    own = view.span(view.position)
    copies = []
    for stretch in store.stretches:
        begin, end = max(own[0], stretch[0]), min(own[1], stretch[1])
        if begin < end:
            row = store.row(begin)
            copies.append(((row, row + end - begin), (begin - own[0], end - own[0])))
    return tuple(copies)


def _needed(view: View, position: int, chunk: int, window: int | None) -> Rows:
    """Tokens of another position's chunk that ``position`` looks back on.

    Ahead of its low chunk, what the low chunk looks back on holds all that the high one does.
    """
    low, high = view.chunks(position)
    reach = looked_back_on(view, low if chunk < low else high, window)
    span = view.span(chunk)
    return max(span[0], reach[0]), min(span[1], reach[1])


def _at_once(view: View, window: int | None, store: _Store) -> tuple[Round, ...]:
    own = view.position
    sends, receives = [], []
    for other in range(view.size):
        if other == own:
            continue
        for chunk in view.chunks(own):
            begin, end = _needed(view, other, chunk, window)
            if begin < end:
                sends.append(store.transfer(view.ranks[other], chunk, (begin, end)))
        for chunk in view.chunks(other):
            begin, end = _needed(view, own, chunk, window)
            if begin < end:
                receives.append(store.transfer(view.ranks[other], chunk, (begin, end)))
    return (Round(tuple(sends), tuple(receives)),) if sends or receives else ()


def _in_hops(view: View, window: int | None, store: _Store) -> tuple[Round, ...]:
    own, size = view.position, view.size
    rounds = []
    for hop in range(1, 2 * size):
        sends, receives = [], []
        for neighbour, direction in ((own + 1, 1), (own - 1, -1)):
            if not 0 <= neighbour < size:
                continue
            chunk, tokens = _hop(view, neighbour, hop, direction, window)
            if tokens[0] < tokens[1]:
                sends.append(store.transfer(view.ranks[neighbour], chunk, tokens))
            chunk, tokens = _hop(view, own, hop, -direction, window)
            if tokens[0] < tokens[1]:
                receives.append(store.transfer(view.ranks[neighbour], chunk, tokens))
        if sends or receives:
            rounds.append(Round(tuple(sends), tuple(receives)))
    return tuple(rounds)


def _hop(view: View, receiver: int, hop: int, direction: int, window: int | None) -> tuple[int, Rows]:
    """Chunk and tokens that ``receiver`` gets in round ``hop``.

    From its previous position (direction 1), or from the next one (-1).
    """
    low, high = view.chunks(receiver)
    chunk = low - hop if direction == 1 else high - hop
    if chunk < 0 or (direction == -1 and chunk <= receiver):
        return 0, (0, 0)
    return chunk, _needed(view, receiver, chunk, window)
