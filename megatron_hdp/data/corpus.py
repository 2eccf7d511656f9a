"""Several datasets as batches of sequences: a pure function of (data, seed, step).

Neither the pool, nor its ranks, nor earlier steps appear anywhere here, so a resumed run, or one with more or fewer
ranks, sees the same sequences in the same steps.
"""

import os
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from megatron_hdp.data.blend import SequenceCount, TokenBudget, whole_weights
from megatron_hdp.data.indexed import IndexedFile
from megatron_hdp.data.stream import SequenceTable, Stream, cut_documents
from megatron_hdp.errors import ConfigError, DataError, EmptySplitError
from megatron_hdp.types import IntArray

__all__ = ["Batch", "Corpus", "Documents", "SequenceCount", "TokenBudget", "document_range", "open_corpus"]

SPLITS = ("train", "valid", "test")


class Documents(Protocol):
    """A file of documents: what `IndexedFile` offers."""

    prefix: str
    lengths: npt.NDArray[np.integer]
    read_bytes: int

    def read(self, document: int, begin: int, end: int) -> IntArray:
        """Tokens [begin, end) of a document, int64."""
        ...


@dataclass(frozen=True, eq=False)
class Batch:
    """The sequences of one step, in columns of n entries, ordered by dataset and then by place in its stream."""

    step: int
    lengths: IntArray
    """Tokens of every sequence."""
    dataset: IntArray
    """Index of its dataset in the corpus."""
    document: IntArray
    """Its document, counted in the file."""
    begin: IntArray
    """Its offset in the document, in tokens."""
    ends_document: npt.NDArray[np.bool_]
    """Whether its last token is the document's last one, which has no label."""

    def __post_init__(self) -> None:
        for column in (self.lengths, self.dataset, self.document, self.begin, self.ends_document):
            column.setflags(write=False)


class Corpus:
    """Datasets with weights and document ranges, cut into sequences. `open_corpus` makes one from files."""

    def __init__(
        self,
        files: Sequence[Documents],
        weights: Sequence[float] | None,
        ranges: Sequence[tuple[int, int]],
        *,
        context: int,
        seed: int,
        size: TokenBudget | SequenceCount,
    ) -> None:
        """``ranges``: the documents [first, last) that each file contributes.

        Weights are shares of tokens; without them a dataset's share is its size, as if files were concatenated.
        Raises `ConfigError` for options that cannot work, `DataError` where there are no tokens.
        """
        if context < 1:
            raise ConfigError(f"--seq-length is {context}: the context must be at least 1 token")
        if not 0 <= seed < 2**32:
            raise ConfigError(f"--seed is {seed}: it must be from 0 to {2**32 - 1}")
        if weights is not None and len(weights) != len(files):
            raise ConfigError(f"--data-path: {len(weights)} weights for {len(files)} datasets: give one weight each")
        self.context = context
        self.files = tuple(files)
        self.tables = tuple(cut_documents(f.lengths, *span, context) for f, span in zip(files, ranges))
        if not any(table.tokens for table in self.tables):
            raise DataError(
                f"no tokens at all in {_names(files, ranges)}: give larger data, or a larger share in --split"
            )
        shares = whole_weights([table.tokens for table in self.tables] if weights is None else weights)
        for file, span, table, share in zip(files, ranges, self.tables, shares):
            if share and not table.tokens:
                raise DataError(
                    f"no tokens in {_names([file], [span])}, but its weight is not 0: give it a larger share in "
                    "--split, or take it out of --data-path"
                )
        self._used = tuple(d for d, share in enumerate(shares) if share)
        self._streams = tuple(Stream(self.tables[d], seed, d) for d in self._used)
        self._weights = tuple(shares[d] for d in self._used)
        self._size = size
        self._size.check(self._streams, self._weights)
        self._cuts: OrderedDict[int, tuple[int, ...]] = OrderedDict()

    @property
    def longest_sequence(self) -> int:
        """Tokens of the longest sequence that can occur."""
        return max(self.tables[d].longest for d in self._used)

    @property
    def tokens(self) -> int:
        """Tokens of one epoch of every dataset in use."""
        return sum(self.tables[d].tokens for d in self._used)

    @property
    def num_sequences(self) -> int:
        """Sequences of one epoch of every dataset in use."""
        return sum(self.tables[d].size for d in self._used)

    @property
    def empty_documents(self) -> int:
        """Documents of length 0, which were dropped."""
        return sum(self.tables[d].empty_documents for d in self._used)

    @property
    def read_bytes(self) -> int:
        """Bytes of tokens read from the files so far."""
        return sum(file.read_bytes for file in self.files)

    def batch(self, step: int) -> Batch:
        """The sequences of ``step`` (0, 1, ...); never empty. No token is read."""
        if step < 0:
            raise ConfigError(f"step {step}: steps count from 0")
        begins, ends = self._cut(step), self._cut(step + 1)
        columns = [
            self._columns(dataset, stream.sequences(begin, end))
            for dataset, stream, begin, end in zip(self._used, self._streams, begins, ends)
        ]
        lengths, dataset, document, begin, ends_document = (np.concatenate(parts) for parts in zip(*columns))
        return Batch(step, lengths, dataset, document, begin, ends_document.astype(bool))

    def read(self, dataset: int, document: int, begin: int, end: int) -> IntArray:
        """Tokens [begin, end) of a document, int64 [end - begin]; only these are read from disk."""
        return self.files[dataset].read(document, begin, end)

    def _columns(self, dataset: int, sequences: IntArray) -> tuple[IntArray, ...]:
        """Columns of a batch for some sequences of one dataset."""
        table: SequenceTable = self.tables[dataset]
        lengths = table.lengths[sequences].astype(np.int64)
        document, begin = table.locate(sequences)
        ends = (begin + lengths == self.files[dataset].lengths[document]).astype(np.int64)
        return lengths, np.full(sequences.size, dataset, np.int64), document, begin, ends

    def _cut(self, step: int) -> tuple[int, ...]:
        """Cut between steps ``step - 1`` and ``step``, kept because two steps need it."""
        if step not in self._cuts:
            self._cuts[step] = self._size.cut(step, self._streams, self._weights)
        cut = self._cuts[step]
        while len(self._cuts) > 4:
            self._cuts.popitem(last=False)
        return cut


def _names(files: Sequence[Documents], ranges: Sequence[tuple[int, int]]) -> str:
    """The files with their document ranges, for messages."""
    return ", ".join(f"{f.prefix} (documents {a} to {b} of {f.lengths.size})" for f, (a, b) in zip(files, ranges))


def document_range(documents: int, shares: Sequence[float], split_index: int) -> tuple[int, int]:
    """Documents [first, last) of one split; shares of all splits, adding up to 1, in the order of --split.

    The same rounding as Megatron, so that a run with and one without HDP train on the same documents.
    """
    if not shares or min(shares) < 0 or abs(sum(shares) - 1) > 1e-6:
        raise ConfigError(
            f"shares {list(shares)} of train, valid and test: none may be negative, and they must add up to 1"
        )
    begin = 0.0
    for share in shares[:split_index]:
        begin += share
    end = begin + shares[split_index]
    return round(begin * documents), round(end * documents)


def open_corpus(
    prefixes: Sequence[str | Path],
    weights: Sequence[float] | None = None,
    *,
    context: int,
    seed: int,
    size: TokenBudget | SequenceCount,
    shares: Sequence[float] | None = None,
    split_index: int = 0,
) -> Corpus:
    """The corpus of one split from .bin/.idx files.

    ``shares`` are the normalised parts of --split and ``split_index`` says which one this is (0 train, 1 valid,
    2 test); without shares every document counts, as for --train-data-path. Raises `DataError` for damaged files,
    `EmptySplitError` for an empty split, `ConfigError` for options that cannot work.
    """
    if not prefixes:
        raise ConfigError("--data-path names no dataset")
    files = [IndexedFile.open(os.fspath(prefix)) for prefix in prefixes]
    ranges = [
        (0, f.lengths.size) if shares is None else document_range(f.lengths.size, shares, split_index) for f in files
    ]
    if shares is not None and all(first == last for first, last in ranges):
        raise EmptySplitError(
            f"the {SPLITS[split_index]} split is empty: {_names(files, ranges)}, share {shares[split_index]:.4g} of "
            "--split: give it a larger share, or --eval-iters 0 where it is not needed"
        )
    return Corpus(files, weights, ranges, context=context, seed=seed, size=size)
