"""Timelines as a trace file for chrome://tracing and ui.perfetto.dev: one process per strategy, one thread per lane."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

from megatron_hdp.errors import ConfigError
from megatron_hdp.simulator.chrome import timeline_events
from megatron_hdp.simulator.files import StrategyRun, whole_file
from megatron_hdp.simulator.result import Timeline


def write_trace(runs: Sequence[StrategyRun], stages: int, out: Path) -> None:
    """Write the timelines of all runs that have one.

    Args:
        runs: strategies.
        stages: pipeline stages: lane ``rank * stages + stage``.
        out: the file, JSON of Chrome's trace event format.

    Raises:
        ConfigError: no run has a timeline, or the file cannot be written.
    """
    shown = [(run, run.timeline) for run in runs if run.timeline is not None]
    if not shown:
        raise ConfigError(f"{out}: no trace, because no run of this simulation has a timeline")
    try:
        with whole_file(out) as file:
            file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
            _write(file, _events(shown, stages))
            file.write("\n]}\n")
    except OSError as error:
        raise ConfigError(f"{out}: cannot be written ({error.strerror})") from error


def _write(file: TextIO, events: Iterator[dict[str, Any]]) -> None:
    """One event a line."""
    for number, event in enumerate(events):
        file.write((",\n" if number else "") + json.dumps(event, separators=(",", ":")))


def _events(shown: Sequence[tuple[StrategyRun, Timeline]], stages: int) -> Iterator[dict[str, Any]]:
    for pid, (run, line) in enumerate(shown):
        yield from timeline_events(pid, f"{run.name}: {run.words}", line, stages)
