"""Repeats of many cases in turn, within a time that all ranks agree on."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron_hdp.profiler.agree import Everyone
from megatron_hdp.profiler.cases import Case
from megatron_hdp.profiler.samples import Sample, middle

type Runner = Callable[[], Sample]

_FEWEST_ROUNDS = 3
_MOST_ROUNDS = 30
_LONG_SECONDS = 0.01
"""A case that is shorter than this runs several times in a round."""
_MOST_IN_A_ROUND = 5


@dataclass(frozen=True)
class Rounds:
    """What was measured on one rank."""

    samples: dict[Case, list[Sample]]
    left_out: tuple[Case, ...]
    """Cases that did not fit into the time or the memory."""


def run_rounds(
    cases: Sequence[Case],
    has: Callable[[Case], bool],
    prepare: Callable[[Case], Runner],
    seconds: float,
    everyone: Everyone,
    clock: Callable[[], float] = time.perf_counter,
) -> Rounds:
    """Warm up every case in the given order, then run all of them in turn until the time is up.

    In turn, because a machine's speed drifts: each case then sees all of it. All ranks run the same cases equally
    often, for a case may contain collectives of tensor parallelism; a rank that does not have a case skips it.
    ``prepare`` makes a case's runner. A `MemoryError` of either ends the cases there, on all ranks; so does a quarter
    of the time, because three rounds must still fit into the rest.
    """
    begin = clock()
    seconds = -everyone.most(-seconds)[0]  # what all of them have left
    runners: dict[Case, Runner | None] = {}
    for case in cases:
        fits = True
        runner: Runner | None = None
        try:
            if has(case):
                runner = prepare(case)
                runner()
        except MemoryError:
            fits = False
        failed, elapsed = everyone.most(0.0 if fits else 1.0, clock() - begin)
        if failed:
            break
        runners[case] = runner
        if elapsed > seconds / 4:
            break
    left_out = tuple(case for case in cases if case not in runners)
    samples: dict[Case, list[Sample]] = {case: [] for case, runner in runners.items() if runner is not None}
    repeats = dict.fromkeys(runners, 1)
    for done in range(_MOST_ROUNDS):
        started = clock()
        for case, runner in runners.items():
            if runner is not None:
                samples[case] += [runner() for _ in range(repeats[case])]
        now = clock()
        medians = [sum(middle(samples[case])) if case in samples else 0.0 for case in runners]
        spent, last, *medians = everyone.most(now - begin, now - started, *medians)
        if done + 1 >= _FEWEST_ROUNDS and spent + last > seconds:
            break
        for case, median in zip(runners, medians):
            repeats[case] = max(1, min(_MOST_IN_A_ROUND, round(_LONG_SECONDS / max(median, 1e-9))))
    return Rounds(samples, left_out)
