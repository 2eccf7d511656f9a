"""Clocks of --hdp-timeline: CPU time of the thread that computes, or CUDA events that are read when they are over."""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, override

import torch

from megatron_hdp.attention.trace import WAIT, Trace

Mark = Any
"""A point in time, as the clock that made it knows it."""


class CpuClock:
    """Autograd runs the backward pass of CPU tensors in the thread that calls it, so one thread's clock has it all."""

    is_immediate = True
    """A step can be read as soon as it is over."""

    def __init__(self) -> None:
        self._offset = time.time() - time.perf_counter()  # so that times of day never step back in a run

    def now(self) -> float:
        """Seconds since 1970, of this process."""
        return time.perf_counter() + self._offset

    def begin_step(self) -> Mark:
        """A mark that `read` takes for all operations of the step."""
        return None

    def mark(self) -> Mark:
        """Now."""
        return self.now(), time.thread_time()

    def begin_wait(self) -> Mark:
        """A wait for messages begins."""
        return None

    def end_wait(self, mark: Mark, seconds: float) -> Any:
        """It is over, and took the host so many seconds."""
        return seconds

    def is_over(self, mark: Mark) -> bool:
        """Can `read` read it without waiting?"""
        return True

    def finish(self) -> None:
        """Wait until all marks can be read."""

    def read(self, step: Mark, begin: Mark, end: Mark, waits: Sequence[Any]) -> tuple[float, float, float, float]:
        """Begin and end in seconds since 1970, seconds of compute, seconds of waits."""
        return begin[0], end[0], end[1] - begin[1], sum(waits)


class CudaClock(CpuClock):
    """Events in the current stream. What a step's first event and the host's clock are apart counts for its times of
    day: the time of the launch, as Megatron's loop has waited for the device by then."""

    is_immediate = False

    @override
    def begin_step(self) -> Mark:
        return self.now(), self.mark()

    @override
    def mark(self) -> Mark:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @override
    def begin_wait(self) -> Mark:
        return self.mark()

    @override
    def end_wait(self, mark: Mark, seconds: float) -> Any:
        return mark, self.mark()

    @override
    def is_over(self, mark: Mark) -> bool:
        return bool(mark.query())

    @override
    def finish(self) -> None:
        torch.cuda.synchronize()

    @override
    def read(self, step: Mark, begin: Mark, end: Mark, waits: Sequence[Any]) -> tuple[float, float, float, float]:
        host, first = step
        waited = sum(_between(*wait) for wait in waits)
        return host + _between(first, begin), host + _between(first, end), _between(begin, end) - waited, waited


def _between(first: Any, last: Any) -> float:
    return float(first.elapsed_time(last)) / 1e3


def clock_of(device: torch.device) -> CpuClock:
    """The clock of what computes on a device."""
    return CudaClock() if device.type == "cuda" else CpuClock()


class WaitTrace(Trace):
    """A trace that keeps nothing, and passes on each wait for a ring's messages."""

    def __init__(self, clock: CpuClock, waited: Callable[[Any], None]) -> None:
        super().__init__()
        self._clock, self._waited = clock, waited
        self._begun: Mark = None

    @override
    def begin_wait(self) -> None:
        self._begun = self._clock.begin_wait()

    @override
    def add(self, name: str, lane: str, begin: float, end: float) -> None:
        if lane == WAIT:
            self._waited(self._clock.end_wait(self._begun, end - begin))

    @override
    @contextlib.contextmanager
    def span(self, name: str, lane: str) -> Iterator[None]:
        yield
