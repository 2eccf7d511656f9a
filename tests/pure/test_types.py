"""Rings, pieces and plans as data."""

import dataclasses

import numpy as np
import pytest

from megatron_hdp.errors import PlanError
from megatron_hdp.planner import plan
from megatron_hdp.types import Plan, Ring, chunk_tokens


@pytest.fixture
def example() -> Plan:
    return plan([5, 40, 3, 17, 1, 9], num_ranks=4, tokens_per_rank=12)


def test_ring_walks_up_the_even_and_down_the_odd_offsets():
    assert Ring(10, 6).ranks == (10, 12, 14, 15, 13, 11)
    assert Ring(3, 5).ranks == (3, 5, 7, 6, 4)
    assert Ring(7, 1).ranks == (7,)
    assert Ring(7, 2).ranks == (7, 8)


@pytest.mark.parametrize("num_ranks", [16, 64])
def test_neighbours_are_close_and_peers_few_over_all_intervals(num_ranks):
    peers: dict[int, set[int]] = {rank: set() for rank in range(num_ranks)}
    for size in range(1, num_ranks + 1):
        for start in range(num_ranks - size + 1):
            ring = Ring(start, size)
            ranks = ring.ranks
            assert sorted(ranks) == list(range(start, start + size))
            for position, rank in enumerate(ranks):
                before, after = ring.neighbours(rank)
                assert ring.position(rank) == position
                assert (before, after) == (ranks[position - 1], ranks[(position + 1) % size])
                assert abs(before - rank) <= 2
                assert abs(after - rank) <= 2
                peers[rank] |= {before, after} - {rank}
    assert max(map(len, peers.values())) == 4


@pytest.mark.parametrize("rank", [2, 6])
def test_rank_off_the_ring_is_named(rank):
    with pytest.raises(PlanError, match=f"rank {rank} .*3 to 5"):
        Ring(3, 3).position(rank)


@pytest.mark.parametrize("pad_multiple", [2, 4, 6, 16])
def test_chunks_are_the_smallest_that_hold_the_sequence(pad_multiple):
    for size in range(1, 8):
        for length in range(1, 120):
            chunk = chunk_tokens(length, size, pad_multiple)
            piece = 2 * chunk
            assert piece % pad_multiple == 0
            assert size * piece >= length > size * (piece - pad_multiple)


def test_pieces_cut_the_sequence_without_overlap(example):
    for sequence in range(example.num_sequences):
        pieces = [example.piece(sequence, rank) for rank in example.ring(sequence).ranks]
        positions = [t for piece in pieces for begin, end in piece.spans for t in range(begin, end)]
        padded = sum(piece.tokens for piece in pieces)
        assert sorted(positions) == list(range(padded))
        assert sum(piece.real_tokens for piece in pieces) == example.lengths[sequence] <= padded


def test_columns_are_frozen(example):
    with pytest.raises(ValueError, match="read-only"):
        example.lengths[0] = 7
    with pytest.raises(dataclasses.FrozenInstanceError):
        example.capacity = 7


def test_json_round_trip(example):
    again = Plan.from_json(example.to_json())
    assert again == example
    assert again.digest() == example.digest()
    assert hash(again) == hash(example)
    assert again.to_json() == example.to_json()


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Plan)])
def test_digest_sees_every_field(example, field):
    value = getattr(example, field)
    changed = value + 2 if isinstance(value, int) else np.concatenate([value[:-1], value[-1:] + 1])
    assert dataclasses.replace(example, **{field: changed}) != example


@pytest.mark.parametrize("text", ['{"schema": 0}', "[]", '{"schema": 1}', '{"schema": 1, "color": 3}'])
def test_foreign_json_is_refused(text):
    with pytest.raises(PlanError, match="schema 1"):
        Plan.from_json(text)
