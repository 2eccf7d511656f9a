"""Rings, pieces and plans as data."""

import dataclasses
import json

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


@pytest.mark.parametrize("text", ['{"schema": 0}', "[]", '{"schema": 2}', '{"schema": 2, "color": 3}'])
def test_foreign_json_is_refused(text):
    with pytest.raises(PlanError, match="schema 2"):
        Plan.from_json(text)


@pytest.mark.parametrize("text", ["{}", "1", "null", '{"schema": 1}'])
def test_json_without_the_schema_is_refused(text):
    with pytest.raises(PlanError, match="not a plan of schema 2"):
        Plan.from_json(text)


@pytest.mark.parametrize("schema", ["true", "2.0", '"2"', "null", "[2]", "1"])
def test_schema_must_be_the_integer_two(example, schema):
    text = example.to_json().replace('"schema":2', f'"schema":{schema}')
    with pytest.raises(PlanError, match="not a plan of schema 2"):
        Plan.from_json(text)


DEEP = [pytest.param("[" * 100000, id="lists"), pytest.param('{"schema":' * 100000, id="objects")]


@pytest.mark.parametrize("text", ["", "{", "\ufeff{}", *DEEP, "{'a': 1}", "{} {}"])
def test_what_is_no_json_is_refused(text):
    with pytest.raises(PlanError, match="plan JSON cannot be read"):
        Plan.from_json(text)


def test_field_twice_is_named(example):
    text = example.to_json()
    with pytest.raises(PlanError, match='the field "capacity" twice'):
        Plan.from_json(text[:-1] + ',"capacity":12}')


def test_missing_and_unknown_fields_are_named(example):
    data = json.loads(example.to_json())
    data["color"] = data.pop("ring_size")
    with pytest.raises(PlanError, match='missing ring_size; unknown "color"'):
        Plan.from_json(json.dumps(data))


DIGITS = pytest.param("9" * 5000, id="digits")
NO_INTEGERS = ["true", "2.0", '"2"', "null", "[2]", "{}", "NaN", str(2**63), str(-(2**63) - 1), DIGITS]


@pytest.mark.parametrize("name", ["num_ranks", "capacity", "pad_multiple"])
@pytest.mark.parametrize("value", NO_INTEGERS)
def test_scalar_that_is_no_integer_is_named(example, name, value):
    text = example.to_json().replace(f'"{name}":{getattr(example, name)}', f'"{name}":{value}')
    assert value in text
    with pytest.raises(PlanError, match=f"plan JSON: {name} is .* whole number"):
        Plan.from_json(text)


COLUMNS = ["lengths", "ring_start", "ring_size", "rank_offsets", "microbatch_offsets", "piece_sequence", "exchange"]
COLUMNS += ["head_ranks"]


@pytest.mark.parametrize("name", COLUMNS)
@pytest.mark.parametrize("value", NO_INTEGERS)
def test_column_that_is_not_all_integers_is_named(example, name, value):
    data = json.loads(example.to_json())
    data[name][1] = "here"
    with pytest.raises(PlanError, match=f"plan JSON: value 1 of {name} is .* whole number"):
        Plan.from_json(json.dumps(data).replace('"here"', value))


@pytest.mark.parametrize("name", [*COLUMNS, "offload"])
@pytest.mark.parametrize("value", [3, None, "1", {}, True])
def test_column_that_is_no_list_is_named(example, name, value):
    with pytest.raises(PlanError, match=f"plan JSON: {name} is .* must be a list"):
        Plan.from_json(json.dumps({**json.loads(example.to_json()), name: value}))


@pytest.mark.parametrize("value", ["true", '"0"', "null", "[0.0]", "NaN", "Infinity", "-Infinity", "1e999", "9" * 400])
def test_offload_that_is_no_number_is_named(example, value):
    data = json.loads(example.to_json())
    data["offload"][2] = "here"
    with pytest.raises(PlanError, match=r"plan JSON: value 2 of offload is .* finite number"):
        Plan.from_json(json.dumps(data).replace('"here"', value))


def test_there_is_no_minus_zero_in_a_plan(example):
    minus = dataclasses.replace(example, offload=[-0.0] * example.num_sequences)
    assert not np.signbit(minus.offload).any()
    assert minus == example
    assert minus.to_json() == example.to_json() == Plan.from_json(example.to_json().replace("0.0", "-0.0")).to_json()


@pytest.mark.parametrize("name", [*COLUMNS, "offload"])
def test_later_writes_of_the_caller_do_not_reach_the_plan(example, name):
    base = getattr(example, name).copy()
    made = dataclasses.replace(example, **{name: base})
    view = dataclasses.replace(example, **{name: base[:]})
    base[0] += 1  # still writable: the caller's array was not frozen
    assert made == example
    assert view == example
    assert not np.shares_memory(getattr(made, name), base)


@pytest.mark.parametrize("values", [[1.0], [1.5], [True], ["1"], [None], [2**63], [2**64], [[1], [1, 2]]])
def test_integer_columns_are_not_rounded_or_wrapped(example, values):
    with pytest.raises(PlanError, match=r"columns: lengths .* whole numbers of 64 bits"):
        dataclasses.replace(example, lengths=values)


@pytest.mark.parametrize("values", [["0"], [None], [True], [1j], [[0.0], [0.0, 0.0]]])
def test_offload_column_holds_numbers(example, values):
    with pytest.raises(PlanError, match=r"columns: offload .* numbers"):
        dataclasses.replace(example, offload=values)


def test_scalars_of_numpy_become_plain(example):
    made = dataclasses.replace(example, num_ranks=np.int64(4), capacity=np.int32(12))
    assert made == example
    assert made.to_json() == example.to_json()
