"""Is HDP worth it for this data? Plain sentences from simulated steps."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_hdp.lengths import format_size
from megatron_hdp.memory import GIB, sized
from megatron_hdp.simulate.runs import Comparison
from megatron_hdp.simulate.search import STATIC, Search, Tried
from megatron_hdp.simulator.files import StepNumbers, StrategyRun
from megatron_hdp.simulator.strategies import STRATEGIES, Setting
from megatron_hdp.types import IntArray

_WORTH = 1.1
"""From this speed-up on HDP is worth a change of the training script."""
_NOTICED = 1.02
"""Below this one nobody would notice."""
_SAID = 0.01
"""Causes of idling that take a larger part of the step are named."""
CAUSE_WORDS = {
    "load": "data and plans",
    "gather": "parameters",
    "ring": "transfers of rings",
    "partner": "other ranks of a ring",
    "expert": "ranks that share experts",
    "copy": "copies to host memory",
    "bubble": "other pipeline stages",
    "sync": "the slowest rank",
    "reduce": "sums of gradients",
}
"""Cause of idling -> what a GPU waits for."""


@dataclass(frozen=True)
class Ratio:
    """How many times as fast."""

    whole: float
    """All steps together."""
    steps: tuple[float, ...]
    """One by one."""

    def __str__(self) -> str:
        """ "3.31 times as fast (3.20 to 3.40 in 3 steps)"."""
        low, high = min(self.steps), max(self.steps)
        several = f" ({low:.2f} to {high:.2f} in {len(self.steps)} steps)" if len(self.steps) > 1 else ""
        return f"{self.whole:.2f} times as fast{several}"


def ratio(slow: Sequence[float], fast: Sequence[float]) -> Ratio:
    """Seconds of steps over those of the same steps."""
    return Ratio(sum(slow) / sum(fast), tuple(a / b for a, b in zip(slow, fast, strict=True)))


def seconds(run: StrategyRun) -> list[float]:
    """Of every step."""
    return [step["seconds"] for step in run.steps]


def step_seconds(run: StrategyRun) -> float:
    """Mean over steps."""
    return statistics.mean(seconds(run))


def verdict(
    setting: Setting, batches: Sequence[IntArray], compared: Comparison, found: Search | None, batch_tokens: int
) -> tuple[str, ...]:
    """Sentences: is it worth it, by how much at most, why, with which settings, and the flags.

    Args:
        setting: the run.
        batches: sequences of every step.
        compared: what `simulate.runs.compare` found.
        found: what `simulate.search.search` found; None if nobody looked.
        batch_tokens: tokens of a step, for the flags.
    """
    hdp = compared.runs[0]
    static = compared.run(STATIC)
    sentences = [_worth(hdp, static, compared)]
    sentences += _closest(hdp, compared)
    sentences.append(_at_most(hdp, static, compared))
    sentences.append(_why(setting, batches, hdp, static))
    sentences += _planning(hdp)
    if found is not None:
        sentences += _settings(setting, found)
    sentences.append(f"On the training command: {' '.join(training_flags(setting, found, batch_tokens))}")
    return tuple(sentences)


def _worth(hdp: StrategyRun, static: StrategyRun | None, compared: Comparison) -> str:
    """The first sentence."""
    mine = f"with HDP a step takes {step_seconds(hdp):,.2f} s"
    if static is None:
        run = next((run for run in compared.runs if run.name == STATIC), None)
        why = "was not asked for" if run is None else f"cannot run this: {run.failed}"
        return f"W{mine[1:]}; static context parallelism {why}."
    gain = ratio(seconds(static), seconds(hdp))
    if gain.whole >= _WORTH:
        lead = "HDP is worth it"
    else:
        lead = "HDP helps a little" if gain.whole >= _NOTICED else "HDP is hardly worth it for this data"
    return f"{lead}: {mine}, with {static.words}, {step_seconds(static):,.2f} s. HDP is {gain}."


def _closest(hdp: StrategyRun, compared: Comparison) -> list[str]:
    """Of all others the one that comes closest; and what is no plan, but an estimate."""
    sentences = []
    best = closest(compared)
    if best is not None:
        sentences.append(f"Of the other ways, {best.words} comes closest: HDP is {ratio(seconds(best), seconds(hdp))}.")
    for run in compared.runs:
        if run.failed is None and STRATEGIES[run.name].estimate:
            sentences.append(
                f"No plan, but the best that its idea could do: {run.words}, {step_seconds(run):,.2f} s a step. HDP is "
                f"{ratio(seconds(run), seconds(hdp))}."
            )
    return sentences


def closest(compared: Comparison) -> StrategyRun | None:
    """The fastest that is neither hdp nor static, and no estimate."""
    others = [run for run in compared.runs[1:] if run.failed is None and run.name != STATIC]
    return min((run for run in others if not STRATEGIES[run.name].estimate), key=step_seconds, default=None)


def _at_most(hdp: StrategyRun, static: StrategyRun | None, compared: Comparison) -> str:
    """What the bound leaves to gain."""
    most = "" if static is None else f", {ratio(seconds(static), compared.floors).whole:.2f} times as fast as static"
    reached = sum(compared.floors) / sum(seconds(hdp))
    return (
        f"At most: with this capacity no plan with rings across nodes makes the step shorter than "
        f"{statistics.mean(compared.floors):,.2f} s{most}; HDP reaches {100 * reached:.1f} % of that."
    )


def _why(setting: Setting, batches: Sequence[IntArray], hdp: StrategyRun, static: StrategyRun | None) -> str:
    """Who needs rings, and what GPUs wait for."""
    capacity = setting.tokens_per_rank
    tokens = sum(int(lengths.sum()) for lengths in batches)
    local = sum(int(lengths[lengths <= capacity].sum()) for lengths in batches)
    text = (
        f"Why: {100 * local / tokens:.0f} % of the tokens are in sequences of up to {format_size(capacity)} tokens, "
        "which one rank holds and which need no transfers."
    )
    if static is not None:
        ring = max(int(size) for step in static.steps for size in step["ring_sizes"])
        if ring > 1:
            text += f" Static context parallelism sends them all round rings of {ring:,} ranks."
        else:
            text += " Static context parallelism needs no ring for any, and is plain data parallelism."
        text += f" Its GPUs {_spent(static.steps)}"
    else:
        text += " The GPUs"
    return f"{text}; HDP's {_spent(hdp.steps)}." if static is not None else f"{text} {_spent(hdp.steps)}."


def _planning(hdp: StrategyRun) -> list[str]:
    """That plans take longer than steps, if they do: nothing hides them then, and no simulated step has them."""
    planning = statistics.mean(step["plan_seconds"] for step in hdp.steps)
    if planning <= step_seconds(hdp):
        return []
    return [
        f"Planning a step took {planning:,.2f} s on this machine, longer than the step, which the seconds above leave "
        "out: training would wait for its plans."
    ]


def _spent(steps: Sequence[StepNumbers]) -> str:
    """ "compute 8 % of the step and wait for transfers of rings 88 %"."""
    computing = statistics.mean(step["computing"] for step in steps)
    idle = {
        cause: statistics.mean(step["idle"].get(cause, 0.0) / step["seconds"] for step in steps)
        for cause in CAUSE_WORDS
    }
    named = sorted((cause for cause in idle if idle[cause] >= _SAID), key=lambda cause: -idle[cause])[:3]
    waits = ", ".join(f"{CAUSE_WORDS[cause]} {100 * idle[cause]:.0f} %" for cause in named)
    return f"compute {100 * computing:.0f} % of the step" + (f" and wait for {waits}" if waits else "")


def _settings(setting: Setting, found: Search) -> list[str]:
    """The best capacity and offload, or why nobody can say."""
    device = f"{sized(found.device_bytes)} ({found.source})"
    if found.estimated is not None:
        return [
            f"Best setting: not known, because {found.estimated}; the table of capacities says what a step would take."
        ]
    best = found.best
    if best is None or best.seconds is None:
        needed = min((row.device_bytes for row in found.rows if row.device_bytes is not None), default=None)
        least = "" if needed is None else f"; the least that any needs is {sized(needed)}"
        return [
            f"Best setting: none of those tried fits a GPU of {device}{least}. Use more --tp or --stages, or "
            "--recompute full."
        ]
    text = f"Best setting for a GPU of {device}: {_words(best)}, a first step of {best.seconds:,.2f} s"
    asked = next(
        (row for row in found.rows if (row.tokens_per_rank, row.offload) == (setting.tokens_per_rank, setting.offload)),
        None,
    )
    if asked is not None and asked.fits is False and asked.device_bytes is not None:
        text += f"; the asked one would need {sized(asked.device_bytes)} and does not fit"
    elif asked is best:
        text += ", as asked"
    elif asked is not None and asked.seconds is not None:
        text += f", {100 * (1 - best.seconds / asked.seconds):.1f} % less than as asked"
    needs = "" if best.device_bytes is None else f" It needs {sized(best.device_bytes)}"
    node = setting.machines.gpus_per_node
    host = f" and {sized(best.host_bytes)} of host memory for each GPU, {sized(node * best.host_bytes)} for a node"
    needs += f"{host}." if best.offload else "."
    sentences = [text + "." + needs]
    static = found.best_static
    if static is not None and static.static_seconds is not None:
        sentences.append(
            f"Each at its best: static context parallelism is fastest with {static.tokens_per_rank:,} tokens per rank, "
            f"a first step of {static.static_seconds:,.2f} s; HDP is then {static.static_seconds / best.seconds:.2f} "
            "times as fast."
        )
    return sentences


def _words(row: Tried) -> str:
    return f"{row.tokens_per_rank:,} tokens per rank {'with' if row.offload else 'without'} offload"


def training_flags(setting: Setting, found: Search | None, batch_tokens: int) -> list[str]:
    """What to add to the training script's flags: the best setting found, else the asked one."""
    best = None if found is None else found.best
    capacity = setting.tokens_per_rank if best is None else best.tokens_per_rank
    offload = setting.offload if best is None else best.offload
    flags = [
        "--hdp",
        f"--hdp-tokens-per-rank {capacity}",
        f"--hdp-batch-tokens {batch_tokens}",
        f"--seq-length {setting.context}",
    ]
    if offload:
        limit = setting.host_bytes if best is None else best.host_bytes
        flags += ["--hdp-offload", *([] if limit is None else [f"--hdp-offload-gib {math.ceil(limit / GIB)}"])]
    return flags
