"""From 'who runs which piece when' to the columns of a `Plan`."""

from dataclasses import dataclass

import numpy as np

from megatron_hdp.types import IntArray, Plan


@dataclass(frozen=True)
class Batch:
    """One global batch with its rings' sizes; arrays have the shape [num_sequences]."""

    num_ranks: int
    capacity: int
    pad_multiple: int
    lengths: IntArray
    ring_size: IntArray
    piece_tokens: IntArray
    """Tokens of one piece, padding counted."""
    cost: IntArray
    """Work of one piece, see `megatron_hdp.planner.load.piece_cost`."""


@dataclass(frozen=True)
class Cells:
    """Pieces with their rank and place in time; arrays have the shape [num_pieces]."""

    sequence: IntArray
    rank: IntArray
    time: IntArray
    """Pieces of a rank with equal time share a micro-batch; a rank runs its micro-batches in order of time."""

    @staticmethod
    def join(*parts: "Cells") -> "Cells":
        """The cells of all parts together."""
        return Cells(
            np.concatenate([part.sequence for part in parts]),
            np.concatenate([part.rank for part in parts]),
            np.concatenate([part.time for part in parts]),
        )


def slots_of(cells: Cells) -> IntArray:
    """Slot of every cell when the times of a rank are numbered 0, 1, 2, ...; shape [num_pieces]."""
    order = np.lexsort((cells.time, cells.rank))
    rank, time = cells.rank[order], cells.time[order]
    first_of_rank = np.diff(rank, prepend=-1) != 0
    running = np.cumsum(first_of_rank | (np.diff(time, prepend=-1) != 0))
    base = np.maximum.accumulate(np.where(first_of_rank, running, 0))
    slots = np.empty_like(running)
    slots[order] = running - base
    return slots


def build_plan(batch: Batch, ring_start: IntArray, cells: Cells, slots: IntArray, counts: IntArray) -> Plan:
    """The plan in which ``cells`` run in ``slots`` and rank r has ``counts[r]`` micro-batches (at least one)."""
    counts = np.maximum(counts, 1)
    rank_offsets = _offsets(counts)
    microbatch = rank_offsets[cells.rank] + slots
    order = np.lexsort((cells.sequence, microbatch))  # ascending sequences: rings meet in one global order
    sizes = np.bincount(microbatch, minlength=int(rank_offsets[-1]))
    return Plan(
        num_ranks=batch.num_ranks,
        capacity=batch.capacity,
        pad_multiple=batch.pad_multiple,
        lengths=batch.lengths,
        ring_start=ring_start,
        ring_size=batch.ring_size,
        offload=np.zeros(batch.lengths.size),
        rank_offsets=rank_offsets,
        microbatch_offsets=_offsets(sizes),
        piece_sequence=cells.sequence[order],
    )


def ring_cells(sequences: IntArray, start: IntArray, size: IntArray) -> tuple[IntArray, IntArray]:
    """Sequence and rank of every piece of these rings, ring by ring; shapes [sum of size]."""
    member = np.arange(int(size.sum())) - np.repeat(np.cumsum(size) - size, size)
    return np.repeat(sequences, size), np.repeat(start, size) + member


def _offsets(sizes: IntArray) -> IntArray:
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(sizes, dtype=np.int64)])
