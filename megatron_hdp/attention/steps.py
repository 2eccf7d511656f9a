"""How the exchanges and the compute of a micro-batch's pieces are woven together.

The work of a piece is a generator. It yields `STARTED` when its first exchange is posted, `WAIT` ahead of every
wait, and `POSTED` once, when all its exchanges are posted; it returns its result. `drive` runs the pieces one after the
other and uses the waits: it puts shares of local work there, and it starts the next piece when one has posted
everything, so that the last exchange of a piece hides behind the first block of the next.

Exchanges are posted piece by piece, in the order of the micro-batch, which is the same on all ranks: a piece never
posts before the piece ahead of it has posted everything. Two ranks that share rings in different micro-batches
therefore still post in the same order, and nobody waits in a circle, on NCCL's one queue per communicator as well.
"""

import contextlib
import enum
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megatron_hdp.attention.comm import Exchange, Message, RingComm
from megatron_hdp.attention.kernels.interface import BlockKernel
from megatron_hdp.attention.segments import Segments
from megatron_hdp.attention.trace import COMPUTE


class Event(enum.Enum):
    """Where a piece's work stands; see the module's text."""

    STARTED = enum.auto()
    WAIT = enum.auto()
    POSTED = enum.auto()


type Work[T] = Generator[Event, None, T]


@dataclass(frozen=True)
class Job:
    """What the work of all pieces shares besides tensors."""

    comm: RingComm | None
    scale: float
    kernel: BlockKernel

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, segments: Segments, what: str) -> tuple[Tensor, Tensor]:
        """`BlockKernel.forward`, shown in the trace as ``what``."""
        with self._span(f"forward {what}"):
            return self.kernel.forward(q, k, v, segments, scale=self.scale)

    def backward(self, tensors: tuple[Tensor, ...], *, segments: Segments, what: str) -> tuple[Tensor, Tensor, Tensor]:
        """`BlockKernel.backward` of (dout, q, k, v, out, lse), shown in the trace as ``what``."""
        dout, q, k, v, out, lse = tensors
        with self._span(f"backward {what}"):
            return self.kernel.backward(dout, q, k, v, out, lse, segments, scale=self.scale)

    def exchange(self, sends: list[Message], receives: list[Message], sequence: int, task: str) -> Exchange:
        """`RingComm.exchange`."""
        assert self.comm is not None  # checked where the job is made
        return self.comm.exchange(sends, receives, sequence=sequence, task=task)

    def _span(self, what: str) -> contextlib.AbstractContextManager[Any]:
        trace = None if self.comm is None else self.comm.trace
        return contextlib.nullcontext() if trace is None else trace.span(what, COMPUTE)


class Filler:
    """Local work in shares, spread evenly over the waits of a pass."""

    def __init__(self, shares: list[Callable[[], None]], waits: int) -> None:
        self._shares, self._waits = shares, max(waits, 1)
        self._waited = self._done = 0

    def fill(self) -> None:
        """Called ahead of a wait: run the shares that are due."""
        due = len(self._shares) * (self._waited + 1) // self._waits
        self._waited += 1
        self._run(due)

    def finish(self) -> None:
        """Run what is left."""
        self._run(len(self._shares))

    def _run(self, upto: int) -> None:
        while self._done < min(upto, len(self._shares)):
            self._shares[self._done]()
            self._done += 1


def drive(works: Iterable[Work[None]], filler: Filler) -> None:
    """Run the work of all pieces, and the local work, to their end."""
    ending: Work[None] | None = None
    for work in works:
        started = next(work)
        assert started is Event.STARTED
        for event in work:
            if event is Event.POSTED:
                break
            if ending is not None:
                _finish(ending, filler)
                ending = None
            filler.fill()
        if ending is not None:
            _finish(ending, filler)
        ending = work
    if ending is not None:
        _finish(ending, filler)
    filler.finish()


def _finish(work: Work[None], filler: Filler) -> None:
    for _ in work:
        filler.fill()


def inside[T](work: Work[T]) -> Work[T]:
    """The work of an exchange inside another one, which starts and posts on its behalf: only its waits show."""
    while True:
        try:
            event = next(work)
        except StopIteration as stop:
            result: T = stop.value
            return result
        if event is Event.WAIT:
            yield event
