"""One way to time work on a device: CUDA events, or a clock of this thread on CPU ranks."""

import itertools
import time
from collections.abc import Callable
from typing import Any

import torch


class Timer:
    """Marks points in the work of one device; `seconds` is the time between them.

    On CUDA a mark is an event in the current stream. On CPU it is the CPU time of this thread, which other programs on
    the machine do not lengthen, where one thread computes all and waits for nobody; else the time of day.
    """

    def __init__(self, device: torch.device, *, waits: bool = False) -> None:
        """``waits``: the work waits for other processes (tensor parallelism, transfers), which takes no CPU time."""
        self._cuda = device.type == "cuda"
        alone = torch.get_num_threads() == 1 and not waits
        self.leaves_waiting_out = alone and not self._cuda
        """Is waiting for other ranks no part of the time?"""
        self._clock: Callable[[], float] = time.thread_time if alone else time.perf_counter
        self.name = "CUDA events" if self._cuda else "CPU time of the thread" if alone else "wall time"
        self._marks: list[Any] = []

    def mark(self) -> None:
        """Note a point in time."""
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(self._clock())

    def seconds(self) -> tuple[float, ...]:
        """Seconds between the marks made since the last call; waits for the device."""
        marks, self._marks = self._marks, []
        if not self._cuda:
            return tuple(after - before for before, after in itertools.pairwise(marks))
        torch.cuda.synchronize()
        return tuple(before.elapsed_time(after) / 1e3 for before, after in itertools.pairwise(marks))
