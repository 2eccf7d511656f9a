"""One setting varied, everything else as it is."""

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_hdp.lengths import format_size
from megatron_hdp.report.chart import Chart, Section, Table, axis, capital, digits, plain
from megatron_hdp.report.chart import seconds as in_words
from megatron_hdp.report.palette import line, mark

_TITLES = {
    "tokens_per_rank": ("tokens per rank (capacity)", "tokens one rank holds in a micro-batch"),
    "ranks": ("ranks", "ranks of the pool"),
    "gpus": ("GPUs", "GPUs of the cluster"),
    "context": ("context", "longest sequence, tokens"),
    "bandwidth": ("bandwidth between nodes", "bandwidth between nodes"),
    "offload": ("offloading activations", "what is offloaded"),
    "search": ("capacity and offload", "tokens per rank, activations offloaded or not"),
}
_GIVEN = ("ranks", "gpus", "context", "bandwidth")
"""What a run has, rather than what is chosen for it."""
_TOKENS = ("tokens_per_rank", "context", "search")
_OTHER = ("value", "label", "note")
"""Fields of a row that are no strategy."""


type Rows = Sequence[Mapping[str, Any]]


def sweep_section(
    name: str, sweeps: Mapping[str, Sequence[Mapping[str, Any]]], words: Mapping[str, str]
) -> Section | None:
    """A chart for each sweep; ``words`` are those of strategies by name. None if nothing was swept."""
    charts = tuple(_chart(f"{name}-sweep-{_safe(what)}", what, rows, words) for what, rows in sweeps.items() if rows)
    if not charts:
        return None
    return Section(
        name=f"{name}-sweeps",
        title="What other settings would do",
        words="Each chart varies one setting and leaves all others as they are.",
        charts=charts,
    )


def _safe(name: str) -> str:
    return "".join(c if c.isascii() and c.isalnum() else "-" for c in name)


def row_label(what: str, row: Mapping[str, Any]) -> str:
    """What a row's value is called."""
    if row.get("label"):
        return str(row["label"])
    value = row["value"]
    return format_size(int(value)) if what in _TOKENS and isinstance(value, int | float) else str(value)


def _best(rows: Rows, labels: Sequence[str], first: str, words: Mapping[str, str]) -> str:
    """For settings that people choose: the best. A row that says so, or else the fastest of those without notes."""
    known = [
        (row[first], label, str(row.get("note", ""))) for row, label in zip(rows, labels) if row.get(first) is not None
    ]
    marked = [one for one in known if one[2].endswith("best")]
    best = marked[0] if marked else min([one for one in known if not one[2]] or known)
    worst = max(known)
    text = f"{_short(words, first)} needs {in_words(best[0])} a step with the best, {best[1]}"
    return text + (f", and {in_words(worst[0])} with {worst[1]}" if worst[0] > best[0] else "")


def _range(rows: Rows, labels: Sequence[str], first: str, words: Mapping[str, str]) -> str:
    """For what is given: from where to where a step's time goes, of the first strategy and of the next one."""
    keys = [first, *(key for key in rows[0] if key not in (*_OTHER, first))][:2]
    texts: list[str] = []
    for key in keys:
        known = [(row[key], label) for row, label in zip(rows, labels) if row.get(key) is not None]
        if not known:
            continue
        ends = (known[0], known[-1])
        where = f" from {ends[0][1]} to {ends[1][1]}" if not texts else ""
        texts.append(f"{_short(words, key)} goes from {in_words(ends[0][0])} to {in_words(ends[1][0])} a step{where}")
    return ", ".join(texts)


def _short(words: Mapping[str, str], name: str) -> str:
    return words.get(name, name).partition(",")[0]


def _cell(value: float | None) -> str:
    return "-" if value is None else digits(value)


def _chart(name: str, what: str, rows: Rows, words: Mapping[str, str]) -> Chart:
    title, unit = _TITLES.get(what, (what, what))
    series = [key for key in dict.fromkeys(k for row in rows for k in row) if key not in _OTHER]
    labels = [row_label(what, row) for row in rows]
    first = series[0] if series else ""
    heading = f"{title}: no setting could run"
    if any(first and row.get(first) is not None for row in rows):
        heading = (_range if what in _GIVEN else _best)(rows, labels, first, words)
        heading = f"{capital(title)}: {heading}"
    gone = [f"{label}: {row['note']}" for row, label in zip(rows, labels) if row.get(first) is None and row.get("note")]
    return Chart(
        name=name,
        heading=heading,
        caption=(
            f"Seconds of a step by {title}. Lower is better; where there is no mark, a setting cannot run or was not "
            "simulated."
            + (f" {'; '.join(gone)}." if gone else "")
            + (" Notes on settings are in the table." if any(row.get("note") for row in rows) else "")
        ),
        traces=[
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": plain(words.get(key, key)),
                "x": [plain(label) for label in labels],
                "y": [row.get(key) for row in rows],
                "line": line(index),
                "marker": mark(index),
                "connectgaps": True,
                "hovertemplate": "%{x}: %{y:.4g} s<extra>" + plain(words.get(key, key)) + "</extra>",
            }
            for index, key in enumerate(series)
        ],
        layout={
            "xaxis": axis(unit, type="category"),
            "yaxis": axis("seconds a step", rangemode="tozero"),
        },
        table=Table(
            (title, *(words.get(key, key) for key in series), "note"),
            tuple(
                (label, *(_cell(row.get(key)) for key in series), str(row.get("note", "")))
                for row, label in zip(rows, labels)
            ),
            note="Seconds a step; - where nothing was simulated.",
        ),
    )
