"""Packed segments as few dense batches, for kernels that know no packed form.

B segments of one batch, S query rows and K key rows each. Causal segments of nearly equal length share a batch, the
shorter ones padded at their tail: a real query does not see later rows, so its output is untouched, and a padded
query gives no gradient as long as its dout is 0. Padded rows hold copies of their segment's last real row, so every
score is one that the segment has anyway and nothing can overflow.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megatron_hdp.attention.kernels.interface import Segments
from megatron_hdp.attention.placing import placed

SHORT_ROWS = 256
"""Longer segments run alone, in place. Measured on one thread of an EPYC (8 heads of 64, fp32), a call of its own for
each segment against batches: 2.0 to 3.7 times the time at 4 rows, 1.2 to 1.7 at 16, the same at 64, 0.9 from 130 on,
where copies cost more than calls; batches go on up to here for the sake of few launches.
"""
BATCH_ROWS = 1024
"""Rows of a padded batch, at most: the copies stay in the processor's cache. 4096 took up to half as long again."""
GROWTH = 1 / 8
"""A segment is padded by at most this share of its length."""

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Gather:
    """Rows that do not lie side by side."""

    read: Tensor
    """Packed row of every row of the batch [B * S]; padding reads its segment's last row."""
    write: Tensor
    """The same, but padding writes to the row after the last packed one."""
    padding: Tensor | None
    """Rows of the batch that are padding; None if there are none."""


type Rows = slice | Gather


@dataclass(frozen=True, eq=False)
class Batch:
    """Segments that run as one dense call."""

    count: int
    queries: int
    """S, padding counted."""
    keys: int
    """K, padding counted."""
    query_rows: Rows
    key_rows: Rows

    def take(self, packed: Tensor, rows: Rows, *, zero_padding: bool = False) -> Tensor:
        """The batch's rows of a packed tensor, [B, S or K, ...]: a view where they lie side by side."""
        if isinstance(rows, slice):
            return packed[rows].unflatten(0, (self.count, -1))
        taken = packed.index_select(0, rows.read)
        if zero_padding and rows.padding is not None:
            taken.index_fill_(0, rows.padding, 0)
        return taken.unflatten(0, (self.count, -1))

    def put(self, packed: Tensor, rows: Rows, values: Tensor) -> None:
        """Inverse of `take` into a tensor with one row more than is packed, where padding goes."""
        if isinstance(rows, slice):
            packed[rows].unflatten(0, (self.count, -1)).copy_(values)
        else:
            packed.index_copy_(0, rows.write, values.flatten(0, 1))


def batches(segments: Segments, device: torch.device) -> tuple[Batch, ...]:
    """The segments as batches; made once per object and device."""
    return segments.derive(("batches", device), lambda: _batches(segments, device))


def _batches(segments: Segments, device: torch.device) -> tuple[Batch, ...]:
    queries, keys = (np.asarray(rows, dtype=np.int64) for rows in (segments.queries, segments.keys))
    if queries.size == 0:
        return ()
    query_starts, key_starts = np.cumsum(queries) - queries, np.cumsum(keys) - keys
    made = []
    for members in _groups(queries, keys, may_pad=segments.right == 0):
        size_q, size_k = int(queries[members].max()), int(keys[members].max())
        rows_q = _rows(query_starts[members], queries[members], size_q, int(queries.sum()), device)
        # Causal segments have their keys where their queries are.
        same = segments.right == 0
        rows_k = rows_q if same else _rows(key_starts[members], keys[members], size_k, int(keys.sum()), device)
        made.append(Batch(len(members), size_q, size_k, rows_q, rows_k))
    return tuple(made)


def _groups(queries: IntArray, keys: IntArray, *, may_pad: bool) -> list[IntArray]:
    """Indices of the segments of every batch."""
    if (queries == queries[0]).all() and (keys == keys[0]).all():
        return [np.arange(queries.size)]  # side by side: a view, whatever its size
    order = np.lexsort((keys, queries))[::-1]
    groups: list[list[int]] = []
    for index in order.tolist():
        if groups and _fits(groups[-1], index, queries, keys, may_pad=may_pad):
            groups[-1].append(index)
        else:
            groups.append([index])
    return [np.sort(np.asarray(group, dtype=np.int64)) for group in groups]


def _fits(group: list[int], index: int, queries: IntArray, keys: IntArray, *, may_pad: bool) -> bool:
    """Whether a segment, no longer than those of the group, may join it."""
    longest = int(queries[group[0]])
    if max(longest, int(keys[group[0]])) > SHORT_ROWS or (len(group) + 1) * longest > BATCH_ROWS:
        return False
    if may_pad:
        return longest <= int(queries[index]) * (1 + GROWTH)
    return longest == int(queries[index]) and int(keys[group[0]]) == int(keys[index])


def _rows(starts: IntArray, lengths: IntArray, size: int, trash: int, device: torch.device) -> Rows:
    """Where the rows of equally many, possibly padded, segments lie."""
    if (lengths == size).all() and (np.diff(starts) == size).all():
        return slice(int(starts[0]), int(starts[0]) + len(starts) * size)
    column = np.arange(size)
    read = (starts[:, None] + np.minimum(column, lengths[:, None] - 1)).ravel()
    padding = (column >= lengths[:, None]).ravel()
    write = np.where(padding, trash, read)
    where = np.flatnonzero(padding)
    return Gather(_index(read, device), _index(write, device), _index(where, device) if where.size else None)


def _index(values: IntArray, device: torch.device) -> Tensor:
    return placed(torch.from_numpy(values), device)
