"""A plan in a few numbers, for logs, metrics and the command line."""

from dataclasses import dataclass

import numpy as np

from megatron_hdp.planner.check import peers
from megatron_hdp.planner.load import microbatch_costs, rank_costs
from megatron_hdp.planner.order import execute
from megatron_hdp.types import Plan


@dataclass(frozen=True)
class PlanSummary:
    """What a plan does. Work is `megatron_hdp.planner.load.piece_cost`, not seconds."""

    sequences: int
    tokens: int
    """Real tokens of the batch."""
    padding_tokens: int
    padding_fraction: float
    """Padding over all tokens that ranks hold."""
    ring_sizes: dict[int, int]
    """Ring size -> number of sequences, ascending sizes."""
    microbatches_min: int
    """Micro-batches of the rank that has the fewest."""
    microbatches_max: int
    imbalance: float
    """Work of the busiest rank over the mean of all."""
    span_over_mean: float
    """Time until the last rank is done, waiting in rings counted, over the mean work; no pipeline. At least 1."""
    peers_max: int
    tokens_per_rank_max: int
    """Tokens, padding counted, of the rank that holds the most over the whole plan."""
    tokens_per_rank_mean: float


def summarize(plan: Plan) -> PlanSummary:
    """Summary of a plan that passes `check`."""
    piece_tokens = 2 * plan.chunk_tokens
    held = int((piece_tokens * plan.ring_size).sum())
    begin = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(piece_tokens[plan.piece_sequence])])
    per_rank = np.diff(begin[plan.microbatch_offsets[plan.rank_offsets]])
    work = rank_costs(plan)
    sizes, counts = np.unique(plan.ring_size, return_counts=True)
    return PlanSummary(
        sequences=plan.num_sequences,
        tokens=plan.tokens,
        padding_tokens=held - plan.tokens,
        padding_fraction=(held - plan.tokens) / held,
        ring_sizes=dict(zip(sizes.tolist(), counts.tolist(), strict=True)),
        microbatches_min=int(plan.microbatch_counts.min()),
        microbatches_max=int(plan.microbatch_counts.max()),
        imbalance=float(work.max() / work.mean()),
        span_over_mean=float(execute(plan, microbatch_costs(plan)).max() / work.mean()),
        peers_max=int(peers(plan).max()),
        tokens_per_rank_max=int(per_rank.max()),
        tokens_per_rank_mean=held / plan.num_ranks,
    )
