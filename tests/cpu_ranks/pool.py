"""A pool of gloo processes that stays alive over many test cases.

Starting eight processes that import torch takes seconds; running a case on eight processes that already did takes
milliseconds. The processes start once and run pickled case functions, ``case(context, *args)``, defined at the top
level of an importable test module. Every call has a timeout; when it passes, the call fails with the stack of every
process and the pool starts afresh, so one hanging case cannot spoil the next.
"""

import faulthandler
import importlib
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

GRACE_S = 5.0
"""After the first failure of a case the other ranks get this long, because they often wait for the failed one."""


@dataclass
class RankContext:
    """What a case function knows about the process that it runs in."""

    rank: int
    """Rank inside the group that runs the case."""
    size: int
    """Ranks that run the case: pool processes 0 .. size - 1."""
    groups: dict[int, Any] = field(repr=False)

    @property
    def group(self) -> Any:
        """Process group of the first ``size`` processes."""
        return self.groups[self.size]

    @property
    def ranks(self) -> tuple[int, ...]:
        """Global ranks of the group, in order."""
        return tuple(range(self.size))


@dataclass(frozen=True)
class Outcome:
    """What one rank did with a case: a value, an error's traceback, or a death."""

    value: Any = None
    error: str | None = None
    died: bool = False


class RankPool:
    """``size`` gloo processes with one thread each; a context manager."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._connections: list[Connection] = []
        self._processes: list[Any] = []
        self._group_sizes: set[int] = set()
        self._directory: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> "RankPool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, case: Callable[..., Any], *args: Any, ranks: int | None = None, timeout_s: float = 60.0) -> list[Any]:
        """Run ``case(context, *args)`` on the first ``ranks`` processes and return their values in rank order.

        Raises AssertionError with every traceback if a rank raises, dies or is not done after ``timeout_s`` seconds.
        """
        outcomes = self.outcomes(case, *args, ranks=ranks, timeout_s=timeout_s)
        failures = [
            f"--- rank {rank} ---\n{outcome.error or 'the process died'}"
            for rank, outcome in enumerate(outcomes)
            if outcome.died or outcome.error
        ]
        if failures:
            raise AssertionError(f"{case.__name__} failed on {len(failures)} ranks\n" + "\n".join(failures))
        return [outcome.value for outcome in outcomes]

    def outcomes(
        self, case: Callable[..., Any], *args: Any, ranks: int | None = None, timeout_s: float = 60.0
    ) -> list[Outcome]:
        """Like `run`, for cases in which ranks are meant to raise or die: returns what every rank did."""
        size = self.size if ranks is None else ranks
        self._start()
        if size not in self._group_sizes:
            self._send_and_collect(range(self.size), _make_group, (size,), self.size, 60.0)
            self._group_sizes.add(size)
        outcomes = self._send_and_collect(range(size), case, args, size, timeout_s)
        if any(outcome.died or outcome.error for outcome in outcomes):
            self.close()  # the group may hold half-sent messages: the next case starts on fresh processes
        return outcomes

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for connection in self._connections:
            connection.close()
        if self._directory is not None:
            self._directory.cleanup()
        self._connections, self._processes, self._group_sizes, self._directory = [], [], set(), None

    def _start(self) -> None:
        if self._processes:
            return
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch.distributed", "numpy"])
        self._directory = tempfile.TemporaryDirectory(prefix="rank_pool_")
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(theirs, rank, self.size, self._directory.name, sys.path), daemon=True
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)
        self._group_sizes = {self.size}

    def _send_and_collect(
        self, members: Sequence[int], case: Callable[..., Any], args: tuple[Any, ...], size: int, timeout_s: float
    ) -> list[Outcome]:
        for rank in members:
            self._connections[rank].send((sys.path, case.__module__, case.__qualname__, args, size))
        outcomes: dict[int, Outcome] = {}
        deadline = time.monotonic() + timeout_s
        while len(outcomes) < len(members):
            waiting = {self._connections[rank]: rank for rank in members if rank not in outcomes}
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                stacks = self._stacks(list(waiting.values()))
                for rank in waiting.values():
                    outcomes[rank] = Outcome(error=f"not done when the time was up; its stack:\n{stacks[rank]}")
                break
            for connection in ready:
                rank = waiting[connection]  # type: ignore[index]
                outcomes[rank] = _receive(connection)  # type: ignore[arg-type]
                if outcomes[rank].died or outcomes[rank].error:
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        return [outcomes[rank] for rank in members]

    def _stacks(self, ranks: Sequence[int]) -> dict[int, str]:
        """Stacks of the processes, written by faulthandler on a signal."""
        assert self._directory is not None
        for rank in ranks:
            os.kill(self._processes[rank].pid, signal.SIGUSR1)
        time.sleep(0.5)
        return {rank: Path(self._directory.name, f"stack{rank}").read_text() or "(no stack)" for rank in ranks}


def _receive(connection: Connection) -> Outcome:
    try:
        return Outcome(*connection.recv())
    except (EOFError, ConnectionResetError):
        return Outcome(died=True)


def _make_group(context: RankContext, size: int) -> None:
    """Every process of the pool has to take part in making a group, members or not."""
    import torch.distributed as dist

    context.groups[size] = dist.new_group(list(range(size)), backend="gloo")


def _serve(connection: Connection, rank: int, size: int, directory: str, path: list[str]) -> None:
    """Main function of one process: run cases until the pipe closes."""
    sys.path[:] = path
    import torch
    import torch.distributed as dist

    stack_file = Path(directory, f"stack{rank}").open("w")  # noqa: SIM115 - faulthandler needs it open for good
    faulthandler.register(signal.SIGUSR1, file=stack_file, all_threads=True)
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{directory}/store",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=120),
    )
    groups = {size: dist.group.WORLD}
    while True:
        try:
            case_path, module, name, args, case_size = connection.recv()
        except (EOFError, OSError):
            return
        try:
            sys.path[:] = case_path
            function = getattr(importlib.import_module(module), name)
            result = (function(RankContext(rank, case_size, groups), *args), None)
        except BaseException:
            result = (None, traceback.format_exc())
        connection.send(result)
