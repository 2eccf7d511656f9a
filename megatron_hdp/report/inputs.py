"""What a report is made from: files, told apart by what is in them."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_hdp.errors import DataError, PlanError
from megatron_hdp.simulator.files import Simulation, read_simulation
from megatron_hdp.timeline import RunTimeline, read_timeline
from megatron_hdp.types import Plan

_LOOK = 1 << 16
"""Bytes of a file that tell what it is."""
_MOST = 1e100
"""Larger numbers of a log are taken for unknown."""
_MOST_STEPS = 1 << 53
_NEEDED = ("iteration", "loss", "seconds", "tokens")
"""Fields of a line of --hdp-log without which there is nothing to show."""


@dataclass(frozen=True)
class PlanFile:
    """What `megatron-hdp plan --json` wrote."""

    path: Path
    plans: tuple[Plan, ...]


@dataclass(frozen=True)
class SimulationFile:
    """What `megatron-hdp simulate --json` wrote."""

    path: Path
    simulation: Simulation


@dataclass(frozen=True)
class RunFile:
    """What a training run wrote with --hdp-log."""

    path: Path
    steps: tuple[dict[str, Any], ...]
    """One object per iteration, in order; of iterations that were trained twice, after a restart, the later one."""
    repeated: int
    """Iterations that the file has more than once."""
    cut: bool
    """The last line is incomplete, as a killed run leaves it; it is not in ``steps``."""


@dataclass(frozen=True)
class TimelineFolder:
    """What a training run wrote with --hdp-timeline."""

    path: Path
    run: RunTimeline


type Input = PlanFile | SimulationFile | RunFile | TimelineFolder


def read_input(path: Path) -> Input:
    """Read a file of any kind, or the folder of --hdp-timeline.

    Raises:
        DataError: missing, damaged, or of no kind that a report can show.
    """
    if path.is_dir():
        return TimelineFolder(path, read_timeline(path))
    text = _read(path)
    lines = text.split("\n", 2)
    first = lines[0].strip()
    if not text.strip():
        raise DataError(f"{path}: is empty: nothing to report")
    if '"simulation_schema"' in text[:_LOOK]:
        return SimulationFile(path, read_simulation(path))
    if first.startswith("{") and ('"iteration"' in first or '"loss"' in first):
        return _run(path, text)
    if first.startswith(("[", "{")) and '"num_ranks"' in text and '"ring_start"' in text:
        return PlanFile(path, _plans(path, text))
    if '"pieces_schema"' in text[-_LOOK:] or '"pieces_schema"' in text[:_LOOK]:
        raise DataError(f"{path}: a plan of --json-pieces: give the one of --json, which has the columns")
    if '"reproduce_schema"' in text[:_LOOK]:
        raise DataError(f"{path}: what megatron-hdp reproduce wrote, which is for programs: no report shows it")
    raise DataError(
        f"{path}: neither a plan (megatron-hdp plan --json), nor a simulation (megatron-hdp simulate --json), nor the "
        "log or timeline of a training run (--hdp-log, --hdp-timeline)"
    )


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not text in UTF-8") from error


def _plans(path: Path, text: str) -> tuple[Plan, ...]:
    """One plan, or a list with one plan a line."""
    try:
        if text.lstrip().startswith("{"):
            return (Plan.from_json(text),)
        made = tuple(Plan.from_json(json.dumps(one)) for one in json.loads(text))
    except (PlanError, ValueError, RecursionError) as error:
        raise DataError(f"{path}: {error}") from error
    return made


def _run(path: Path, text: str) -> RunFile:
    """The lines of a log; only the last one may be cut."""
    lines = text.split("\n")  # not splitlines: texts in JSON may hold other ends of lines
    steps: dict[int, dict[str, Any]] = {}
    read, cut = 0, False
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            data = json.loads(line, parse_constant=lambda _: None, parse_float=_known, parse_int=_known_whole)
        except (ValueError, RecursionError) as error:
            if number == len(lines) and not text.endswith("\n"):
                cut = True
                continue
            raise DataError(f"{path}, line {number}: not JSON: {error}") from error
        _check_line(path, number, data)
        steps[data["iteration"]] = data
        read += 1
    if not steps:
        raise DataError(f"{path}: has no complete line: the run ended before its first step did")
    ordered = tuple(steps[iteration] for iteration in sorted(steps))
    return RunFile(path, ordered, read - len(steps), cut)


def _known(text: str) -> float | None:
    """A number; None, not known, for what is too large to compute with, as for NaN."""
    value = float(text)
    return value if abs(value) <= _MOST else None


def _known_whole(text: str) -> int | None:
    return int(text) if abs(float(text)) <= _MOST else None


def _check_line(path: Path, number: int, data: Any) -> None:
    """Raise `DataError` unless the line has what every line of --hdp-log has."""
    if not isinstance(data, dict) or any(name not in data for name in _NEEDED):
        raise DataError(f"{path}, line {number}: not a step of --hdp-log, which has {', '.join(_NEEDED)}")
    if type(data["iteration"]) is not int or not 0 <= data["iteration"] < _MOST_STEPS:
        raise DataError(
            f"{path}, line {number}: iteration is {str(data['iteration'])[:40]!r}, must be a whole number from 0 on"
        )
    for name, value in data.items():
        if name in _DICTS:
            if not isinstance(value, dict) or not all(isinstance(v, int | float) and v >= 0 for v in value.values()):
                raise DataError(f"{path}, line {number}: {name} must be an object of numbers, none below 0")
            if name == "ring_sizes" and not all(re.fullmatch("[1-9][0-9]{0,8}", size) for size in value):
                raise DataError(f"{path}, line {number}: ring_sizes has a size that is no whole number above 0")
        elif value is not None and not isinstance(value, int | float) and name in _NUMBERS:
            raise DataError(f"{path}, line {number}: {name} is {str(value)[:40]!r}, must be a number")


_DICTS = ("ring_sizes", "exchanges")
_NUMBERS = (
    *_NEEDED,
    "grad_norm",
    "learning_rate",
    "micro_batches_min",
    "micro_batches_max",
    "imbalance",
    "span_seconds",
    "bound_seconds",
    "efficiency",
    "bytes_sent",
    "plan_seconds",
    "read_seconds",
    "padding_tokens",
    "own_offload_bytes_out",
    "own_offload_wait_seconds",
)
