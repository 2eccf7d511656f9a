"""What each step of a ring takes beside computing and transfers: calls, posting of messages, merging of results."""

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from megatron_hdp.cost.profile import LinkProfile
from megatron_hdp.profiler.fit import LayerFit
from megatron_hdp.profiler.samples import Sample, middle

PIECES = (256, 512, 1024)
"""Tokens of the pieces that are timed, as far as a rank holds them: short, so that computing takes little."""
MOST_RANKS = 4
"""Ranks of the ring, at most: a step of a wider one takes no longer."""
_WARM_UP, _REPEATS = 3, 9


class RingSample(NamedTuple):
    """Core attention of one layer on a ring, on one rank; seconds."""

    tokens: int
    """Of a piece."""
    ring: int
    seconds: Sample
    """Forward and backward."""


def sample(tokens: int, ring: int, runs: Sequence[Sample]) -> RingSample:
    """The medians of repeats, the first of which are not looked at."""
    return RingSample(tokens, ring, middle(runs[_WARM_UP:]))


NUM_RUNS = _WARM_UP + _REPEATS


def ring_steps(
    samples: Sequence[RingSample], layer: LayerFit, row_bytes: tuple[float, float], link: LinkProfile | None
) -> tuple[float, float] | None:
    """Seconds of each step after the first, forward and backward: what the other coefficients do not say.

    Args:
        samples: of all ranks that were on a ring.
        layer: fit of local sequences, whose core attention has a part per token that a ring's first step has as well.
        row_bytes: of a token's keys and values, and of their gradients.
        link: what transfers take, where the clock counts them; None if it does not.

    Returns:
        None without samples.
    """
    if not samples:
        return None
    found = []
    for part, fit in enumerate(layer.attention):
        quadratic, per_token, constant = fit.coefficients
        moved = row_bytes[0] + (row_bytes[1] if part else 0.0)
        left = []
        for tokens, ring, seconds in samples:
            computing = quadratic * ring * tokens**2 + per_token * tokens + constant
            sending = 0.0 if link is None else (ring - 1) * (link.latency + moved * tokens / link.bandwidth)
            left.append((seconds[part] - computing - sending) / (ring - 1))
        found.append(max(0.0, statistics.median(left)))
    return found[0], found[1]
