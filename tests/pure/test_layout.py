"""The schedule of attention blocks and its traffic, without torch."""

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_hdp.attention.layout import attention_layout, slice_tokens
from megatron_hdp.attention.traffic import ring_bytes
from megatron_hdp.errors import PlanError
from megatron_hdp.types import MicroBatch, Piece, Plan, Ring, chunk_tokens


def piece_of(length: int, ring: Ring, rank: int, sequence: int = 0, pad_multiple: int = 2) -> Piece:
    return Piece(sequence, length, ring, ring.position(rank), chunk_tokens(length, ring.size, pad_multiple))


def held_tokens(piece: Piece) -> list[int]:
    """Real token positions of a piece, in order of its rows."""
    return [token for begin, end in piece.spans for token in range(begin, end) if token < piece.length]


RINGS = st.integers(1, 9).flatmap(lambda size: st.tuples(st.integers(0, 5), st.just(size)))


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 150), RINGS, st.sampled_from([2, 4, 6]))
def test_the_blocks_compute_every_causal_pair_exactly_once(length, start_size, pad_multiple):
    """Dull twin: count every (query, key) pair of the sequence over all ranks and steps."""
    ring = Ring(*start_size)
    pairs = np.zeros((length, length), dtype=int)
    pieces = {rank: piece_of(length, ring, rank, pad_multiple=pad_multiple) for rank in ring.ranks}
    for rank, piece in pieces.items():
        layout = attention_layout(MicroBatch((piece,)), rank)
        own = held_tokens(piece)
        if ring.size == 1:
            (group,) = layout.groups
            assert (group.real_tokens, group.offsets) == (length, (0,))
            pairs += np.tri(length, dtype=int)
            continue
        (shared,) = layout.rings
        assert shared.real_tokens == len(own)
        for step, block in enumerate(shared.blocks):
            source = held_tokens(pieces[ring.ranks[block.source]])
            assert block.step == step
            assert block.source == shared.source(step)
            assert shared.slice_tokens[block.source] == len(source)
            queries, keys = own[slice(*block.queries)], source[slice(*block.keys)]
            assert block.empty == (not queries or not keys)
            for i, query in enumerate(queries):
                pairs[query, keys[: i + 1] if block.causal else keys] += 1
    np.testing.assert_array_equal(pairs, np.tri(length, dtype=int))


@pytest.mark.parametrize("size", range(2, 9))
def test_slices_arrive_from_the_neighbour_that_had_them(size):
    """What a rank receives at a step is what the rank before it held."""
    ring = Ring(3, size)
    layouts = {rank: attention_layout(MicroBatch((piece_of(41, ring, rank),)), rank).rings[0] for rank in ring.ranks}
    for rank, shared in layouts.items():
        before = layouts[shared.previous]
        assert before.next == rank
        for step in range(size):
            assert shared.source(step + 1) == before.source(step)
        assert shared.source(size) == shared.position


def test_full_slices_give_every_rank_equal_work():
    ring = Ring(0, 6)
    work = set()
    for rank in ring.ranks:
        (shared,) = attention_layout(MicroBatch((piece_of(120, ring, rank),)), rank).rings
        work.add(tuple((b.queries[1] - b.queries[0]) * (b.keys[1] - b.keys[0]) for b in shared.blocks))
    assert work == {(20 * 20, *(5 * (20 * 10,)))}


def test_local_pieces_of_equal_real_length_form_one_group():
    local = Ring(2, 1)
    lengths = [5, 3, 6, 5, 5]
    shared = piece_of(17, Ring(1, 3), 2, sequence=9)
    pieces = [piece_of(length, local, 2, sequence) for sequence, length in enumerate(lengths)]
    layout = attention_layout(MicroBatch((*pieces[:3], shared, *pieces[3:])), 2)
    # Rows: 6, 4, 6 for lengths 5, 3, 6; then 2 chunks of 3; then 6, 6.
    assert {group.real_tokens: group.offsets for group in layout.groups} == {5: (0, 22, 28), 3: (6,), 6: (10,)}
    assert [(ring.sequence, ring.offset) for ring in layout.rings] == [(9, 16)]
    assert layout.tokens == 34


def test_ten_thousand_tiny_sequences_are_few_groups():
    local = Ring(0, 1)
    pieces = tuple(piece_of(1 + sequence % 7, local, 0, sequence) for sequence in range(10_000))
    layout = attention_layout(MicroBatch(pieces), 0)
    assert len(layout.groups) == 7
    assert sum(len(group.offsets) for group in layout.groups) == 10_000


def test_a_rank_with_nothing_but_padding_still_passes_slices_on():
    """One token on 4 ranks: position 0 holds it, everyone else only forwards."""
    ring = Ring(0, 4)
    (shared,) = attention_layout(MicroBatch((piece_of(1, ring, 2),)), 2).rings
    assert shared.slice_tokens == (1, 0, 0, 0)
    assert all(block.empty for block in shared.blocks)
    assert sum(slice_tokens(1, 4, 1)) == 1


def test_a_piece_of_another_rank_is_refused():
    with pytest.raises(PlanError, match="sequence 4 is for position 0"):
        attention_layout(MicroBatch((piece_of(9, Ring(0, 2), 0, sequence=4),)), 1)


@st.composite
def plans(draw) -> Plan:
    num_ranks = draw(st.integers(1, 9))
    count = draw(st.integers(1, 8))
    sizes = [draw(st.integers(1, num_ranks)) for _ in range(count)]
    starts = [draw(st.integers(0, num_ranks - size)) for size in sizes]
    lengths = [draw(st.integers(1, 80)) for _ in range(count)]
    held = [[s for s in range(count) if starts[s] <= rank < starts[s] + sizes[s]] for rank in range(num_ranks)]
    return Plan(
        num_ranks,
        1000,
        draw(st.sampled_from([2, 4])),
        np.array(lengths),
        np.array(starts),
        np.array(sizes),
        np.zeros(count),
        np.arange(num_ranks + 1),
        np.cumsum([0, *map(len, held)]),
        np.array([s for sequences in held for s in sequences], dtype=np.int64),
    )


@settings(max_examples=100, deadline=None)
@given(plans(), st.sampled_from([2, 4, 8]))
def test_ring_bytes_equal_the_messages_counted_one_by_one(plan, element):
    forward, both = [], []
    for rank in range(plan.num_ranks):
        kv_rows = gradient_rows = 0
        for micro_batch in plan.micro_batches(rank):
            for shared in attention_layout(micro_batch, rank).rings:
                kv_rows += sum(shared.slice_tokens[shared.source(step)] for step in range(shared.size - 1))
                gradient_rows += sum(shared.slice_tokens[shared.source(step)] for step in range(shared.size))
        forward.append(kv_rows * 2 * 3 * 16 * element)
        both.append(2 * forward[-1] + gradient_rows * 2 * 3 * 16 * max(4, element))
    assert ring_bytes(plan, 3, 16, element, backward=False).tolist() == forward
    assert ring_bytes(plan, 3, 16, element).tolist() == both


def test_layout_and_traffic_need_no_torch():
    code = "import sys, megatron_hdp.attention.traffic; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
