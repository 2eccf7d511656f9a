"""The page: one HTML file with everything in it, so that it works offline."""

import base64
import functools
import gzip
import importlib
import json
from collections.abc import Sequence
from importlib import resources
from types import ModuleType
from typing import Any

from megatron_hdp import __version__
from megatron_hdp.errors import ConfigError
from megatron_hdp.report.chart import Chart, Part

_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; form-action "
    "'none'; base-uri 'none'"
)
"""The browser loads nothing from anywhere, whatever is in the page."""


def render(parts: Sequence[Part], title: str, date: str) -> str:
    """The page's HTML.

    Args:
        parts: what it shows, in this order.
        title: its title.
        date: when it was made, for its foot.

    Raises:
        ConfigError: jinja2 or plotly is not installed.
    """
    jinja2, offline = _needed("jinja2"), _needed("plotly.offline")
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_template), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True
    )
    text: str = environment.get_template("report.html.j2").render(
        title=title,
        date=date,
        version=__version__,
        plotly_version=offline.get_plotlyjs_version(),
        parts=parts,
        policy=_POLICY,
        style=_template("report.css"),
        script=_template("report.js"),
        what_if_script=_template("what_if.js"),
        library=_library(),
        data=_packed(_data(parts)),
    )
    return text


def _needed(module: str) -> ModuleType:
    """A module of the extra "report"."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"report: {module.partition('.')[0]} is not installed: pip install 'megatron-hdp[report]', or pip install "
            "plotly jinja2"
        ) from error


@functools.cache
def _library() -> str:
    """The drawing library; it takes half a second to pack."""
    return _packed(str(_needed("plotly.offline").get_plotlyjs()))


def _template(name: str) -> str:
    return resources.files("megatron_hdp.report").joinpath("templates", name).read_text(encoding="utf-8")


def _data(parts: Sequence[Part]) -> str:
    """What the page's script draws, as JSON."""
    charts = [_chart(chart) for part in parts for section in part.sections for chart in section.charts]
    panels = {f"what-if-{index}": part.what_if for index, part in enumerate(parts) if part.what_if is not None}
    return json.dumps({"charts": charts, "panels": panels}, separators=(",", ":"), allow_nan=False)


def _chart(chart: Chart) -> dict[str, Any]:
    return {
        "name": chart.name,
        "traces": chart.traces,
        "layout": chart.layout,
        "height": chart.height,
        "narrow": chart.narrow_height or chart.height,
        "cells": chart.cells,
    }


def _packed(text: str) -> str:
    """Compressed, in letters that HTML leaves alone; equal texts give equal letters."""
    return base64.b64encode(gzip.compress(text.encode("utf-8"), 9, mtime=0)).decode("ascii")


def names(parts: Sequence[Part]) -> list[str]:
    """Names of all charts, in the order of the page, those of what-if panels included."""
    found = []
    for index, part in enumerate(parts):
        found += [chart.name for section in part.sections for chart in section.charts]
        found += [f"what-if-{index}-{what}" for what in ("rings", "time")] if part.what_if is not None else []
    return found


def check_names(parts: Sequence[Part]) -> None:
    """Raise ValueError unless every chart's name is its own: they are ids in the page, and files of PNGs."""
    found = names(parts)
    twice = {name for name in found if found.count(name) > 1}
    if twice:
        raise ValueError(f"charts of one name: {sorted(twice)}")
