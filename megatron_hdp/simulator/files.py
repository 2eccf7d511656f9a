"""A simulation as a JSON file: what `megatron-hdp simulate --json` writes and `megatron-hdp report` reads.

Bars of a timeline are whole microseconds in columns, each bar's start counted from the end of the one before it in its
lane: most of those numbers are 0, which keeps a step of 1,024 ranks small. Everything else comes back as it was.
"""

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO, TypedDict, cast

import numpy as np

from megatron_hdp.cost import CostModel
from megatron_hdp.errors import ConfigError, DataError
from megatron_hdp.simulator.file_format import SIMULATION_SCHEMA, TIMES, Bars, Run, checked, columns, expanded, starts
from megatron_hdp.simulator.result import StepResult, Timeline
from megatron_hdp.types import IntArray, Plan

_MICROSECONDS = 1e6


class StepNumbers(TypedDict):
    """Numbers of one simulated step."""

    seconds: float
    span_seconds: float
    """From the start of the first micro-batch to the end of the last."""
    tokens: int
    tokens_per_second: float
    """Of all GPUs."""
    mfu: float | None
    computing: float
    """Share of the step in which a lane computes, mean over lanes."""
    idle: dict[str, float]
    """Cause -> seconds, mean over lanes; keys are `result.CAUSES`."""
    optimizer_seconds: float
    bytes_by_link: dict[str, int]
    nic_peak: float
    """byte/s of the busiest NIC over any 10 ms."""
    nic_mean: float
    plan_seconds: float
    """Making and checking the plan, measured where the simulation ran."""
    ring_sizes: dict[str, list[int]]
    """Ring size, as a text for JSON's sake -> [sequences, tokens]."""


@dataclass(frozen=True, kw_only=True)
class StrategyRun:
    """One way to run the same steps."""

    name: str
    """A name of `simulator.strategies.STRATEGIES`."""
    words: str
    """For people: "static context parallelism, ring of 256"."""
    steps: tuple[StepNumbers, ...]
    failed: str | None = None
    """Why it cannot run these steps; `steps` is empty then."""
    timeline: Timeline | None = None
    """Of the step that is shown."""


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """Everything that a report shows of a simulation."""

    title: str
    setting: dict[str, Any]
    """Flag -> value, as asked and as derived: model, gpus, tensor_parallel, stages, virtual_stages, expert_group,
    ranks, tokens_per_rank, context, batch_tokens, profile, cluster, recompute, offload, seed, version, date,
    command."""
    lengths: IntArray
    """Sequences of the step that is shown."""
    shown_step: int = 0
    runs: tuple[StrategyRun, ...]
    """The first one is "hdp"."""
    layer: dict[str, float]
    """For the what-if panel, per layer and rank, seconds and bytes: attention_forward (s/token^2),
    attention_backward_factor, linear_forward (s/token), kv_per_token (byte), kv_gradient_per_token, link_latency,
    link_bandwidth (across nodes), inside_latency, inside_bandwidth."""
    sweeps: dict[str, tuple[dict[str, Any], ...]] = field(default_factory=dict)
    """Name of what is swept (tokens_per_rank, ranks, context, bandwidth, offload; search: all capacities and offload
    settings that were tried) -> rows with value, label and
    strategy -> seconds, None where it cannot run; some have a note. Names are small letters, digits and _."""
    verdict: tuple[str, ...] = ()
    """Sentences: is HDP worth it for this data, by how much at most, with which settings."""


def layer_numbers(cost: CostModel) -> dict[str, float]:
    """See `Simulation.layer`."""
    layer, profile = cost.layer_profile, cost.profile
    return {
        "attention_forward": layer.attention_forward,
        "attention_backward_factor": layer.attention_backward_factor,
        "linear_forward": layer.linear_forward,
        "kv_per_token": layer.kv_per_token,
        "kv_gradient_per_token": layer.kv_gradient_per_token,
        "link_latency": profile.across_nodes.latency,
        "link_bandwidth": profile.across_nodes.bandwidth,
        "inside_latency": profile.inside_node.latency,
        "inside_bandwidth": profile.inside_node.bandwidth,
    }


def step_numbers(plan: Plan, result: StepResult, plan_seconds: float) -> StepNumbers:
    """What a file keeps of a simulated step."""
    sizes = np.unique(plan.ring_size)
    held = {int(size): plan.lengths[plan.ring_size == size] for size in sizes}
    return StepNumbers(
        seconds=result.seconds,
        span_seconds=result.span_seconds,
        tokens=result.tokens,
        tokens_per_second=result.tokens_per_second,
        mfu=result.mfu,
        computing=result.computing,
        idle=result.idle_seconds(),
        optimizer_seconds=result.optimizer_seconds,
        bytes_by_link={link: int(number) for link, number in result.bytes_by_link.items()},
        nic_peak=result.nic_peak,
        nic_mean=result.nic_mean,
        plan_seconds=plan_seconds,
        ring_sizes={str(size): [lengths.size, int(lengths.sum())] for size, lengths in held.items()},
    )


def write_simulation(simulation: Simulation, out: Path) -> None:
    """Write the file. Equal simulations give equal bytes.

    Raises:
        ConfigError: the file cannot be written.
        DataError: the simulation is not one that `read_simulation` would take.
    """
    data = {
        "simulation_schema": SIMULATION_SCHEMA,
        "title": simulation.title,
        "setting": simulation.setting,
        "lengths": simulation.lengths.tolist(),
        "shown_step": simulation.shown_step,
        "runs": [_run_data(run) for run in simulation.runs],
        "layer": simulation.layer,
        "sweeps": {name: list(rows) for name, rows in simulation.sweeps.items()},
        "verdict": list(simulation.verdict),
    }
    checked(data, f"{out}")
    try:
        with whole_file(out) as file:
            file.write(json.dumps(data, separators=(",", ":"), allow_nan=False) + "\n")
    except OSError as error:
        raise ConfigError(f"{out}: cannot be written ({error.strerror})") from error


@contextlib.contextmanager
def whole_file(out: Path) -> Iterator[TextIO]:
    """A text file to write, which takes its place once all of it is written; until then a file that was there stays.

    What UTF-8 does not have (halves of characters, as in names of files that are no text) becomes a question mark.
    Devices and pipes are written as they are. Raises OSError.
    """
    place = out.resolve()
    direct = place.exists() and not place.is_file()
    temporary = place if direct else place.with_name(f".hdp-{os.getpid()}.part")
    try:
        with temporary.open("w", encoding="utf-8", errors="replace") as file:
            yield file
        if not direct:
            if place.exists():
                temporary.chmod(place.stat().st_mode)
            temporary.replace(place)
    except BaseException:
        if not direct:
            temporary.unlink(missing_ok=True)
        raise


def read_simulation(path: Path) -> Simulation:
    """Inverse of `write_simulation`; times of bars are rounded to microseconds.

    Raises `DataError` that names the file and the field, for a file that is missing, damaged, or of another version.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not a simulation: not text in UTF-8") from error
    try:
        data = json.loads(text, object_pairs_hook=_object)
    except DataError as error:
        raise DataError(f"{path}: {error}") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: not a simulation, or only a part of one: {error}") from error
    file = checked(data, f"{path}")
    return Simulation(
        title=file.title,
        setting=file.setting,
        lengths=np.array(file.lengths, np.int64),
        shown_step=file.shown_step,
        runs=tuple(_run(run) for run in file.runs),
        layer=file.layer,
        sweeps={name: tuple(rows) for name, rows in file.sweeps.items()},
        verdict=tuple(file.verdict),
    )


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON in which no field comes twice."""
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        raise DataError(f"field {next(name for name in names if names.count(name) > 1)[:60]!r} comes twice")
    return result


def _run_data(run: StrategyRun) -> dict[str, Any]:
    bars = None if run.timeline is None else _packed(run.timeline)
    return {"name": run.name, "words": run.words, "steps": list(run.steps), "failed": run.failed, "timeline": bars}


def _run(run: Run) -> StrategyRun:
    steps = tuple(cast(StepNumbers, step.model_dump()) for step in run.steps)
    timeline = None if run.timeline is None else _unpacked(run.timeline)
    return StrategyRun(name=run.name, words=run.words, steps=steps, failed=run.failed, timeline=timeline)


def _packed(timeline: Timeline) -> dict[str, Any]:
    """A timeline as columns of whole numbers."""
    lanes = int(timeline.lane.max()) + 1 if timeline.lane.size else 0
    lane_bars = np.bincount(timeline.lane, minlength=lanes)
    start, end = _rounded(timeline.start), _rounded(timeline.end)
    before = np.concatenate([np.zeros(1, np.int64), end[:-1]])[: end.size]
    before[_firsts(lane_bars)] = 0
    columns: dict[str, Any] = {
        "kind": timeline.kind,
        "slot": timeline.slot,
        "part": timeline.part,
        "gap": start - before,
        "length": end - start,
    }
    columns |= {name: _rounded(getattr(timeline, name)) for name in TIMES}
    return {"lane_bars": lane_bars.tolist()} | {name: _short(column) for name, column in columns.items()}


def _unpacked(bars: Bars) -> Timeline:
    lane_bars = np.array(bars.lane_bars, np.int64)
    count = int(lane_bars.sum())
    column = {name: expanded(values, count) for name, values in columns(bars)}
    start = starts(column["gap"], column["length"], lane_bars)
    times = {name: column[name] / _MICROSECONDS for name in TIMES}
    return Timeline(
        lane=np.repeat(np.arange(lane_bars.size), lane_bars),
        kind=column["kind"].astype(np.int8),
        slot=column["slot"],
        part=column["part"].astype(np.int8),
        start=start / _MICROSECONDS,
        end=(start + column["length"]) / _MICROSECONDS,
        **times,
    )


def _firsts(lane_bars: IntArray) -> IntArray:
    """Index of the first bar of every lane that has one."""
    return np.asarray((np.cumsum(lane_bars) - lane_bars)[lane_bars > 0], np.int64)


def _rounded(seconds: Any) -> IntArray:
    return np.asarray(np.rint(np.asarray(seconds) * _MICROSECONDS), np.int64)


def _short(column: Any) -> list[int] | int:
    """One number where all are the same."""
    if column.size and bool((column == column[0]).all()):
        return int(column[0])
    values: list[int] = column.tolist()
    return values
