"""A training run's own record of its steps (--hdp-timeline FOLDER): what is in the folder, and reading it. No torch.

    run.json                          `RunSetting`, by the first process
    plans.jsonl                       {"start", "step", "plan"} of every step, by the first process
    rank00003-stage01-tensor00.jsonl  a line for every step of one process, `timeline_writer.StepLine`

A run that is resumed appends, with another "start"; a step that was run again counts as it ran last. A step that not
all processes have finished counts not at all.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_hdp.cost import Profile
from megatron_hdp.errors import DataError, HdpError
from megatron_hdp.simulator import simulate_step
from megatron_hdp.simulator.replay import replay
from megatron_hdp.simulator.result import KINDS, Seconds, Timeline
from megatron_hdp.timeline_setting import RunSetting, read_setting
from megatron_hdp.types import IntArray, Plan

PLANS_FILE = "plans.jsonl"
FORWARD, BACKWARD = 0, 1
"""Values of ``phase``, as in `planner.schedule`."""
_LOAD, _REDUCE = KINDS.index("load"), KINDS.index("reduce")
_OF_PHASE = np.array([KINDS.index("forward"), KINDS.index("backward")], dtype=np.int8)


@dataclass(frozen=True, eq=False)
class MeasuredStep:
    """One step as its ranks ran it. Columns of operations are sorted by lane and begin and have the shape [num_ops].

    Times are seconds since the first lane asked for the step's data, by the clocks of the processes: on several
    machines they agree as well as those clocks do.
    """

    step: int
    plan: Plan
    stages: int
    virtual_stages: int
    lane: IntArray
    phase: IntArray
    """`FORWARD` or `BACKWARD`."""
    slot: IntArray
    """Which of the rank's micro-batches."""
    part: IntArray
    """Which of the stage's model parts."""
    begin: Seconds
    end: Seconds
    compute: Seconds
    """Seconds in which the lane computed."""
    ring: Seconds
    """Seconds in which it waited for messages of rings; for other ranks as well as for the links."""
    asked: Seconds
    """When each lane asked for the step's data, [num_lanes]."""
    done: Seconds
    """When Megatron's schedule returned, gradients summed where that is not left for later, [num_lanes]."""
    planned_span: float | None
    """Seconds that the run itself expected from first to last micro-batch."""

    @property
    def span_seconds(self) -> float:
        """Wall-clock seconds from the begin of the first micro-batch to the end of the last."""
        return float(self.end.max() - self.begin.min())

    @property
    def seconds(self) -> float:
        """From the first request for data to the last end of a schedule; the optimizer is not in it."""
        return float(self.done.max())

    def lane_ends(self) -> Seconds:
        """When each lane ends its last micro-batch, since the first one of all began; [num_lanes]."""
        ends = np.full(self.asked.size, -np.inf)
        np.maximum.at(ends, self.lane, self.end)
        return ends - self.begin.min()

    def op_seconds(self, values: Seconds) -> tuple[Seconds, Seconds]:
        """A column by micro-batch: forward and backward, [num_microbatches, stages x virtual_stages].

        The second index is the model part's place, part x stages + stage, as in `planner.graph.pipeline_graph`.
        """
        rank, stage = np.divmod(self.lane, self.stages)
        place = self.part * self.stages + stage
        result = np.zeros((2, int(self.plan.rank_offsets[-1]), self.stages * self.virtual_stages))
        result[self.phase, self.plan.rank_offsets[rank] + self.slot, place] = values
        return result[0], result[1]

    def timeline(self) -> Timeline:
        """Bars of the step as it was measured: loading, forward, backward, and what follows the last micro-batch.

        What a bar holds besides ``compute`` and ``ring`` was not told apart: other waiting (experts, copies), and on
        CPU ranks time in which other processes had the core.
        """
        lanes = np.arange(self.asked.size)
        first, last = np.full(lanes.size, np.inf), np.full(lanes.size, -np.inf)
        np.minimum.at(first, self.lane, self.begin)
        np.maximum.at(last, self.lane, self.end)
        none, no_time = np.full(lanes.size, -1), np.zeros(lanes.size)
        length = self.end - self.begin
        compute = np.minimum(self.compute, length)
        columns: dict[str, tuple[Any, Any, Any]] = {
            "lane": (lanes, self.lane, lanes),
            "kind": (np.full(lanes.size, _LOAD), _OF_PHASE[self.phase], np.full(lanes.size, _REDUCE)),
            "slot": (none, self.slot, none),
            "part": (none * 0, self.part, none * 0),
            "start": (self.asked, self.begin, last),
            "end": (first, self.end, np.maximum(self.done, last)),
            "compute": (no_time, compute, no_time),
            "ring": (no_time, np.minimum(self.ring, length - compute), no_time),
        }
        joined = {name: np.concatenate(parts) for name, parts in columns.items()}
        order = np.lexsort((joined["start"], joined["lane"]))
        small = {name: joined[name].astype(np.int8) for name in ("kind", "part")}
        zeros = np.zeros(order.size)
        columns_of_all = {name: values[order] for name, values in (joined | small).items()}
        return Timeline(**columns_of_all, partner=zeros, expert=zeros, copy=zeros)


@dataclass(frozen=True, eq=False)
class Overlay:
    """One step three times, in bars of the same lanes; each timeline has its own zero, the begin of the step."""

    step: int
    plan: Plan
    measured: Timeline
    """By the wall clock: CPU ranks that share cores take turns in it."""
    replayed: Timeline
    """Every micro-batch as long as it computed; ranks wait for each other as the simulator says. No transfers."""
    simulated: Timeline
    """By the cost model of the run's profile."""
    spans: tuple[float, float, float]
    """Seconds from the first micro-batch's start to the last one's end: measured, replayed, simulated."""


@dataclass(frozen=True, eq=False)
class RunTimeline:
    """A whole folder."""

    setting: RunSetting
    steps: tuple[MeasuredStep, ...]
    """Sorted by number."""
    incomplete: tuple[int, ...] = ()
    """Steps that not all processes have finished, and that are not in `steps`."""

    def step(self, number: int | None = None) -> MeasuredStep:
        """The step with this number; by default the one in the middle, which is warm. Raises `DataError`."""
        if number is None:
            return self.steps[len(self.steps) // 2]
        for each in self.steps:
            if each.step == number:
                return each
        raise DataError(f"step {number} was not recorded: there are {self.steps[0].step} to {self.steps[-1].step}")

    def overlay(self, number: int | None = None, profile: Profile | None = None) -> Overlay:
        """`step` as measured, as replayed and as simulated, with another ``profile`` than the run's if given."""
        step = self.step(number)
        job = self.setting.job(profile)
        replayed = replay(step.plan, job, *step.op_seconds(step.compute))
        simulated = simulate_step(step.plan, job)
        assert simulated.timeline is not None, "simulate_step makes a timeline unless told not to"
        spans = (step.span_seconds, replayed.span_seconds, simulated.span_seconds)
        return Overlay(step.step, step.plan, step.timeline(), replayed.timeline, simulated.timeline, spans)


def lane_file(rank: int, stage: int, tensor: int) -> str:
    """Name of the file of one process."""
    return f"rank{rank:05d}-stage{stage:02d}-tensor{tensor:02d}.jsonl"


def read_timeline(folder: str | Path) -> RunTimeline:
    """All of what a run with --hdp-timeline left.

    Raises:
        DataError: the folder is none of a run, files are missing or damaged, no step is complete, or the processes had
            different plans in a step.
    """
    folder = Path(folder)
    setting = read_setting(folder)
    plans = {(line["start"], line["step"]): line for line in _lines(folder / PLANS_FILE)}
    places = [
        (rank * setting.stages + stage, lane_file(rank, stage, tensor))
        for rank in range(setting.pool)
        for stage in range(setting.stages)
        for tensor in range(setting.tensor_parallel)
    ]
    files = [
        (lane, name, {(line["start"], line["step"]): line for line in _lines(folder / name)}) for lane, name in places
    ]
    known = set(plans).union(*(lines for _, _, lines in files))
    complete = set(plans).intersection(*(lines for _, _, lines in files))
    newest = {step: (start, step) for start, step in sorted(complete)}  # of a step's runs, the last one that all ended
    if not newest:
        raise DataError(f"{folder}: no step that all of the {len(files)} processes of the run have finished")
    steps = tuple(
        _joined(setting, plans[key], [(lane, name, lines[key]) for lane, name, lines in files], str(folder))
        for _, key in sorted(newest.items())
    )
    return RunTimeline(setting, steps, tuple(sorted({step for _, step in known} - set(newest))))


def _lines(file: Path) -> Iterator[dict[str, Any]]:
    """The lines of a file; a last one that a process could not finish is left out. Raises `DataError`."""
    try:
        lines = file.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file.parent}: the timeline of a process cannot be read: {error}") from error
    for number, line in enumerate(lines[:-1], 1):
        try:
            yield _line(line)
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{file}: line {number} is not what --hdp-timeline writes: {error!r}") from error


def _line(text: str) -> dict[str, Any]:
    line: dict[str, Any] = json.loads(text)
    line["start"], line["step"] = int(line["start"]), int(line["step"])
    return line


def _joined(
    setting: RunSetting, planned: dict[str, Any], lines: list[tuple[int, str, dict[str, Any]]], folder: str
) -> MeasuredStep:
    """One step of all processes; a lane of several tensor ranks lasts from the first begin to the last end."""
    number = planned["step"]
    try:
        plan, span = Plan.from_json(planned["plan"]), planned["planned_span"]
    except (HdpError, KeyError, TypeError) as error:
        raise DataError(f"{folder}: {PLANS_FILE}: step {number}: {error!r}") from error
    if plan.num_ranks != setting.pool:
        raise DataError(f"{folder}: step {number} was planned for {plan.num_ranks} ranks, the pool has {setting.pool}")
    ops: dict[_Key, list[float]] = {}
    asked, done = np.full(setting.lanes, np.inf), np.full(setting.lanes, -np.inf)
    digest = plan.digest().hex()
    for lane, name, line in lines:
        try:
            if line["digest"] != digest:
                raise DataError(f"{folder}: {name} ran another plan in step {number} than {PLANS_FILE} has")
            own = _operations(lane, line)
            _require(own, lane, plan, setting)
            asked[lane] = min(asked[lane], float(line["asked"]))
            done[lane] = max(done[lane], float(line["done"]))
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, HdpError):
                raise
            raise DataError(f"{folder}: {name}: step {number} is not what --hdp-timeline writes: {error!r}") from error
        for key, times in own.items():
            old = ops.setdefault(key, times)
            ops[key] = [min(old[0], times[0]), *map(max, old[1:], times[1:])]
    keys = sorted(ops, key=lambda key: (key[0], ops[key][0]))
    of_lane, phase, slot, part = np.array(keys, dtype=np.int64).T
    begins, ends, compute, ring = np.array([ops[key] for key in keys], dtype=np.float64).T
    zero = float(asked.min())
    return MeasuredStep(
        step=number,
        plan=plan,
        stages=setting.stages,
        virtual_stages=setting.virtual_stages,
        lane=of_lane,
        phase=phase,
        slot=slot,
        part=part,
        begin=begins - zero,
        end=ends - zero,
        compute=compute,
        ring=ring,
        asked=asked - zero,
        done=done - zero,
        planned_span=span,
    )


_Key = tuple[int, int, int, int]
"""Lane, phase, slot, part."""


def _operations(lane: int, line: dict[str, Any]) -> dict[_Key, list[float]]:
    """The operations of one process: begin, end, compute, ring. Raises ValueError for times that cannot be."""
    names = ("phase", "slot", "part", "begin", "end", "compute", "ring")
    found: dict[_Key, list[float]] = {}
    for phase, slot, part, *values in zip(*(line[name] for name in names), strict=True):
        times = [float(value) for value in values]
        if not all(map(math.isfinite, times)) or times[1] < times[0]:
            raise ValueError(f"times are {times}")
        found[lane, int(phase), int(slot), int(part)] = times
    return found


def _require(found: dict[_Key, list[float]], lane: int, plan: Plan, setting: RunSetting) -> None:
    """Raise ValueError unless every micro-batch of the lane ran forward and backward in every model part."""
    count = int(plan.microbatch_counts[lane // setting.stages])
    wanted = {
        (lane, phase, slot, part)
        for phase in (FORWARD, BACKWARD)
        for slot in range(count)
        for part in range(setting.virtual_stages)
    }
    if found.keys() != wanted:
        raise ValueError(
            f"{count} micro-batches x {setting.virtual_stages} model parts run forward and backward: "
            f"{len(wanted & found.keys())} of {len(wanted)} passes are there, and {len(found.keys() - wanted)} others"
        )
