"""What the machine of benchmarks/attention.py is, and what else runs on it."""

import contextlib
import ctypes
import datetime
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

DISTURBED = 0.05
"""A measurement is disturbed if other processes used more than this share of the ranks' CPU time ..."""
COARSE_S = 0.05
"""... and this, as the machine's own time is counted in hundredths of a second."""


def machine() -> str:
    """Date, hardware and command."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line.split(":")[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
        cpu = names[0] if names else cpu
    gpu = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    return (
        f"{datetime.date.today()}, {cores()} cores of {cpu}{gpu}, torch {torch.__version__}, load "
        f"{os.getloadavg()[0]:.1f} when started. Command: python {' '.join(sys.argv)}"
    )


def cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0))


def busy_seconds() -> float:
    """CPU seconds since start that this machine was not idle, time taken by its host included; 0 if nothing says."""
    with contextlib.suppress(OSError):
        ticks = [int(word) for word in Path("/proc/stat").read_text().split()[1:9]]
        return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")  # idle, waiting for disks
    return 0.0


def wait_until_quiet(deadline: float) -> None:
    """Wait, until ``deadline`` (seconds since 1970) at most, for a second in which nobody computes."""
    while time.time() < deadline:
        busy = busy_seconds()
        time.sleep(1)
        if busy_seconds() - busy < DISTURBED:
            return


class PeakMemory:
    """Resident memory of the process at its highest while the body runs, over what it held before; Linux."""

    peak: int | None = None

    def __enter__(self) -> "PeakMemory":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
            self._before = _status("VmRSS")
        return self

    def __exit__(self, *_: object) -> None:
        if hasattr(self, "_before"):
            self.peak = _status("VmHWM") - self._before


def _status(name: str) -> int:
    """Bytes that /proc/self/status gives for a name."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return 1024 * int(line.split()[1])
    raise OSError(f"/proc/self/status has no {name}")


_BUSY = """
import os, numpy
parent = os.getppid()
os.nice(19)
queries, keys = (numpy.ones((rows, 32), dtype=numpy.float32) for rows in (128, 512))
while os.getppid() == parent:
    scores = queries @ keys.T
    numpy.exp(scores, out=scores) @ keys
"""


class Others:
    """What share of all cores other processes use, from its making on; `every_core_busy`'s own are told apart."""

    def __init__(self, own: Sequence[int]) -> None:
        """``own``: processes that run all the time; finished children of this process count as own as well."""
        self._own = own
        self._begin = self._seconds(), time.perf_counter()

    def share(self) -> float:
        """0 .. 1; 0 where the system does not say."""
        seconds, now = self._seconds(), time.perf_counter()
        return max(0.0, (seconds - self._begin[0]) / (now - self._begin[1]) / (os.cpu_count() or 1))

    def _seconds(self) -> float:
        times = os.times()
        ours = times.user + times.system + times.children_user + times.children_system
        return busy_seconds() - ours - sum(map(_cpu_seconds, self._own))


def _cpu_seconds(process: int) -> float:
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0


@contextlib.contextmanager
def every_core_busy() -> Iterator[tuple[int, ...]]:
    """Meanwhile no core is idle: one process of the lowest priority computes on each of them, attention in blocks.

    Two cores may be two threads of one, which is slower when both compute. With neighbours that always compute, a
    second of CPU time is the same in all measurements; next to a process of normal priority they get 1.5 % of a core.
    Yields the processes' numbers.
    """
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    started = []
    try:
        for core in sorted(os.sched_getaffinity(0)):
            process = subprocess.Popen([sys.executable, "-c", _BUSY], env=environment)
            started.append(process)
            os.sched_setaffinity(process.pid, {core})
        yield tuple(process.pid for process in started)
    finally:
        for process in started:
            process.kill()
            process.wait()
