"""Whether a file is that of a simulation: its fields, their types and ranges, and what they must not contradict."""

from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from megatron_hdp.errors import DataError
from megatron_hdp.simulator.result import CAUSES, KINDS
from megatron_hdp.types import IntArray

SIMULATION_SCHEMA = 1
TIMES = ("compute", "ring", "partner", "expert", "copy")
"""Columns of a timeline that say what a bar's seconds were."""
_MOST = 2**53
"""Whole numbers up to here are exact in JavaScript as well."""
_MOST_MICROSECONDS = 2**38
_MOST_BARS = 2**24
_ROUNDING = 1e-6
_ROW_WORDS = ("label", "note")
"""Fields of a sweep's row that are text; all others but its value are seconds by strategy."""

_Whole = Annotated[int, Field(ge=-_MOST, le=_MOST)]
_Count = Annotated[int, Field(ge=0, le=_MOST)]
_Micro = Annotated[int, Field(ge=-_MOST_MICROSECONDS, le=_MOST_MICROSECONDS)]
_Times = list[_Micro] | _Micro
"""A column of a timeline; one number where all are the same."""


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class Bars(_Model):
    """A timeline. Columns but the first have one entry a bar, or one number for all."""

    lane_bars: list[_Count]
    """Bars of each lane."""
    kind: list[_Count] | _Count
    slot: list[_Whole] | _Whole
    part: list[_Whole] | _Whole
    gap: _Times
    """Start, counted from the end of the lane's bar before."""
    length: _Times
    compute: _Times
    ring: _Times
    partner: _Times
    expert: _Times
    copied: Annotated[_Times, Field(alias="copy")]


class _Step(_Model):
    """`StepNumbers` with its ranges."""

    seconds: Annotated[float, Field(gt=0)]
    span_seconds: Annotated[float, Field(ge=0)]
    tokens: _Count
    tokens_per_second: Annotated[float, Field(ge=0)]
    mfu: Annotated[float, Field(ge=0)] | None
    computing: Annotated[float, Field(ge=0, le=1 + _ROUNDING)]
    idle: dict[str, Annotated[float, Field(ge=-_ROUNDING)]]
    optimizer_seconds: Annotated[float, Field(ge=0)]
    bytes_by_link: dict[str, _Count]
    nic_peak: Annotated[float, Field(ge=0)]
    nic_mean: Annotated[float, Field(ge=0)]
    plan_seconds: Annotated[float, Field(ge=0)]
    ring_sizes: dict[
        Annotated[str, Field(pattern=r"^[1-9][0-9]{0,8}$")], Annotated[list[_Count], Field(min_length=2, max_length=2)]
    ]


class Run(_Model):
    """`files.StrategyRun`."""

    name: str
    words: str
    steps: list[_Step]
    failed: str | None
    timeline: Bars | None


class File(_Model):
    """`files.Simulation`."""

    simulation_schema: int
    title: str
    setting: dict[str, JsonValue]
    lengths: Annotated[list[Annotated[int, Field(ge=1, le=_MOST)]], Field(min_length=1)]
    shown_step: _Count
    runs: Annotated[list[Run], Field(min_length=1)]
    layer: dict[str, Annotated[float, Field(ge=0)]]
    sweeps: dict[Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,59}$")], list[dict[str, int | float | str | None]]]
    verdict: list[str]


def checked(data: Any, where: str) -> File:
    """The file's data, judged. Raises `DataError`."""
    schema = data.get("simulation_schema") if isinstance(data, dict) else None
    if type(schema) is not int:
        raise DataError(f"{where}: not a simulation: `megatron-hdp simulate --json` writes those")
    if schema != SIMULATION_SCHEMA:
        raise DataError(
            f"{where}: a simulation of version {schema}, this version of megatron_hdp reads {SIMULATION_SCHEMA}: "
            "simulate again with this one"
        )
    try:
        file = File.model_validate(data)
    except ValidationError as error:
        raise DataError(f"{where}: {_explained(error)}") from error
    problem = _problem(file)
    if problem is not None:
        raise DataError(f"{where}: {problem}")
    return file


def _problem(file: File) -> str | None:
    """What types and ranges do not say."""
    names = [run.name for run in file.runs]
    if names[0] != "hdp" or len(set(names)) != len(names):
        return f"runs are {', '.join(names)}: the first must be hdp, and each comes once"
    for run in file.runs:
        if (run.failed is None) != bool(run.steps):
            return (
                f"the run {run.name} has {len(run.steps)} steps, and its `failed` is {run.failed!r}: one or the other"
            )
        if run.steps and file.shown_step >= len(run.steps):
            return f"shown_step is {file.shown_step}, and the run {run.name} has {len(run.steps)} steps"
        problem = _steps_problem(run.steps)
        if problem is not None:
            return f"the run {run.name}: {problem}"
        if run.timeline is not None:
            problem = _bars_problem(run.timeline, file.setting.get("stages", 1))
            if problem is not None:
                return f"timeline of the run {run.name}: {problem}"
    for name, rows in file.sweeps.items():
        problem = next((found for row in rows if (found := _row_problem(row)) is not None), None)
        if problem is not None:
            return f"sweep {name}: {problem}"
    return None


def _steps_problem(steps: list[_Step]) -> str | None:
    """Why these are no steps."""
    for number, step in enumerate(steps):
        unknown = [cause for cause in step.idle if cause not in CAUSES]
        if unknown:
            return f"idle of step {number} has {unknown[0]!r:.40}, and causes are {', '.join(CAUSES)}"
        if any(sum(pair[i] for pair in step.ring_sizes.values()) == 0 for i in (0, 1)):
            return f"ring_sizes of step {number} hold no sequences or no tokens"
    return None


def _row_problem(row: dict[str, int | float | str | None]) -> str | None:
    """Why this is no row of a sweep."""
    if row.get("value") is None:
        return "a row without its value"
    for name, seconds in row.items():
        if name in _ROW_WORDS or name == "value" or seconds is None:
            continue
        if isinstance(seconds, str) or seconds <= 0:
            return f"{name:.40} of a row is {seconds!r:.40}: it must be seconds, above 0, or null"
    return None


def _bars_problem(bars: Bars, stages: Any) -> str | None:
    """Why these columns are no timeline of lanes of so many stages."""
    if type(stages) is not int or stages < 1 or len(bars.lane_bars) % stages:
        return f"{len(bars.lane_bars)} lanes, and stages of the setting is {stages!r:.40}, which must divide them"
    count = sum(bars.lane_bars)
    if count > _MOST_BARS:
        return f"{count:,} bars, at most {_MOST_BARS:,} are read"
    for name, column in columns(bars):
        if isinstance(column, list) and len(column) != count:
            return f"column {name} has {len(column)} entries for {count} bars"
    if count and int(np.max(bars.kind)) >= len(KINDS):
        return f"kind {int(np.max(bars.kind))}, and there are {len(KINDS)}"
    if count and (np.abs(bars.part).max() > 127 or np.abs(bars.slot).max() > 2**31):
        return "a slot or a part that is too large"
    if count and min(np.min(getattr(bars, name)) for name in ("length", *TIMES[:-1], "copied")) < 0:
        return "a time below 0"
    gaps, lengths = (expanded(column, count) for column in (bars.gap, bars.length))
    if count and starts(gaps, lengths, np.array(bars.lane_bars, np.int64)).min() < 0:
        return "a bar starts before the step"
    return None


def columns(bars: Bars) -> list[tuple[str, list[int] | int]]:
    """Names and values of all columns that have one entry a bar."""
    names = ("kind", "slot", "part", "gap", "length", *TIMES[:-1])
    return [*((name, getattr(bars, name)) for name in names), ("copy", bars.copied)]


def _explained(error: ValidationError) -> str:
    """The first problem, with its place."""
    first = error.errors(include_url=False)[0]
    place = ".".join(str(part) for part in first["loc"] if not str(part).startswith("list["))
    place = "".join(letter if letter.isprintable() else "?" for letter in place)[:200]
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    return f"field {place}: {first['msg'][0].lower()}{first['msg'][1:]}{more}"


def starts(gap: IntArray, length: IntArray, lane_bars: IntArray) -> IntArray:
    """Start of every bar: sums of what comes before it in its lane."""
    until = np.concatenate([np.zeros(1, np.int64), np.cumsum(gap + length)])
    lane_starts = np.repeat(until[np.cumsum(lane_bars) - lane_bars], lane_bars)
    return np.asarray(until[:-1] + gap - lane_starts, np.int64)


def expanded(values: list[int] | int, count: int) -> IntArray:
    """A column of ``count`` bars, int64 [num_bars]."""
    return np.full(count, values, np.int64) if isinstance(values, int) else np.array(values, np.int64)
