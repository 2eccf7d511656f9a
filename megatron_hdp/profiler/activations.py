"""Bytes that the forward pass of a model's layers keeps for backward."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


class LayerBytes:
    """Counts the storages that autograd saves inside the given layers, each once, parameters and buffers not.

    A storage belongs to the layer that saves it first; what is saved outside of layers does not count.
    """

    def __init__(self, layers: Iterable[torch.nn.Module], protected: Iterable[Tensor]) -> None:
        """``protected``: tensors that are there anyway: parameters, buffers, and what all layers are handed."""
        self._layers = tuple(layers)
        self._protected = {tensor.untyped_storage().data_ptr() for tensor in protected}
        self._seen: dict[int, int] = {}
        self._inside = False

    def of(self, forward: Callable[[], Any]) -> int:
        """Bytes kept by ``forward``, which must return what keeps its graph alive."""
        self._seen = {}
        handles = [layer.register_forward_pre_hook(self._enter) for layer in self._layers]
        handles += [layer.register_forward_hook(self._leave) for layer in self._layers]
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda saved: saved):
                alive = forward()  # nothing is freed before it is counted, so no address comes twice
            found = sum(self._seen.values())
            del alive
        finally:
            for handle in handles:
                handle.remove()
        return found

    def _enter(self, *_: Any) -> None:
        self._inside = True

    def _leave(self, *_: Any) -> None:
        self._inside = False

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if self._inside and address not in self._protected:
            self._seen[address] = storage.nbytes()
        return tensor.detach()  # an output kept as it is would keep itself alive
