"""Figures as text."""

import textwrap
from collections.abc import Sequence
from itertools import groupby

from megatron_hdp.reproduce.paper import Range
from megatron_hdp.reproduce.result import CHOICES, Choice, Figure, Row
from megatron_hdp.reproduce.sensitivity import Varied

_WIDTH = 120
_NAME = 52
_HEADER = f"{'':<{_NAME}}{'paper':>13}{'simulated':>11}{'min .. max':>17}"
_STANDARD = "std. error"


def render_figure(figure: Figure) -> str:
    """A figure's table, its notes and what was assumed."""
    notes = list(dict.fromkeys(row.reason for row in figure.rows if row.reason))
    wide = len(_STANDARD) + 2 if any(row.uncertain is not None for row in figure.rows) else 0
    lines = [f"{figure.key}: {figure.title}", f"{_HEADER}{_STANDARD if wide else '':>{wide}}{'error':>9}  basis"]
    lines += [_row(row, notes, wide) for row in figure.rows]
    for name, holds in figure.orders.items():
        lines.append(f"order: {name}: {'yes' if holds else 'NO'}")
    for choice in CHOICES:
        if any(choice in row.in_sight for row in figure.rows):
            lines += _wrapped(f"{_sign([choice])} not a blind prediction: {CHOICES[choice]}")
    for number, note in enumerate(notes, 1):
        lines += _wrapped(f"[{number}] {note}")
    for words in figure.words:
        lines += _wrapped(words)
    return "\n".join(lines)


def _wrapped(words: str) -> list[str]:
    return textwrap.wrap(words, _WIDTH, subsequent_indent="    ")


def _sign(choices: Sequence[Choice]) -> str:
    """*b for "backward", *bs for "backward" and "stages"."""
    return "*" + "".join(choice[0] for choice in choices)


def _row(row: Row, notes: Sequence[str], wide: int) -> str:
    """A line; ``wide`` characters are for the standard error."""
    uncertain = "" if row.uncertain is None else f"{100 * row.uncertain:.0f} %"
    spread = "" if row.spread is None else f"{_number(row.spread[0])} .. {_number(row.spread[1])}"
    label = " (label)" if row.tag == "label" and row.paper is not None else ""
    basis = row.basis if row.paper is not None else "not in the paper"
    sign = f" {_sign(row.in_sight)}" if row.in_sight else ""
    mark = f" [{notes.index(row.reason) + 1}]" if row.reason else ""
    paper = "" if row.paper is None else f"{_published(row.paper)} {row.unit}"
    name = row.name if row.paper is not None else f"{row.name}, {row.unit}"
    cells = f"{textwrap.shorten(name, _NAME - 1):<{_NAME}}{paper:>13}{_number(row.simulated):>11}{spread:>17}"
    cells += f"{uncertain:>{wide}}{_error(row):>9}"
    return f"{cells}  {basis}{sign}{label}{_verdict(row)}{mark}".rstrip()


def _error(row: Row) -> str:
    """One decimal, or as many as show that an error is beyond its limit: +15.03 % where 15 % are missed."""
    if row.error is None:
        return ""
    percent, digits = 100 * row.error, 1
    while row.off and digits < 9 and f"{abs(percent):.{digits}f}" == f"{100 * (row.limit or 0.0):.{digits}f}":
        digits += 1
    return f"{round(percent, digits) + 0.0:+.{digits}f} %"  # + 0.0 makes 0 of -0


def _verdict(row: Row) -> str:
    if row.limit is None or not row.judged:
        return ", not judged" if row.predicted else ""
    words = "MISSED" if row.missed else "off" if row.off else "within"
    layouts = f", layouts {_number(row.layouts[0])} .. {_number(row.layouts[1])}" if row.layouts is not None else ""
    return f", {words} {100 * row.limit:.0f} %{layouts}"


def _published(value: float | Range) -> str:
    if isinstance(value, tuple):
        return f"{value[0]:g}-{value[1]:g}"
    return f"{round(value, 2):g}"


def _number(value: float) -> str:
    """Three digits or so."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 20 else f"{value:.2f}"


def render_sensitivity(varied: Sequence[Varied], count: int) -> str:
    """What is not published, varied: a table for each setting, and the range of its speed-ups."""
    lines = [f"sensitivity: what is not published, one change at a time, {count} steps each (the same for all)"]
    for setting, rows in groupby(varied, key=lambda row: row.setting):
        own = list(rows)
        lines.append(f"{setting:<64}{'static, s':>10}{'naive, x':>10}{'balanced, x':>13}")
        for row in own:
            if row.static_s is None:
                lines += _wrapped(f"  {row.change}: cannot run: {row.failed}")
            else:
                lines.append(f"  {row.change:<62}{row.static_s:>10.0f}{row.naive:>10.2f}{row.balanced:>13.2f}")
        for name in ("naive", "balanced"):
            values = [getattr(row, name) for row in own if getattr(row, name) is not None]
            if values:
                lines.append(f"  {name}: {min(values):.2f} to {max(values):.2f}")
    return "\n".join(lines)


def render_summary(figures: Sequence[Figure]) -> str:
    """How many judged values were met, which were not, and how many of them are blind predictions."""
    judged = [(figure.key, row) for figure in figures for row in figure.rows if row.judged]
    off = [(key, row) for key, row in judged if row.off and not row.missed]
    missed = [(key, row) for key, row in judged if row.missed]
    wrong = [f"  {figure.key}, {name}" for figure in figures for name, holds in figure.orders.items() if not holds]
    seen = sum(bool(row.in_sight) for _, row in judged)
    lines = ["no value here is judged"]
    if judged:
        words = f"{_within(judged)} predicted values are within their limit (10 %, in Figure 17 15 %)"
        ranged = [(key, row) for key, row in judged if isinstance(row.paper, tuple)]
        if ranged:
            single = [(key, row) for key, row in judged if not isinstance(row.paper, tuple)]
            words += (
                f": {_within(single)} single values, and {_within(ranged)} of which the paper has no more than a range "
                "over all models and data"
            )
        lines = _wrapped(words)
    if seen:
        lines += _wrapped(
            f"* {seen} of these {len(judged)} are no blind predictions: a choice behind them was made with judged "
            "values in sight"
        )
    for words, rows in (("off, but not with another layout:", off), ("missed, see the notes above:", missed)):
        lines += [words, *(f"  {key}, {row.name} ({_error(row)})" for key, row in rows)] if rows else []
    if wrong:
        lines += ["in the wrong order:", *wrong]
    elif any(figure.orders for figure in figures):
        lines.append("all orders are right")
    return "\n".join(lines)


def _within(judged: Sequence[tuple[str, Row]]) -> str:
    return f"{sum(not row.off for _, row in judged)} of {len(judged)}"
