"""From a step number to this rank's micro-batches: read lengths, plan, agree, read only the rank's own tokens."""

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
import torch

from megatron_hdp.data.batches import MicroBatchArrays, piece_arrays
from megatron_hdp.data.corpus import Batch, Corpus
from megatron_hdp.errors import DataError, PlanError
from megatron_hdp.metrics import StepRecord
from megatron_hdp.pool import Service
from megatron_hdp.types import IntArray, MicroBatch, Plan


@dataclass(frozen=True)
class MicroBatchTensors:
    """One micro-batch of one rank, ready for the model. T tokens, padding counted."""

    micro_batch: MicroBatch
    tokens_1T: torch.Tensor
    """Token ids, int64 [1, T]."""
    labels_1T: torch.Tensor
    """Next token of every token, int64 [1, T]."""
    loss_mask_1T: torch.Tensor
    """1 where the label counts, float32 [1, T]."""
    positions_1T: torch.Tensor
    """Position of every token in its sequence, int64 [1, T]."""
    most_tokens: int
    """T of the longest micro-batch that the ranks sharing experts with this one run together with it."""
    sequences: int
    """Sequences of the global batch."""


@dataclass(frozen=True)
class StepBundle:
    """All that one rank needs for one step. Yielded whole, so that Megatron can replay a step."""

    step: int
    plan: Plan
    micro_batches: tuple[MicroBatchTensors, ...]
    record: StepRecord | None
    """What the log will say of the step; None where nothing is logged (evaluation)."""


@dataclass(frozen=True, kw_only=True)
class LoaderOptions:
    """How documents become model input."""

    rank: int
    vocab_size: int
    """Tokens must be below this: entries of the tokenizer, which the model's embedding may exceed by padding."""
    eod: int | None
    """End-of-document token whose own position is masked, or None."""
    lookahead: int
    expert_group: int = 1
    """Consecutive pool ranks that share experts, and run equally many micro-batches."""


def most_tokens(plan: Plan, rank: int, expert_group: int) -> IntArray:
    """For every micro-batch of ``rank``, the rows of the longest of its slot in the expert group of ``rank``; [slots].

    An empty micro-batch has as many rows as a piece at least has. Raises PlanError if counts differ in the group.
    """
    first = rank // expert_group * expert_group
    counts = plan.microbatch_counts[first : first + expert_group]
    if len(set(counts.tolist())) != 1:
        raise PlanError(
            f"ranks {first} to {first + expert_group - 1} share experts and have {counts.tolist()} micro-batches: "
            "plan with expert_group"
        )
    begin, end = plan.rank_offsets[first], plan.rank_offsets[first + expert_group]
    tokens = np.concatenate(([0], np.cumsum(2 * plan.chunk_tokens[plan.piece_sequence])))
    rows = np.diff(tokens[plan.microbatch_offsets[begin : end + 1]])
    most: IntArray = np.where(rows == 0, plan.pad_multiple, rows).reshape(expert_group, -1).max(axis=0)
    return most


class StepLoader:
    """Bundles of any step, read ahead. The bundle of a step depends on nothing but data, seed and step."""

    def __init__(
        self,
        corpus: Corpus,
        make_plan: Callable[[IntArray], Plan],
        agree: Callable[[bytes, int], None],
        service: Service,
        options: LoaderOptions,
        describe: Callable[[int, Plan, tuple[float, float]], StepRecord] | None = None,
    ) -> None:
        """``describe`` makes a step's record from step, plan, and the seconds of planning and of reading."""
        self.corpus = corpus
        self._make_plan = make_plan
        self._agree = agree
        self._service = service
        self._options = options
        self._describe = describe
        self._ahead: dict[int, Future[StepBundle]] = {}

    def bundle(self, step: int) -> StepBundle:
        """This rank's bundle of ``step``. Raises `DataError` or `PlanError`.

        Every process must ask for the same steps in the same order, since plans are compared between processes.
        """
        for wanted in range(step, step + self._options.lookahead + 1):
            if wanted not in self._ahead:
                self._ahead[wanted] = self._service.submit(lambda wanted=wanted: self._make(wanted))  # type: ignore[misc]
        # bundles of the current step stay: each model chunk of an interleaved pipeline asks for its own
        for old in [known for known in self._ahead if known < step]:
            del self._ahead[old]
        return self._ahead[step].result()

    def _make(self, step: int) -> StepBundle:
        start = time.perf_counter()
        batch = self.corpus.batch(step)
        plan = self._make_plan(batch.lengths)
        planned = time.perf_counter()
        self._agree(plan.digest(), step)
        agreed = time.perf_counter()
        micro_batches = tuple(
            self._read(batch, plan, micro_batch, int(most))
            for micro_batch, most in zip(
                plan.micro_batches(self._options.rank),
                most_tokens(plan, self._options.rank, self._options.expert_group),
                strict=True,
            )
        )
        seconds = (planned - start, time.perf_counter() - agreed)
        # here and not in the step: at hundreds of ranks a summary takes milliseconds
        record = None if self._describe is None else self._describe(step, plan, seconds)
        return StepBundle(step, plan, micro_batches, record)

    def _read(self, batch: Batch, plan: Plan, micro_batch: MicroBatch, most: int) -> MicroBatchTensors:
        options = self._options
        arrays = piece_arrays(self.corpus, batch, micro_batch, eod=options.eod, pad_multiple=plan.pad_multiple)
        self._check_vocabulary(arrays)
        return MicroBatchTensors(
            micro_batch,
            torch.from_numpy(arrays.tokens)[None],
            torch.from_numpy(arrays.labels)[None],
            torch.from_numpy(arrays.loss_mask)[None],
            torch.from_numpy(arrays.positions)[None],
            most,
            plan.num_sequences,
        )

    def _check_vocabulary(self, arrays: MicroBatchArrays) -> None:
        """An id beyond the vocabulary trains a row of padding; one beyond the embedding reads other memory."""
        largest = int(max(arrays.tokens.max(), arrays.labels.max()))
        if largest >= self._options.vocab_size:
            raise DataError(
                f"the data holds token id {largest}, but the vocabulary has {self._options.vocab_size} entries "
                "(--vocab-size, or the tokenizer's): was the corpus made with another tokenizer?"
            )
