import abc
import inspect
import itertools
import time
from collections import Counter
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_hdp.data.blend import whole_weights
from megatron_hdp.data.corpus import Corpus, SequenceCount, TokenBudget, document_range, open_corpus
from megatron_hdp.data.indexed import write_indexed
from megatron_hdp.data.stdlib_corpus import END_OF_DOCUMENT, VOCABULARY_SIZE, build_stdlib_corpus
from megatron_hdp.data.stream import cut_documents
from megatron_hdp.errors import ConfigError, DataError


class Lengths:
    """Documents of which only the lengths are known."""

    def __init__(self, lengths, prefix="made-up"):
        self.prefix, self.read_bytes = prefix, 0
        self.lengths = np.asarray(lengths, np.int32)

    def read(self, document, begin, end):
        raise AssertionError("a batch must not read tokens")


def make(datasets, weights=None, *, context=8, seed=1, size=None, ranges=None):
    files = [Lengths(lengths, f"data{d}") for d, lengths in enumerate(datasets)]
    ranges = [(0, len(lengths)) for lengths in datasets] if ranges is None else ranges
    return Corpus(files, weights, ranges, context=context, seed=seed, size=size or SequenceCount(3))


def rows(batch):
    columns = (batch.dataset, batch.document, batch.begin, batch.lengths, batch.ends_document)
    return list(zip(*(column.tolist() for column in columns)))


# ------------------------------------------------------------------ dull twins: lists, loops and fractions


def dull_sequences(lengths, context, first=0, last=None):
    """(document, begin, length, ends) of every sequence, in order."""
    found = []
    for document in range(first, len(lengths) if last is None else last):
        for begin in range(0, lengths[document], context):
            length = min(context, lengths[document] - begin)
            found.append((document, begin, length, begin + length == lengths[document]))
    return found


def dull_stream(lengths, context, seed, dataset):
    """(start, sequence) without end, one epoch after the other."""
    sequences, start = dull_sequences(lengths, context), 0
    for epoch in itertools.count():
        for index in np.random.RandomState([seed, dataset, epoch]).permutation(len(sequences)):
            yield start, sequences[index]
            start += sequences[index][2]


def dull_batches(datasets, weights, context, seed, size, steps):
    """The first batches, by walking every stream from its beginning."""
    shares = [Fraction(str(w)) for w in (weights or [sum(lengths) for lengths in datasets])]
    shares = [share / sum(shares) for share in shares]
    used = [d for d in range(len(datasets)) if shares[d]]
    streams = {d: dull_stream(datasets[d], context, seed, d) for d in used}
    heads = {d: next(streams[d]) for d in used}
    batches = []
    for step in range(steps):
        batch = []
        if isinstance(size, TokenBudget):
            for d in used:
                while heads[d][0] < (step + 1) * size.tokens * shares[d]:
                    batch.append((d, *heads[d][1]))
                    heads[d] = next(streams[d])
        else:
            for _ in range(size.count):
                d = min(used, key=lambda d: (heads[d][0] / shares[d], d))
                batch.append((d, *heads[d][1]))
                heads[d] = next(streams[d])
            batch.sort(key=lambda row: row[0])  # stable: the order inside of a stream stays
        batches.append(batch)
    return batches


def may_be_empty(datasets, weights, context, tokens):
    """Whether every dataset's share of a step is less than its longest sequence."""
    shares = [Fraction(str(w)) for w in (weights or [sum(lengths) for lengths in datasets])]
    return all(tokens * w < sum(shares) * min(context, max(n)) for w, n in zip(shares, datasets))


# ------------------------------------------------------------------ sequences


@pytest.mark.parametrize(
    ("length", "expected"),
    [(0, []), (1, [1]), (7, [7]), (8, [8]), (9, [8, 1]), (16, [8, 8]), (40, [8] * 5), (41, [8] * 5 + [1])],
)
def test_one_document_is_cut_at_the_context(length, expected):
    table = cut_documents(np.array([0, length, 0, 3], np.int32), 0, 4, 8)
    assert table.lengths.tolist() == [*expected, 3]
    assert table.empty_documents == 2 + (length == 0)
    assert table.tokens == length + 3
    assert table.longest == max([*expected, 3])
    document, begin = table.locate(np.arange(table.size))
    assert document.tolist() == [1] * len(expected) + [3]
    assert begin.tolist() == [8 * i for i in range(len(expected))] + [0]


@settings(deadline=None)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=30), st.integers(1, 20), st.data())
def test_table_is_the_dull_list(lengths, context, data):
    first = data.draw(st.integers(0, len(lengths)))
    last = data.draw(st.integers(first, len(lengths)))
    table = cut_documents(np.array(lengths, np.int32), first, last, context)
    expected = dull_sequences(lengths, context, first, last)
    document, begin = table.locate(np.arange(table.size))
    assert list(zip(document.tolist(), begin.tolist(), table.lengths.tolist())) == [row[:3] for row in expected]


def test_context_beyond_int32():
    table = cut_documents(np.array([5, 2**31 - 1], np.int64), 0, 2, 2**40)
    assert table.lengths.tolist() == [5, 2**31 - 1]


# ------------------------------------------------------------------ batches


SIZES = st.one_of(st.integers(1, 12).map(SequenceCount), st.integers(1, 200).map(TokenBudget))
DATASETS = st.lists(
    st.lists(st.integers(0, 30), min_size=1, max_size=12).filter(lambda lengths: sum(lengths) > 0),
    min_size=1,
    max_size=4,
)


@settings(max_examples=200, deadline=None)
@given(DATASETS, SIZES, st.integers(1, 20), st.integers(0, 2**32 - 1), st.booleans(), st.data())
def test_batches_are_the_dull_walk(datasets, size, context, seed, weighted, data):
    weights = None
    if weighted:
        choices = st.sampled_from([1, 2, 3, 0.3, 0.7, 1e-2, 5])
        weights = [data.draw(choices) for _ in datasets]
    if isinstance(size, TokenBudget) and may_be_empty(datasets, weights, context, size.tokens):
        with pytest.raises(ConfigError, match="can give a step without any sequence"):
            make(datasets, weights, context=context, seed=seed, size=size)
        return
    corpus = make(datasets, weights, context=context, seed=seed, size=size)
    expected = dull_batches(datasets, weights, context, seed, size, 12)
    steps = list(range(12))
    np.random.RandomState(0).shuffle(steps)
    for step in steps:
        assert rows(corpus.batch(step)) == expected[step]
        assert expected[step]


def test_far_step_equals_the_walk():
    datasets = [[3, 9, 20, 1], [5] * 7, [100, 2]]
    for size in (SequenceCount(5), TokenBudget(90)):
        expected = dull_batches(datasets, [0.2, 0.5, 0.3], 16, 7, size, 500)
        for step in (499, 250, 499, 0):
            assert rows(make(datasets, [0.2, 0.5, 0.3], context=16, seed=7, size=size).batch(step)) == expected[step]


@pytest.mark.parametrize("size", [SequenceCount(7), TokenBudget(60)])
def test_resume_sees_what_an_unbroken_run_sees(size):
    datasets = [list(range(1, 30)), [4, 4, 50]]
    walking = make(datasets, [1, 3], size=size)
    walked = [rows(walking.batch(step)) for step in range(60)]
    for start in (1, 17, 59):
        resumed = make(datasets, [1, 3], size=size)
        assert [rows(resumed.batch(step)) for step in range(start, 60)] == walked[start:]


@pytest.mark.parametrize("size", [SequenceCount(10), TokenBudget(50)])
def test_every_token_is_predicted_exactly_once_in_an_epoch(size):
    lengths = [0, 1, 7, 8, 9, 16, 40, 41, 3, 0, 25]
    corpus = make([lengths], size=size)
    sequences = itertools.chain.from_iterable(rows(corpus.batch(step)) for step in range(100))
    for _ in range(3):
        inputs, predicted = Counter(), Counter()
        for _, document, begin, length, ends in itertools.islice(sequences, corpus.num_sequences):
            inputs.update((document, begin + i) for i in range(length))
            predicted.update((document, begin + i + 1) for i in range(length - ends))
        assert inputs == Counter((d, i) for d, n in enumerate(lengths) for i in range(n))
        assert predicted == Counter((d, i) for d, n in enumerate(lengths) for i in range(1, n))


def test_one_sequence_per_batch():
    corpus = make([[5, 6, 7]], size=SequenceCount(1))
    seen = [rows(corpus.batch(step)) for step in range(3)]
    assert [len(batch) for batch in seen] == [1, 1, 1]
    assert sorted(batch[0][1] for batch in seen) == [0, 1, 2]


def test_a_batch_may_hold_many_epochs():
    corpus = make([[5, 6, 7]], size=SequenceCount(10))
    assert len(rows(corpus.batch(3))) == 10
    assert Counter(row[1] for step in range(3) for row in rows(corpus.batch(step))) == {0: 10, 1: 10, 2: 10}


def test_ten_thousand_tiny_documents():
    corpus = make([[2] * 10_000], size=TokenBudget(1000))
    steps = [corpus.batch(step) for step in range(20)]
    assert all(int(batch.lengths.sum()) == 1000 for batch in steps)
    assert sorted(np.concatenate([batch.document for batch in steps]).tolist()) == list(range(10_000))


def test_order_changes_with_seed_dataset_and_epoch():
    lengths = list(range(1, 60))

    def order(seed, datasets=1, dataset=0, epoch=0):
        corpus = make([lengths] * datasets, [1] * datasets, context=100, seed=seed, size=SequenceCount(59 * datasets))
        batch = corpus.batch(epoch)
        return batch.document[batch.dataset == dataset].tolist()

    assert order(1) == order(1)
    assert len({str(o) for o in (order(1), order(2), order(1, 2, 1), order(1, epoch=1))}) == 4


@pytest.mark.parametrize("size", [TokenBudget(4000), SequenceCount(100)])
def test_weights_are_token_shares(size):
    random = np.random.default_rng(5)
    datasets = [random.integers(1, 20, 500).tolist(), random.integers(1, 400, 300).tolist(), [17] * 50]
    corpus = make(datasets, [0.5, 0.2, 0.3], context=256, size=size)
    tokens = np.zeros(3)
    for step in range(400):
        batch = corpus.batch(step)
        np.add.at(tokens, batch.dataset, batch.lengths)
    assert tokens / tokens.sum() == pytest.approx([0.5, 0.2, 0.3], abs=0.01)
    if isinstance(size, TokenBudget):
        assert tokens.sum() / 400 == pytest.approx(4000, rel=0.01)


def test_without_weights_all_datasets_end_their_epochs_together():
    datasets = [[3] * 40, [10] * 60, [1] * 7]
    corpus = make(datasets, context=16, size=TokenBudget(727))
    for step in range(3):
        assert Counter(corpus.batch(step).dataset.tolist()) == {0: 40, 1: 60, 2: 7}


def test_pool_and_ranks_are_nowhere(monkeypatch):
    datasets = [[3, 9, 20, 1], [5] * 7]
    before = rows(make(datasets).batch(5))
    for name, value in (("RANK", "3"), ("WORLD_SIZE", "64"), ("LOCAL_RANK", "3")):
        monkeypatch.setenv(name, value)
    assert rows(make(datasets).batch(5)) == before
    names = {*inspect.signature(open_corpus).parameters, *inspect.signature(Corpus.batch).parameters}
    assert names == {"prefixes", "weights", "context", "seed", "size", "shares", "split_index", "self", "step"}


def test_columns_are_read_only_and_typed():
    batch = make([[5, 6, 7]]).batch(0)
    for name in ("lengths", "dataset", "document", "begin"):
        assert getattr(batch, name).dtype == np.int64
        with pytest.raises(ValueError, match="read-only"):
            getattr(batch, name)[0] = 1
    assert batch.ends_document.dtype == bool


def test_totals():
    corpus = make([[5, 0, 26], [100]], [1, 0], context=8, size=SequenceCount(2))
    assert (corpus.longest_sequence, corpus.tokens, corpus.num_sequences, corpus.empty_documents) == (8, 31, 5, 1)
    assert {row[0] for step in range(20) for row in rows(corpus.batch(step))} == {0}


def test_a_million_documents():
    lengths = np.random.default_rng(1).lognormal(6, 1.5, 1_000_000).astype(np.int32)
    start = time.perf_counter()
    corpus = make([lengths], context=8192, size=TokenBudget(4_000_000))
    batch = corpus.batch(1_000_000)  # thousands of epochs in
    seconds = time.perf_counter() - start
    assert abs(int(batch.lengths.sum()) - 4_000_000) <= 8192
    assert seconds < 5  # about 0.1 s on an idle core
    start = time.perf_counter()
    for step in range(1_000_001, 1_000_021):
        corpus.batch(step)
    assert time.perf_counter() - start < 2


# ------------------------------------------------------------------ splits, files, wrong options


def test_document_ranges_partition_the_file():
    for count in (1, 2, 3, 10, 33, 1000):
        ranges = [document_range(count, [0.969, 0.03, 0.001], index) for index in range(3)]
        assert ranges[0][0] == 0
        assert ranges[2][1] == count
        assert ranges[0][1] == ranges[1][0]
        assert ranges[1][1] == ranges[2][0]
    assert document_range(1000, [0.969, 0.03, 0.001], 1) == (969, 999)


def test_shares_must_be_normalised():
    with pytest.raises(ConfigError, match="must add up to 1"):
        document_range(10, [969, 30, 1], 0)


def test_splits_of_a_file_hold_their_own_documents(tmp_path):
    write_indexed(tmp_path / "a", [[d] * (d + 1) for d in range(20)], np.uint16)
    seen = []
    for index in range(3):
        corpus = open_corpus(
            [tmp_path / "a"],
            context=100,
            seed=index,
            size=SequenceCount(1),
            shares=[0.5, 0.25, 0.25],
            split_index=index,
        )
        batches = [corpus.batch(step) for step in range(corpus.num_sequences)]
        for batch in batches:
            document = int(batch.document[0])
            assert corpus.read(0, document, 0, document + 1).tolist() == [document] * (document + 1)
        seen.append(sorted(int(batch.document[0]) for batch in batches))
    assert seen == [list(range(10)), list(range(10, 15)), list(range(15, 20))]


def test_separate_files_count_whole(tmp_path):
    write_indexed(tmp_path / "valid", [[1, 2], [3]], np.uint16)
    assert open_corpus([tmp_path / "valid"], context=4, seed=0, size=SequenceCount(1), split_index=1).tokens == 3


def test_empty_split(tmp_path):
    write_indexed(tmp_path / "a", [[1, 2]] * 10, np.uint16)
    with pytest.raises(
        DataError, match=r"the test split is empty: .*documents 10 to 10 of 10\), share 0\.001 of --split"
    ):
        open_corpus(
            [tmp_path / "a"], context=4, seed=0, size=SequenceCount(1), shares=[0.969, 0.03, 0.001], split_index=2
        )


def test_a_weighted_dataset_without_tokens():
    with pytest.raises(DataError, match=r"no tokens in data1 \(documents 0 to 2 of 2\), but its weight is not 0"):
        make([[5], [0, 0]], [1, 1])
    assert make([[5], [0, 0]]).batch(0).dataset.tolist() == [0, 0, 0]
    with pytest.raises(DataError, match="no tokens at all in data0"):
        make([[0, 0]])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"context": 0}, "--seq-length is 0"),
        ({"seed": -1}, "--seed is -1"),
        ({"seed": 2**32}, "--seed is 4294967296"),
        ({"weights": [1, 2]}, "2 weights for 1 datasets"),
        ({"weights": [-1]}, "weight -1: weights must be finite and not negative"),
        ({"weights": [float("nan")]}, "weight nan"),
        ({"weights": [float("inf")]}, "weight inf"),
        ({"weights": [0]}, "all 1 weights are 0"),
    ],
)
def test_options_that_cannot_work(options, message):
    with pytest.raises(ConfigError, match=message):
        make([[5, 6]], **options)


def test_sizes_and_steps_that_cannot_work():
    with pytest.raises(ConfigError, match="--hdp-batch-tokens is 0"):
        TokenBudget(0)
    with pytest.raises(ConfigError, match="--global-batch-size is -1"):
        SequenceCount(-1)
    with pytest.raises(ConfigError, match="step -1"):
        make([[5]]).batch(-1)
    with pytest.raises(ConfigError, match="names no dataset"):
        open_corpus([], context=4, seed=0, size=SequenceCount(1))


def test_a_budget_that_could_give_an_empty_step():
    with pytest.raises(
        ConfigError, match=r"--hdp-batch-tokens 99 .* has 50 tokens, its share of a step 50: set .* 100"
    ):
        make([[50, 1], [60]], [0.5, 0.5], context=64, size=TokenBudget(99))
    corpus = make([[50, 1], [60]], [0.5, 0.5], context=64, size=TokenBudget(100))
    assert all(corpus.batch(step).lengths.size for step in range(300))


def test_weights_are_read_as_written():
    assert whole_weights([0.3, 0.7]) == whole_weights([3, 7]) == whole_weights([30.0, 70.0]) == (3, 7)
    assert whole_weights([1e-5, 1]) == (1, 100_000)
    assert whole_weights([0, 2]) == (0, 1)


def test_stdlib_corpus(tmp_path):
    summary = build_stdlib_corpus(tmp_path / "a", 40)
    assert build_stdlib_corpus(tmp_path / "b", 40) == summary
    assert (tmp_path / "a.bin").read_bytes() == (tmp_path / "b.bin").read_bytes()
    corpus = open_corpus([tmp_path / "a"], context=10**6, seed=0, size=SequenceCount(40))
    assert (summary.documents, summary.tokens, summary.longest) == (40, corpus.tokens, corpus.longest_sequence)
    assert list(summary.quantiles.values()) == sorted(summary.quantiles.values())
    lengths = corpus.files[0].lengths
    texts = [corpus.read(0, d, 0, int(lengths[d])) for d in range(40)]
    assert all(text[-1] == END_OF_DOCUMENT and text[:-1].max(initial=0) < 256 for text in texts)
    assert VOCABULARY_SIZE == END_OF_DOCUMENT + 1
    source = Path(inspect.getsourcefile(abc)).read_bytes()
    assert source in [bytes(text[:-1].tolist()) for text in texts]
