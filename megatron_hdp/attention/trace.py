"""What one rank did when: spans of compute, waiting and exchanges, for Chrome's trace viewer. No torch.

A span is (name, lane, begin, end), in seconds of `time.perf_counter`. Spans of the lane `EXCHANGE` may overlap each
other and everything else; those of other lanes are what the process itself did, one thing after the other.

    trace = Trace()
    comm = RingComm(group, ranks, trace=trace)
    ...
    Path("trace.json").write_text(json.dumps(chrome_trace([(comm.rank, trace)])))  # for chrome://tracing, Perfetto
"""

import contextlib
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

COMPUTE = "compute"
WAIT = "wait"
EXCHANGE = "exchange"

Span = tuple[str, str, float, float]
"""Name, lane, begin and end in seconds of `time.perf_counter`."""


class Trace:
    """Collects the spans of one process."""

    def __init__(self) -> None:
        self.events: list[Span] = []
        self.clock_offset = time.time() - time.perf_counter()
        """Seconds to add to a span's times to get time since 1970, which is what processes have in common."""

    def add(self, name: str, lane: str, begin: float, end: float) -> None:
        """Note a span; times are seconds of `time.perf_counter`."""
        self.events.append((name, lane, begin, end))

    def begin_wait(self) -> None:
        """Called ahead of a wait that `add` will note; for traces with a clock of their own."""

    @contextlib.contextmanager
    def span(self, name: str, lane: str) -> Iterator[None]:
        """Note the time that the body takes, also if it raises."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, lane, begin, time.perf_counter())


def chrome_trace(traces: Sequence[tuple[int, Trace]]) -> dict[str, Any]:
    """JSON object in Chrome's trace event format: one process per (rank, trace), one thread per lane.

    Times are microseconds since the first span. Exchanges are asynchronous events ("b" and "e"), as any number of them
    can be in flight; all else are complete events ("X").
    """
    starts = [trace.clock_offset + begin for _, trace in traces for _, _, begin, _ in trace.events]
    origin = min(starts, default=0.0)
    events: list[dict[str, Any]] = []
    for rank, trace in traces:
        lanes = list(dict.fromkeys([COMPUTE, WAIT, EXCHANGE, *(lane for _, lane, _, _ in trace.events)]))
        events.append({"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": {"name": f"rank {rank}"}})
        for thread, lane in enumerate(lanes):
            events.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": thread, "args": {"name": lane}})
        shift = trace.clock_offset - origin
        for number, (name, lane, begin, end) in enumerate(trace.events):
            where = {"name": name, "cat": lane, "pid": rank, "tid": lanes.index(lane)}
            first, last = 1e6 * (begin + shift), 1e6 * (end + shift)
            if lane == EXCHANGE:
                where["id"] = f"{rank}.{number}"
                events += [{**where, "ph": "b", "ts": first}, {**where, "ph": "e", "ts": last}]
            else:
                events.append({**where, "ph": "X", "ts": first, "dur": last - first})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def exchange_seconds(trace: Trace) -> tuple[float, float]:
    """Seconds with at least one exchange in flight, and how many of those the process spent waiting.

    One minus their ratio is the share that was hidden. An exchange is in flight from its post until the process takes
    what came, so the first number says how long there was to hide it, not how long the wire was busy.
    """
    flying = _union(trace, EXCHANGE)
    waiting = _union(trace, WAIT)
    waited = 0.0
    for begin, end in flying:
        waited += sum(max(0.0, min(end, last) - max(begin, first)) for first, last in waiting)
    return _total(flying), waited


def lane_seconds(trace: Trace, lane: str) -> float:
    """Seconds with at least one span of ``lane``."""
    return _total(_union(trace, lane))


def _union(trace: Trace, lane: str) -> list[tuple[float, float]]:
    """The spans of a lane as intervals that do not touch, in order."""
    merged: list[tuple[float, float]] = []
    for begin, end in sorted((begin, end) for _, of, begin, end in trace.events if of == lane):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((begin, end))
    return merged


def _total(intervals: Iterable[tuple[float, float]]) -> float:
    return sum(end - begin for begin, end in intervals)
