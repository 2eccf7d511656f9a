"""How much work a piece is, in integers: a float sum could differ between platforms, and with it the plan."""

import numpy as np

from megatron_hdp.types import IntArray, Plan

ATTENTION_TOKENS = 49152
"""Sequence length at which causal attention costs as much as everything else.

A token of a sequence of s tokens costs 1 + s / ATTENTION_TOKENS tokens' worth of linear layers: 12 h^2 multiplications
per layer and token outside attention against s h inside it, at h = 4096 (LLaMA-7B). It only ranks and balances work;
seconds come from a profile.
"""


def piece_cost(lengths: IntArray, piece_tokens: IntArray) -> IntArray:
    """Work of one piece, in 1 / ATTENTION_TOKENS of a token's linear layers; shapes [num_sequences].

    Summed over a ring it is d t (ATTENTION_TOKENS + s), with t the piece's tokens, padding counted. It fits int64 for
    any batch below 2^31 tokens, sums over the batch included.
    """
    return piece_tokens * (ATTENTION_TOKENS + lengths)


def microbatch_costs(plan: Plan) -> IntArray:
    """Work of every micro-batch of a plan, in units of `piece_cost`, in the plan's order."""
    cost = piece_cost(plan.lengths, 2 * plan.chunk_tokens)[plan.piece_sequence]
    total = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(cost)])
    return np.diff(total[plan.microbatch_offsets])


def rank_costs(plan: Plan) -> IntArray:
    """Work of every rank of a plan, in units of `piece_cost`, shape [num_ranks]."""
    total = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(microbatch_costs(plan))])
    return np.diff(total[plan.rank_offsets])
