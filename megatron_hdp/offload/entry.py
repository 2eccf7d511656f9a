"""`Entry`: a stretch of one storage that left for the arena, and what autograd holds instead of the saved tensors."""

import sys
import weakref
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_hdp.offload.arena import Extents
from megatron_hdp.offload.lanes import Arrival, Lanes, Order, Sent, bytes_of
from megatron_hdp.offload.quota import STEP


class Stretch(NamedTuple):
    """Bytes [start, end) of a storage."""

    start: int
    end: int

    @property
    def size(self) -> int:
        """Bytes."""
        return self.end - self.start


class Shape(NamedTuple):
    """How a saved tensor lies in its storage; offset and strides in elements."""

    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Tensor) -> "Shape":
        """The shape of ``tensor``."""
        return cls(tensor.dtype, tensor.size(), tensor.stride(), tensor.storage_offset())

    def place(self, storage: torch.UntypedStorage, start: int, device: torch.device) -> Tensor:
        """The tensor again, in a storage whose first byte was byte ``start`` of the old one."""
        offset = self.offset - start // self.dtype.itemsize
        return torch.empty(0, dtype=self.dtype, device=device).set_(storage, offset, self.size, self.stride)


def stretch_of(tensor: Tensor) -> Stretch:
    """The bytes that hold ``tensor``: the whole storage if it spans half of it or more, else its own stretch.

    Views of one storage are then copied together if they lie between each other (queries, keys and values of one
    projection), and a small view of a large storage goes alone. The start is a multiple of 512 bytes, so that what is
    rebuilt is aligned as the original was.
    """
    item = tensor.itemsize
    whole = tensor.untyped_storage().nbytes()
    first = tensor.storage_offset() * item
    last = first + item + item * sum((n - 1) * step for n, step in zip(tensor.size(), tensor.stride()))
    start = first // STEP * STEP
    return Stretch(0, whole) if 2 * (last - start) >= whole else Stretch(start, last)


class Entry:
    """Bytes of one storage at one version, of which the first ``leave`` are on their way out, out, or back.

    Every saved tensor inside them refers to the same entry; when the last of these dies, so does the entry, and its
    room in the arena and on the device goes back. Once fetched it stays on the device, as a second backward pass over
    the same graph (retain_graph) may ask again.
    """

    __slots__ = (
        "__weakref__",
        "_alias",
        "_arrival",
        "_extents",
        "_lanes",
        "_moved",
        "_rest",
        "_sent",
        "_source",
        "layer",
        "leave",
        "stretch",
        "version",
    )

    def __init__(self, lanes: Lanes, tensor: Tensor, stretch: Stretch, extents: Extents, leave: int) -> None:
        # First what the end of an entry looks at, then what may fail.
        self._lanes = lanes
        self._extents: Extents | None = extents
        self._arrival: Arrival | None = None
        self._moved: Tensor | torch.UntypedStorage | None = None
        self.stretch = stretch
        self.leave = leave
        self.layer = -1
        """Last layer that saved it: the first that needs it back."""
        self.version = tensor._version
        """Version of the tensor that left; -1 if it was changed while it did."""
        source_n = bytes_of(tensor.untyped_storage(), *stretch, tensor.device)
        self._source: Tensor | None = source_n
        # The detached tensor shares its version counter, so that a change before the copy is over shows.
        self._alias: Tensor | None = tensor.detach()
        self._rest = source_n[leave:].clone() if leave < stretch.size else None
        self._sent: Sent = lanes.send(source_n[:leave], extents)

    def is_sent(self) -> bool:
        """Whether the copy out is over."""
        return self._lanes.is_over(self._sent)

    def settle(self) -> None:
        """Give up the device memory, after the copy out. Once only."""
        source, alias = self._source, self._alias
        if source is None or alias is None:
            return
        self._lanes.settle(self._sent, source)
        self._source = self._alias = None
        if source.untyped_storage().nbytes() < self.stretch.end:
            # Emptied by its owner in the meantime, who fills it again before the backward pass (recomputed outputs).
            # What was copied may be anything.
            self._moved = source.untyped_storage()
            self._free_room()
        elif alias._version != self.version:  # before the copy or after it: nobody knows
            self.version = -1

    def order(self) -> Order | None:
        """Make room on the device and say what to copy there; None if the bytes are at hand."""
        if self._extents is None or self._source is not None:
            return None
        device = self._lanes.arena.device
        target_n = torch.empty(self.stretch.size, dtype=torch.uint8, device=device)
        if self._rest is not None:
            target_n[self.leave :].copy_(self._rest)
            self._rest = None
        self._moved = target_n
        return Order(target_n[: self.leave], self._extents, self._sent)

    def arrive(self, arrival: Arrival) -> None:
        """The copy that `order` asked for is queued: the room in the arena is free for copies out after it."""
        self._arrival = arrival
        self._free_room()

    def rebuild(self, shape: Shape) -> Tensor:
        """A saved tensor on the device again; all of an entry share one storage.

        Raises:
            RuntimeError: it was changed in place while its copy was under way.
        """
        device = self._lanes.arena.device
        source, moved = self._source, self._moved
        if source is not None:
            alias = self._alias
            require_version(shape, self.version, -1 if alias is None else alias._version)
            return shape.place(source.untyped_storage(), 0, device)
        if self.version < 0:
            require_version(shape, 0, 1)
        if isinstance(moved, torch.UntypedStorage):
            return shape.place(moved, 0, device)
        if moved is None or self._arrival is None:
            raise RuntimeError("activation offload: a tensor was asked for before it was fetched")
        self._lanes.receive(self._arrival, moved)
        return shape.place(moved.untyped_storage(), self.stretch.start, device)

    def _free_room(self) -> None:
        if self._extents is not None:
            self._lanes.arena.release(self._extents)
            self._extents = None

    def __del__(self) -> None:
        if sys.is_finalizing():
            return
        self._free_room()
        if self._arrival is not None:
            self._lanes.abandon(self._arrival)


class Kept(NamedTuple):
    """A saved tensor that stays where it is."""

    layer: int
    tensor: Tensor
    version: int


class Gone(NamedTuple):
    """A saved tensor whose bytes, or some of them, are an entry's."""

    layer: int
    entry: Entry
    shape: Shape


class Storage:
    """What is known of one storage in a micro-batch; alive or not, no other storage gets its key meanwhile."""

    __slots__ = ("_reference", "entries", "layer", "stays")

    def __init__(self, storage: torch.UntypedStorage, layer: int) -> None:
        self._reference = StorageReference(storage)
        self.layer = layer
        """Layer that it belongs to."""
        self.stays = False
        """A tensor in it is kept, so it stays on the device as a whole."""
        self.entries: list[weakref.ref[Entry]] = []

    def find(self, stretch: Stretch, version: int) -> Entry | None:
        """An entry that holds these bytes as they are now."""
        for reference in self.entries:
            entry = reference()
            if entry is not None and entry.version == version:
                start, end = entry.stretch
                if start <= stretch.start and stretch.end <= end:
                    return entry
        return None


class StorageReference:
    """Weak reference to a storage. Its address, `key`, is not used again as long as this lives."""

    __slots__ = ("key",)

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.key = storage._weak_ref()

    def __del__(self) -> None:
        if not sys.is_finalizing():
            torch.UntypedStorage._free_weak_ref(self.key)


def require_version(shape: Shape, saved: int, current: int) -> None:
    """Raise what autograd raises for a saved tensor that was changed in place; it cannot look through hooks itself."""
    if saved != current:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"[{shape.dtype} {list(shape.size)}] was saved for backward and changed afterwards. "
            "Find the operation with torch.autograd.set_detect_anomaly(True)"
        )
