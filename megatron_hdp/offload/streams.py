"""What offloading needs of a device: streams, events, copies. One class for CUDA, one for the CPU.

Streams and events are the device's own objects and only handed through. On the CPU a copy is done when the call
returns, so there is nothing to order; the code above runs the same calls.
"""

import time
from typing import Any, Protocol

import torch
from torch import Tensor


class Streams(Protocol):
    """A device's queues. No call waits on the host, but `synchronize` (and the CPU's copies)."""

    host_copy_seconds: float
    """Seconds that callers of `copy` were held up by it so far."""

    def current(self) -> Any:
        """The stream that compute of this thread is queued on."""

    def new(self) -> Any:
        """A new stream."""

    def record(self, stream: Any, *, timed: bool = False) -> Any:
        """A new event behind all that is queued on ``stream``."""

    def wait(self, stream: Any, event: Any) -> None:
        """What is queued on ``stream`` from now on runs after ``event``."""

    def done(self, event: Any) -> bool:
        """Whether ``event`` is over."""

    def seconds(self, begin: Any, end: Any) -> float | None:
        """Seconds between two timed events; None as long as they are not over."""

    def copy(self, target: Tensor, source: Tensor, stream: Any) -> None:
        """Queue a copy of bytes on ``stream``."""

    def hold(self, tensor: Tensor, stream: Any) -> None:
        """Keep the memory of ``tensor`` from being handed out again until ``stream`` is done with what is queued."""

    def synchronize(self, stream: Any) -> None:
        """Block until ``stream`` has done all that is queued."""


class CpuStreams:
    """Copies at once; see `Streams`."""

    def __init__(self) -> None:
        self.host_copy_seconds = 0.0

    def current(self) -> Any:
        """The only one."""
        return "host"

    def new(self) -> Any:
        """The only one."""
        return "host"

    def record(self, stream: Any, *, timed: bool = False) -> Any:
        """Now, in seconds."""
        return time.perf_counter()

    def wait(self, stream: Any, event: Any) -> None:
        """Nothing to wait for."""

    def done(self, event: Any) -> bool:
        """Always."""
        return True

    def seconds(self, begin: Any, end: Any) -> float | None:
        """See `Streams`."""
        return float(end - begin)

    def copy(self, target: Tensor, source: Tensor, stream: Any) -> None:
        """Copy now."""
        begin = time.perf_counter()
        target.copy_(source)
        self.host_copy_seconds += time.perf_counter() - begin

    def hold(self, tensor: Tensor, stream: Any) -> None:
        """Nothing uses it any more."""

    def synchronize(self, stream: Any) -> None:
        """Nothing to wait for."""


class CudaStreams:
    """Streams of one CUDA device; see `Streams`. Copies between pinned and device memory go by the copy engines."""

    host_copy_seconds = 0.0

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def current(self) -> Any:
        """See `Streams`."""
        return torch.cuda.current_stream(self._device)

    def new(self) -> Any:
        """See `Streams`."""
        return torch.cuda.Stream(self._device)

    def record(self, stream: Any, *, timed: bool = False) -> Any:
        """See `Streams`."""
        return stream.record_event(torch.cuda.Event(enable_timing=timed))

    def wait(self, stream: Any, event: Any) -> None:
        """See `Streams`."""
        stream.wait_event(event)

    def done(self, event: Any) -> bool:
        """See `Streams`."""
        return bool(event.query())

    def seconds(self, begin: Any, end: Any) -> float | None:
        """See `Streams`."""
        return float(begin.elapsed_time(end)) / 1000.0 if end.query() else None

    def copy(self, target: Tensor, source: Tensor, stream: Any) -> None:
        """See `Streams`."""
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)

    def hold(self, tensor: Tensor, stream: Any) -> None:
        """See `Streams`."""
        tensor.record_stream(stream)

    def synchronize(self, stream: Any) -> None:
        """See `Streams`."""
        stream.synchronize()


def make_streams(device: torch.device) -> Streams:
    """The streams of a device, by its kind."""
    return CudaStreams(device) if device.type == "cuda" else CpuStreams()
