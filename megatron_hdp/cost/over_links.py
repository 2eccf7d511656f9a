"""Core attention over links that are given one by one, where `CostModel` knows two tiers; for simulations."""

import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from megatron_hdp.cost.attention import Pieces, gather_attention, heads_attention, ring_attention, swaps
from megatron_hdp.cost.fixed import fixed
from megatron_hdp.cost.model import CostModel, Phase
from megatron_hdp.cost.packed import Pack, packed_gather, packed_heads, packed_walk
from megatron_hdp.cost.profile import LinkProfile
from megatron_hdp.cost.stage import StageCoefficients
from megatron_hdp.types import EXCHANGES, IntArray

FREE = LinkProfile(0.0, sys.float_info.max)
"""A link that takes no time."""
_GATHER, _HEADS = EXCHANGES.index("gather"), EXCHANGES.index("heads")


@dataclass(frozen=True)
class Shared:
    """Sequences on rings; columns of shape [num_sequences], int64."""

    lengths: IntArray
    ring: IntArray
    exchange: IntArray
    """Index into `EXCHANGES`."""
    head_ranks: IntArray
    link: IntArray
    """Of the ring's hops, or of what gathers: index into the links of `stage_over`."""
    swap_link: IntArray
    """Of the swap of rows for heads."""


def stage_over(cost: CostModel, links: Sequence[LinkProfile]) -> StageCoefficients:
    """The stage's integers with these links in the place of tiers."""
    layer, layers = cost.layer_profile, cost.layers_per_stage
    kv, gradient = Fraction(layer.kv_per_token) * layers, Fraction(layer.kv_gradient_per_token) * layers

    def per_link(amount: Fraction, field: str) -> IntArray:
        return np.array([fixed(amount / Fraction(link.bandwidth), field) for link in links], dtype=np.int64)

    return dataclasses.replace(
        cost._stage,
        latency=np.array([fixed(Fraction(link.latency) * layers, "latency") for link in links], dtype=np.int64),
        kv_time=per_link(kv, "kv_per_token"),
        gradient_time=per_link(gradient, "kv_gradient_per_token"),
        both_time=per_link(kv + gradient, "kv_per_token"),
    )


def attention_over(cost: CostModel, stage: StageCoefficients, shared: Shared, phase: Phase) -> Any:
    """Time of each sequence's pieces in core attention, transfers included; picoseconds, int64 [num_sequences].

    As `CostModel.exchange_picoseconds` less what is besides attention, where all links of a tier are alike.
    """
    tokens = cost.piece_tokens(shared.lengths, shared.ring)
    pieces = Pieces(shared.lengths, tokens, shared.ring, shared.link)
    swapping = Pieces(shared.lengths, tokens, shared.ring, shared.swap_link)
    groups = np.where(shared.exchange == _HEADS, shared.head_ranks, 1)
    result = np.zeros(shared.lengths.size, dtype=np.int64)
    for direction in cost._directions(phase):
        attention = ring_attention(stage, cost.window, pieces, direction)
        if np.any(shared.exchange == _GATHER):
            gathered = gather_attention(stage, cost.window, pieces, direction)
            attention = np.where(shared.exchange == _GATHER, gathered, attention)
        if np.any(shared.exchange == _HEADS) and cost.heads is not None and cost.kv_heads is not None:
            counts = (cost.heads, cost.kv_heads)
            swapped = heads_attention(stage, cost.window, pieces, direction, groups, counts)
            swapped = swapped - swaps(stage, pieces, direction, groups, counts)
            swapped = swapped + swaps(stage, swapping, direction, groups, counts)
            attention = np.where(shared.exchange == _HEADS, swapped, attention)
        result += attention
    return result


def pack_over(cost: CostModel, stage: StageCoefficients, pack: Shared, phase: Phase) -> int:
    """`attention_over` of sequences that share one exchange, as `CostModel.packed_attention_picoseconds`.

    All of the pack have the same ring, exchange, head ranks and links.
    """
    ring, exchange, head_ranks = int(pack.ring[0]), int(pack.exchange[0]), int(pack.head_ranks[0])
    sequences = Pack(cost.piece_tokens(pack.lengths, ring), ring, int(pack.link[0]), int(pack.swap_link[0]))
    total = 0
    for direction in cost._directions(phase):
        if exchange == _GATHER:
            total += packed_gather(stage, cost.window, sequences, direction)
        elif exchange == _HEADS and cost.heads is not None and cost.kv_heads is not None:
            counts = (cost.heads, cost.kv_heads)
            total += packed_heads(stage, cost.window, sequences, direction, head_ranks, counts)
        else:
            total += packed_walk(stage, cost.window, sequences, direction)
    return total
