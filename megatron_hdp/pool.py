"""The pool of ranks: who is in it, the one communicator of all rings, and agreement on plans."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist

from megatron_hdp.attention.comm import RingComm
from megatron_hdp.errors import PlanError


@dataclass(frozen=True)
class Pool:
    """The data-parallel columns that share this process's tensor and pipeline place."""

    rank: int
    """This column's place in the pool, 0 .. size - 1."""
    ranks: tuple[int, ...]
    """Global ranks of the pool's members, in pool order."""
    comm: RingComm
    """All ring traffic of the pool; the only communicator that rings use."""
    control: "dist.ProcessGroup"
    """All processes of the run, on the CPU: plans are compared here, off the training path."""

    @property
    def size(self) -> int:
        """Number of columns."""
        return len(self.ranks)


def make_pool(ranks: Sequence[int]) -> Pool:
    """Make the pool of the global ``ranks`` (this process is one of them). Collective over the whole run.

    Every process makes the groups of all pools in one order, which is what torch.distributed requires. The peers that
    rings will ever use are contacted here, so that their buffers exist before the memory peak of training.
    """
    mine = tuple(ranks)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    group = None
    for pool in sorted(set(everyone)):
        made = dist.new_group(list(pool))
        group = made if pool == mine else group
    assert group is not None, "this process is in no pool"
    control = dist.new_group(list(range(dist.get_world_size())), backend="gloo")
    comm = RingComm(group, mine)
    comm.warm_up()
    return Pool(mine.index(dist.get_rank()), mine, comm, control)


def agree_on_plan(digest: bytes, step: int, control: "dist.ProcessGroup") -> None:
    """Raise `PlanError` on every process unless all processes hold the plan with the same ``digest``."""
    number = int.from_bytes(digest[:7], "little")
    bounds = torch.tensor([number, -number], dtype=torch.int64)
    dist.all_reduce(bounds, op=dist.ReduceOp.MAX, group=control)
    if int(bounds[0]) != -int(bounds[1]):
        raise PlanError(
            f"step {step}: the ranks do not hold the same plan (this rank has {digest.hex()[:14]}); do all of them "
            "read the same data files, flags and version of megatron_hdp?"
        )


class Service:
    """One daemon thread that runs jobs in the order in which they are handed in.

    All processes hand in the same jobs in the same order, so jobs may hold collectives on the pool's control group.
    The thread is a daemon because a job may wait for a lost rank, which must not keep the process alive.
    """

    def __init__(self) -> None:
        self._jobs: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="megatron_hdp plans", daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], Any]) -> "Future[Any]":
        """Run ``job`` after all earlier ones; the future holds its result or exception."""
        future: Future[Any] = Future()
        self._jobs.put((future, job))
        return future

    def close(self, timeout_seconds: float = 10.0) -> None:
        """Finish the jobs handed in and end the thread; a stuck job is left behind after the timeout."""
        self._jobs.put(None)
        self._thread.join(timeout_seconds)

    def _work(self) -> None:
        while (item := self._jobs.get()) is not None:
            future, job = item
            try:
                future.set_result(job())
            except BaseException as error:  # handed to the caller, who waits for the result
                future.set_exception(error)
