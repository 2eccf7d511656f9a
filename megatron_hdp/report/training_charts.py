"""What training runs did, step by step; several runs in the same charts."""

import math
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megatron_hdp.report.chart import Chart, Section, Table, Tile, amount, axis, digits, percent, plain, rate
from megatron_hdp.report.chart import seconds as in_words
from megatron_hdp.report.data_charts import ring_section
from megatron_hdp.report.palette import line

type Step = Mapping[str, Any]
type Runs = Mapping[str, Sequence[Step]]
"""Name of a run -> its steps, in order."""
type Value = Callable[[Step], float | None]

_MOST_POINTS = 1500
"""Points of a curve; longer runs are drawn as means of some steps each."""
_MOST_ROWS = 40
"""Rows of a table of steps."""


def training_sections(name: str, runs: Runs) -> list[Section]:
    """Everything that logs hold, as far as it is there."""
    quality = [_loss_chart(name, runs)]
    if loss_difference(runs) is not None:
        quality.append(_difference_chart(name, runs))
    if _any(runs, _field("grad_norm")):
        quality.append(_grad_chart(name, runs))
    found = [
        Section(name=f"{name}-training", title="How training goes", charts=tuple(quality)),
        Section(name=f"{name}-speed", title="How fast it goes", charts=_speed_charts(name, runs)),
    ]
    counted = {words: _rings(steps) for words, steps in runs.items()}
    if all(counted.values()):
        found.append(ring_section(name, counted, None, tokens=False))
    balance = _balance_charts(name, runs)
    if balance:
        found.append(Section(name=f"{name}-balance", title="How well the work is spread", charts=balance))
    return found


def tiles(runs: Runs) -> tuple[Tile, ...]:
    """The runs in numbers."""
    found = [Tile(value=rate(_typical(steps)), words=f"with {words}, median step") for words, steps in runs.items()]
    apart = loss_difference(runs)
    if apart is not None:
        found.append(Tile(value=_exponent(apart[1]), words=f"largest difference of the loss, {apart[0]}"))
    return tuple(found[:6])


def loss_difference(runs: Runs) -> tuple[str, float] | None:
    """Of the first run and each other one, in the steps that both have: the largest, and between which runs."""
    (first, own), *others = runs.items()
    losses = {step["iteration"]: step["loss"] for step in own}
    found: list[tuple[float, str]] = []
    for words, steps in others:
        pairs = [(losses.get(step["iteration"]), step["loss"]) for step in steps]
        both = [abs(a - b) for a, b in pairs if a is not None and b is not None]
        if both:
            found.append((max(both), f"{first} and {words}, {len(both):,} steps"))
    return (max(found)[1], max(found)[0]) if found else None


def _exponent(value: float) -> str:
    return "0" if value == 0 else digits(value) if value >= 0.001 else f"{value:.1e}"


def _field(name: str, factor: float = 1.0) -> Value:
    """A field of the log, times a factor."""

    def value(step: Step) -> float | None:
        found = step.get(name)
        return None if found is None else factor * float(found)

    return value


def tokens_per_second(step: Step) -> float | None:
    """Real tokens over wall-clock seconds."""
    return None if not step["seconds"] or step["tokens"] is None else step["tokens"] / step["seconds"]


def _typical(steps: Sequence[Step]) -> float:
    """Tokens per second of the median step. The first one warms up and does not count, unless it is the only one."""
    rates = [value for value in map(tokens_per_second, steps[1:] or steps) if value is not None]
    return statistics.median(rates) if rates else math.nan


def _any(runs: Runs, value: Value) -> bool:
    return any(value(step) is not None for steps in runs.values() for step in steps)


def _rings(steps: Sequence[Step]) -> dict[int, tuple[float, float]]:
    """Ring size -> sequences in all steps."""
    counted: Counter[int] = Counter()
    for step in steps:
        counted.update({int(size): int(count) for size, count in step.get("ring_sizes", {}).items()})
    return {size: (float(count), 0.0) for size, count in sorted(counted.items()) if count}


def curve(steps: Sequence[Step], value: Value) -> tuple[list[float], list[float | None]]:
    """Iterations and values, at most `_MOST_POINTS`: means of equally many steps each where there are more."""
    points = [(float(step["iteration"]), value(step)) for step in steps]
    size = -(-len(points) // _MOST_POINTS)
    if size == 1:
        return [x for x, _ in points], [y for _, y in points]
    xs: list[float] = []
    ys: list[float | None] = []
    for first in range(0, len(points), size):
        group = points[first : first + size]
        known = [y for _, y in group if y is not None]
        xs.append(statistics.fmean(x for x, _ in group))
        ys.append(statistics.fmean(known) if known else None)
    return xs, ys


def _curves(
    name: str,
    heading: str,
    caption: str,
    unit: str,
    runs: Runs,
    values: Mapping[str, Value],
    *,
    from_zero: bool = False,
) -> Chart:
    """One line for each run and value; ``values``: what is added to the run's name -> value."""
    traces, series, index = [], {}, 0
    for words, steps in runs.items():
        for more, value in values.items():
            x, y = curve(steps, value)
            label = f"{words}{more}"
            traces.append(
                {
                    "type": "scatter",
                    "mode": "lines+markers" if len(x) <= 30 else "lines",
                    "name": plain(label),
                    "x": x,
                    "y": y,
                    "line": line(index),
                    "connectgaps": False,
                    "hovertemplate": "step %{x}: %{y:.6g}<extra>" + plain(label) + "</extra>",
                }
            )
            series[label] = {step["iteration"]: value(step) for step in steps}
            index += 1
    longest = max(len(steps) for steps in runs.values())
    size = -(-longest // _MOST_POINTS)
    more = f" Each point is the mean of {size:,} steps." if size > 1 else ""
    return Chart(
        name=name,
        heading=heading,
        caption=caption + more,
        traces=traces,
        layout={
            "xaxis": axis("training step"),
            "yaxis": axis(unit, rangemode="tozero" if from_zero else "normal"),
        },
        table=_table(series),
    )


def _table(series: Mapping[str, Mapping[int, float | None]]) -> Table:
    """Values by step; of many steps some, evenly chosen, and the last."""
    steps = sorted({step for values in series.values() for step in values})
    stride = -(-len(steps) // _MOST_ROWS)
    shown = sorted({*steps[::stride], steps[-1]})
    rows = tuple(
        (f"{step:,}", *("-" if (value := values.get(step)) is None else f"{value:.6g}" for values in series.values()))
        for step in shown
    )
    note = f"Every {stride}th of {len(steps):,} steps." if stride > 1 else ""
    return Table(("step", *series), rows, note)


def _loss_chart(name: str, runs: Runs) -> Chart:
    apart = loss_difference(runs)
    ends = [next((s["loss"] for s in reversed(steps) if s["loss"] is not None), None) for steps in runs.values()]
    first = next(iter(runs))
    heading = f"The loss of {first} ends at {ends[0]:.4g}" if ends[0] is not None else "The log has no loss"
    if apart is not None:
        heading = f"Losses of {apart[0]}, differ by at most {_exponent(apart[1])}"
    return _curves(
        f"{name}-loss",
        heading,
        "Loss per token of each training step, in nats. Runs that see the same data in the same order lie on each "
        "other when they compute the same gradients.",
        "loss",
        runs,
        {"": _field("loss")},
    )


def _difference_chart(name: str, runs: Runs) -> Chart:
    """Losses of all runs but the first, less the first one's."""
    (first, own), *others = runs.items()
    losses = {step["iteration"]: step["loss"] for step in own}

    def less(step: Step) -> float | None:
        known = losses.get(step["iteration"])
        return None if known is None or step["loss"] is None else step["loss"] - known

    apart = {words: [abs(found) for step in steps if (found := less(step)) is not None] for words, steps in others}
    means = ", ".join(f"{words} {_exponent(statistics.fmean(found))}" for words, found in apart.items() if found)
    return _curves(
        f"{name}-loss-difference",
        f"Mean distance to the loss of {first}: {means}",
        f"Loss of each run less that of {first} in the same training step. With the same data and the same weights at "
        "the start, what is left is the rounding of floating-point numbers, which grows slowly as weights drift apart.",
        f"loss less that of {first}",
        dict(others),
        {"": less},
    )


def _grad_chart(name: str, runs: Runs) -> Chart:
    value = _field("grad_norm")
    known = [found for steps in runs.values() for step in steps if (found := value(step)) is not None]
    return _curves(
        f"{name}-grad-norm",
        f"The gradient's norm goes up to {digits(max(known))}, median {digits(statistics.median(known))}",
        "Norm of the gradient of all parameters ahead of clipping, by training step; no unit. Spikes are steps that "
        "would change the model most.",
        "norm of the gradient",
        runs,
        {"": value},
    )


def _speed_charts(name: str, runs: Runs) -> tuple[Chart, ...]:
    rates = {words: _typical(steps) for words, steps in runs.items()}
    words = ", ".join(f"{run} {rate(value)}" for run, value in rates.items())
    charts = [
        _curves(
            f"{name}-tokens",
            f"Median step: {words}",
            "Real tokens of a step over its wall-clock seconds, by training step; higher is better. The first step "
            "warms up, and steps that save a checkpoint or evaluate take longer.",
            "tokens/s",
            runs,
            {"": tokens_per_second},
            from_zero=True,
        )
    ]
    plan = _field("plan_seconds", 1e3)
    if _any(runs, plan):
        charts.append(_planner_chart(name, runs, plan))
    sent = _field("bytes_sent", 1e-6)
    if _any(runs, sent):
        means = {
            run: statistics.fmean([v for s in steps if (v := sent(s)) is not None] or [0.0])
            for run, steps in runs.items()
        }
        charts.append(
            _curves(
                f"{name}-sent",
                "Sent over rings in a step, mean: "
                + ", ".join(f"{run} {amount(1e6 * value)}" for run, value in means.items()),
                "Megabytes that all ranks together send each other for attention, by training step, as planned.",
                "MB a step",
                runs,
                {"": sent},
                from_zero=True,
            )
        )
    return tuple(charts)


def _planner_chart(name: str, runs: Runs, plan: Value) -> Chart:
    values = [found for steps in runs.values() for step in steps if (found := plan(step)) is not None]
    median = statistics.median(values)
    return _curves(
        f"{name}-planning",
        f"Planning a step takes {in_words(1e-3 * median)} (median), at most {in_words(1e-3 * max(values))}",
        "Milliseconds for making and checking a step's plan, and for reading its data, by training step; both happen "
        "while the step before runs.",
        "ms",
        runs,
        {", planning": plan, ", reading": _field("read_seconds", 1e3)},
    )


def _balance_charts(name: str, runs: Runs) -> tuple[Chart, ...]:
    charts = []
    efficiency = _field("efficiency", 100)
    if _any(runs, efficiency):
        means = {
            run: statistics.fmean([v for s in steps if (v := efficiency(s)) is not None] or [0.0])
            for run, steps in runs.items()
        }
        charts.append(
            _curves(
                f"{name}-efficiency",
                "Efficiency of the plans, mean: "
                + ", ".join(f"{run} {percent(value / 100)}" for run, value in means.items())
                + "; 100 % could not be faster",
                "Efficiency of each step's plan, in percent: the time below which no plan of the step can be, over the "
                "plan's own time, both by the cost model.",
                "efficiency, %",
                runs,
                {"": efficiency},
            )
        )
    most, least = _field("micro_batches_max"), _field("micro_batches_min")
    if _any(runs, most):
        widest = max((v for steps in runs.values() for s in steps if (v := most(s)) is not None), default=0)
        fewest = min((v for steps in runs.values() for s in steps if (v := least(s)) is not None), default=0)
        charts.append(
            _curves(
                f"{name}-micro-batches",
                f"Ranks run between {fewest:,.0f} and {widest:,.0f} micro-batches a step",
                "Micro-batches of the rank that has the most and of the one that has the fewest, by training step. "
                "Under HDP ranks with light ones run more of them; static parallelism gives all the same number.",
                "micro-batches",
                runs,
                {", most": most, ", fewest": least},
                from_zero=True,
            )
        )
    return tuple(charts)
