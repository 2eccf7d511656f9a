"""Transfers between neighbours of rings, and copies between device and host, alone and beside them.

All ranks call these together.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_hdp.attention.comm import Exchange, RingComm
from megatron_hdp.profiler.agree import Everyone
from megatron_hdp.profiler.timer import Timer
from megatron_hdp.types import Ring

_SMALLEST = 1 << 10
_GROWTH = 8
_REPEATS = 9
COPY_BYTES = 64 << 20
"""More than most caches hold."""
_LONGEST_EXCHANGE = 256 << 20
"""Bytes of the transfer beside which copies are timed, at most."""


def ring_sizes(largest: int) -> tuple[int, ...]:
    """Bytes to send: from 1 KiB by factors of 8 up to ``largest``, which is one of them."""
    sizes = [_SMALLEST]
    while sizes[-1] * _GROWTH < largest:
        sizes.append(sizes[-1] * _GROWTH)
    return (*sizes, max(largest, _SMALLEST * _GROWTH))


def time_ring(
    comm: RingComm, ring: Ring | None, sizes: Sequence[int], everyone: Everyone
) -> tuple[tuple[float, ...], int] | None:
    """Seconds of exchanges of so many bytes with both neighbours on ``ring``, and the ranks of the largest ring.

    ``ring`` is this rank's, None if it is on none and only takes part. Several rings may run at once. A ring is as slow
    as its slowest rank, and all rings count as one: the largest of all medians. None if no rank is on a ring.
    """
    members = everyone.most(0.0 if ring is None else ring.size)[0]
    if members < 2:
        return None
    timer = Timer(everyone.device, waits=True)
    seconds = []
    if ring is not None:
        for _ in range(_REPEATS):  # the first messages of a connection are slow
            _exchange(comm, ring, sizes[0], everyone.device).wait()
    for size in sizes:
        runs = []
        for turn in range(_REPEATS + 1):
            timer.mark()
            if ring is not None:
                _exchange(comm, ring, size, everyone.device).wait()
            timer.mark()
            taken = timer.seconds()[0]
            if turn:  # the first one brings the ranks into step
                runs.append(taken)
        seconds.append(everyone.most(statistics.median(runs) if ring is not None else 0.0)[0])
    return tuple(seconds), int(members)


@dataclass(frozen=True)
class Copies:
    """Bytes per second of copies, the median of this rank."""

    out: float
    back: float
    pinned: bool
    """Host memory was page-locked (only CUDA has that)."""


def time_copies(
    everyone: Everyone,
    beside: Callable[[int], Exchange] | None = None,
    bandwidth: float = 1.0,
    size: int = COPY_BYTES,
) -> Copies:
    """Copy ``size`` bytes from device to host and back; on CPU ranks from memory to memory.

    ``beside`` starts an exchange of so many bytes, which is made to outlast the copy, given the ``bandwidth`` in
    bytes/s at which exchanges run.
    """
    device = everyone.device
    on_device = torch.ones(size, dtype=torch.uint8, device=device)
    host, pinned = _host_memory(size, device)
    timer = Timer(device, waits=True)
    medians: list[float] = []
    length = min(size, 1 << 20)  # of the exchange: first a guess, then what outlasts two copies
    for target, source in ((host, on_device), (on_device, host)):
        runs: list[float] = []
        for turn in range(_REPEATS + 1):
            under_way = beside(length) if beside is not None else None
            timer.mark()
            target.copy_(source, non_blocking=True)
            timer.mark()
            runs.append(timer.seconds()[0])
            if under_way is not None:
                under_way.wait()
            if turn == 0:  # touches the memory, and tells how long a copy takes
                wanted = int(2 * everyone.most(runs.pop())[0] * bandwidth)
                length = min(_LONGEST_EXCHANGE, max(length, wanted))
        medians.append(statistics.median(runs))
    return Copies(size / medians[0], size / medians[1], pinned)


def exchanger(comm: RingComm, ring: Ring, device: torch.device) -> Callable[[int], Exchange]:
    """Starts exchanges of any number of bytes with the neighbours on ``ring``."""
    return lambda size: _exchange(comm, ring, size, device)


def _exchange(comm: RingComm, ring: Ring, size: int, device: torch.device) -> Exchange:
    before, after = ring.neighbours(comm.rank)
    sent, received = _buffers(size, device)
    return comm.exchange([(sent, after)], [(received, before)], sequence=0, task=f"profile, {size} bytes")


_kept: dict[tuple[int, str], tuple[Tensor, Tensor]] = {}


def _buffers(size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Memory that was touched before: the first touch is no part of a transfer. Only the last size is kept."""
    key = size, str(device)
    if key not in _kept:
        _kept.clear()
        _kept[key] = (
            torch.ones(size, dtype=torch.uint8, device=device),
            torch.ones(size, dtype=torch.uint8, device=device),
        )
    return _kept[key]


def _host_memory(size: int, device: torch.device) -> tuple[Tensor, bool]:
    host = torch.ones(size, dtype=torch.uint8)
    if device.type != "cuda":
        return host, False
    try:
        return host.pin_memory(), True
    except RuntimeError:  # the machine's limit of locked memory
        return host, False
