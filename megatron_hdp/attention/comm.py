"""Ring traffic: neighbour exchanges on one communicator for the whole pool.

One process group carries every ring; no group is ever made per ring. All ranks post their exchanges in the order of
(ring piece, step), and ring pieces come in the same order on every rank, so messages between two ranks match up by
order alone and no cycle of waiting can form.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_hdp.attention.trace import EXCHANGE, WAIT, Trace
from megatron_hdp.errors import ConfigError, RankLostError

type Operation = tuple[Callable[..., object], Tensor, int, str]
"""`isend` or `irecv`, the tensor, the peer's pool rank, and words for what it does."""
type Message = tuple[Tensor, int]
"""A contiguous tensor, and the pool rank that it goes to or comes from."""


@dataclass(frozen=True)
class Exchange:
    """Sends and receives under way."""

    works: tuple[tuple[dist.Work, str], ...]
    """Outstanding operations, each with the words for what it does."""
    sent: tuple[Tensor, ...]
    """Kept alive, and not to be written to, until `wait` returns."""
    received: tuple[Tensor, ...]
    context: str
    trace: Trace | None = None
    posted: float = field(default_factory=time.perf_counter)

    def wait(self) -> tuple[Tensor, ...]:
        """Block (NCCL: make the current stream wait) until all are done; returns the received tensors.

        Raises RankLostError if a peer is gone.
        """
        if self.trace is not None and self.works:
            self.trace.begin_wait()
        begin = time.perf_counter()
        for work, deed in self.works:
            try:
                work.wait()
            except RuntimeError as error:
                raise _lost(deed, self.context, error) from error
        if self.trace is not None and self.works:
            end = time.perf_counter()
            self.trace.add(self.context, EXCHANGE, self.posted, end)
            self.trace.add(self.context, WAIT, begin, end)
        return self.received


class RingComm:
    """The pool's one communicator for ring traffic, as seen from this process.

    ``group`` holds exactly the pool (None: the default group); ``ranks`` are its global ranks in pool order, so pool
    rank r is global rank ``ranks[r]``. Call `warm_up` on every rank before the first step.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        ranks: Sequence[int],
        *,
        overlap: bool = True,
        trace: Trace | None = None,
    ) -> None:
        """``overlap`` off waits for every exchange where it is posted, to measure what hiding it saves. ``trace``
        collects when exchanges were under way and waited for (host times: of interest on CPU)."""
        self.ranks = tuple(ranks)
        me = dist.get_rank()
        if me not in self.ranks or dist.get_world_size(group) != len(self.ranks):
            raise ConfigError(
                f"the ring communicator of global rank {me} was given pool ranks {self.ranks} and a group of "
                f"{dist.get_world_size(group)}: pass the group that holds exactly the pool of this rank"
            )
        self.group = group
        self.rank = self.ranks.index(me)
        """Pool rank of this process."""
        self.overlap = overlap
        self.trace = trace
        self.bytes_sent = 0
        """Payload bytes of rings sent so far; the few of the warm-up do not count."""
        self.peers: set[int] = set()
        """Pool ranks that this rank has exchanged a message with."""

    @property
    def size(self) -> int:
        """Ranks of the pool."""
        return len(self.ranks)

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message], *, sequence: int, task: str) -> Exchange:
        """Send contiguous tensors to pool ranks while others are received into the given ones; returns at once.

        Both sides know the shapes, so an empty tensor is not sent. Messages between two ranks match by order.
        ``sequence`` and ``task`` are for the error message. Raises RankLostError if a peer is gone.
        """
        operations: list[Operation] = [
            *((dist.isend, tensor, peer, "sending to") for tensor, peer in sends if tensor.numel()),
            *((dist.irecv, tensor, peer, "receiving from") for tensor, peer in receives if tensor.numel()),
        ]
        context = f"{task} of sequence {sequence}"
        sent, received = (tuple(tensor for tensor, _ in messages) for messages in (sends, receives))
        exchange = Exchange(self._post(operations, context), sent, received, context, self.trace)
        if not self.overlap:
            exchange.wait()
            return Exchange((), sent, received, context)
        return exchange

    def warm_up(self, max_distance: int = 2) -> None:
        """Exchange one small message with every pool rank within ``max_distance``; all ranks must call it together.

        Connections and their buffers then exist before memory is at its peak (and NCCL's first call on a group has
        to be made by all its ranks). Everything is posted as one batch, so no order can deadlock. Raises
        RankLostError if a peer is gone.
        """
        near = range(self.rank - max_distance, self.rank + max_distance + 1)
        peers = [peer for peer in near if peer != self.rank and 0 <= peer < self.size]
        if not peers:
            return
        device = self._device()
        mine = torch.full((1,), self.rank, dtype=torch.int64, device=device)
        theirs = [torch.full((1,), -1, dtype=torch.int64, device=device) for _ in peers]
        sends: list[Operation] = [(dist.isend, mine, peer, "sending to") for peer in peers]
        receives: list[Operation] = [
            (dist.irecv, buffer, peer, "receiving from") for peer, buffer in zip(peers, theirs)
        ]
        context = "the first message, warming up the ring connections"
        sent_before = self.bytes_sent
        for work, deed in self._post(sends + receives, context):
            try:
                work.wait()
            except RuntimeError as error:
                raise _lost(deed, context, error) from error
        self.bytes_sent = sent_before
        answers = [int(buffer) for buffer in theirs]
        if answers != peers:
            raise ConfigError(
                f"pool rank {self.rank} asked ranks {peers} for their pool rank and got {answers}: "
                "give every rank the same list of pool ranks"
            )

    def _post(self, operations: list[Operation], context: str) -> tuple[tuple[dist.Work, str], ...]:
        if not operations:
            return ()
        deeds = [f"pool rank {self.rank} was {words} pool rank {peer}" for _, _, peer, words in operations]
        batch = [dist.P2POp(op, tensor, self.ranks[peer], self.group) for op, tensor, peer, _ in operations]
        try:
            works = dist.batch_isend_irecv(batch)
        except RuntimeError as error:
            raise _lost(" and ".join(deeds), context, error) from error
        self.peers.update(peer for _, _, peer, _ in operations)
        self.bytes_sent += sum(tensor.nbytes for op, tensor, _, _ in operations if op is dist.isend)
        if len(works) != len(deeds):  # NCCL hands back one work for the whole batch
            return tuple((work, " and ".join(deeds)) for work in works)
        return tuple(zip(works, deeds))

    def _device(self) -> torch.device:
        """Where messages of this group's backend live."""
        if dist.get_backend(self.group) == "nccl":
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")


def _lost(deed: str, context: str, error: RuntimeError) -> RankLostError:
    return RankLostError(
        f"a rank stopped answering: {deed} ({context}) when the connection failed. Look at the log of that rank for "
        f"the first error; this rank only noticed. Transport said: {error}"
    )
