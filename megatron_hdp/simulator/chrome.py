"""A step in Chrome's trace event format, for ui.perfetto.dev and chrome://tracing.

As `megatron_hdp.attention.trace` writes what a process did: complete events ("X") in microseconds.

    result = simulate_step(plan, job)
    Path("trace.json").write_text(json.dumps(chrome_trace(result, ranks=range(8))))
"""

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from megatron_hdp.errors import ConfigError
from megatron_hdp.simulator.result import KINDS, StepResult, Timeline

_MICROSECONDS = 1e6
_WAITS = ("compute", "ring", "partner", "expert", "copy")


def chrome_trace(result: StepResult, ranks: Iterable[int] | None = None) -> dict[str, Any]:
    """JSON object of a simulated step: one process, one thread for each stage of each rank.

    Each bar tells in its arguments which part of it was computing, and which was waiting for what.

    Args:
        result: of `simulate_step`, with its timeline.
        ranks: which to show; all when None.

    Raises:
        ConfigError: no timeline was kept.
    """
    if result.timeline is None:
        raise ConfigError("the step has no timeline: simulate it with timeline=True")
    line = result.timeline
    if ranks is not None:
        line = _of_ranks(line, list(ranks), result.stages)
    events = list(timeline_events(0, f"step of {result.seconds:.3f} s", line, result.stages))
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _of_ranks(line: Timeline, ranks: list[int], stages: int) -> Timeline:
    """The bars of some ranks."""
    keep = np.flatnonzero(np.isin(line.lane // stages, ranks))
    columns = {field.name: getattr(line, field.name)[keep] for field in dataclasses.fields(line)}
    return Timeline(**columns)


def timeline_events(pid: int, name: str, line: Timeline, stages: int) -> Iterator[dict[str, Any]]:
    """Names of one process and of its threads, which are the lanes that have bars; then the bars."""
    yield {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}}
    yield {"ph": "M", "pid": pid, "name": "process_sort_index", "args": {"sort_index": pid}}
    for lane in np.unique(line.lane).tolist():
        rank, stage = divmod(lane, stages)
        thread = f"rank {rank}" + (f", stage {stage}" if stages > 1 else "")
        yield {"ph": "M", "pid": pid, "tid": lane, "name": "thread_name", "args": {"name": thread}}
        yield {"ph": "M", "pid": pid, "tid": lane, "name": "thread_sort_index", "args": {"sort_index": lane}}
    columns = {of: getattr(line, of).tolist() for of in ("lane", "kind", "slot", "part", "start", "end", *_WAITS)}
    for bar, lane in enumerate(columns["lane"]):
        start, end, slot = columns["start"][bar], columns["end"][bar], columns["slot"][bar]
        kind = KINDS[columns["kind"][bar]]
        words = {of: round(columns[of][bar], 6) for of in _WAITS if columns[of][bar] > 0}
        if slot >= 0:
            words |= {"micro_batch": slot, "part": columns["part"][bar]}
        yield {
            "ph": "X",
            "pid": pid,
            "tid": lane,
            "name": kind if slot < 0 else f"{kind} {slot}",
            "cat": kind,
            "ts": round(start * _MICROSECONDS, 3),
            "dur": round((end - start) * _MICROSECONDS, 3),
            "args": words,
        }
