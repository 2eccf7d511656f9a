"""What is measured: micro-batches of one long sequence, of many short ones, and others that only test the fit."""

from dataclasses import dataclass
from typing import Literal

from megatron_hdp.errors import ConfigError

type Kind = Literal["layers", "attention", "loss", "embedding"]

SHORTEST = 64
"""Tokens of the shortest sequence that is measured alone."""
_MOST_LENGTHS = 9
"""Lengths of the grid: factor 2 between them, so that nine span a factor of 256."""
_PACKED = (8, 32, 128)
"""Full micro-batches of equal sequences have so many of them."""
_UNSEEN = (0.71, 0.36, 0.18, 0.09)
"""Shares of the capacity, between those of the grid, that only test the fit."""


@dataclass(frozen=True)
class Case:
    """One thing to time: a micro-batch of local sequences through one part of the model."""

    kind: Kind
    lengths: tuple[int, ...]
    unseen: bool = False
    """Not used for the fit: tests what the fit says."""

    @property
    def tokens(self) -> int:
        """Tokens of the micro-batch."""
        return sum(self.lengths)

    @property
    def shown(self) -> str:
        """The micro-batch in a few characters."""
        if len(set(self.lengths)) == 1:
            return f"{len(self.lengths)} x {self.lengths[0]}" if len(self.lengths) > 1 else f"{self.lengths[0]}"
        return f"{len(self.lengths)} of {min(self.lengths)} to {max(self.lengths)}"


def grid(capacity: int) -> tuple[int, ...]:
    """Lengths from the capacity down by halves, even, ascending."""
    lengths = [_even(capacity)]
    while len(lengths) < _MOST_LENGTHS and lengths[-1] // 2 >= SHORTEST:
        lengths.append(_even(lengths[-1] / 2))
    return tuple(reversed(lengths))


def all_cases(capacity: int) -> tuple[Case, ...]:
    """Every case for micro-batches of ``capacity`` tokens, the cheap ones first.

    Raises ConfigError for a capacity at which there is no grid.
    """
    if capacity < 4 * SHORTEST:
        raise ConfigError(
            f"--hdp-tokens-per-rank is {capacity}: a profile is measured from {SHORTEST} tokens up to it, give at "
            f"least {4 * SHORTEST}"
        )
    lengths = grid(capacity)
    unseen = [_even(share * capacity) for share in _UNSEEN if share * capacity >= SHORTEST]
    cases = [Case("attention", (length,)) for length in lengths]
    cases += [Case("layers", (length,)) for length in lengths]
    cases += [Case("layers", _equal(capacity, count)) for count in _PACKED if capacity // count >= 8]
    cases += [Case("layers", (length,), unseen=True) for length in unseen]
    cases += [Case("layers", _equal(capacity // 2, 16), unseen=True), Case("layers", _mixed(capacity), unseen=True)]
    cases += [Case(kind, (length,)) for kind in ("loss", "embedding") for length in lengths[-3:]]
    return tuple(sorted(set(cases), key=lambda case: (case.tokens, case.kind, case.lengths)))


def weight(tokens: int, capacity: int) -> float:
    """How much a micro-batch counts in a fit: the planner fills them, so small ones are rare and count less."""
    return min(1.0, max(0.25, 4 * tokens / capacity))


def _equal(tokens: int, count: int) -> tuple[int, ...]:
    return (_even(tokens / count),) * count


def _mixed(tokens: int) -> tuple[int, ...]:
    """Halves of what is left, as documents often are: few long ones and many short ones."""
    lengths: list[int] = []
    while tokens >= 32 and len(lengths) < 6:
        lengths.append(_even(tokens / 2))
        tokens -= lengths[-1]
    return tuple(lengths)


def _even(tokens: float) -> int:
    return max(2, int(tokens) // 2 * 2)
