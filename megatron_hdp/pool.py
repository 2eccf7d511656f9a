"""The pool of ranks: who is in it, the one communicator of all rings, and agreement on plans."""

import os
import socket
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch.distributed as dist

from megatron_hdp.attention.comm import RingComm
from megatron_hdp.errors import ConfigError, PlanError

_CONNECTS_WITHIN = timedelta(seconds=60)
_WAITS_FOR = timedelta(days=1)  # a lost rank is noticed by `liveness`; one that saves or evaluates may take its time


@dataclass(frozen=True)
class Pool:
    """The data-parallel columns that share this process's tensor and pipeline place."""

    rank: int
    """This column's place in the pool, 0 .. size - 1."""
    ranks: tuple[int, ...]
    """Global ranks of the pool's members, in pool order."""
    comm: RingComm
    """All ring traffic of the pool; the only communicator that rings use."""
    agreement: "Agreement"
    """Compares the plans of all processes of the run, off the training path."""

    @property
    def size(self) -> int:
        """Number of columns."""
        return len(self.ranks)


RING_DISTANCE = 2
"""Neighbours on a ring are at most this many pool ranks apart."""
FAR_DISTANCE = 64
"""Further apart nobody is contacted ahead of time: every peer costs buffers, and hardly any plan needs them all."""


def warm_up_distance(exchange: str, ranks: Sequence[int], ranks_per_node: int) -> int:
    """How far apart, in pool ranks, those are that are contacted before training starts; equal on all of ``ranks``.

    ``exchange`` is --hdp-exchange, ``ranks`` the global ranks of the pool. Rings need their neighbours only. Gather and
    heads may need any two ranks of a ring; "auto" chooses them where links are fast, which is inside a node.
    """
    if exchange == "ring":
        return RING_DISTANCE
    whole = len(ranks) - 1
    if exchange == "auto":
        nodes = Counter(rank // ranks_per_node for rank in ranks)
        whole = min(whole, max(nodes.values()) - 1)
    return max(RING_DISTANCE, min(whole, FAR_DISTANCE))


def make_pool(ranks: Sequence[int], warm_up: int = RING_DISTANCE) -> Pool:
    """Make the pool of the global ``ranks`` (this process is one of them). Collective over the whole run.

    Every process makes the groups of all pools in one order, which is what torch.distributed requires. Peers up to
    ``warm_up`` pool ranks apart are contacted here, so that their buffers exist before the memory peak of training.
    """
    mine = tuple(ranks)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    group = None
    for pool in sorted(set(everyone)):
        made = dist.new_group(list(pool))
        group = made if pool == mine else group
    assert group is not None, "this process is in no pool"
    comm = RingComm(group, mine)
    comm.warm_up(warm_up)
    return Pool(mine.index(dist.get_rank()), mine, comm, Agreement())


def together[T](make: Callable[[], T]) -> T:
    """What ``make`` returns. Collective: if it raises `ConfigError` on one process, that is raised on all."""
    made: T | None = None
    own: str | None = None
    try:
        made = make()
    except ConfigError as error:
        own = str(error)
    errors: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, own)
    first = next((error for error in errors if error is not None), None)
    if first is not None:
        raise ConfigError(first)
    return made  # type: ignore[return-value]


def ranks_per_node() -> int:
    """Processes that torchrun, or a Slurm script in its manner, started on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))


class Agreement:
    """All processes of the run compare what they hold. Made on all of them together, after process groups exist.

    Through a small key-value store of its own, on global rank 0: a background thread must not use the communicators of
    training, and one more communicator would cost connections and memory for 32 bytes a step.
    """

    def __init__(self) -> None:
        self._everyone = dist.get_world_size()
        self._round = 0
        self._before: list[str] = []
        self._store: dist.TCPStore | None = None
        if self._everyone > 1:
            host = os.environ.get("MASTER_ADDR") or socket.gethostname()
            is_first = dist.get_rank() == 0
            # port 0 lets rank 0 find a free one
            mine = self._open(host, 0, is_first=True) if is_first else None
            told = [(host, mine.port) if mine is not None else None]
            dist.broadcast_object_list(told, src=0)
            assert told[0] is not None
            self._store = mine if mine is not None else self._open(*told[0], is_first=False)

    @staticmethod
    def _open(host: str, port: int, *, is_first: bool) -> "dist.TCPStore":
        return dist.TCPStore(host, port, is_master=is_first, wait_for_workers=False, timeout=_CONNECTS_WITHIN)

    def on_plan(self, digest: bytes, step: int) -> None:
        """Raise `PlanError` on every process unless all processes hold the plan with the same ``digest``.

        All call it equally often, for the same steps in the same order; it waits for the last of them.
        """
        if self._store is None:
            return
        self._round += 1
        keys = [f"{self._round}/{name}" for name in ("arrived", "verdict", digest.hex())]
        arrived, verdict, own = keys
        self._store.add(own, 1)
        if self._store.add(arrived, 1) == self._everyone:  # the last one: all have counted their plan
            self._store.set(verdict, "same" if self._store.add(own, 0) == self._everyone else "different")
            for key in self._before:  # everybody has read the verdict of the round before
                self._store.delete_key(key)
        self._before = keys
        self._store.wait([verdict], _WAITS_FOR)
        if self._store.get(verdict) != b"same":
            raise PlanError(
                f"step {step}: the ranks do not hold the same plan (this rank has {digest.hex()[:14]}); do all of them "
                "read the same data files, flags and version of megatron_hdp?"
            )


class Service:
    """One daemon thread that runs jobs in the order in which they are handed in.

    All processes hand in the same jobs in the same order, so jobs may wait for their counterparts in other processes.
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
