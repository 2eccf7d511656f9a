"""`ActivationOffload`: one per process and device; makes the contexts, keeps the books."""

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from megatron_hdp.errors import ConfigError
from megatron_hdp.offload.arena import HostArena
from megatron_hdp.offload.entry import StorageReference
from megatron_hdp.offload.lanes import Lanes
from megatron_hdp.offload.micro_batch import MicroBatch
from megatron_hdp.offload.streams import Streams, make_streams

_MIN_BYTES = {"cuda": 2**18}
"""Starting a copy over PCIe takes about 10 microseconds, in which 256 KiB are through."""
_MIN_BYTES_ELSEWHERE = 2**10


@dataclass(frozen=True)
class OffloadMetrics:
    """What offloading did since the metrics were last taken, on this process."""

    bytes_out: int
    bytes_in: int
    bytes_kept: int
    """Bytes that should have left and stayed, as the arena was full."""
    wait_seconds: float
    """Seconds that compute waited for copies. On CUDA as told by events that are over by now: no wait is lost, but the
    last ones of a step may count for the next. On the CPU the time of the copies themselves."""
    arena_high_water: int
    """Most bytes of the arena in use."""
    arena_bytes: int


class ActivationOffload:
    """Moves saved activations of ``arena.device`` to ``arena`` and back.

    Args:
        arena: where they go; stays the caller's, close it after this.
        min_bytes: smaller tensors stay. Default 256 KiB on CUDA, 1 KiB on the CPU, where models are small.
        keep_when_full: with a full arena a tensor stays on the device and is counted; else ConfigError.
        streams: the device's queues, for tests.
    """

    def __init__(
        self,
        arena: HostArena,
        *,
        min_bytes: int | None = None,
        keep_when_full: bool = True,
        streams: Streams | None = None,
    ) -> None:
        self.arena = arena
        self.min_bytes = (
            _MIN_BYTES.get(arena.device.type, _MIN_BYTES_ELSEWHERE) if min_bytes is None else max(1, min_bytes)
        )
        self.keep_when_full = keep_when_full
        self.lanes = Lanes(arena, streams or make_streams(arena.device))
        self.active: MicroBatch | None = None
        """The context that is open: layers that are wrapped far from the block tell it that they begin."""
        self.protected: dict[int, StorageReference] = {}
        self._out = self._in = self._kept = 0

    def micro_batch(self, ratio: float, layers: int, *, keep_first: bool = True, keep_last: bool = True) -> MicroBatch:
        """Context for one forward pass through ``layers`` layers of which ``ratio`` of the bytes leave.

        The first and the last layer keep theirs unless told otherwise (a stage of several chunks may want only the
        very first and last layer kept). With ratio 0, with no layer left, or without grad it does nothing at all.

        Raises:
            ConfigError: a ratio outside 0 .. 1, or no layers.
        """
        if not 0.0 <= ratio <= 1.0:
            raise ConfigError(f"activation offload: the ratio is {ratio}, must be from 0 to 1")
        if layers < 1:
            raise ConfigError(f"activation offload: {layers} layers, must be at least 1")
        keep = ({0} if keep_first else set()) | ({layers - 1} if keep_last else set())
        return MicroBatch(self, float(ratio), layers, frozenset(keep))

    def layer(self, index: int, hidden: Tensor | None = None) -> None:
        """`MicroBatch.layer` of the open context; nothing where none is, as in the backward pass."""
        if self.active is not None:
            self.active.layer(index, hidden)

    def protect(self, tensors: Iterable[Tensor]) -> None:
        """Never move the memory of these tensors, nor of what shares it.

        Parameters and their views are known without this; it is for what autograd cannot trace to them (detached
        parameters, ``.data``), and for tensors that are kept for the whole run (tables of rotary angles).
        """
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self.protected.setdefault(storage._cdata, StorageReference(storage))

    def take_metrics(self) -> OffloadMetrics:
        """The metrics since the last call; starts them anew. Call it once per step."""
        metrics = OffloadMetrics(
            bytes_out=self._out,
            bytes_in=self._in,
            bytes_kept=self._kept,
            wait_seconds=self.lanes.take_wait_seconds(),
            arena_high_water=self.arena.high_water,
            arena_bytes=self.arena.bytes,
        )
        self._out = self._in = self._kept = 0
        self.arena.reset_high_water()
        return metrics

    def close(self) -> None:
        """Wait for all copies; afterwards the arena can be closed."""
        self.lanes.synchronize()

    def count_out(self, bytes: int) -> None:
        """Bytes left."""
        self._out += bytes

    def count_in(self, bytes: int) -> None:
        """Bytes came back."""
        self._in += bytes

    def count_kept(self, bytes: int) -> None:
        """Bytes had to stay."""
        self._kept += bytes
