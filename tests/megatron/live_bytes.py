"""Memory of what torch computes, at its peak and now, on any device: no allocator of the CPU can be asked for it."""

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all tensors that operations make while the mode is on, for as long as they live."""

    def __init__(self):
        super().__init__()
        self.peak, self.largest, self.made = 0, 0, 0
        self._live = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        before = {self._key(x) for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        self._forget()
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and self._key(tensor) not in before:
                storage = tensor.untyped_storage()
                self._live[self._key(tensor)] = StorageWeakRef(storage), storage.nbytes(), self.made
                self.largest = max(self.largest, storage.nbytes())
                self.made += 1
        self.peak = max(self.peak, sum(size for _, size, _ in self._live.values()))
        return result

    def bytes(self, begin, end):
        """Alive now of those made when ``made`` was from ``begin`` to before ``end``."""
        self._forget()
        return sum(size for _, size, number in self._live.values() if begin <= number < end)

    def _forget(self):
        self._live = {key: entry for key, entry in self._live.items() if not entry[0].expired()}

    @staticmethod
    def _key(tensor):
        return tensor.untyped_storage()._cdata
