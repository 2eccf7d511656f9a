"""Writing what `megatron_hdp.timeline` reads: one file for each process, and two by the first one. No torch."""

import dataclasses
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path

from megatron_hdp.errors import ConfigError, DataError
from megatron_hdp.timeline import PLANS_FILE
from megatron_hdp.timeline_setting import RUN_FILE, RunSetting, read_setting
from megatron_hdp.types import Plan

_NANOSECONDS = 9
"""Decimals of a time in seconds."""


@dataclass
class StepLine:
    """What one process did in a step; lists have an entry for each operation, times are seconds since 1970."""

    step: int
    digest: str
    """Of the plan, in hex."""
    asked: float
    """When the step's data were asked for."""
    done: float = 0.0
    """When Megatron's schedule returned."""
    phase: list[int] = field(default_factory=list)
    slot: list[int] = field(default_factory=list)
    part: list[int] = field(default_factory=list)
    begin: list[float] = field(default_factory=list)
    end: list[float] = field(default_factory=list)
    compute: list[float] = field(default_factory=list)
    """Seconds."""
    ring: list[float] = field(default_factory=list)
    """Seconds of waiting for messages of rings."""

    def add(self, phase: int, slot: int, part: int, times: tuple[float, float, float, float]) -> None:
        """An operation; ``times`` are begin, end, compute, ring."""
        for column, whole in ((self.phase, phase), (self.slot, slot), (self.part, part)):
            column.append(whole)
        for times_column, seconds in zip((self.begin, self.end, self.compute, self.ring), times, strict=True):
            times_column.append(seconds)

    def to_json(self, start: int) -> str:
        """One line, with the run's ``start``."""
        data = dataclasses.asdict(self)
        data = {
            name: [round(value, _NANOSECONDS) for value in values] if name in _TIMES else values
            for name, values in data.items()
        }
        return json.dumps({"start": start} | data, separators=(",", ":")) + "\n"


_TIMES = ("begin", "end", "compute", "ring")


def check_folder(folder: str | Path, layout: dict[str, int]) -> None:
    """Refuse a folder that this run must not write to; writes nothing.

    Args:
        folder: of --hdp-timeline; may be missing.
        layout: fields of `RunSetting` that a run already recorded there must have.

    Raises:
        ConfigError: it is no folder, holds something else, or holds a run of another layout.
    """
    folder = Path(folder)
    asked = f"--hdp-timeline {folder}"
    try:
        if not folder.exists():
            return
        if not folder.is_dir():
            raise ConfigError(f"{asked}: this is a file; give a folder, which will be made if it is missing")
        if not (folder / RUN_FILE).exists():
            if others := sorted(each.name for each in folder.iterdir()):
                raise ConfigError(f"{asked}: holds other files ({', '.join(others[:3])}): give a folder of its own")
            return
        there = read_setting(folder)
    except (OSError, DataError) as error:
        raise ConfigError(f"{asked}: cannot go on with what is there: {error}") from error
    for name, value in layout.items():
        if getattr(there, name) != value:
            raise ConfigError(
                f"{asked}: holds steps of a run with {name} {getattr(there, name)}, this one has {value}: give another "
                "folder"
            )


class TimelineWriter:
    """Appends lines to the files of one process. Should one fail, it says so once and the run goes on without."""

    def __init__(self, folder: str | Path, file: str, start: int, setting: RunSetting | None) -> None:
        """Make the folder and the files.

        Args:
            folder: of --hdp-timeline.
            file: of this process, see `timeline.lane_file`.
            start: tells this run from others that wrote to the folder, and is larger than theirs.
            setting: of the run, where this is the process that writes it down; else None.

        Raises:
            ConfigError: nothing can be written there, or the folder holds a run with another setting.
        """
        self._folder, self._file, self._start = Path(folder), Path(folder) / file, start
        self._plans = self._folder / PLANS_FILE
        self._failed = False
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            _end_last_line(self._file)
            if setting is not None:
                _end_last_line(self._plans)
                _note(setting, self._folder)
        except OSError as error:
            raise ConfigError(f"--hdp-timeline {folder}: cannot be written ({error.strerror})") from error

    def write_step(self, line: StepLine) -> None:
        """Append a step of this process."""
        self._append(self._file, line.to_json(self._start))

    def write_plan(self, step: int, plan: Plan, planned_span: float | None) -> None:
        """Append a step's plan, and the seconds that it expects to take."""
        data = {"start": self._start, "step": step, "planned_span": planned_span, "plan": plan.to_json()}
        self._append(self._plans, json.dumps(data, separators=(",", ":")) + "\n")

    def _append(self, file: Path, text: str) -> None:
        if self._failed:
            return
        try:
            with file.open("a", encoding="utf-8") as out:
                out.write(text)
        except OSError as error:
            self._failed = True
            print(f"megatron_hdp: --hdp-timeline stops here: {file}: {error.strerror}", file=sys.stderr, flush=True)


def _end_last_line(file: Path) -> None:
    """Make the file, or cut off the line at its end that a process could not finish."""
    with file.open("ab+") as out:
        out.seek(0)
        whole = out.read()
        out.truncate(whole.rfind(b"\n") + 1)


def _note(setting: RunSetting, folder: Path) -> None:
    """Write the setting down, or compare it with the one that is there. Raises ConfigError if they differ."""
    file = folder / RUN_FILE
    if not file.exists():
        file.write_text(setting.to_json(), encoding="utf-8")
        return
    try:
        there = read_setting(folder)
    except DataError as error:
        raise ConfigError(f"--hdp-timeline {folder}: cannot go on with what is there: {error}") from error
    names = [f.name for f in dataclasses.fields(setting) if getattr(there, f.name) != getattr(setting, f.name)]
    if names:
        raise ConfigError(
            f"--hdp-timeline {folder}: holds steps of a run that differs in {', '.join(names)}: give another folder"
        )
