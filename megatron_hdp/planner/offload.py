"""How much of each sequence's activations may leave for host memory, how much has to, and what rings that allows.

A fraction r of the layers but two may leave if its copies hide behind the compute of the piece's own layers, wherever
its ring lies, and if host memory holds it. What has to leave is what the capacity does not hold. r is a multiple of
1/1024; `share_of` makes `Plan.offload` of it, which is the share of all layers.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron_hdp.cost import CostModel, Tier
from megatron_hdp.cost.fixed import OFFLOAD_STEPS
from megatron_hdp.errors import PlanError
from megatron_hdp.planner.check import held_tokens
from megatron_hdp.types import IntArray, chunk_tokens

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Limits:
    """What a piece may be at most where activations leave; None: no limit."""

    piece_bytes: int | None = None
    """Of host memory, as `CostModel.host_bytes`."""
    piece_tokens: int | None = None
    """At least the capacity."""
    parts: int = 1
    """Model parts of a stage, each of which keeps its first and its last layer."""


def smallest_rings(
    lengths: IntArray,
    num_ranks: int,
    capacity: int,
    cost: CostModel,
    limits: Limits | None = None,
) -> tuple[IntArray, FloatArray]:
    """Ranks of every sequence by memory, and `Plan.offload` there; both [num_sequences].

    Without offload that is ceil(s / capacity). With it, ByteScale's D(s, r): the smallest ring on which what stays fits
    when the largest fraction leaves that may; 0 leaves where that saves no rank. Only sequences above the capacity
    offload.

    Args:
        lengths: tokens of every sequence, int64 [num_sequences].
        num_ranks: ranks of the pool.
        capacity: tokens that one rank holds in one micro-batch.
        cost: of one pipeline stage.
        limits: of what may leave; nothing may when None.

    Raises:
        PlanError: a sequence does not fit in the pool.
    """
    size = -(-lengths // capacity)
    share = np.zeros(lengths.size)
    long = np.flatnonzero(size > 1)
    if limits is not None and long.size:
        own = lengths[long]
        low = np.ones_like(own) if limits.piece_tokens is None else -(-own // limits.piece_tokens)
        high = size[long]
        while np.any(low < high):  # what stays falls with the ring; ``high`` holds what it has to
            middle = (low + high) // 2
            leaves = largest_fraction(own, middle, cost, num_ranks, limits)
            good = fits(own, middle, leaves, capacity, cost)
            low, high = np.where(good, low, np.minimum(middle + 1, high)), np.where(good, middle, high)
        fewer = high < size[long]
        share[long] = np.where(fewer, share_of(largest_fraction(own, high, cost, num_ranks, limits), cost), 0.0)
        size[long] = high
    if int(size.max()) > num_ranks:
        longest = int(np.argmax(size))
        raise PlanError(
            f"sequence {longest} has {int(lengths[longest])} tokens and needs {int(size[longest])} ranks of {capacity} "
            f"tokens, the pool has {num_ranks}: raise --hdp-tokens-per-rank or use more ranks"
        )
    return size, share


def share_of(fraction: FloatArray, cost: CostModel) -> FloatArray:
    """`Plan.offload` of r: the share of all layers that leaves."""
    return np.asarray(1.0 - cost.held_fraction(fraction), dtype=np.float64)


def largest_fraction(lengths: IntArray, rings: IntArray, cost: CostModel, num_ranks: int, limits: Limits) -> FloatArray:
    """Largest r of each piece that may leave, wherever in the pool its ring lies; float64 [num_sequences]."""
    free = cost.largest_free_offload(lengths, rings, Tier.INSIDE_NODE)
    if num_ranks > cost.ranks_per_node:
        across = cost.largest_free_offload(lengths, rings, Tier.ACROSS_NODES)
        free = np.where(rings > cost.ranks_per_node, across, np.minimum(free, across))
    if limits.piece_bytes is not None:
        free = np.minimum(free, _within(lengths, rings, cost, limits.piece_bytes))
    layers = cost.layers_per_stage
    most = max(layers - 2 * limits.parts, 0) * OFFLOAD_STEPS // max(layers - 2, 1)
    return np.asarray(np.minimum(free, most / OFFLOAD_STEPS), dtype=np.float64)


def needed_fraction(lengths: IntArray, rings: IntArray, capacity: int, cost: CostModel) -> FloatArray:
    """Least r with which each piece, alone in its micro-batch, fits the capacity; 1 where none does."""
    low, high = np.zeros_like(lengths), np.full_like(lengths, OFFLOAD_STEPS)
    while np.any(low < high):
        middle = (low + high) // 2
        good = fits(lengths, rings, middle / OFFLOAD_STEPS, capacity, cost)
        low, high = np.where(good, low, middle + 1), np.where(good, middle, high)
    return np.asarray(high / OFFLOAD_STEPS, dtype=np.float64)


def fits(
    lengths: IntArray, rings: IntArray, fraction: FloatArray, capacity: int, cost: CostModel
) -> npt.NDArray[np.bool_]:
    """Does a piece of which so much leaves keep no more than a full local micro-batch, in bytes and in tokens?

    The cost model counts bytes, with Act's constant; a plan's capacity counts tokens, rounded up.
    """
    tokens = 2 * chunk_tokens(lengths, rings, cost.pad_multiple)
    stays = held_tokens(tokens, share_of(fraction, cost)) <= capacity
    return np.asarray(stays & (cost.bytes(lengths, rings, fraction) <= cost.bytes(capacity)), dtype=np.bool_)


def _within(lengths: IntArray, rings: IntArray, cost: CostModel, piece_bytes: int) -> FloatArray:
    """Largest r of which a piece takes at most ``piece_bytes`` of host memory."""
    layer = cost.host_bytes(lengths, rings, 1.0) // cost.layers_per_stage
    leaving = np.maximum(layer * max(cost.layers_per_stage - 2, 0), 1)
    steps = np.minimum(np.minimum(piece_bytes, leaving) * OFFLOAD_STEPS // leaving, OFFLOAD_STEPS)
    over = cost.host_bytes(lengths, rings, share_of(steps / OFFLOAD_STEPS, cost)) > piece_bytes
    return np.asarray(np.maximum(steps - over, 0) / OFFLOAD_STEPS, dtype=np.float64)  # bytes are rounded up
