"""How many bytes ring attention sends, from the plan alone. No torch."""

import numpy as np

from megatron_hdp.attention.layout import slice_tokens_of_many
from megatron_hdp.types import IntArray, Plan


def ring_bytes(plan: Plan, heads_kv: int, head_dim: int, bytes_per_element: int, backward: bool = True) -> IntArray:
    """Bytes that every rank sends for one attention layer of one plan, shape [num_ranks].

    Forward: each slice but the one that the next rank owns goes on once. Backward: the same again, and every slice's
    gradients go on once, in fp32 (fp64 for fp64 inputs). Recomputing the forward pass costs another forward.
    """
    row_elements = 2 * heads_kv * head_dim
    gradient_bytes = max(4, bytes_per_element)
    sent = np.zeros(plan.num_ranks, dtype=np.int64)
    chunks = plan.chunk_tokens
    for size in np.unique(plan.ring_size[plan.ring_size > 1]).tolist():
        chosen = np.flatnonzero(plan.ring_size == size)
        lengths = plan.lengths[chosen, None]
        held = slice_tokens_of_many(plan.lengths[chosen], chunks[chosen], size)
        per_position = (lengths - np.roll(held, -1, axis=1)) * bytes_per_element * (2 if backward else 1)
        if backward:
            per_position = per_position + lengths * gradient_bytes
        walk = np.array(plan.ring(int(chosen[0])).ranks) - plan.ring_start[chosen[0]]
        np.add.at(sent, plan.ring_start[chosen, None] + walk, per_position * row_elements)
    return sent
