"""From medians to coefficients: non-negative least squares of relative errors. numpy only.

The terms are those of the cost model (docs/cost-model.md): attention a s^2, linear b s, one constant per sequence and
one per micro-batch, the constants in forward and again in backward.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from megatron_hdp.cost.calibrate import nonnegative_least_squares
from megatron_hdp.profiler.cases import Case, weight
from megatron_hdp.profiler.samples import Sample

POOR_R2 = 0.98
POOR_ERROR = 0.15
"""A fit is called poor below this R2, or if an error of what counts fully is larger than this."""
POOR_TRANSFER_ERROR = 0.3
"""The same for transfers: networks change their way of sending between small and large messages."""
POOR_UNSEEN = 0.08
"""The median error of unseen micro-batches is called poor above this."""


@dataclass(frozen=True)
class Fit:
    """Coefficients of one fit, and how good it is."""

    what: str
    coefficients: tuple[float, ...]
    points: int
    r2: float
    worst: float
    """Largest relative error of a point that counts fully (all of them, unless weights were given)."""
    worst_at: str
    tolerance: float = POOR_ERROR

    @property
    def is_poor(self) -> bool:
        """Should the user be warned? Below `POOR_R2`, or with an error above the tolerance."""
        return self.r2 < POOR_R2 or self.worst > self.tolerance

    @property
    def quality(self) -> str:
        """One phrase for reports and for the profile."""
        return f"{self.points} points, R2 {self.r2:.4f}, worst error {100 * self.worst:.1f} % at {self.worst_at}"


def fit(
    what: str,
    terms: Sequence[Sequence[float]],
    values: Sequence[float],
    names: Sequence[str],
    weights: Sequence[float] | None = None,
    known: Sequence[float] | None = None,
) -> Fit:
    """Coefficients >= 0 of ``terms`` (one row per point) that give ``values`` (positive) with least relative errors.

    ``known`` is a part of every value that is not fitted. A point with weight w counts w^2 as much as one with 1.
    """
    value = np.asarray(values, dtype=np.float64)
    matrix = np.asarray(terms, dtype=np.float64)
    offset = np.zeros_like(value) if known is None else np.asarray(known, dtype=np.float64)
    counts = np.ones_like(value) if weights is None else np.asarray(weights, dtype=np.float64)
    scale = counts / value
    # columns of like size: seconds per token^2 beside seconds would look singular to the solver
    size = np.maximum(np.abs(matrix * scale[:, None]).max(axis=0), 1e-300)
    found = nonnegative_least_squares(matrix * scale[:, None] / size, (value - offset) * scale) / size
    said = matrix @ found + offset
    errors = np.where(counts >= counts.max(), np.abs(said / value - 1), 0.0)
    spread = float(np.sum((value - value.mean()) ** 2))
    r2 = 1.0 - float(np.sum((value - said) ** 2)) / spread if spread > 0 else 1.0
    at = int(errors.argmax())
    return Fit(what, tuple(float(x) for x in found), len(value), r2, float(errors[at]), names[at])


def area(length: int, window: int | None) -> float:
    """What a s^2 is a multiple of: token^2 of a local sequence, with a window twice the area of its mask."""
    reach = length if window is None else min(length, window)
    return float(reach * (2 * length - reach))


@dataclass(frozen=True)
class LayerFit:
    """One layer's times. Pairs are (forward, backward)."""

    attention: tuple[Fit, Fit]
    """a [s/token^2], and what is linear and constant in core attention alone."""
    layer: Fit
    """b forward [s/token], b backward, per sequence [s], per micro-batch [s]."""
    windows: tuple[int | None, ...]
    """What a query of each measured layer sees."""

    @property
    def quadratic(self) -> tuple[float, float]:
        """Seconds per token^2."""
        return self.attention[0].coefficients[0], self.attention[1].coefficients[0]

    def seconds(self, lengths: Sequence[int]) -> Sample:
        """Forward and backward of one layer, as the cost model says; mean over layers whose windows differ."""
        forward, backward, per_sequence, per_microbatch = self.layer.coefficients
        constant = per_sequence * len(lengths) + per_microbatch
        quadratic = _areas(lengths, self.windows)
        return tuple(a * quadratic + b * sum(lengths) + constant for a, b in zip(self.quadratic, (forward, backward)))


def _areas(lengths: Sequence[int], windows: Sequence[int | None]) -> float:
    """Area of a micro-batch, mean over the layers."""
    return sum(area(s, window) for s in lengths for window in windows) / len(windows)


def fit_layer(
    times: Mapping[Case, Sample], windows: Sequence[int | None], attention_window: int | None, capacity: int
) -> LayerFit:
    """The fit of all cases that are not unseen.

    Core attention alone gives a; then whole layers, with a known, give the rest. ``attention_window`` is that of the
    cases of attention; micro-batches count by `cases.weight`.
    """
    seen = {case: sample for case, sample in times.items() if not case.unseen}
    forward, backward = _fit_attention(seen, attention_window, capacity)
    rows, values, known, names, weights = [], [], [], [], []
    for part, (phase, attention) in enumerate((("forward", forward), ("backward", backward))):
        for case in seen:
            if case.kind == "layers":
                rows.append((case.tokens * (part == 0), case.tokens * (part == 1), len(case.lengths), 1.0))
                values.append(seen[case][part])
                known.append(attention.coefficients[0] * _areas(case.lengths, windows))
                names.append(f"{case.shown} {phase}")
                weights.append(weight(case.tokens, capacity))
    rest = fit("whole layer, a known", rows, values, names, weights, known)
    return LayerFit((forward, backward), rest, tuple(windows))


def _fit_attention(seen: Mapping[Case, Sample], window: int | None, capacity: int) -> tuple[Fit, Fit]:
    """Forward and backward of core attention alone: a, and what is linear and constant in it."""
    cases = [case for case in seen if case.kind == "attention"]
    names = [case.shown for case in cases]
    terms = [(area(case.tokens, window), case.tokens, 1.0) for case in cases]
    weights = [weight(case.tokens, capacity) for case in cases]
    forward, backward = (
        fit(f"core attention {phase}", terms, [seen[case][part] for case in cases], names, weights)
        for part, phase in enumerate(("forward", "backward"))
    )
    return forward, backward


@dataclass(frozen=True)
class Unseen:
    """One micro-batch that the fit did not see."""

    case: Case
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        """Relative, without sign."""
        return abs(self.predicted / self.measured - 1)


def check_unseen(times: Mapping[Case, Sample], layer: LayerFit) -> tuple[Unseen, ...]:
    """Forward and backward of every unseen micro-batch, measured and predicted."""
    found = []
    for case, sample in times.items():
        if case.unseen and case.kind == "layers":
            found.append(Unseen(case, sum(sample), sum(layer.seconds(case.lengths))))
    return tuple(found)


def fit_line(
    what: str, sizes: Sequence[float], values: Sequence[float], unit: str, tolerance: float = POOR_ERROR
) -> Fit:
    """value = constant + slope x size; coefficients (constant, slope)."""
    line = fit(what, [(1.0, size) for size in sizes], values, [f"{size:.0f} {unit}" for size in sizes])
    return replace(line, tolerance=tolerance)


@dataclass(frozen=True)
class Transfers:
    """Exchanges with both neighbours of a ring, on its slowest rank."""

    where: str
    sizes: tuple[int, ...]
    """Bytes sent each way."""
    seconds: tuple[float, ...]
    ranks: int
    """Ranks of the largest ring."""
    fit: Fit
    """Latency [s] and seconds per byte."""


def fit_transfers(where: str, sizes: Sequence[int], seconds: Sequence[float], ranks: int) -> Transfers:
    """Latency and bandwidth from the times of exchanges of ``sizes`` bytes."""
    line = fit_line(f"transfers {where}", sizes, seconds, "bytes", POOR_TRANSFER_ERROR)
    return Transfers(where, tuple(sizes), tuple(seconds), ranks, line)
