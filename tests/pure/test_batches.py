import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_hdp.data.batches import piece_arrays
from megatron_hdp.data.corpus import SequenceCount, open_corpus
from megatron_hdp.data.indexed import write_indexed
from megatron_hdp.errors import PlanError
from megatron_hdp.types import MicroBatch, Piece, Ring, chunk_tokens

CONTEXT = 24
PAD = 99
LENGTHS = [0, 1, 2, 23, 24, 25, 48, 72, 73, 5, 7, 11]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    random = np.random.default_rng(0)
    for name in ("a", "b"):
        write_indexed(folder / name, [random.integers(0, 90, n) for n in LENGTHS], np.uint16)
    return open_corpus([folder / "a", folder / "b"], [1, 2], context=CONTEXT, seed=3, size=SequenceCount(9))


def everyones_pieces(batch, pool, pad_multiple, random):
    """For every rank of the pool its pieces: each sequence on a ring of random size and place."""
    pieces = [[] for _ in range(pool)]
    for sequence, length in enumerate(batch.lengths.tolist()):
        size = int(random.integers(1, pool + 1))
        ring = Ring(int(random.integers(0, pool - size + 1)), size)
        chunk = chunk_tokens(length, size, pad_multiple)
        for position, rank in enumerate(ring.ranks):
            pieces[rank].append(Piece(sequence, length, ring, position, chunk))
    return pieces


def dull_piece(corpus, batch, piece, eod, pad):
    """Columns token, label, mask, position of a piece: pad the whole sequence, cut it in 2d chunks, take two."""
    i = piece.sequence
    dataset, document, begin, length = (
        int(column[i]) for column in (batch.dataset, batch.document, batch.begin, batch.lengths)
    )
    text = corpus.read(dataset, document, 0, LENGTHS[document]).tolist()
    whole = []
    for place in range(2 * piece.ring.size * piece.chunk_tokens):
        if place >= length:
            whole.append((pad, pad, 0.0, place))
            continue
        token = text[begin + place]
        has_label = begin + place + 1 < len(text)
        label = text[begin + place + 1] if has_label else pad
        whole.append((token, label, float(has_label and token != eod), place))
    chunks = [whole[c : c + piece.chunk_tokens] for c in range(0, len(whole), piece.chunk_tokens)]
    return chunks[piece.position] + chunks[2 * piece.ring.size - 1 - piece.position]


def columns(arrays):
    return list(
        zip(arrays.tokens.tolist(), arrays.labels.tolist(), arrays.loss_mask.tolist(), arrays.positions.tolist())
    )


@settings(max_examples=150, deadline=None)
@given(
    step=st.integers(0, 10**6),
    pool=st.integers(1, 7),
    pad_multiple=st.sampled_from([2, 4, 6]),
    eod=st.one_of(st.none(), st.integers(0, 90)),
    seed=st.integers(0, 2**32 - 1),
)
def test_pieces_are_the_dull_gather(corpus, step, pool, pad_multiple, eod, seed):
    batch = corpus.batch(step)
    random = np.random.default_rng(seed)
    for pieces in everyones_pieces(batch, pool, pad_multiple, random):
        random.shuffle(pieces)
        micro_batch = MicroBatch(tuple(pieces))
        arrays = piece_arrays(corpus, batch, micro_batch, eod=eod, pad_token=PAD, pad_multiple=pad_multiple)
        expected = [row for piece in pieces for row in dull_piece(corpus, batch, piece, eod, PAD)]
        if not pieces:
            expected = [(PAD, PAD, 0.0, place) for place in range(pad_multiple)]
        assert columns(arrays) == expected


@pytest.mark.parametrize("pool", [1, 2, 3, 5, 8])
def test_any_pool_trains_on_the_same_tokens_and_labels(corpus, pool):
    random = np.random.default_rng(pool)
    for step in range(5):
        batch = corpus.batch(step)
        expected = []
        for i, length in enumerate(batch.lengths.tolist()):
            text = corpus.read(int(batch.dataset[i]), int(batch.document[i]), 0, LENGTHS[int(batch.document[i])])
            text = text[int(batch.begin[i]) :].tolist()
            expected += [(i, place, text[place], text[place + 1]) for place in range(min(length, len(text) - 1))]
        got = []
        for pieces in everyones_pieces(batch, pool, 2, random):
            for piece in pieces:
                arrays = piece_arrays(corpus, batch, MicroBatch((piece,)))
                counted = arrays.loss_mask == 1
                triples = zip(arrays.positions[counted], arrays.tokens[counted], arrays.labels[counted])
                got += [(piece.sequence, *map(int, triple)) for triple in triples]
        assert sorted(got) == sorted(expected)


def test_types_and_shapes(corpus):
    arrays = piece_arrays(corpus, corpus.batch(0), MicroBatch(()), pad_multiple=6)
    assert [a.dtype for a in (arrays.tokens, arrays.labels, arrays.loss_mask, arrays.positions)] == [
        np.int64,
        np.int64,
        np.float32,
        np.int64,
    ]
    assert columns(arrays) == [(0, 0, 0.0, place) for place in range(6)]


def test_only_own_tokens_are_read(corpus):
    """Every real token of a rank once, and one more for the last label of each run of tokens, if it has one."""
    random = np.random.default_rng(1)
    for step in range(30):
        batch = corpus.batch(step)
        for pieces in everyones_pieces(batch, 6, 2, random):
            expected = 0
            for piece in pieces:
                ends = bool(batch.ends_document[piece.sequence])
                (a, b), (c, d) = piece.spans
                for begin, end in [(a, d)] if b == c else [(a, b), (c, d)]:
                    end = min(end, piece.length)
                    if begin < end:
                        expected += end - begin + (not (ends and end == piece.length))
            before = corpus.read_bytes
            piece_arrays(corpus, batch, MicroBatch(tuple(pieces)))
            assert corpus.read_bytes - before == 2 * expected  # uint16
            real = sum(piece.real_tokens for piece in pieces)
            assert real <= expected <= real + 2 * len(pieces)


def test_label_across_a_cut_and_at_the_end(tmp_path):
    write_indexed(tmp_path / "one", [np.arange(10, 15)], np.uint16)
    corpus = open_corpus([tmp_path / "one"], context=4, seed=0, size=SequenceCount(2))
    batch = corpus.batch(0)
    rows = {}
    for i, length in enumerate(batch.lengths.tolist()):
        piece = Piece(i, length, Ring(0, 1), 0, chunk_tokens(length, 1, 2))
        rows[int(batch.begin[i])] = columns(piece_arrays(corpus, batch, MicroBatch((piece,)), pad_token=PAD))
    assert rows[0] == [(10, 11, 1.0, 0), (11, 12, 1.0, 1), (12, 13, 1.0, 2), (13, 14, 1.0, 3)]
    assert rows[4] == [(14, PAD, 0.0, 0), (PAD, PAD, 0.0, 1)]


def test_plan_of_another_batch(corpus):
    batch = corpus.batch(0)
    length = int(batch.lengths[0]) + 1
    for sequence, known in ((0, str(length - 1)), (batch.lengths.size, "None")):
        piece = Piece(sequence, length, Ring(0, 1), 0, chunk_tokens(length, 1, 2))
        with pytest.raises(PlanError, match=f"sequence {sequence} has {length} tokens, .* says {known}: the plan was"):
            piece_arrays(corpus, batch, MicroBatch((piece,)))
