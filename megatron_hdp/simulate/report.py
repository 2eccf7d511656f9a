"""What `megatron-hdp simulate` prints: tables of strategies, of settings and of sweeps."""

import statistics
import textwrap
from collections.abc import Callable, Mapping, Sequence

from megatron_hdp.memory import GIB
from megatron_hdp.simulate.search import STATIC, Search
from megatron_hdp.simulate.sweeps import Row
from megatron_hdp.simulate.verdict import CAUSE_WORDS, computing_of, idle_of, ratio, seconds, share
from megatron_hdp.simulator.files import StepNumbers, StrategyRun
from megatron_hdp.simulator.result import CAUSES

_NAME, _COLUMN = 14, 11
_WIDTH = 118
_SHOWN = 0.0005
"""Causes that take a larger part of some strategy's step have a column."""
NOTE = (
    "Seconds are simulated, by the profile's costs and the cluster's links (docs/simulate.md); plan time is measured "
    "on this machine."
)


def render_strategies(runs: Sequence[StrategyRun]) -> str:
    """One row per strategy, means over steps and shares of all seconds; those that cannot run say why."""
    base = next((run for run in runs if run.name == STATIC and run.failed is None), None)
    several = len(runs[0].steps) > 1
    titles = ["step, s", *(["min", "max"] if several else []), "x static", "tokens/s"]
    titles += ["MFU %", "compute %", "NIC Gb/s", "plan, s"]
    lines = [f"{'':<{_NAME}}" + "".join(f"{title:>{_COLUMN}}" for title in titles)]
    for run in runs:
        if run.failed is not None:
            lines += _cannot(run.name, run.failed)
            continue
        of = seconds(run)
        counted = all(step["mfu"] is not None for step in run.steps)
        cells = [
            f"{statistics.mean(of):,.2f}",
            *([f"{min(of):,.2f}", f"{max(of):,.2f}"] if several else []),
            "-" if base is None else f"{ratio(seconds(base), of).whole:.2f}",
            f"{sum(step['tokens'] for step in run.steps) / sum(of):,.0f}",
            f"{100 * share(run.steps, lambda step: (step['mfu'] or 0.0) * step['seconds']):.1f}" if counted else "-",
            f"{100 * share(run.steps, computing_of):.1f}",
            f"{8e-9 * max(step['nic_peak'] for step in run.steps):,.0f}",
            f"{statistics.mean(step['plan_seconds'] for step in run.steps):.2f}",
        ]
        lines.append(f"{run.name:<{_NAME}}" + "".join(f"{cell:>{_COLUMN}}" for cell in cells))
    known = any(step["mfu"] is not None for run in runs for step in run.steps)
    notes = [f"Means of {len(runs[0].steps)} steps, % of all their seconds"] if several else []
    notes += ["x static: times as fast", "NIC: the busiest one's peak over any 10 ms"]
    notes += [] if known else ["MFU needs a --cluster that says what its GPUs could do"]
    return "\n".join([*lines, *textwrap.wrap("; ".join(notes) + ".", _WIDTH)])


def _cannot(name: str, why: str) -> list[str]:
    return textwrap.wrap(
        f"{name:<{_NAME}}  cannot: {' '.join(why.split())}",
        _WIDTH,
        subsequent_indent=" " * (_NAME + 2),
        break_long_words=False,
    )


def render_time(runs: Sequence[StrategyRun]) -> str:
    """Where the time of a GPU goes: % of all steps' seconds, mean over GPUs."""
    able = [run for run in runs if run.failed is None]
    parts: dict[str, Callable[[StepNumbers], float]] = {
        "computing": computing_of,
        "optimizer": lambda step: step["optimizer_seconds"],
    }
    parts |= {cause: idle_of(cause) for cause in CAUSES}
    shares = {run.name: {part: share(run.steps, of) for part, of in parts.items()} for run in able}
    shown = [part for part in parts if any(found[part] > _SHOWN for found in shares.values())]
    lines = [f"{'% of the step':<{_NAME}}" + "".join(f"{part:>{_COLUMN}}" for part in shown)]
    for name, found in shares.items():
        lines.append(f"{name:<{_NAME}}" + "".join(f"{100 * found[part]:>{_COLUMN}.1f}" for part in shown))
    waits = "; ".join(f"{part}: {CAUSE_WORDS[part]}" for part in shown if part in CAUSE_WORDS)
    return "\n".join([*lines, *textwrap.wrap(f"What a GPU waits for: {waits}." if waits else "", _WIDTH)])


def render_search(found: Search) -> str:
    """Capacities and offload, with the best one marked."""
    with_static = any(row.static_seconds is not None for row in found.rows)
    titles = ["offload", "hdp, s", *(["static, s"] if with_static else []), "GPU, GiB", "host, GiB"]
    lines = [f"{'tokens per rank':<16}" + "".join(f"{title:>{_COLUMN}}" for title in titles)]
    for row in found.rows:
        if row.failed is not None:
            lines += _cannot(f"{row.tokens_per_rank:,}", row.failed)
            continue
        static = [] if not with_static else ["" if row.static_seconds is None else f"{row.static_seconds:,.2f}"]
        cells = [
            "yes" if row.offload else "no",
            "-" if row.seconds is None else f"{row.seconds:,.2f}",
            *static,
            "-" if row.device_bytes is None else f"{row.device_bytes / GIB:,.1f}",
            f"{row.host_bytes / GIB:,.1f}" if row.offload else "",
        ]
        mark = "  best" if row is found.best else "  does not fit" if row.fits is False else ""
        lines.append((f"{row.tokens_per_rank:<16,}" + "".join(f"{cell:>{_COLUMN}}" for cell in cells) + mark).rstrip())
    return "\n".join([*lines, f"The first step. A GPU has {found.device_bytes / GIB:,.1f} GiB ({found.source})."])


def render_sweep(name: str, rows: Sequence[Row], names: Sequence[str]) -> str:
    """A sweep: seconds of a step, and how many times as fast as static hdp is."""
    able = STATIC in names
    width = max(len(name), *(len(str(row["label"])) for row in rows)) + 2
    titles = [f"{name}, s" for name in names] + (["x static"] if able else [])
    lines = [f"{name:<{width}}" + "".join(f"{title:>{_NAME}}" for title in titles)]
    for row in rows:
        cells = ["-" if row[name] is None else f"{row[name]:,.2f}" for name in names]
        if able:
            cells.append(_faster(row))
        line = f"{row['label']!s:<{width}}" + "".join(f"{cell:>{_NAME}}" for cell in cells)
        lines.append(line)
        lines += textwrap.wrap(
            str(row.get("note", "")), _WIDTH, initial_indent=" " * width, subsequent_indent=" " * width
        )
    return "\n".join(lines)


def _faster(row: Mapping[str, object]) -> str:
    static, hdp = row[STATIC], row["hdp"]
    return f"{static / hdp:.2f}" if isinstance(static, float) and isinstance(hdp, float) else "-"


def render_verdict(sentences: Sequence[str]) -> str:
    """Paragraphs, wrapped; flags for a command line stay on one line."""
    lines = []
    for sentence in sentences:
        text, colon, flags = sentence.partition(": --")
        if colon:
            lines += [f"{text}:", f"  --{flags}"]
        else:
            lines.append(textwrap.fill(sentence, _WIDTH, break_long_words=False, break_on_hyphens=False))
    return "\n".join(lines)
