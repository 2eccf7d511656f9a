"""Which part of each dataset's stream belongs to batch k: exact integer arithmetic, any k without the ones before.

Weights are shares of tokens, kept as whole numbers. A *cut* is one index per stream; batch k lies between cuts k and
k + 1, so that batches never overlap and leave nothing out.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from megatron_hdp.data.stream import Stream
from megatron_hdp.errors import ConfigError


@dataclass(frozen=True)
class TokenBudget:
    """Batches of ``tokens`` tokens on average: dataset d gives the sequences whose first token falls into its share.

    With normalised weights w, batch k holds those sequences of d that start in [k tokens w_d, (k + 1) tokens w_d).
    """

    tokens: int

    def __post_init__(self) -> None:
        if self.tokens <= 0:
            raise ConfigError(f"--hdp-batch-tokens is {self.tokens}: it must be a positive number of tokens")

    def check(self, streams: Sequence[Stream], weights: Sequence[int]) -> None:
        """Raise `ConfigError` if a batch could be empty: no share always reaches the start of a next sequence."""
        total = sum(weights)
        # starts are at most one longest sequence apart, so a share of that width holds one
        if any(self.tokens * w >= s.table.longest * total for s, w in zip(streams, weights)):
            return
        needed = min(-(-s.table.longest * total // w) for s, w in zip(streams, weights))
        heaviest = max(range(len(weights)), key=lambda d: weights[d])
        share, longest = weights[heaviest] / total, streams[heaviest].table.longest
        raise ConfigError(
            f"--hdp-batch-tokens {self.tokens} can give a step without any sequence: the longest sequence of the "
            f"heaviest dataset (share {share:.3g}) has {longest} tokens, its share of a step "
            f"{self.tokens * share:.0f}: set --hdp-batch-tokens to at least {needed}"
        )

    def cut(self, step: int, streams: Sequence[Stream], weights: Sequence[int]) -> tuple[int, ...]:
        """Index of the first sequence of batch ``step`` in every stream."""
        total = sum(weights)
        # starts are whole numbers: the first one at or after an edge is at or after its ceiling
        return tuple(s.count_before(-(-step * self.tokens * w // total)) for s, w in zip(streams, weights))


@dataclass(frozen=True)
class SequenceCount:
    """Batches of ``count`` sequences: ranks k count .. (k + 1) count - 1 of all streams merged.

    The merge is by virtual time, a sequence's start over its dataset's weight (equal times: the lower dataset first),
    so that tokens follow the weights at every moment.
    """

    count: int

    def __post_init__(self) -> None:
        if self.count <= 0:
            raise ConfigError(f"--global-batch-size is {self.count}: it must be a positive number of sequences")

    def check(self, streams: Sequence[Stream], weights: Sequence[int]) -> None:
        """Nothing can go wrong here: a batch always has ``count`` sequences."""

    def cut(self, step: int, streams: Sequence[Stream], weights: Sequence[int]) -> tuple[int, ...]:
        """Index of the first sequence of batch ``step`` in every stream."""
        return merged_cut(step * self.count, streams, weights)


def merged_cut(rank: int, streams: Sequence[Stream], weights: Sequence[int]) -> tuple[int, ...]:
    """How many of the first ``rank`` sequences of the merged stream come from each stream; they sum to ``rank``.

    Bisection on the heaviest stream's tokens. Between two of its neighbouring tokens every other stream has at most
    one start (its weight is not larger), so that what is left to order exactly is one candidate per stream.
    """
    heaviest = max(weights)

    def place(token: int, weight: int) -> int:
        """First token of a stream that is not before the heaviest stream's ``token`` in virtual time."""
        return -(-token * weight // heaviest)

    def whole_epochs(token: int) -> int:
        """At most this many sequences start before ``token``: epochs begun, no epoch loaded."""
        return sum(s.table.size * -(-place(token, w) // s.table.tokens) for s, w in zip(streams, weights))

    def sure(token: int) -> int:
        """At least this many sequences start before ``token``: epochs completed, no epoch loaded."""
        return sum(s.table.size * (place(token, w) // s.table.tokens) for s, w in zip(streams, weights))

    def counts(token: int) -> tuple[int, ...]:
        return tuple(s.count_before(place(token, w)) for s, w in zip(streams, weights))

    low = _last(lambda token: whole_epochs(token) <= rank, 0)
    high = _last(lambda token: sure(token) <= rank, low) + 1
    token = _last(lambda token: sum(counts(token)) <= rank, low, high)
    cut = list(counts(token))
    after = counts(token + 1)
    tied = [d for d in range(len(streams)) if after[d] > cut[d]]
    tied.sort(key=lambda d: (Fraction(streams[d].start(cut[d]), weights[d]), d))
    for dataset in tied[: rank - sum(cut)]:
        cut[dataset] += 1
    return tuple(cut)


def _last(holds: Callable[[int], bool], low: int, high: int | None = None) -> int:
    """Largest number from ``low`` on for which ``holds`` (true at low, false at high, falls once)."""
    if high is None:
        step = 1
        while holds(low + step):
            step *= 2
        high = low + step
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def whole_weights(weights: Sequence[float | int]) -> tuple[int, ...]:
    """The smallest whole numbers in the ratio of ``weights``, read as the decimals that the user wrote.

    Raises `ConfigError` for a weight that is not a finite number of at least 0, or if all are 0.
    """
    for weight in weights:
        if not math.isfinite(weight) or weight < 0:
            raise ConfigError(f"--data-path: weight {weight}: weights must be finite and not negative")
    fractions = [Fraction(str(weight)) for weight in weights]
    denominator = math.lcm(*(f.denominator for f in fractions))
    numerators = [int(f * denominator) for f in fractions]
    divisor = math.gcd(*numerators)
    if divisor == 0:
        raise ConfigError(f"--data-path: all {len(weights)} weights are 0: give at least one dataset a share")
    return tuple(n // divisor for n in numerators)
