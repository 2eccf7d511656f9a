"""One dataset as an endless stream of sequences, with random access to any place in it.

A document of n tokens gives ceil(n / context) sequences: consecutive parts of ``context`` tokens, the last one shorter.
Epoch e of the stream is a random order of all sequences, drawn from (seed, dataset, epoch) alone. A sequence's *start*
is the number of tokens before it in the stream, so epoch e begins at e * tokens.
"""

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron_hdp.types import IntArray

_EPOCHS_KEPT = 2
"""A batch at the end of an epoch also holds the beginning of the next one."""


@dataclass(frozen=True, eq=False)
class SequenceTable:
    """The sequences of documents ``first .. last - 1`` of a file, in columns: about 12 bytes each, no objects."""

    first: int
    """First document of the range, counted in the file."""
    context: int
    lengths: npt.NDArray[np.integer]
    """Tokens of every sequence, in order of document and offset, shape [sequences]."""
    bounds: IntArray
    """Sequences of document first + i: bounds[i] .. bounds[i + 1], shape [documents + 1]."""
    empty_documents: int
    """Documents of length 0, which give no sequence."""
    tokens: int
    longest: int

    @property
    def size(self) -> int:
        """Number of sequences."""
        return int(self.lengths.size)

    def locate(self, sequences: IntArray) -> tuple[IntArray, IntArray]:
        """Document (counted in the file) and offset in it of every given sequence, int64 of the same shape."""
        # empty documents share their bound with the next one: `right` finds the last, which has the tokens
        index = np.searchsorted(self.bounds, sequences, side="right") - 1
        return self.first + index, (sequences - self.bounds[index]) * self.context


def cut_documents(lengths: npt.NDArray[np.integer], first: int, last: int, context: int) -> SequenceTable:
    """Cut documents ``first .. last - 1`` of a file with these ``lengths`` (tokens, [documents]) into sequences."""
    tokens = lengths[first:last].astype(np.int64)
    parts = -(-tokens // context)
    bounds = np.zeros(tokens.size + 1, np.int64)
    np.cumsum(parts, out=bounds[1:])
    sequences: npt.NDArray[np.integer] = np.full(int(bounds[-1]), context, _smallest_type(context))
    full = parts > 0
    sequences[bounds[1:][full] - 1] = (tokens - (parts - 1) * context)[full]
    longest = int(sequences.max()) if sequences.size else 0
    empty = int(tokens.size - np.count_nonzero(full))
    return SequenceTable(first, context, sequences, bounds, empty, int(tokens.sum()), longest)


def _smallest_type(largest: int) -> type[np.int32] | type[np.int64]:
    """int32 where it can hold ``largest``: corpora of 10 million documents lie in every process's memory."""
    return np.int32 if largest <= np.iinfo(np.int32).max else np.int64


class Stream:
    """An endless stream of a table's sequences. The table must hold at least one."""

    def __init__(self, table: SequenceTable, seed: int, dataset: int) -> None:
        self.table = table
        self._key = (seed, dataset)
        self._epochs: OrderedDict[int, tuple[npt.NDArray[np.integer], IntArray]] = OrderedDict()

    def epoch(self, epoch: int) -> tuple[npt.NDArray[np.integer], IntArray]:
        """Sequences of an epoch in their order, and their starts inside of the epoch; both [sequences]."""
        found = self._epochs.pop(epoch, None)
        if found is None:
            # the older generator on purpose: numpy promises that its streams never change
            generator = np.random.RandomState([*self._key, epoch])
            order: npt.NDArray[np.integer] = np.arange(self.table.size, dtype=_smallest_type(self.table.size))
            generator.shuffle(order)
            lengths = self.table.lengths[order]
            starts = np.cumsum(lengths, dtype=np.int64)
            starts -= lengths
            found = order, starts
        self._epochs[epoch] = found
        while len(self._epochs) > _EPOCHS_KEPT:
            self._epochs.popitem(last=False)
        return found

    def count_before(self, token: int) -> int:
        """Sequences of the stream that start before ``token``."""
        epoch, inside = divmod(token, self.table.tokens)
        below = int(np.searchsorted(self.epoch(epoch)[1], inside)) if inside else 0
        return epoch * self.table.size + below

    def start(self, index: int) -> int:
        """Start in tokens of the stream's ``index``-th sequence."""
        epoch, inside = divmod(index, self.table.size)
        return epoch * self.table.tokens + int(self.epoch(epoch)[1][inside])

    def sequences(self, begin: int, end: int) -> IntArray:
        """The table's numbers of the stream's sequences ``begin .. end - 1``, int64 [end - begin]."""
        size = self.table.size
        parts: list[npt.NDArray[np.integer]] = [np.empty(0, np.int64)]
        for epoch in range(begin // size, -(-end // size)):
            order, _ = self.epoch(epoch)
            parts.append(order[max(begin - epoch * size, 0) : min(end - epoch * size, size)])
        return np.concatenate(parts).astype(np.int64)
