"""Who computes what on which rows, for every exchange and window, without torch."""

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_hdp.attention.fetch_layout import Fetch
from megatron_hdp.attention.heads_layout import head_parts
from megatron_hdp.attention.layout import Alone, attention_layout
from megatron_hdp.attention.segments import Segments
from megatron_hdp.attention.walk_layout import Walk
from megatron_hdp.errors import ConfigError, PlanError
from megatron_hdp.types import MicroBatch, Piece, Ring, chunk_tokens


def piece_of(length, ring, rank, sequence=0, pad_multiple=2, exchange="ring", head_ranks=1) -> Piece:
    chunk = chunk_tokens(length, ring.size, pad_multiple)
    return Piece(sequence, length, ring, ring.position(rank), chunk, 0.0, exchange, head_ranks)


def held_tokens(piece: Piece) -> list[int]:
    """Real token positions of a piece, in order of its rows."""
    return [token for begin, end in piece.spans for token in range(begin, end) if token < piece.length]


def visible(segments: Segments) -> list[tuple[int, int]]:
    """Every (query row, key row) of the packed rows that a kernel computes, by the contract of `Segments`."""
    pairs, query, key = [], 0, 0
    for queries, keys in zip(segments.queries, segments.keys):
        for r in range(queries):
            seen = [
                c
                for c in range(keys)
                if (segments.left is None or r - segments.left <= c)
                and (segments.right is None or c <= r + segments.right)
            ]
            assert seen, "every query sees a key"
            pairs += [(query + r, key + c) for c in seen]
        query, key = query + queries, key + keys
    causal, full = segments.right == 0, segments.right is None and segments.left is None
    edge = segments.right is None and segments.left is not None and segments.left >= 0
    assert (
        full or (causal and segments.queries == segments.keys) or (edge and min(segments.keys) >= segments.queries[0])
    )
    return pairs


RINGS = st.integers(1, 9).flatmap(lambda size: st.tuples(st.integers(0, 5), st.just(size)))
HOW = st.sampled_from(["ring", "gather", "heads"])


@settings(max_examples=300, deadline=None)
@given(st.data(), st.integers(1, 120), RINGS, st.sampled_from([2, 4, 6]), HOW)
def test_every_pair_is_computed_exactly_once(data, length, start_size, pad_multiple, exchange):
    """Dull twin: count every (query, key) pair of the sequence over all ranks."""
    ring = Ring(*start_size)
    window = data.draw(st.one_of(st.none(), st.integers(1, length + 3)), "window")
    swaps = [a for a in range(2, ring.size + 1) if ring.size % a == 0]
    exchange = "ring" if ring.size == 1 else exchange
    head_ranks = data.draw(st.sampled_from(swaps), "head_ranks") if exchange == "heads" else 1
    pieces = {r: piece_of(length, ring, r, 0, pad_multiple, exchange, head_ranks) for r in ring.ranks}
    pairs = np.zeros((length, length), dtype=int)
    stores = fetched_tokens(pieces, window)
    for rank, piece in pieces.items():
        layout = attention_layout(MicroBatch((piece,)), rank, window)
        if ring.size == 1:
            (share,) = layout.shares
            assert (share.offsets, share.real_tokens) == ((0,), (length,))
            return
        (shared,) = layout.pieces
        assert shared.rows == (0, len(held_tokens(piece)))
        for query, key in computed(shared, pieces, stores.get(rank)):
            pairs[query, key] += 1
    back = np.subtract.outer(np.arange(length), np.arange(length))
    seen = (back >= 0) & (back < (length if window is None else window))
    np.testing.assert_array_equal(pairs, head_ranks * seen.astype(int))  # each rank of a swap has its own heads


def common_tokens(shared, pieces) -> list[int]:
    """Token positions of the rows that the inner exchange works on."""
    swap = shared.swap
    tokens = [-1] * sum(swap.rows(m) for m in range(len(swap.members)))
    for m, rank in enumerate(swap.members):
        held = held_tokens(pieces[rank])
        low, high = swap.places(m)
        tokens[slice(*low)] = held[: low[1] - low[0]]
        tokens[slice(*high)] = held[low[1] - low[0] :]
    assert tokens == sorted(tokens)
    return tokens


def own_tokens(shared, pieces) -> list[int]:
    if shared.swap:
        return common_tokens(shared, pieces)
    return held_tokens(pieces[shared.inner.view.ranks[shared.inner.view.position]])


def fetched_tokens(pieces, window) -> dict[int, list[int]]:
    """Token of every row of each rank's store, filled by running the rounds of all ranks together."""
    shared, stores, own = {}, {}, {}
    for rank, piece in pieces.items():
        if piece.ring.size == 1:
            return {}
        (shared[rank],) = attention_layout(MicroBatch((piece,)), rank, window).pieces
        fetch = shared[rank].inner
        if not isinstance(fetch, Fetch):
            return {}
        own[rank] = own_tokens(shared[rank], pieces)
        stores[rank] = [None] * fetch.store_rows
        for stored, rows in fetch.copies:
            stores[rank][slice(*stored)] = own[rank][slice(*rows)]
    for number in range(max(len(each.inner.rounds) for each in shared.values())):
        flying = {}
        for rank, each in shared.items():
            for transfer in each.inner.rounds[number].sends if number < len(each.inner.rounds) else ():
                rows = (own if transfer.own else stores)[rank][slice(*transfer.rows)]
                assert None not in rows, "rows are sent only once they are there"
                flying.setdefault((rank, transfer.peer), []).append(rows)
        for rank, each in shared.items():
            for transfer in each.inner.rounds[number].receives if number < len(each.inner.rounds) else ():
                assert not transfer.own
                rows = flying[transfer.peer, rank].pop(0)
                assert stores[rank][slice(*transfer.rows)] == [None] * len(rows), "no row comes twice"
                stores[rank][slice(*transfer.rows)] = rows
        assert not any(flying.values()), "everything sent is received"
    assert all(None not in store for store in stores.values())
    return stores


def computed(shared, pieces, store) -> list[tuple[int, int]]:
    """(query token, key token) of everything that one rank computes."""
    own, inner = own_tokens(shared, pieces), shared.inner
    if isinstance(inner, Alone):
        return [(own[q], own[k]) for q, k in visible(inner.segments)]
    pairs = []
    if isinstance(inner, Fetch):
        if inner.diagonal:
            pairs += [(own[q], own[k]) for q, k in visible(inner.diagonal)]
        for block in inner.blocks:
            queries, keys = own[slice(*block.queries)], store[slice(*block.keys)]
            pairs += [(queries[q], keys[k]) for q, k in visible(block.segments)]
        return pairs
    for step, block in enumerate(inner.blocks):
        assert (block.step, block.source) == (step, inner.source(step))
        (source,) = attention_layout(
            MicroBatch((pieces[inner.view.ranks[block.source]],)), inner.view.ranks[block.source]
        ).pieces
        held = own_tokens(source, pieces)
        assert inner.slice_tokens[block.source] == len(held)
        queries, keys = own[slice(*block.queries)], held[slice(*block.keys)]
        assert (block.segments is None) == (not queries or not keys)
        if block.segments:
            pairs += [(queries[q], keys[k]) for q, k in visible(block.segments)]
    return pairs


@pytest.mark.parametrize("size", range(2, 9))
def test_slices_arrive_from_the_neighbour_that_had_them(size):
    """What a rank receives at a step is what the rank before it held."""
    ring = Ring(3, size)
    walks = {}
    for rank in ring.ranks:
        (shared,) = attention_layout(MicroBatch((piece_of(41, ring, rank),)), rank).pieces
        walks[rank] = shared.inner
    for rank, walk in walks.items():
        assert isinstance(walk, Walk)
        before = walks[walk.previous]
        assert before.next == rank
        for step in range(size):
            assert walk.source(step + 1) == before.source(step)
        assert walk.source(size) == walk.view.position


def test_full_slices_give_every_rank_equal_work():
    ring = Ring(0, 6)
    work = set()
    for rank in ring.ranks:
        (shared,) = attention_layout(MicroBatch((piece_of(120, ring, rank),)), rank).pieces
        work.add(tuple(len(visible(block.segments)) for block in shared.inner.blocks))
    assert work == {(20 * 21 // 2, *(5 * (20 * 10,)))}


def test_hops_come_from_the_two_neighbours_only_and_as_many_as_the_window_reaches():
    ring = Ring(0, 6)
    chunk = chunk_tokens(1200, 6, 2)
    for window, hops in ((2, 1), (chunk + 1, 1), (chunk + 2, 2), (3 * chunk, 3)):
        for rank in ring.ranks:
            (shared,) = attention_layout(MicroBatch((piece_of(1200, ring, rank),)), rank, window).pieces
            position = ring.position(rank)
            near = {ring.ranks[p] for p in (position - 1, position + 1) if 0 <= p < 6}
            rounds = shared.inner.rounds
            assert {t.peer for r in rounds for t in (*r.sends, *r.receives)} <= near
            assert len(rounds) <= hops
            fetched = sum(t.rows[1] - t.rows[0] for r in rounds for t in r.receives)
            assert fetched <= 2 * (window - 1)


def test_local_pieces_form_one_share_and_more_where_rings_wait():
    local = Ring(2, 1)
    lengths = [5, 3, 6, 5, 5]
    shared = piece_of(17, Ring(1, 3), 2, sequence=9)
    pieces = [piece_of(length, local, 2, sequence) for sequence, length in enumerate(lengths)]
    layout = attention_layout(MicroBatch((*pieces[:3], shared, *pieces[3:])), 2)
    # Rows: 6, 4, 6 for lengths 5, 3, 6; then 2 chunks of 3; then 6, 6.
    (share,) = layout.shares
    assert (share.offsets, share.real_tokens) == ((0, 6, 10, 22, 28), (5, 3, 6, 5, 5))
    assert [(piece.sequence, piece.rows) for piece in layout.pieces] == [(9, (16, 22))]
    assert layout.tokens == 34
    long = [piece_of(3000, local, 2, sequence) for sequence in range(7)]
    wide = piece_of(17, Ring(0, 6), 2, sequence=9)
    layout = attention_layout(MicroBatch((*long, wide)), 2)
    assert [len(share.offsets) for share in layout.shares] == [1, 1, 2, 1, 2]
    assert len(attention_layout(MicroBatch(tuple(long)), 2).shares) == 1


def test_a_rank_with_nothing_but_padding_still_passes_slices_on():
    """One token on 4 ranks: position 0 holds it, everyone else only forwards."""
    ring = Ring(0, 4)
    (shared,) = attention_layout(MicroBatch((piece_of(1, ring, 2),)), 2).pieces
    assert shared.inner.slice_tokens == (1, 0, 0, 0)
    assert all(block.segments is None for block in shared.inner.blocks)


def test_what_cannot_be_laid_out_is_refused():
    with pytest.raises(PlanError, match="sequence 4 is for position 0"):
        attention_layout(MicroBatch((piece_of(9, Ring(0, 2), 0, sequence=4),)), 1)
    for head_ranks in (1, 4):
        piece = piece_of(90, Ring(0, 6), 0, 7, exchange="heads", head_ranks=head_ranks)
        with pytest.raises(PlanError, match=f"sequence 7 swaps heads among {head_ranks} ranks of a ring of 6"):
            attention_layout(MicroBatch((piece,)), 0)
    with pytest.raises(PlanError, match="window is 0"):
        attention_layout(MicroBatch(()), 0, 0)


def test_parts_of_heads():
    assert head_parts(8, 4, 2).kv == ((0, 2), (2, 4))
    assert head_parts(8, 2, 4).kv == ((0, 1), (0, 1), (1, 2), (1, 2))
    assert head_parts(8, 2, 4).replicated
    assert not head_parts(8, 4, 4).replicated
    assert head_parts(12, 3, 3).query == ((0, 4), (4, 8), (8, 12))
    for heads, kv, ranks in ((8, 8, 3), (12, 4, 6), (6, 3, 2)):
        with pytest.raises(ConfigError, match=f"{heads} query and {kv} key/value heads .* among {ranks} ranks"):
            head_parts(heads, kv, ranks)


def test_layout_and_traffic_need_no_torch():
    code = "import sys, megatron_hdp.attention.layout, megatron_hdp.attention.traffic; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
