"""Is HDP worth it for this data? Plain sentences from simulated steps."""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron_hdp.lengths import format_size
from megatron_hdp.memory import GIB, sized
from megatron_hdp.simulate.runs import Comparison
from megatron_hdp.simulate.search import STATIC, Search, Tried
from megatron_hdp.simulate.setting import why_no_estimate
from megatron_hdp.simulator.files import StepNumbers, StrategyRun
from megatron_hdp.simulator.strategies import STRATEGIES, Setting
from megatron_hdp.types import IntArray

_WORTH = 1.1
"""From this speed-up on HDP is worth a change of the training script."""
_NOTICED = 1.02
"""Below this one nobody would notice."""
_EQUAL = 0.0005
"""Steps that differ by less take the same time: it would be said as 0.0 %."""
_SAID = 0.01
"""Causes of idling that take a larger part of the step are named."""
_SMALLER = "Lower --tokens-per-rank, use more --tp or --stages, or --recompute full"
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


def share(steps: Sequence[StepNumbers], of: Callable[[StepNumbers], float]) -> float:
    """Seconds of something over those of all steps: every table and every sentence counts so."""
    return math.fsum(map(of, steps)) / math.fsum(step["seconds"] for step in steps)


def computing_of(step: StepNumbers) -> float:
    """Seconds of a step in which a GPU computes."""
    return step["computing"] * step["seconds"]


def idle_of(cause: str) -> Callable[[StepNumbers], float]:
    """Step -> seconds in which a GPU waits for this."""
    return lambda step: step["idle"].get(cause, 0.0)


def verdict(
    setting: Setting,
    batches: Sequence[IntArray],
    compared: Comparison,
    found: Search | None,
    batch_tokens: int,
    memory: tuple[int, str],
) -> tuple[str, ...]:
    """Sentences: is it worth it, by how much at most, why, with which settings, and the flags.

    Args:
        setting: the run.
        batches: sequences of every step.
        compared: what `simulate.runs.compare` found.
        found: what `simulate.search.search` found; None if nobody looked.
        batch_tokens: tokens of a step, for the flags.
        memory: bytes of a GPU, and who says so.
    """
    hdp = compared.runs[0]
    static = compared.run(STATIC)
    sentences = [_worth(setting, hdp, static, compared, found)]
    sentences += _closest(hdp, compared)
    sentences.append(_at_most(hdp, static, compared))
    sentences.append(_why(setting, batches, hdp, static))
    sentences += _planning(hdp)
    sentences += [_asked(setting, compared, memory)] if found is None else _settings(setting, compared, found)
    asked = found is None or found.best is None
    but = ", though it does not fit a GPU" if asked and _too_large(compared, memory[0]) else ""
    sentences.append(f"On the training command{but}: {' '.join(training_flags(setting, found, batch_tokens))}")
    return tuple(sentences)


def _worth(
    setting: Setting, hdp: StrategyRun, static: StrategyRun | None, compared: Comparison, found: Search | None
) -> str:
    """The first sentence; where best settings of both are known, they decide."""
    mine = f"with HDP a step takes {step_seconds(hdp):,.2f} s"
    if static is None:
        run = next((run for run in compared.runs if run.name == STATIC), None)
        why = "was not asked for" if run is None else f"cannot run this: {run.failed}"
        return f"W{mine[1:]}; static context parallelism {why}."
    gain = ratio(seconds(static), seconds(hdp))
    fair = None if found is None else _at_their_best(found)
    decides = gain.whole if fair is None else fair
    if decides >= _WORTH:
        lead = "HDP is worth it"
    else:
        lead = "HDP helps a little" if decides >= _NOTICED else "HDP is hardly worth it for this data"
    text = f"{lead}: {mine}, with {_named(static)}, {step_seconds(static):,.2f} s. HDP is {gain}"
    if fair is not None:
        text += (
            f" at {format_size(setting.tokens_per_rank)} tokens per rank; with each at its best capacity {fair:.2f} "
            "times as fast, by the first step"
        )
    return text + "."


def _at_their_best(found: Search) -> float | None:
    """How many times as fast as static context parallelism hdp is, each with its best setting; None if not known."""
    best, static = found.best, found.best_static
    if best is None or best.seconds is None or static is None or static.static_seconds is None:
        return None
    return static.static_seconds / best.seconds


def _named(run: StrategyRun) -> str:
    """Words, with the name of the strategy's row where they do not begin with it."""
    return run.words if run.words.startswith(run.name) else f"{run.words} ({run.name})"


def _closest(hdp: StrategyRun, compared: Comparison) -> list[str]:
    """Of all others the one that comes closest, or is faster; and what is no plan, but an estimate."""
    sentences = []
    best = closest(compared)
    if best is not None:
        of, gain = f"Of the other ways, {_named(best)}", step_seconds(hdp) / step_seconds(best) - 1
        if abs(gain) < _EQUAL:
            sentences.append(f"{of} comes closest: it is as fast as HDP, {step_seconds(best):,.2f} s a step.")
        elif gain > 0:
            sentences.append(f"{of} is {100 * gain:.1f} % faster than HDP, {step_seconds(best):,.2f} s a step.")
        else:
            sentences.append(f"{of} comes closest: HDP is {ratio(seconds(best), seconds(hdp))}.")
    for run in compared.runs:
        if run.failed is None and STRATEGIES[run.name].estimate:
            sentences.append(
                f"No plan, but the best that its idea could do: {_named(run)}, {step_seconds(run):,.2f} s a step. "
                f"HDP is {ratio(seconds(run), seconds(hdp))}."
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
    computing = share(steps, computing_of)
    idle = {cause: share(steps, idle_of(cause)) for cause in CAUSE_WORDS}
    named = sorted((cause for cause in idle if idle[cause] >= _SAID), key=lambda cause: -idle[cause])[:3]
    waits = ", ".join(f"{CAUSE_WORDS[cause]} {100 * idle[cause]:.0f} %" for cause in named)
    return f"compute {100 * computing:.0f} % of the step" + (f" and wait for {waits}" if waits else "")


def _too_large(compared: Comparison, device: int) -> bool:
    """Does the setting that was asked for need more than a GPU has, as far as is known?"""
    return compared.device_bytes is not None and compared.device_bytes > device


def _asked(setting: Setting, compared: Comparison, memory: tuple[int, str]) -> str:
    """What the setting that was asked for needs of a GPU, where nobody looked for others."""
    if compared.device_bytes is None:
        return f"What a GPU needs is not known, because {why_no_estimate(setting)}."
    device = f"{sized(memory[0])} ({memory[1]})"
    text = f"A GPU needs {sized(compared.device_bytes)} with the settings asked for"
    if _too_large(compared, memory[0]):
        return f"{text}, which does not fit its {device}. {_SMALLER}, or leave out --no-search to look for what fits."
    return f"{text}, and has {device}."


def _settings(setting: Setting, compared: Comparison, found: Search) -> list[str]:
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
        if compared.device_bytes is not None:
            least += f", the one asked for {sized(compared.device_bytes)}"
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
        text += f", {_shorter(best.seconds, asked.seconds)} the settings asked for"
        text += "" if asked.device_bytes is None else f", which need {sized(asked.device_bytes)}"
    which = "It" if asked is best else "The best one"
    needs = "" if best.device_bytes is None else f" {which} needs {sized(best.device_bytes)}"
    node = setting.machines.gpus_per_node
    host = f" and {sized(best.host_bytes)} of host memory for each GPU, {sized(node * best.host_bytes)} for a node"
    needs += f"{host}." if best.offload else "."
    sentences = [text + "." + needs]
    static, fair = found.best_static, _at_their_best(found)
    if static is not None and fair is not None:
        sentences.append(
            f"Each at its best: static context parallelism is fastest with {static.tokens_per_rank:,} tokens per rank, "
            f"a first step of {static.static_seconds:,.2f} s; with its own best setting, HDP is "
            f"{fair:.2f} times as fast."
        )
    return sentences


def _shorter(best: float, asked: float) -> str:
    """ "25.0 % shorter than with"; a best setting that needs less memory may be a little longer."""
    gain = 1 - best / asked
    if abs(gain) < _EQUAL:
        return "as long as with"
    return f"{100 * abs(gain):.1f} % {'shorter' if gain > 0 else 'longer'} than with"


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
