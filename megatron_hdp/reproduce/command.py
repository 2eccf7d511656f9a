"""`megatron-hdp reproduce`: figures one after the other, as they are ready."""

import datetime
import json
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

import megatron_hdp
from megatron_hdp.errors import ConfigError
from megatron_hdp.plan_flags import check_output

DEFAULT_SEEDS, QUICK_SEEDS = 64, 2
_FEW_SEEDS = 16
"""Fewer batches than these have averages that are far from those of many."""
REPRODUCE_SCHEMA = 1
"""Of the JSON file: by its name `megatron-hdp report` knows what it is."""
MOST_SEEDS = 10_000
FIGURES = ("figure-6a", "figure-18a", "figure-21", "figure-18b", "figure-20", "figure-19", "figure-17", "sensitivity")


@dataclass(frozen=True)
class ReproduceFlags:
    """Flags of `megatron-hdp reproduce`."""

    only: str | None = None
    """Some of figure-6a, figure-18a, figure-21, figure-18b, figure-20, figure-19, figure-17, sensitivity, with commas.
    Default: all."""
    seeds: int | None = None
    """Batches that averages are taken over; costly settings take a part of them. Default: 64, which takes 80 s of one
    core; the paper's averages are of 200."""
    quick: bool = False
    """2 batches and no sensitivity unless asked for: a smoke run of 15 s, whose averages say little."""
    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Write everything to this file."""


def run(flags: ReproduceFlags) -> None:
    """Simulate and print. Raises `ConfigError` for flags that cannot work."""
    names, seeds = _names(flags.only), _seeds(flags)
    if flags.only is None and flags.quick:
        names.remove("sensitivity")
    _check_json(flags.json)
    from megatron_hdp.reproduce.render import render_summary
    from megatron_hdp.reproduce.result import CHOICES

    figures: list[Any] = []
    saved: list[dict[str, Any]] = []
    print(_TITLE + (f"\n{seeds} batches: averages say little." if seeds < _FEW_SEEDS else ""), flush=True)
    for name, words, found, data in _ready(names, seeds):
        _progress("")
        print(f"\n{words}", flush=True)
        saved.append(data)
        if name != "sensitivity":
            figures.append(found)
    if figures:
        print(f"\n{render_summary(figures)}")
    if flags.json is not None:
        head = {
            "reproduce_schema": REPRODUCE_SCHEMA,
            "version": megatron_hdp.__version__,
            "date": datetime.date.today().isoformat(),
            "command": shlex.join(["megatron-hdp", *sys.argv[1:]]),
        }
        _write(flags.json, head | {"seeds": seeds, "choices": CHOICES, "figures": saved})


_TITLE = (
    "ByteScale (SIGCOMM 2025) beside the simulator; profile bytescale, fitted once to Figures 6a, 18a and 21.\n"
    "calibrated: used in that fit; predicted: the profile was not fitted to it; given: it chose the batches.\n"
    "*: not blind, a choice behind the prediction was made with judged values in sight. within, MISSED: the limit;\n"
    "off: beyond it, but not with another pipeline that could have been assumed; layouts: least and most over those.\n"
    "Values marked (label) were read off labels of figures and are good to about 10 %. See docs/reproduce.md."
)


def _names(only: str | None) -> list[str]:
    """Figures in their order."""
    asked = list(FIGURES) if only is None else [name.strip() for name in only.split(",") if name.strip()]
    for name in asked or [""]:
        if name not in FIGURES:
            raise ConfigError(f"--only {name!r}: choose some of {', '.join(FIGURES)}, separated by commas")
    return [name for name in FIGURES if name in asked]


def _seeds(flags: ReproduceFlags) -> int:
    seeds = (QUICK_SEEDS if flags.quick else DEFAULT_SEEDS) if flags.seeds is None else flags.seeds
    if not 2 <= seeds <= MOST_SEEDS:
        raise ConfigError(f"--seeds is {seeds}: give 2 to {MOST_SEEDS:,}; a spread needs two")
    return seeds


def _ready(names: list[str], seeds: int) -> Iterator[tuple[str, str, Any, dict[str, Any]]]:
    """(name, text, result, JSON) of each figure."""
    from megatron_hdp.cost import load_profile
    from megatron_hdp.reproduce.ladder import figure_19, figure_20
    from megatron_hdp.reproduce.layers import figure_6a, figure_18a, figure_21
    from megatron_hdp.reproduce.one_step import figure_18b
    from megatron_hdp.reproduce.render import render_figure, render_sensitivity
    from megatron_hdp.reproduce.sensitivity import sensitivity
    from megatron_hdp.reproduce.speedups import figure_17
    from megatron_hdp.reproduce.steps import Steps

    profile, steps = load_profile("bytescale"), Steps(progress=_progress)
    makers: dict[str, Callable[[], Any]] = {
        "figure-6a": lambda: figure_6a(profile),
        "figure-18a": lambda: figure_18a(profile),
        "figure-21": lambda: figure_21(profile),
        "figure-18b": lambda: figure_18b(steps, seeds),
        "figure-20": lambda: figure_20(steps, seeds),
        "figure-19": lambda: figure_19(steps, seeds),
        "figure-17": lambda: figure_17(steps, seeds),
    }
    few = max(2, seeds // 16)
    for name in names:
        if name == "sensitivity":
            varied = sensitivity(steps, few)
            rows = [row.to_json() for row in varied]
            yield name, render_sensitivity(varied, few), varied, {"figure": name, "steps": few, "rows": rows}
        else:
            figure = makers[name]()
            yield name, render_figure(figure), figure, figure.to_json()


def _progress(words: str) -> None:
    """Only where a person looks on; on one line, which the next words take the place of, or nothing."""
    if sys.stderr is not None and sys.stderr.isatty():
        width = shutil.get_terminal_size().columns - 1
        print(f"\r\033[K{words[:width]}\r", end="", file=sys.stderr, flush=True)


def _check_json(path: Path | None) -> None:
    """Refuse a file that cannot be written, before minutes are spent; what is in it stays until the end."""
    if path is None:
        return
    try:
        check_output("--json", path)
        if path.exists() and not os.access(path, os.W_OK):
            raise ConfigError(f"--json {path}: cannot be written (it is write-protected)")
        if not _is_device(path):
            _beside(path).touch()
            _beside(path).unlink()
    except OSError as error:
        raise ConfigError(f"--json {path}: cannot be written ({error.strerror})") from error


def _is_device(path: Path) -> bool:
    """Or a pipe: nothing that a file can take the place of."""
    return path.exists() and not path.is_file()


def _beside(path: Path) -> Path:
    """Where a file grows until it is whole; links are followed, so that they stay links."""
    return path.resolve().with_name(f".megatron-hdp-{os.getpid()}.part")


def _write(path: Path, data: dict[str, Any]) -> None:
    """All of it or nothing: a full disk leaves the file that was there."""
    text = json.dumps(data, indent=2, allow_nan=False) + "\n"
    try:
        if _is_device(path):
            path.write_text(text, encoding="utf-8")
            return
        part = _beside(path)
        try:
            part.write_text(text, encoding="utf-8")
            if path.exists():
                shutil.copymode(path, part)
            part.replace(path.resolve())
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"--json {path}: cannot be written ({error.strerror})") from error
