"""Local sequences that ride along in the free room of ring micro-batches, and in micro-batches of their own."""

import heapq

import numpy as np

from megatron_hdp.planner.layout import Batch
from megatron_hdp.planner.packing import best_fit
from megatron_hdp.types import IntArray

WAIT_SHARE = 16
"""Fill of a ring is kept when the waiting that it causes is at most 1 / WAIT_SHARE of the ring's own work."""


def longest_rings(batch: Batch) -> IntArray:
    """Sequences with rings of two or more ranks, longest first (ties: lower index)."""
    rings = np.flatnonzero(batch.ring_size > 1)
    return rings[np.argsort(-batch.lengths[rings], kind="stable")]


def fill_rings(batch: Batch, rings: IntArray) -> tuple[IntArray, IntArray]:
    """Local sequences for the free room that ring pieces leave in their micro-batches.

    All ranks of a ring wait for the one with the most work, so fill that leaves the ring's ranks uneven is taken out
    again; it is better off in a micro-batch of its own.

    Args:
        batch: the batch.
        rings: sequences with rings, shape [num_rings].

    Returns:
        The cell of each sequence, shape [num_sequences]: cells count the rings' pieces ring by ring, -1 for none.
        The work that the fullest cell adds to each ring, shape [num_rings].
    """
    size = batch.ring_size[rings]
    cell_of = np.full(batch.lengths.size, -1, dtype=np.int64)
    local = np.flatnonzero(batch.ring_size == 1)
    if not rings.size or not local.size:
        return cell_of, np.zeros(rings.size, dtype=np.int64)
    rooms = np.repeat(batch.capacity - batch.piece_tokens[rings], size)
    bins = best_fit(batch.piece_tokens[local], batch.capacity, rooms)
    local, bins = local[bins < rooms.size], bins[bins < rooms.size]
    work = np.zeros(rooms.size, dtype=np.int64)
    np.add.at(work, bins, batch.cost[local])
    first = np.cumsum(size) - size
    most, total = np.maximum.reduceat(work, first), np.add.reduceat(work, first)
    even = (size * most - total) * WAIT_SHARE <= size * batch.cost[rings]
    kept = np.repeat(even, size)[bins]
    cell_of[local[kept]] = bins[kept]
    return cell_of, np.where(even, most, 0)


def pack_groups(tokens: IntArray, group: IntArray, capacity: int) -> IntArray:
    """Bin of every item inside its group by best fit decreasing; both arrays and the result [num_items].

    Only items of the same group share a bin; bins of a group count up from 0.
    """
    bins = np.zeros(tokens.size, dtype=np.int64)
    order = np.argsort(group, kind="stable")
    for members in np.split(order, np.flatnonzero(np.diff(group[order])) + 1):
        if members.size and int(tokens[members].sum()) > capacity:
            bins[members] = best_fit(tokens[members], capacity)
    return bins


def spread(cost: IntArray, loads: IntArray) -> IntArray:
    """Rank of every item, heaviest first onto the least loaded rank (LPT, Graham 1969); ties: lower index, lower rank.

    Args:
        cost: work of each item, shape [num_items].
        loads: work that each rank already has, shape [num_ranks].

    Returns:
        Shape [num_items].
    """
    ranks = np.empty(cost.size, dtype=np.int64)
    heap = [(load, rank) for rank, load in enumerate(loads.tolist())]
    heapq.heapify(heap)
    order = np.argsort(-cost, kind="stable")
    for item, work in zip(order.tolist(), cost[order].tolist(), strict=True):
        load, rank = heap[0]
        ranks[item] = rank
        heapq.heapreplace(heap, (load + work, rank))
    return ranks
