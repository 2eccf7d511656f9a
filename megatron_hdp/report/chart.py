"""What a report is made of: sections of charts, each with a statement, a caption and a table. No plotting library.

Traces and layouts are plain data in the format of plotly.js; the page's script adds fonts, colours of axes and what
narrow screens need.
"""

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_hdp.lengths import format_size

type Trace = dict[str, Any]


@dataclass(frozen=True)
class Table:
    """The numbers of a chart, for who cannot see it."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


@dataclass(frozen=True)
class Key:
    """One entry of a legend that stands above a chart."""

    words: str
    colour: str
    pattern: str = ""
    """Of plotly: "/", "\\\\", "x", "-", "|", "+", "."; empty for a plain fill."""


@dataclass(frozen=True, kw_only=True)
class Chart:
    """One picture."""

    name: str
    """Unique in a report; letters, digits and dashes. Names PNG files."""
    heading: str
    """A statement with its number."""
    caption: str
    """How to read it, with units."""
    traces: list[Trace]
    layout: dict[str, Any]
    table: Table
    height: int = 340
    """Pixels on a wide screen."""
    narrow_height: int | None = None
    """Pixels on a phone; None: as on a wide screen."""
    keys: tuple[Key, ...] = ()
    cells: dict[str, Any] | None = None
    """For rasters, see `report.raster`: what the page's script unfolds into heat maps."""


@dataclass(frozen=True, kw_only=True)
class Section:
    """Charts on one matter."""

    name: str
    title: str
    words: str = ""
    charts: tuple[Chart, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Tile:
    """One number of the verdict."""

    value: str
    words: str


@dataclass(frozen=True, kw_only=True)
class Part:
    """Everything about one input, or about several of a kind that are shown together."""

    title: str
    sources: tuple[str, ...]
    """Files."""
    tiles: tuple[Tile, ...] = ()
    verdict: tuple[str, ...] = ()
    setting: tuple[tuple[str, str], ...] = ()
    sections: tuple[Section, ...] = ()
    what_if: dict[str, Any] | None = None
    """Data of the what-if panel, see `report.what_if`."""
    notes: tuple[str, ...] = field(default=())


def plain(text: object) -> str:
    """Text for a chart's labels, which plotly reads as a little HTML."""
    return html.escape(str(text), quote=False)


def capital(text: str) -> str:
    """With a capital letter ahead, as sentences begin."""
    return text[:1].upper() + text[1:]


def axis(title: str, **more: Any) -> dict[str, Any]:
    """An axis with a title."""
    return {"title": {"text": plain(title)}, **more}


def seconds(value: float) -> str:
    """Three digits and a unit that suits them; "-" for what is not a number."""
    if not math.isfinite(value):
        return "-"
    for factor, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if abs(value) >= factor:
            return f"{digits(value / factor)} {unit}"
    return f"{digits(value / 1e-6)} µs" if value else "0 s"


def digits(value: float) -> str:
    """Three significant digits, without powers of ten; thousands separated."""
    if not math.isfinite(value):
        return "-"
    if value == 0:
        return "0"
    after = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:,.{after}f}"


def percent(share: float) -> str:
    """A share as a percentage, finer where it is near 0 or 1."""
    value = 100 * share
    if 0 < value < 0.01:
        return "< 0.01 %"
    return f"{value:.{2 if value < 1 or 99 < value < 100 else 1 if value < 10 else 0}f} %"


def amount(bytes_: float) -> str:
    """Bytes with a decimal unit."""
    for power, unit in ((15, "PB"), (12, "TB"), (9, "GB"), (6, "MB"), (3, "kB")):
        if abs(bytes_) >= 10**power:
            return f"{digits(bytes_ / 10**power)} {unit}"
    return f"{bytes_:,.0f} B"


def rate(tokens: float) -> str:
    """Tokens per second."""
    for power, unit in ((9, "G"), (6, "M"), (3, "k")):
        if abs(tokens) >= 10**power:
            return f"{digits(tokens / 10**power)} {unit} tokens/s"
    return f"{digits(tokens)} tokens/s"


def faster(own: float, other: float) -> str:
    """How ``own`` seconds compare with ``other``: "3.31 times as fast", or "1.02 times as slow"."""
    ratio = other / own
    if 0.995 <= ratio < 1.005:
        return "equally fast"
    return f"{digits(ratio)} times as fast" if ratio > 1 else f"{digits(1 / ratio)} times as slow"


def tokens(count: float) -> str:
    """Tokens: 8K, 2M, or a number that no suffix fits."""
    return format_size(int(count))


def mean(values: Sequence[float]) -> float:
    """Mean; NaN of nothing."""
    return sum(values) / len(values) if values else math.nan


def deviation(values: Sequence[float]) -> float:
    """Standard deviation of a sample; 0 of a single value."""
    if len(values) < 2:
        return 0.0
    centre = mean(values)
    return math.sqrt(sum((value - centre) ** 2 for value in values) / (len(values) - 1))
