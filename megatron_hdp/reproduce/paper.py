"""Published values: ByteScale, SIGCOMM 2025 (doi 10.1145/3718958.3754352), arXiv 2502.21231.

"text" is in the paper's text or a digest of the SIGCOMM version; "label" was read off a figure's labels and is good to
about 10 %. Values that could not be placed are not here: of Figure 17's 48 pairs of bars, 5 and the range of the twelve
at 256K are known.
"""

from dataclasses import dataclass
from typing import Literal

Tag = Literal["text", "label"]
Range = tuple[float, float]

BATCH_TOKENS = 32 << 20
ITERATIONS = 200
"""Averaged over, after 20 that are not."""

# Figure 18: LLaMA-7B, context 2M, Byted, 1,024 GPUs

RING_39_MS = 110.0
RING_39_TOKENS, RING_39_RANKS = 312 * 1024, 39
RING_SHARE = 0.976
"""Of the static ring in ring and MLP."""
STATIC_S, NAIVE_S, BALANCED_S = 520.0, 272.0, 157.0
MICROBATCHES = 8
NAIVE_LEAST_S, NAIVE_MOST_S, NAIVE_STD_S = 60.0, 279.0, 68.0
"""Valid computation time of ranks."""
BALANCED_RANKS_S: Range = (156.0, 157.0)
STATIC_MICROBATCHES_S = ((18, 41), (20, 43), (25, 63), (19, 46), (15, 36), (20, 48), (20, 44), (19, 41))
"""Forward and backward of one rank's micro-batches; together 518 s. Order of all but the third, which holds a sequence
of 2M, is not certain."""
STATIC_LONGEST = 2
"""Which one holds the 2M sequence, as the text says."""

# Figure 19

RDMA_PEAK_GBPS: Range = (110.0, 65.0)
"""Static, naive HDP."""
TENSOR_ACTIVITY_PERCENT: Range = (10.0, 40.0)
"""Static, HDP."""

# Figure 20: the same run, averaged

LADDER = {"dynamic rings": 1.59, "selective offload": 2.01, "balance": 3.69, "remote dataloader": 3.89}
"""What is added, one after the other -> times the throughput of static."""


# Figure 17: times the throughput of static


@dataclass(frozen=True)
class Cell:
    """A pair of bars."""

    model: str
    context: int
    data: str
    naive: float | Range
    balanced: float | Range


_2M, _256K = 2 << 20, 256 << 10
CELLS = (
    Cell("llama-7b", _2M, "github", 3.96, 7.89),
    Cell("llama-7b", _2M, "byted", 2.43, 4.26),
    Cell("llama-70b", _2M, "github", 2.45, 4.28),
    Cell("mixtral-8x22b", _2M, "github", 2.75, 4.13),
    Cell("mixtral-8x22b", _2M, "byted", 1.67, 2.41),
)
RANGES_256K: tuple[Range, Range] = ((1.12, 1.28), (1.28, 1.73))
"""All twelve panels at 256K: naive, balanced."""
MODELS = ("llama-7b", "llama-13b", "llama-30b", "llama-70b", "mixtral-8x7b", "mixtral-8x22b")
DATA = ("github", "byted")
PER_DOUBLING = {"static": 2.0, "naive": 1.23, "balanced": 1.08}
"""Throughput falls so many times when the context doubles, from 256K to 2M; the text tells it of GitHub."""
CONTEXTS = (_256K, _256K * 2, _256K * 4, _2M)
