"""`MicroBatch`: what autograd saves in one micro-batch's forward pass through a stage, and its way back."""

import collections
import threading
import weakref
from collections.abc import Iterable
from types import TracebackType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron_hdp.errors import ConfigError, SeamError
from megatron_hdp.offload.entry import Entry, Gone, Kept, Shape, Storage, Stretch, require_version, stretch_of
from megatron_hdp.offload.host_memory import OFFLOAD_FLAG, gib
from megatron_hdp.offload.lanes import bytes_of
from megatron_hdp.offload.quota import Quota

if TYPE_CHECKING:
    from megatron_hdp.offload.context import ActivationOffload

_TOLERANCE = 0.01
"""Tensors are split if whole ones would be off by more than this share of the stage's activations."""
_LAG_LAYERS = 2
"""A layer's copies out have until the start of this many layers later."""


class MicroBatch:
    """Context of one forward pass; made by `ActivationOffload.micro_batch`.

    Saved-tensor hooks see every tensor that autograd saves between `__enter__` and `__exit__`. In the backward pass the
    first tensor that a layer asks for starts the copies in of the layer below, so nothing is added to the graph and
    recomputed layers need no care: their one saved tensor, the input, is what asks.
    """

    def __init__(self, offload: "ActivationOffload", ratio: float, layers: int, keep: frozenset[int]) -> None:
        self._offload = offload
        self._layers = layers
        self._keep = keep
        self._quota = Quota(ratio, min_bytes=offload.min_bytes)
        self._layer = -1
        self._first_layer_bytes = 0
        self._storages: dict[int, Storage] = {}
        self._leaving: collections.deque[tuple[int, Entry]] = collections.deque()
        """Entries whose device memory is not given up yet, and the layer that they left in, oldest first."""
        self._groups: dict[int, list[weakref.ref[Entry]]] = {}
        """Entries that are out, by the layer that needs them first in the backward pass."""
        self._reached = layers
        """Lowest layer that the backward pass has come to."""
        self._lock = threading.Lock()  # autograd's threads: one per device
        self._hooks: torch.autograd.graph.saved_tensors_hooks | None = None
        self._outer: MicroBatch | None = None

    def __enter__(self) -> "MicroBatch":
        self._outer, self._offload.active = self._offload.active, self
        if self._quota.ratio > 0 and len(self._keep) < self._layers and torch.is_grad_enabled():
            self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
            self._hooks.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._offload.active, self._outer = self._outer, None
        hooks, self._hooks = self._hooks, None  # the hooks refer to this object: no cycle may stay
        if hooks is not None:
            hooks.__exit__(kind, error, traceback)
        self._settle(self._layers + _LAG_LAYERS)
        self._storages.clear()
        if hooks is not None and error is None and self._layer < 0:
            raise SeamError(
                f"activation offload: none of {self._layers} layers told that it begins, so nothing left the device; "
                "call layer() at the beginning of each"
            )

    def layer(self, index: int, hidden: Tensor | None = None) -> None:
        """Layer ``index`` (0 .. layers - 1) begins, with the input ``hidden``.

        Call it outside of the function that a checkpoint recomputes where that can be chosen. Inside it works too: of
        ``hidden`` it is then known to which layer it belongs, though it is saved when the whole checkpoint is over.
        """
        if self._hooks is None:
            return
        if not 0 <= index < self._layers:
            raise ConfigError(
                f"activation offload: layer {index} began in a micro-batch of {self._layers} layers; give micro_batch "
                "the number of layers that run"
            )
        self._settle(index)
        if self._layer < 1 <= index:
            first = self._first_layer_bytes + self._quota.seen
            self._quota.tolerance = round(_TOLERANCE * self._layers * first)
        self._layer = index
        if hidden is not None and self._is_plain(hidden):
            self._storage_of(hidden.untyped_storage(), index)

    def _settle(self, layer: int) -> None:
        """Give up device memory: of copies that are over, and of all from `_LAG_LAYERS` before ``layer``."""
        while self._leaving:
            left, entry = self._leaving[0]
            if left > layer - _LAG_LAYERS and not entry.is_sent():
                break
            self._leaving.popleft()
            entry.settle()

    # ---- forward: what leaves

    def _pack(self, tensor: Tensor) -> Kept | Gone:
        if not self._is_plain(tensor):
            return self._kept(tensor)
        storage = self._storage_of(tensor.untyped_storage(), self._layer)
        if storage.stays:
            return self._kept(tensor)
        stretch = stretch_of(tensor)
        entry = storage.find(stretch, tensor._version)
        if entry is None:
            decision = self._decide(tensor, storage, stretch)
            if isinstance(decision, Kept):
                return decision
            entry = decision
        if entry.layer < self._layer:
            entry.layer = self._layer
            self._groups.setdefault(entry.layer, []).append(weakref.ref(entry))
        return Gone(self._layer, entry, Shape.of(tensor))

    def _decide(self, tensor: Tensor, storage: Storage, stretch: Stretch) -> Kept | Entry:
        """The first save of these bytes: they stay, or an entry takes them away."""
        offload, quota = self._offload, self._quota
        if storage.layer < 0 or storage.layer in self._keep:
            storage.stays = True
            if storage.layer == 0:
                self._first_layer_bytes += tensor.untyped_storage().nbytes()
            return self._kept(tensor)
        if stretch.size < offload.min_bytes:
            return self._kept_alone(tensor, stretch)
        before = quota.gone
        leave = quota.take(stretch.size)
        if any(reference() is not None for reference in storage.entries):
            # Other bytes of it left: kept, these would hold on to the memory of all.
            quota.gone, leave = before + stretch.size, stretch.size
        if leave:
            extents = offload.arena.allocate(leave)
            if extents is not None:
                entry = Entry(offload.lanes, tensor, stretch, extents, leave)
                storage.entries.append(weakref.ref(entry))
                offload.count_out(leave)
                self._leaving.append((self._layer, entry))
                self._settle(self._layer)
                return entry
            quota.gone = before
            self._refuse_or_count(leave)
        storage.stays = True
        quota.seen += tensor.untyped_storage().nbytes() - stretch.size
        return self._kept(tensor)

    def _refuse_or_count(self, bytes: int) -> None:
        offload, arena = self._offload, self._offload.arena
        if not offload.keep_when_full:
            raise ConfigError(
                f"activation offload: layer {self._layer} has {gib(bytes)} to move to the host, whose arena of "
                f"{gib(arena.bytes)} has {gib(arena.bytes_in_use)} in use and {gib(arena.largest_free)} as its largest "
                f"free block: raise {OFFLOAD_FLAG}"
            )
        offload.count_kept(bytes)

    def _kept(self, tensor: Tensor) -> Kept:
        # Detached, as an output of the operation that saves it would otherwise hold itself alive. A leaf has no such
        # operation, and may be a parameter whose attributes somebody wants.
        return Kept(self._layer, tensor if tensor.is_leaf else tensor.detach(), tensor._version)

    def _kept_alone(self, tensor: Tensor, stretch: Stretch) -> Kept:
        """Too small to leave; but a small view must not hold a large storage, so it gets memory of its own."""
        if tensor.untyped_storage().nbytes() < self._offload.min_bytes:
            return self._kept(tensor)
        bytes_n = bytes_of(tensor.untyped_storage(), *stretch, tensor.device).clone()
        alone = Shape.of(tensor).place(bytes_n.untyped_storage(), stretch.start, tensor.device)
        return Kept(self._layer, alone, alone._version)

    def _storage_of(self, storage: torch.UntypedStorage, layer: int) -> Storage:
        known = self._storages.get(storage._cdata)
        if known is None:
            known = self._storages[storage._cdata] = Storage(storage, layer)
            known.stays = storage._cdata in self._offload.protected
        return known

    def _is_plain(self, tensor: Tensor) -> bool:
        """Bytes on the device that are neither a parameter's nor somebody's leaf, whose memory would not go free."""
        return (
            type(tensor) is Tensor
            and tensor.device == self._offload.arena.device
            and tensor.layout is torch.strided
            and tensor.numel() > 0
            and not (tensor.is_leaf and tensor.requires_grad)
            and not _is_view_of_leaf(tensor)
            and not tensor.is_conj()
            and not tensor.is_neg()
            and not tensor.is_quantized
        )

    # ---- backward: what comes back

    def _unpack(self, saved: Kept | Gone) -> Tensor:
        with self._lock:
            self._reach(saved.layer)
            if isinstance(saved, Gone):
                self._fetch([saved.entry])
                return saved.entry.rebuild(saved.shape)
        require_version(Shape.of(saved.tensor), saved.version, saved.tensor._version)
        return saved.tensor

    def _reach(self, layer: int) -> None:
        """The backward pass is at ``layer``: fetch what that needs, and one group of entries ahead."""
        if layer >= self._reached or self._hooks is not None:
            return
        self._reached = layer
        for group in sorted(self._groups, reverse=True):
            entries = [reference() for reference in reversed(self._groups.pop(group))]
            self._fetch(entry for entry in entries if entry is not None)
            if group < layer:
                break

    def _fetch(self, entries: Iterable[Entry]) -> None:
        pairs = [(entry, order) for entry in entries if (order := entry.order()) is not None]
        if pairs:
            arrival = self._offload.lanes.fetch([order for _, order in pairs])
            for entry, order in pairs:
                entry.arrive(arrival)
                self._offload.count_in(order.target.nbytes)


def _is_view_of_leaf(tensor: Tensor) -> bool:
    base = tensor._base
    return base is not None and base.is_leaf and base.requires_grad
