"""Streams and events without a GPU: everything has run when the call returns, so waiting is over at once."""

import threading
import time
from types import TracebackType
from typing import Any

import torch


class Stream:
    """Stands for torch.cuda.Stream. Work 'on' it runs at once in the calling thread."""

    cuda_stream = 0
    stream_id = 0
    device_index = 0
    device_type = 1  # CUDA

    def __init__(self, device: Any = None, priority: int = 0, **kwargs: Any) -> None:
        self.device = torch.device("cpu")
        self.priority = priority

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """Lowest and highest priority, as a GPU would give them."""
        return 0, -1

    def wait_stream(self, stream: Any) -> None:
        """Nothing to wait for."""

    def wait_event(self, event: Any) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        """Whether all work is done: always."""
        return True

    def record_event(self, event: "Event | None" = None) -> "Event":
        """Note the time in ``event`` or a new one."""
        event = event or Event()
        event.record(self)
        return event


class ExternalStream(Stream):
    """Stands for torch.cuda.ExternalStream."""

    def __init__(self, stream_ptr: int, device: Any = None, **kwargs: Any) -> None:
        super().__init__(device)
        self.cuda_stream = stream_ptr


class Event:
    """Stands for torch.cuda.Event; keeps host time."""

    def __init__(
        self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, **kw: Any
    ) -> None:
        self._seconds: float | None = None

    def record(self, stream: Any = None) -> None:
        """Note the time."""
        self._seconds = time.perf_counter()

    def wait(self, stream: Any = None) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        """Whether the work before the event is done: always."""
        return True

    def elapsed_time(self, end_event: "Event") -> float:
        """Milliseconds from this event to ``end_event``.

        Raises:
            RuntimeError: one of the two was never recorded.
        """
        if self._seconds is None or end_event._seconds is None:
            raise RuntimeError("elapsed_time: both events must be recorded first")
        return (end_event._seconds - self._seconds) * 1000.0


_local = threading.local()
_default = Stream()


def default_stream(device: Any = None) -> Stream:
    """The one default stream."""
    return _default


def current_stream(device: Any = None) -> Stream:
    """The stream that this thread has set, else the default one."""
    stream: Stream = getattr(_local, "stream", _default)
    return stream


def set_stream(stream: Stream | None) -> None:
    """Make ``stream`` this thread's current one; None changes nothing."""
    if stream is not None:
        _local.stream = stream


class StreamContext:
    """Stands for torch.cuda.StreamContext: ``with torch.cuda.stream(s)``."""

    def __init__(self, stream: Stream | None) -> None:
        self.stream = stream
        self._outer: Stream | None = None

    def __enter__(self) -> None:
        self._outer = current_stream()
        set_stream(self.stream)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        set_stream(self._outer)


def stream(stream: Stream | None) -> StreamContext:
    """Stands for torch.cuda.stream."""
    return StreamContext(stream)
