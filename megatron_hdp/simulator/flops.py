"""FLOPs that a model needs for a batch: products of matrices, forward and backward, recompute not counted."""

import numpy as np

from megatron_hdp.simulator.job import Job
from megatron_hdp.types import IntArray


def batch_flops(lengths: IntArray, job: Job) -> float:
    """FLOPs of a step over sequences of these true lengths; 0 without a model.

    Backward takes twice the FLOPs of forward. Attention is causal: a query at position p sees min(p + 1, window)
    tokens, on average half of the sequence, and padding is not counted. Embeddings are looked up, not multiplied.
    """
    if job.model is None:
        return 0.0
    m = job.model
    experts = job.experts_per_token if job.experts > 1 else 1
    attention = m.hidden * m.head_dim * (2 * m.heads + 2 * m.kv_heads)
    mlp = (3 if m.gated else 2) * m.hidden * m.ffn * experts
    router = m.hidden * job.experts if job.experts > 1 else 0
    weights = m.layers * (attention + mlp + router) + m.hidden * m.vocabulary
    length = lengths.astype(np.float64)
    reach = length if job.cost.window is None else np.minimum(length, job.cost.window)
    pairs = float((reach * (2 * length - reach)).sum()) / 2  # of a query and a key that it sees
    return 6.0 * weights * float(length.sum()) + 12.0 * m.layers * m.heads * m.head_dim * pairs
