"""Figures as text."""

import textwrap
from collections.abc import Sequence
from itertools import groupby

from megatron_hdp.reproduce.paper import Range
from megatron_hdp.reproduce.result import Figure, Row
from megatron_hdp.reproduce.sensitivity import Varied

_WIDTH = 120
_NAME = 52
_HEADER = f"{'':<{_NAME}}{'paper':>13}{'simulated':>11}{'min .. max':>17}{'error':>9}  basis"


def render_figure(figure: Figure) -> str:
    """A figure's table, its notes and what was assumed."""
    notes = list(dict.fromkeys(row.note for row in figure.rows if row.note))
    lines = [f"{figure.key}: {figure.title}", _HEADER]
    lines += [_row(row, notes) for row in figure.rows]
    for name, holds in figure.orders.items():
        lines.append(f"order: {name}: {'yes' if holds else 'NO'}")
    for number, note in enumerate(notes, 1):
        lines += _wrapped(f"[{number}] {note}")
    for words in figure.words:
        lines += _wrapped(words)
    return "\n".join(lines)


def _wrapped(words: str) -> list[str]:
    return textwrap.wrap(words, _WIDTH, subsequent_indent="    ")


def _row(row: Row, notes: Sequence[str]) -> str:
    error = "" if row.error is None else f"{100 * row.error:+.1f} %"
    spread = "" if row.spread is None else f"{_number(row.spread[0])} .. {_number(row.spread[1])}"
    label = " (label)" if row.tag == "label" and row.paper is not None else ""
    basis = row.basis if row.paper is not None else "not in the paper"
    mark = f" [{notes.index(row.note) + 1}]" if row.note else ""
    paper = "" if row.paper is None else f"{_published(row.paper)} {row.unit}"
    name = row.name if row.paper is not None else f"{row.name}, {row.unit}"
    cells = f"{textwrap.shorten(name, _NAME - 1):<{_NAME}}{paper:>13}{_number(row.simulated):>11}{spread:>17}{error:>9}"
    return f"{cells}  {basis}{label}{_verdict(row)}{mark}".rstrip()


def _verdict(row: Row) -> str:
    if not row.judged or row.limit is None:
        return ""
    words = "MISSED" if row.missed else "off" if row.off else "within"
    layouts = f", layouts {_number(row.layouts[0])} .. {_number(row.layouts[1])}" if row.layouts is not None else ""
    return f", {words} {100 * row.limit:.0f} %{layouts}"


def _published(value: float | Range) -> str:
    if isinstance(value, tuple):
        return f"{value[0]:g}-{value[1]:g}"
    return f"{value:g}" if value == round(value, 2) else f"{value:.2f}"


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
    """How many judged values were met, and which were not."""
    judged = [(figure.key, row) for figure in figures for row in figure.rows if row.judged]
    off = [(key, row) for key, row in judged if row.off and not row.missed]
    missed = [(key, row) for key, row in judged if row.missed]
    wrong = [f"  {figure.key}, {name}" for figure in figures for name, holds in figure.orders.items() if not holds]
    within = len(judged) - len(off) - len(missed)
    lines = [f"{within} of {len(judged)} predicted values are within their limit (10 %, in Figure 17 15 %)"]
    for words, rows in (("off, but between what other layouts give:", off), ("missed, see the notes above:", missed)):
        lines += (
            [words, *(f"  {key}, {row.name} ({100 * (row.error or 0.0):+.0f} %)" for key, row in rows)] if rows else []
        )
    return "\n".join(lines + (["in the wrong order:", *wrong] if wrong else ["all orders are right"]))
