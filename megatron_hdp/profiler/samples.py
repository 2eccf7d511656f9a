"""Samples of one case, and what is made of them."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_hdp.profiler.cases import Case

type Sample = tuple[float, ...]
"""Seconds of the parts of one run, forward and backward say."""

OUTLIER = 1.5
"""A sample this many times the median is shown as an outlier."""


def middle(samples: Sequence[Sample]) -> Sample:
    """Medians of the parts."""
    return tuple(statistics.median(part) for part in zip(*samples, strict=True))


def outliers(samples: Sequence[Sample]) -> tuple[int, float]:
    """How many samples took more than `OUTLIER` times the median in all, and the worst one's factor."""
    totals = [sum(sample) for sample in samples]
    median = statistics.median(totals)
    factors = [total / median for total in totals] if median > 0 else [1.0]
    return sum(factor > OUTLIER for factor in factors), max(factors)


@dataclass(frozen=True)
class Measured:
    """One case over all ranks."""

    case: Case
    seconds: Sample
    """Medians of the repeats, then over the ranks."""
    repeats: int
    outliers: int
    worst: float
    """Largest sample over its rank's median."""
    spread: float
    """Slowest over fastest rank."""


def combine(gathered: Sequence[Mapping[Case, Sequence[Sample]]]) -> tuple[Measured, ...]:
    """Every rank's samples of every case, as medians; a rank need not have every case."""
    found = []
    for case in dict.fromkeys(case for samples in gathered for case in samples):
        ranks = [samples[case] for samples in gathered if case in samples]
        medians = [middle(samples) for samples in ranks]
        totals = [sum(sample) for sample in medians]
        counts, factors = zip(*(outliers(samples) for samples in ranks))
        repeats = sum(len(samples) for samples in ranks)
        spread = max(totals) / max(min(totals), 1e-12)
        found.append(Measured(case, middle(medians), repeats, sum(counts), max(factors), spread))
    return tuple(found)
