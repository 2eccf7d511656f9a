"""Simulated steps: each once, whatever figures need it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from megatron_hdp.reproduce.case import Case, batch, setting_of
from megatron_hdp.reproduce.static import static_step
from megatron_hdp.simulator.result import StepResult
from megatron_hdp.simulator.strategies import run_strategy
from megatron_hdp.types import IntArray

STRATEGIES = {"naive": "naive", "balanced": "bytescale", "ours": "hdp"}
"""The paper's words -> a name of `simulator.strategies.STRATEGIES`; "static" is `reproduce.static`."""


@dataclass(frozen=True)
class Step:
    """What is kept of a simulated step."""

    seconds: float
    tokens: int
    busy: tuple[float, float, float]
    """Seconds that ranks spend in micro-batches, waits inside them counted: least, most, standard deviation."""
    peak: float
    """byte/s of one NIC."""


def step_of(result: StepResult) -> Step:
    """The numbers of a simulated step; a rank is its first stage."""
    waits = (result.idle[cause] for cause in ("ring", "partner", "expert", "copy"))
    busy = sum(waits, result.compute)[:: result.stages]
    spread = float(busy.min()), float(busy.max()), float(busy.std())
    return Step(result.seconds, result.tokens, spread, result.nic_peak)


@dataclass
class Steps:
    """Simulates on demand."""

    progress: Callable[[str], None] = lambda words: None
    """Told what is simulated next."""
    _known: dict[tuple[Case, str, int], Step] = field(default_factory=dict)

    def static_count(self, count: int) -> int:
        """A static step hardly depends on its batch, and takes ten times as long to simulate."""
        return max(1 if count < 4 else 2, count // 8)

    def run(self, case: Case, strategy: str, steps: Sequence[int]) -> list[Step]:
        """Those steps, in order; ``strategy`` is a name of `STRATEGIES` here."""
        missing = [step for step in steps if (case, strategy, step) not in self._known]
        if missing:
            self.progress(f"{case.model} {case.data} {case.context >> 10}K: {strategy}, {len(missing)} steps")
        for step in missing:
            self._known[case, strategy, step] = self.simulate(case, strategy, batch(case, step))
        return [self._known[case, strategy, step] for step in steps]

    def simulate(self, case: Case, strategy: str, lengths: IntArray) -> Step:
        """One step."""
        setting = setting_of(case)
        if strategy == "static":
            return step_of(static_step(lengths, setting))
        return step_of(run_strategy(STRATEGIES[strategy], lengths, setting).result)


def throughput(steps: Sequence[Step]) -> float:
    """Tokens per second of all steps together."""
    return sum(step.tokens for step in steps) / sum(step.seconds for step in steps)


@dataclass(frozen=True)
class Speedup:
    """Throughput over that of static."""

    value: float
    """Of all steps together."""
    least: float
    most: float
    """Of single steps, over static's mean."""
    uncertain: float
    """Standard error of ``value``, relative: batches differ, and these are some of them."""


STANDARD_ERROR = "std. error: of the mean, because batches differ; that of static is not in it"
"""What the column is."""


def speedup(static: Sequence[Step], steps: Sequence[Step], extra_s: float = 0.0) -> Speedup:
    """Of ``steps``, each ``extra_s`` longer, over ``static``."""
    base = throughput(static)
    seconds = np.array([step.seconds for step in steps]) + extra_s
    tokens = np.array([step.tokens for step in steps], dtype=np.float64)
    each = tokens / seconds / base
    value = float(tokens.sum() / seconds.sum() / base)
    uncertain = float(seconds.std(ddof=1) / seconds.mean() / np.sqrt(seconds.size))
    return Speedup(value, float(each.min()), float(each.max()), uncertain)
