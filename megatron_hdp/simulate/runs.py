"""Simulated steps for `megatron-hdp simulate`: every strategy on the same batches, kept as numbers."""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron_hdp.errors import HdpError
from megatron_hdp.plan_flags import own_words
from megatron_hdp.planner.summary import PICOSECOND, bound_of
from megatron_hdp.simulate.setting import memory_of, why_no_estimate
from megatron_hdp.simulator.files import StepNumbers, StrategyRun, step_numbers
from megatron_hdp.simulator.strategies import (
    STRATEGIES,
    MegatronPlanner,
    Setting,
    StrategyStep,
    run_strategy,
)
from megatron_hdp.types import IntArray

BEFORE_WORDS_SECONDS = 5.0
"""Progress is told this long after the last line of it, so that short runs are quiet."""


class Progress:
    """Lines on stderr for who waits."""

    def __init__(self, total: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._total, self._done, self._clock = total, 0, clock
        self._start = self._said = clock()

    def step(self, what: str) -> None:
        """One simulation begins; say so if nothing was said for a while."""
        now = self._clock()
        if now - self._said >= BEFORE_WORDS_SECONDS:
            self._said = now
            print(
                f"megatron-hdp simulate: {self._done} of {self._total} simulations done in {now - self._start:.0f} s; "
                f"now {what}",
                file=sys.stderr,
                flush=True,
            )
        self._done += 1


@dataclass(frozen=True)
class Comparison:
    """All strategies on the same steps."""

    runs: tuple[StrategyRun, ...]
    """The first is hdp."""
    floors: tuple[float, ...]
    """Seconds of each step that no plan of its batch with rings across nodes, with this capacity and what hdp offloads,
    can go below: the bound on its span, and what hdp's step has besides."""
    device_bytes: int | None = None
    """Peak of a GPU with hdp's plan of the first step; None without an estimate."""

    def run(self, name: str) -> StrategyRun | None:
        """The strategy of that name, if it was run and could."""
        return next((run for run in self.runs if run.name == name and run.failed is None), None)


def compare(
    names: Sequence[str],
    batches: Sequence[IntArray],
    setting: Setting,
    *,
    longest: int,
    megatron: MegatronPlanner | None,
    keep: Sequence[str],
    progress: Progress,
) -> Comparison:
    """Run strategies, hdp first, on batches.

    Args:
        names: of `STRATEGIES`.
        batches: sequences of every step, int64 [num_sequences].
        setting: the run.
        longest: tokens of the longest sequence of the run.
        megatron: planner of "megatron".
        keep: strategies whose timeline of the first step is kept.
        progress: is told of every simulation.

    Raises:
        HdpError: hdp cannot run. Another strategy that cannot has its reason in `StrategyRun.failed`.
    """
    runs, floors = [], []
    device_bytes = None
    for name in names:
        steps: list[StepNumbers] = []
        timeline, words, failed = None, STRATEGIES[name].words, None
        for number, lengths in enumerate(batches):
            progress.step(f"{name}, step {number + 1}")
            kept = name in keep and number == 0
            try:
                step = run_strategy(name, lengths, setting, timeline=kept, longest=longest, megatron=megatron)
            except HdpError as error:
                if name == names[0]:
                    raise
                steps, failed = [], own_words(str(error))
                break
            words, timeline = step.words, step.result.timeline if kept else timeline
            steps.append(step_numbers(step.plan, step.result, step.plan_seconds))
            if name == names[0]:
                floors.append(floor_seconds(step, setting))
                if number == 0 and why_no_estimate(setting) is None:
                    device_bytes = memory_of(setting, step.plan, longest).device
        kept_timeline = None if failed else timeline
        runs.append(StrategyRun(name=name, words=words, steps=tuple(steps), failed=failed, timeline=kept_timeline))
    return Comparison(tuple(runs), tuple(floors), device_bytes)


def floor_seconds(step: StrategyStep, setting: Setting) -> float:
    """See `Comparison.floors`."""
    bound = bound_of(step.plan, setting.cost, stages=setting.stages, virtual_stages=setting.virtual_stages)
    return step.result.seconds - step.result.span_seconds + PICOSECOND * bound.picoseconds
