"""From a rank's micro-batch to model input: its own tokens, labels, loss mask and positions, and no one else's."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron_hdp.data.corpus import Batch, Corpus
from megatron_hdp.errors import PlanError
from megatron_hdp.types import IntArray, MicroBatch, Piece


@dataclass(frozen=True, eq=False)
class MicroBatchArrays:
    """Model input of one micro-batch of one rank: pieces one after the other, each as its two spans; shape [T] each."""

    tokens: IntArray
    labels: IntArray
    """The token that follows in the document; the pad token where none follows."""
    loss_mask: npt.NDArray[np.float32]
    """1 where the label counts, 0 at a document's last token, at padding, and at masked end-of-document tokens."""
    positions: IntArray
    """Place of every token in its own (padded) sequence, for rotary positions."""


def piece_arrays(
    corpus: Corpus,
    batch: Batch,
    micro_batch: MicroBatch,
    *,
    eod: int | None = None,
    pad_token: int = 0,
    pad_multiple: int = 2,
) -> MicroBatchArrays:
    """Arrays of a micro-batch of one rank, read from disk: its spans, and one token more for the last label of each.

    ``eod`` is the end-of-document token whose own position carries no loss (--eod-mask-loss), or None. An empty
    micro-batch becomes ``pad_multiple`` tokens of padding. Raises `PlanError` if the micro-batch belongs to another
    batch.
    """
    total = micro_batch.tokens or pad_multiple
    tokens = np.full(total, pad_token, np.int64)
    labels = np.full(total, pad_token, np.int64)
    loss_mask = np.zeros(total, np.float32)
    positions = np.arange(total, dtype=np.int64)
    place = 0
    for piece in micro_batch.pieces:
        _check(batch, piece)
        for begin, end in _runs(piece):
            positions[place : place + end - begin] = np.arange(begin, end)
            real = min(end, piece.length) - begin
            if real > 0:
                text = _read(corpus, batch, piece, begin, real)
                tokens[place : place + real] = text[:real]
                labels[place : place + text.size - 1] = text[1:]
                loss_mask[place : place + text.size - 1] = 1
            place += end - begin
    if eod is not None:
        loss_mask[tokens == eod] = 0
    return MicroBatchArrays(tokens, labels, loss_mask, positions)


def _runs(piece: Piece) -> tuple[tuple[int, int], ...]:
    """The piece's spans, joined to one where they touch (local pieces, and the middle of a ring)."""
    low, high = piece.spans
    return ((low[0], high[1]),) if low[1] == high[0] else (low, high)


def _read(corpus: Corpus, batch: Batch, piece: Piece, begin: int, real: int) -> IntArray:
    """``real`` tokens of the sequence from ``begin`` on, and the one after them unless the document ends there."""
    i = piece.sequence
    last = bool(batch.ends_document[i]) and begin + real == piece.length
    start = int(batch.begin[i]) + begin
    return corpus.read(int(batch.dataset[i]), int(batch.document[i]), start, start + real + (not last))


def _check(batch: Batch, piece: Piece) -> None:
    known = int(batch.lengths[piece.sequence]) if 0 <= piece.sequence < batch.lengths.size else None
    if known != piece.length:
        raise PlanError(
            f"the plan says sequence {piece.sequence} has {piece.length} tokens, the batch of step {batch.step} with "
            f"{batch.lengths.size} sequences says {known}: the plan was made for another batch"
        )
