"""Ways to run the same steps side by side: seconds, idle by cause, bytes, planning."""

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from megatron_hdp.report.chart import (
    Chart,
    Section,
    Table,
    Tile,
    amount,
    axis,
    capital,
    deviation,
    digits,
    faster,
    mean,
    percent,
    plain,
    rate,
)
from megatron_hdp.report.chart import seconds as in_words
from megatron_hdp.report.palette import KEYS, STATES, fill, hatch
from megatron_hdp.simulator.files import StepNumbers, StrategyRun
from megatron_hdp.simulator.result import CAUSES
from megatron_hdp.simulator.strategies import STRATEGIES

RIVAL = "static"
"""The strategy that speed-ups are told against: what people run today."""
_LINKS = {
    "inside_node": ("between GPUs of a node", "#3f7fb5", ""),
    "across_nodes": ("between nodes", "#d55e00", "/"),
    "to_host": ("to host memory", "#009e73", "-"),
    "from_host": ("from host memory", "#c77cab", "x"),
}
_FEW = 4
"""Rows of a chart below which it is drawn as for so many."""


def ran(runs: Sequence[StrategyRun]) -> list[StrategyRun]:
    """Those that could run the steps."""
    return [run for run in runs if run.steps]


def plans(runs: Sequence[StrategyRun]) -> list[StrategyRun]:
    """Those that could run the steps and are more than an estimate."""
    return [run for run in ran(runs) if run.name not in STRATEGIES or not STRATEGIES[run.name].estimate]


def rival_of(runs: Sequence[StrategyRun]) -> StrategyRun | None:
    """Static context parallelism, or else the last plan that is not the first."""
    others = plans(runs)[1:]
    return next((run for run in others if run.name == RIVAL), others[-1] if others else None)


def short(run: StrategyRun) -> str:
    """For headings: without what its words say after a comma."""
    return run.words.partition(",")[0]


def step_seconds(run: StrategyRun) -> float:
    """Mean over steps."""
    return mean([step["seconds"] for step in run.steps])


def share(run: StrategyRun, part: Callable[[StepNumbers], float]) -> float:
    """Seconds of a part over those of all steps, as `megatron-hdp simulate` counts it."""
    return math.fsum(map(part, run.steps)) / math.fsum(step["seconds"] for step in run.steps)


def computing(run: StrategyRun) -> float:
    """Share of all steps' seconds in which a rank computes."""
    return share(run, lambda step: step["computing"] * step["seconds"])


def throughput(run: StrategyRun) -> float:
    """Tokens per second over all steps."""
    return sum(step["tokens"] for step in run.steps) / sum(step["seconds"] for step in run.steps)


def tiles(runs: Sequence[StrategyRun]) -> tuple[Tile, ...]:
    """The verdict in numbers."""
    own, rival = ran(runs)[0], rival_of(runs)
    found = [Tile(value=rate(throughput(own)), words=f"with {short(own)}, {in_words(step_seconds(own))} a step")]
    if rival is not None:
        ratio = throughput(own) / throughput(rival)
        words = f"the tokens per second of {short(rival)}"
        found.insert(0, Tile(value=f"{digits(ratio)} ×", words=words))
        found.append(
            Tile(value=rate(throughput(rival)), words=f"with {short(rival)}, {in_words(step_seconds(rival))} a step")
        )
    words = "of the time GPUs compute"
    words += f"; {percent(computing(rival))} with {short(rival)}" if rival is not None else ""
    found.append(Tile(value=percent(computing(own)), words=words))
    return tuple(found)


def comparison_section(name: str, runs: Sequence[StrategyRun]) -> Section:
    """How long a step takes in each way."""
    able, own = ran(runs), ran(runs)[0]
    rival = rival_of(runs)
    steps = len(own.steps)
    best = min(plans(runs)[1:], key=step_seconds, default=None)
    heading = f"{capital(short(own))} needs {in_words(step_seconds(own))} a step"
    if rival is not None:
        ratio = faster(step_seconds(own), step_seconds(rival))
        heading += f", {short(rival)} {in_words(step_seconds(rival))}: {short(own)} is {ratio}"
    if best is not None and best is not rival:
        place = "next best is" if step_seconds(best) >= step_seconds(own) else "faster is"
        heading += f"; {place} {best.words}, {in_words(step_seconds(best))}"
    spread = f" Thin lines are the standard deviation over {steps} steps." if steps > 1 else " It is one step."
    chart = Chart(
        name=f"{name}-steps",
        heading=heading,
        caption=(
            "Seconds from one step to the next, mean, by the way to run it; the same sequences and the same machine "
            f"for all. Shorter is better.{spread}"
        ),
        traces=[
            {
                "type": "bar",
                "orientation": "h",
                "y": [f"{label(run)}<br><b>{in_words(step_seconds(run))}</b>" for run in able],
                "x": [step_seconds(run) for run in able],
                "error_x": {
                    "type": "data",
                    "array": [deviation([step["seconds"] for step in run.steps]) for run in able],
                    "visible": steps > 1,
                    "color": "#202020",
                    "thickness": 1.5,
                },
                "marker": {"color": ["#0b3c6f" if run is own else "#9ecae1" for run in able]},
                "hovertemplate": "%{y}: %{x:.4g} s<extra></extra>",
            }
        ],
        layout={"xaxis": axis("seconds a step", rangemode="tozero"), "yaxis": names(), "showlegend": False},
        table=Table(
            (
                "way to run",
                "seconds a step",
                "standard deviation",
                "tokens/s",
                "computing",
                "MFU",
                f"against {own.name}",
            ),
            tuple(_row(run, own) for run in runs),
        ),
        height=90 + 50 * max(len(able), _FEW),
    )
    failed = [f"{run.words} cannot run these steps: {run.failed}" for run in runs if run.failed]
    return Section(name=f"{name}-comparison", title="How long a step takes", words=" ".join(failed), charts=(chart,))


def _row(run: StrategyRun, own: StrategyRun) -> tuple[str, ...]:
    if not run.steps:
        return (run.words, f"cannot run: {run.failed}", "", "", "", "", "")
    times = [step["seconds"] for step in run.steps]
    known = all(step["mfu"] is not None for step in run.steps)
    return (
        run.words,
        in_words(mean(times)),
        in_words(deviation(times)),
        digits(throughput(run)),
        percent(computing(run)),
        percent(share(run, lambda step: (step["mfu"] or 0.0) * step["seconds"])) if known else "not known",
        f"{digits(mean(times) / step_seconds(own))} × the time",
    )


def label(run: StrategyRun) -> str:
    """A row's label, broken where it is long."""
    return wrapped(run.words)


def wrapped(text: str) -> str:
    """Text for a chart's row, in two lines if it is long."""
    text = text if len(text) <= 60 else f"{text[:58]}…"
    if len(text) <= 18:
        return plain(text)
    middle = min((i for i, c in enumerate(text) if c == " "), key=lambda i: abs(i - len(text) / 2), default=None)
    return plain(text) if middle is None else f"{plain(text[:middle])}<br>{plain(text[middle + 1 :])}"


def names() -> dict[str, Any]:
    """The axis of ways to run, first on top."""
    return {"autorange": "reversed", "automargin": True, "ticklabelstandoff": 6}


def idle_section(name: str, runs: Sequence[StrategyRun]) -> Section:
    """Stacked bars: computing, then waiting by cause."""
    able = ran(runs)
    shares = {run.name: _states(run) for run in able}
    used = [state for state in _STACK if any(found.get(state, 0.0) > 1e-6 for found in shares.values())]
    traces = [
        {
            "type": "bar",
            "orientation": "h",
            "name": words,
            "y": [label(run) for run in able],
            "x": [shares[run.name].get(state, 0.0) for run in able],
            "customdata": [100 * shares[run.name].get(state, 0.0) / step_seconds(run) for run in able],
            "marker": fill(state),
            "hovertemplate": "%{y}: %{x:.4g} s, %{customdata:.3g} % of the step<extra>" + words + "</extra>",
        }
        for state in used
        for words in (_words(state),)
    ]
    own, rival = able[0], rival_of(runs)
    rows = tuple(
        (run.words, *(f"{in_words(found)} ({percent(found / step_seconds(run))})" for found in _of(shares, run, used)))
        for run in able
    )
    chart = Chart(
        name=f"{name}-idle",
        heading=_idle_heading(own, rival, shares),
        caption=(
            "A step's seconds, mean over all ranks and steps: the dark part computes, each other part waits for one "
            "cause. The whole bar is the step."
        ),
        traces=traces,
        layout={
            "barmode": "stack",
            "xaxis": axis("seconds of a step, mean over ranks"),
            "yaxis": names(),
            "showlegend": False,
        },
        table=Table(("way to run", *(_words(state) for state in used)), rows),
        height=90 + 34 * max(len(able), _FEW),
        keys=tuple(_key(state) for state in used),
    )
    return Section(name=f"{name}-idle-causes", title="What ranks wait for", charts=(chart,))


_STACK = ("forward", *STATES[2:])
"""Order of the parts of a bar; "forward" stands for all computing of micro-batches."""


def _key(state: str) -> Any:
    key = KEYS[state]
    return type(key)(_words(state), key.colour, key.pattern)


def _words(state: str) -> str:
    return "computing" if state == "forward" else KEYS[state].words


def _of(shares: dict[str, dict[str, float]], run: StrategyRun, used: Sequence[str]) -> list[float]:
    return [shares[run.name].get(state, 0.0) for state in used]


def _states(run: StrategyRun) -> dict[str, float]:
    """State -> seconds, mean over steps."""
    found = {cause: mean([step["idle"].get(cause, 0.0) for step in run.steps]) for cause in CAUSES}
    found["forward"] = mean([step["computing"] * step["seconds"] for step in run.steps])
    found["optimizer"] = mean([step["optimizer_seconds"] for step in run.steps])
    return found


def _idle_heading(own: StrategyRun, rival: StrategyRun | None, shares: dict[str, dict[str, float]]) -> str:
    def worst(run: StrategyRun) -> str:
        waits = {k: v for k, v in shares[run.name].items() if k not in ("forward", "optimizer")}
        idle = sum(waits.values()) / step_seconds(run)
        if not waits or idle < 5e-4:
            return f"With {short(run)} ranks wait for nothing"
        cause = max(waits, key=waits.__getitem__)
        return (
            f"With {short(run)} ranks wait {percent(idle)} of the time, most of it "
            f"{KEYS[cause].words.removeprefix('waits ')} ({in_words(waits[cause])} a step)"
        )

    return worst(own) if rival is None else f"{worst(rival)}. {worst(own)}"


def bytes_section(name: str, runs: Sequence[StrategyRun]) -> Section:
    """What travels where."""
    able = ran(runs)
    moved = {
        run.name: {link: mean([float(step["bytes_by_link"].get(link, 0)) for step in run.steps]) for link in _LINKS}
        for run in able
    }
    used = [link for link in _LINKS if any(found[link] for found in moved.values())]
    top = max((sum(found.values()) for found in moved.values()), default=0.0)
    power, unit = next(
        ((p, u) for p, u in ((15, "PB"), (12, "TB"), (9, "GB"), (6, "MB")) if top >= 10**p), (0, "bytes")
    )
    own, rival = able[0], rival_of(runs)
    heading = f"{capital(short(own))} sends {amount(moved[own.name]['across_nodes'])} between nodes in a step"
    if rival is not None:
        heading += f", {short(rival)} {amount(moved[rival.name]['across_nodes'])}"
    rows = tuple(
        (
            run.words,
            *(amount(moved[run.name][link]) for link in _LINKS),
            f"{digits(8e-9 * max(step['nic_peak'] for step in run.steps))} Gb/s",
            f"{digits(8e-9 * mean([step['nic_mean'] for step in run.steps]))} Gb/s",
        )
        for run in able
    )
    chart = Chart(
        name=f"{name}-bytes",
        heading=heading,
        caption=(
            f"What all GPUs together send or copy in one step, in {unit} (powers of ten), mean over steps, by the way "
            "it goes. Links between nodes are the slowest."
        ),
        traces=[
            {
                "type": "bar",
                "orientation": "h",
                "name": words,
                "y": [label(run) for run in able],
                "x": [moved[run.name][link] / 10**power for run in able],
                "marker": {"color": colour, **hatch(colour, shape)},
                "hovertemplate": f"%{{y}}: %{{x:.4g}} {unit} {words}<extra></extra>",
            }
            for link in used
            for words, colour, shape in (_LINKS[link],)
        ],
        layout={"barmode": "stack", "xaxis": axis(f"{unit} a step"), "yaxis": names()},
        table=Table(
            ("way to run", *(words for words, _, _ in _LINKS.values()), "NIC, peak", "NIC, mean"),
            rows,
        ),
        height=120 + 34 * max(len(able), _FEW),
    )
    return Section(name=f"{name}-traffic", title="What is sent", charts=(chart,))


def planning_section(name: str, runs: Sequence[StrategyRun]) -> Section:
    """How long planning takes beside the step."""
    able = ran(runs)
    own = able[0]
    median = {run.name: statistics.median(step["plan_seconds"] for step in run.steps) for run in able}
    chart = Chart(
        name=f"{name}-planning",
        heading=(
            f"Planning a step takes {in_words(median[own.name])}, {percent(median[own.name] / step_seconds(own))} of "
            "the step that it plans"
        ),
        caption=(
            "Milliseconds in which one CPU core makes and checks the plan of a step, median over steps, on a "
            "logarithmic axis; measured on the machine that wrote the simulation. Plans are made while the step "
            "before runs."
        ),
        traces=[
            {
                "type": "scatter",
                "mode": "markers+text",
                "y": [label(run) for run in able],
                "x": [1e3 * median[run.name] for run in able],
                "marker": {
                    "color": ["#0b3c6f" if run is own else "#9ecae1" for run in able],
                    "size": 13,
                    "line": {"color": "#0b3c6f", "width": 1},
                },
                "text": [in_words(median[run.name]) for run in able],
                "textposition": "top center",
                "cliponaxis": False,
                "hovertemplate": "%{y}: %{x:.4g} ms<extra></extra>",
            }
        ],
        layout={
            "xaxis": axis(
                "planning, ms", type="log", dtick=1, range=_decades([1e3 * value for value in median.values()])
            ),
            "yaxis": names(),
            "showlegend": False,
        },
        table=Table(
            ("way to run", "median", "most", "of the step"),
            tuple(
                (
                    run.words,
                    in_words(median[run.name]),
                    in_words(max(step["plan_seconds"] for step in run.steps)),
                    percent(median[run.name] / step_seconds(run)),
                )
                for run in able
            ),
        ),
        height=90 + 34 * max(len(able), _FEW),
    )
    return Section(name=f"{name}-planner", title="What planning costs", charts=(chart,))


def _decades(values: Sequence[float]) -> list[float]:
    """Range of a logarithmic axis, in powers of ten, with room for labels at both ends."""
    logs = [math.log10(value) for value in values if value > 0] or [0.0]
    return [math.floor(min(logs) - 0.2), math.ceil(max(logs) + 0.2)]
