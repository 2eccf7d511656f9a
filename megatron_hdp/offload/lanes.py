"""`Lanes`: the copies to and from the arena, in order with compute, without the host ever waiting for one.

Two streams, out and in. Who waits for whom:

out      waits for the compute that made the tensor (event at the save), and for the last copy in, as that may still
         read the room of the arena that is written now
compute  waits for a copy out before the device memory of the tensor is given up. So memory goes back in the order of
         the compute stream, and a host that runs ahead of the device cannot make it pile up, which `record_stream`
         alone would allow: the allocator asks for its events only when the host allocates
in       waits for the compute before it (the memory it fills may just have been given up there) and for the copy out
compute  waits for a copy in before it uses the tensor, or before the memory is given up unused

`record_stream` is for what that order does not cover: a tensor saved or used on another stream than its own.
"""

import collections
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_hdp.offload.arena import Extents, HostArena
from megatron_hdp.offload.streams import Streams


class Sent(NamedTuple):
    """A copy out under way."""

    event: Any
    origin: Any
    """Stream on which the tensor was saved."""


class Order(NamedTuple):
    """One copy in: what to fill, from where, and the copy out that wrote it."""

    target: Tensor
    extents: Extents
    sent: Sent


class Arrival:
    """Copies in under way, which end together."""

    def __init__(self, event: Any, origin: Any) -> None:
        self.event = event
        self.origin = origin
        """Stream whose memory is filled."""
        self.waited: list[Any] = []
        """Streams that wait for the event already."""


class Lanes:
    """The two copy streams of one device, and how long compute waited for them."""

    def __init__(self, arena: HostArena, streams: Streams) -> None:
        self.arena = arena
        self.streams = streams
        self._out, self._in = streams.new(), streams.new()
        self._last_in: Any = None
        """The last copy in, until a copy out has waited for it."""
        self._waits: collections.deque[tuple[Any, Any]] = collections.deque()
        self._wait_seconds = 0.0
        self._host_seconds_told = 0.0

    def send(self, source_n: Tensor, extents: Extents) -> Sent:
        """Queue the copy of ``source_n`` (uint8 [n]) to the arena. Keep it alive until `settle`."""
        origin = self.streams.current()
        if self._last_in is not None:
            self.streams.wait(self._out, self._last_in)
            self._last_in = None
        self.streams.wait(self._out, self.streams.record(origin))
        start = 0
        for offset, size in extents:
            self.streams.copy(self.arena.view(offset, size), source_n[start : start + size], self._out)
            start += size
        return Sent(self.streams.record(self._out), origin)

    def is_over(self, sent: Sent) -> bool:
        """Whether a copy out is done."""
        return self.streams.done(sent.event)

    def settle(self, sent: Sent, source: Tensor) -> None:
        """Make compute wait for a copy out, so that the memory of ``source`` may go back."""
        current = self.streams.current()
        if not self.streams.done(sent.event):
            self._wait(current, sent.event)
        if current != sent.origin:  # the memory may belong to the other stream, which waits for nothing
            self.streams.hold(source, self._out)

    def fetch(self, orders: Sequence[Order]) -> Arrival:
        """Queue copies from the arena into targets that were just allocated on the current stream."""
        origin = self.streams.current()
        self.streams.wait(self._in, self.streams.record(origin))
        for target, extents, sent in orders:
            self.streams.wait(self._in, sent.event)
            start = 0
            for offset, size in extents:
                self.streams.copy(target[start : start + size], self.arena.view(offset, size), self._in)
                start += size
        self._last_in = self.streams.record(self._in)
        return Arrival(self._last_in, origin)

    def receive(self, arrival: Arrival, target: Tensor) -> None:
        """Make compute of this thread wait for copies in, before ``target`` is used."""
        current = self.streams.current()
        if current not in arrival.waited:
            self._wait(current, arrival.event)
            arrival.waited.append(current)
        if current != arrival.origin:
            self.streams.hold(target, current)

    def abandon(self, arrival: Arrival) -> None:
        """The target of a copy in dies: its memory must not go back before the copy is over."""
        if arrival.origin not in arrival.waited:
            self.streams.wait(arrival.origin, arrival.event)
            arrival.waited.append(arrival.origin)

    def take_wait_seconds(self) -> float:
        """Seconds that compute waited for copies since the last call, as far as the device has told by now."""
        while self._waits:
            seconds = self.streams.seconds(*self._waits[0])
            if seconds is None:
                break
            self._wait_seconds += seconds
            self._waits.popleft()
        host = self.streams.host_copy_seconds
        taken = self._wait_seconds + host - self._host_seconds_told
        self._wait_seconds, self._host_seconds_told = 0.0, host
        return taken

    def synchronize(self) -> None:
        """Block until no copy is under way."""
        self.streams.synchronize(self._out)
        self.streams.synchronize(self._in)

    def _wait(self, stream: Any, event: Any) -> None:
        begin = self.streams.record(stream, timed=True)
        self.streams.wait(stream, event)
        self._waits.append((begin, self.streams.record(stream, timed=True)))


def bytes_of(storage: torch.UntypedStorage, start: int, end: int, device: torch.device) -> Tensor:
    """Bytes [start, end) of a storage as a uint8 tensor that shares it."""
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, start, (end - start,), (1,))
