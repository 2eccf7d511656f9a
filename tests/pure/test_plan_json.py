"""Both forms of a plan's JSON: against their schemas, against a walk over the pieces, and as canonical text."""

import copy
import dataclasses
import hashlib
import json
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from megatron_hdp.plan_json import expand, to_pieces_json
from megatron_hdp.planner import check, plan
from megatron_hdp.types import EXCHANGES, Plan

DOCS = Path(__file__).parents[2] / "docs"
COLUMNS, PIECES = (json.loads((DOCS / f"{name}.schema.json").read_text()) for name in ("plan", "plan-pieces"))


def errors(schema, data):
    return [error.message for error in Draft202012Validator(schema).iter_errors(data)]


def collapse(data):
    """The plan of written-out pieces, which say everything."""
    num = len(data["lengths"])
    columns = {name: [None] * num for name in ("ring_start", "ring_size", "offload", "exchange", "head_ranks")}
    rank_offsets, microbatch_offsets, sequences = [0], [0], []
    for micro_batches in data["ranks"]:
        for pieces in micro_batches:
            for piece in pieces:
                ring, exchange = piece["ring"], EXCHANGES.index(piece["exchange"])
                values = (min(ring), len(ring), piece["offload"], exchange, piece["head_ranks"])
                for column, value in zip(columns.values(), values, strict=True):
                    assert column[piece["sequence"]] in (None, value)
                    column[piece["sequence"]] = value
                sequences.append(piece["sequence"])
            microbatch_offsets.append(len(sequences))
        rank_offsets.append(len(microbatch_offsets) - 1)
    sizes = (data["num_ranks"], data["capacity"], data["pad_multiple"])
    offsets = {"rank_offsets": rank_offsets, "microbatch_offsets": microbatch_offsets}
    return Plan(*sizes, lengths=data["lengths"], **columns, **offsets, piece_sequence=sequences)


@st.composite
def plans(draw):
    num_ranks, pad = draw(st.integers(1, 9)), draw(st.sampled_from([2, 4]))
    lengths = draw(st.lists(st.integers(1, num_ranks * 16), min_size=1, max_size=15))
    options = draw(st.sampled_from([{}, {"algorithm": "static"}, {"balance": "pp", "stages": 3, "virtual_stages": 2}]))
    made = plan(lengths, num_ranks, 16, pad_multiple=pad, **options)
    exchange, head_ranks = 0 * made.ring_size, 0 * made.ring_size + 1
    for s, size in enumerate(made.ring_size.tolist()):
        if size > 1:
            exchange[s] = draw(st.integers(0, 2))
            head_ranks[s] = size if exchange[s] == 2 else 1
    made = dataclasses.replace(made, exchange=exchange, head_ranks=head_ranks)
    check(made)
    return made


@settings(max_examples=60, deadline=None)
@given(plans())
def test_written_out_pieces_are_those_of_the_plan(made):
    data = json.loads(to_pieces_json(made))
    assert data == expand(made)
    assert errors(PIECES, data) == []
    assert errors(COLUMNS, json.loads(made.to_json())) == []
    for rank, (written, micro_batches) in enumerate(zip(data["ranks"], made, strict=True)):
        for pieces, micro_batch in zip(written, micro_batches, strict=True):
            for written_piece, piece in zip(pieces, micro_batch.pieces, strict=True):
                assert written_piece["ring"][written_piece["position"]] == rank
                assert written_piece["tokens"] == piece.tokens
                assert tuple(written_piece["ring"]) == piece.ring.ranks
    assert collapse(data) == made


def test_offload_is_written_exactly():
    lengths = [30000, 100, 9000]
    made = dataclasses.replace(plan(lengths, 4, 8192), offload=np.array([1 / 3, 0, 0.7]))
    data = json.loads(to_pieces_json(made))
    assert collapse(data).offload.tolist() == made.offload.tolist()
    assert errors(PIECES, data) == errors(COLUMNS, json.loads(made.to_json())) == []


def test_text_is_canonical():
    made = plan([10, 3, 4], 2, 8)
    for text in (made.to_json(), to_pieces_json(made)):
        assert text == json.dumps(json.loads(text), sort_keys=True, separators=(",", ":"))
        assert not re.search(r"\s", text)
    assert to_pieces_json(Plan.from_json(made.to_json())) == to_pieces_json(made)


def test_the_documented_example_is_what_the_planner_gives():
    page = (DOCS / "plan-schema.md").read_text()
    made = plan([10, 3, 4], 2, 8)
    check(made)
    columns, pieces = re.findall(r"```json\n(.*?)```", page, re.S)
    assert json.loads(columns) == json.loads(made.to_json())
    assert json.loads(pieces) == expand(made)


def test_the_page_names_every_field():
    page = (DOCS / "plan-schema.md").read_text()
    fields = {*COLUMNS["properties"], *PIECES["properties"], *PIECES["$defs"]["piece"]["properties"]} - {"ranks"}
    assert all(f"`{name}`" in page for name in fields)
    assert "`ranks[r][k]`" in page


def test_the_documented_digest_is_the_digest():
    made = plan([30, 3, 4, 17], 3, 16)
    data = json.loads(made.to_json())
    sha = hashlib.sha256(f"2 {data['num_ranks']} {data['capacity']} {data['pad_multiple']}".encode())
    names = ["lengths", "ring_start", "ring_size", "offload", "rank_offsets", "microbatch_offsets", "piece_sequence"]
    names += ["exchange", "head_ranks"]
    for name in names:
        kind = "<f8" if name == "offload" else "<i8"
        sha.update(f" {name} {len(data[name])} ".encode() + np.array(data[name], dtype=kind).tobytes())
    assert sha.digest() == made.digest()


@pytest.mark.parametrize(
    ("schema", "change"),
    [
        (PIECES, lambda data: data.pop("lengths")),
        (PIECES, lambda data: data.update(pieces_schema=1)),
        (PIECES, lambda data: data.update(more=1)),
        (PIECES, lambda data: data["ranks"][0].clear()),
        (PIECES, lambda data: data["ranks"][0][0][0].pop("position")),
        (PIECES, lambda data: data["ranks"][0][0][0].update(ring=[])),
        (PIECES, lambda data: data["ranks"][0][0][0].update(tokens=0)),
        (PIECES, lambda data: data["ranks"][0][0][0].update(offload=1.5)),
        (PIECES, lambda data: data["ranks"][0][0][0].update(exchange="walk")),
        (PIECES, lambda data: data["ranks"][0][0][0].update(head_ranks=0)),
        (COLUMNS, lambda data: data.pop("offload")),
        (COLUMNS, lambda data: data.pop("head_ranks")),
        (COLUMNS, lambda data: data["exchange"].__setitem__(0, 3)),
        (COLUMNS, lambda data: data.update(schema=0)),
        (COLUMNS, lambda data: data["rank_offsets"].__setitem__(0, 1)),
        (COLUMNS, lambda data: data["ring_size"].__setitem__(0, 0)),
        (COLUMNS, lambda data: data["lengths"].__setitem__(0, "10")),
    ],
)
def test_schemas_refuse_what_is_no_plan(schema, change):
    made = plan([10, 3, 4], 2, 8)
    data = copy.deepcopy(expand(made) if schema is PIECES else json.loads(made.to_json()))
    assert errors(schema, data) == []
    change(data)
    assert errors(schema, data)
