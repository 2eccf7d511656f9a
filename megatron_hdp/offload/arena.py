"""`HostArena`: one block of host memory, taken and touched at start, that a process's tensors go to.

On CUDA it is pinned, by cudaHostRegister of exactly these bytes: torch's pinned allocator would round up to a power of
two.
"""

import collections
import weakref
from types import TracebackType

import torch
from torch import Tensor

from megatron_hdp.errors import ConfigError
from megatron_hdp.offload.allocator import ALIGNMENT, PythonArena, make_arena
from megatron_hdp.offload.host_memory import OFFLOAD_FLAG, gib, require_host_memory
from megatron_hdp.planner.native import _core

type Extents = tuple[tuple[int, int], ...]
"""Where a tensor lies in the arena: (offset, bytes), one after the other. Usually a single one."""


class HostArena:
    """``bytes`` bytes of host memory (rounded down to 256) for tensors of ``device``.

    A tensor gets one stretch where one is free, else several, so that nothing but the sum of the sizes decides whether
    it fits. `release` may be called from finalizers, in any thread.

    Raises:
        ConfigError: not that much host memory, or the driver refused to pin it. Nothing is kept then.
    """

    def __init__(self, bytes: int, device: torch.device, allocator: PythonArena | None = None) -> None:
        if bytes < ALIGNMENT:
            raise ConfigError(f"{OFFLOAD_FLAG}: the arena needs at least {ALIGNMENT} bytes, not {bytes}")
        self.device = torch.device(device)
        if self.device.type == "cuda" and self.device.index is None:  # tensors always know which
            self.device = torch.device("cuda", torch.cuda.current_device())
        self._allocator = allocator or make_arena(bytes)
        require_host_memory(self._allocator.bytes)
        memory, self.numa_node = _map_memory(self._allocator.bytes)
        """Node that the memory was asked to lie on; -1 where the kernel knows none or refused."""
        self._memory: Tensor | None = memory
        self._returned: collections.deque[Extents] = collections.deque()
        self._pin = _Pin(memory) if self.device.type == "cuda" else None
        if self._pin is not None:
            weakref.finalize(self, self._pin)

    @property
    def bytes(self) -> int:
        """Size of the arena."""
        return self._allocator.bytes

    @property
    def bytes_in_use(self) -> int:
        """Bytes that tensors hold, each stretch rounded up to 256."""
        self._take_back()
        return self._allocator.bytes_in_use

    @property
    def largest_free(self) -> int:
        """Bytes of the largest free stretch."""
        self._take_back()
        return self._allocator.largest_free

    @property
    def high_water(self) -> int:
        """Most bytes in use since `reset_high_water`."""
        return self._allocator.high_water

    def reset_high_water(self) -> None:
        """Start the high-water mark anew, at what is in use."""
        self._take_back()
        self._allocator.reset_high_water()

    def allocate(self, bytes: int) -> Extents | None:
        """Room for ``bytes`` bytes, or None if that many are not free.

        Raises:
            ConfigError: the arena is closed.
        """
        self._memory_or_raise()
        self._take_back()
        offset = self._allocator.allocate(bytes)
        if offset is not None:
            return ((offset, bytes),)
        if -(-bytes // ALIGNMENT) * ALIGNMENT > self._allocator.bytes - self._allocator.bytes_in_use:
            return None
        extents = []
        while bytes:
            part = min(bytes, self._allocator.largest_free)
            offset = self._allocator.allocate(part)
            assert offset is not None, "the largest free stretch is free"
            extents.append((offset, part))
            bytes -= part
        return tuple(extents)

    def release(self, extents: Extents) -> None:
        """Give room back. Only noted here, as a finalizer may run in the middle of `allocate`."""
        self._returned.append(extents)

    def view(self, offset: int, bytes: int) -> Tensor:
        """The bytes as a uint8 tensor, shape [bytes]. Do not keep it: `close` counts on that."""
        return self._memory_or_raise()[offset : offset + bytes]

    def close(self) -> None:
        """Unpin and unmap. Copies must be over (`ActivationOffload.close` sees to that); what is still out is lost."""
        if self._pin is not None:
            self._pin()
        self._memory = None

    def __enter__(self) -> "HostArena":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _memory_or_raise(self) -> Tensor:
        if self._memory is None:
            raise ConfigError("activation offload: the host arena is closed; make a new one")
        return self._memory

    def _take_back(self) -> None:
        while self._returned:
            for offset, _ in self._returned.popleft():
                self._allocator.free(offset)


def _map_memory(bytes: int) -> tuple[Tensor, int]:
    """Touched memory as a uint8 tensor [at least bytes], and its NUMA node."""
    try:
        if _core is not None:
            array, node = _core.host_memory(bytes)
            return torch.from_numpy(array), int(node)
        return torch.zeros(bytes, dtype=torch.uint8, device="cpu").add_(0), -1  # zeros alone may touch nothing
    except RuntimeError as error:
        raise ConfigError(
            f"activation offload: {gib(bytes)} of host memory could not be had ({error}): lower {OFFLOAD_FLAG}, or "
            "raise the limit of the process (ulimit -v)"
        ) from error


class _Pin:
    """Page-locks ``memory`` while it is alive; calling it undoes that, once."""

    def __init__(self, memory: Tensor) -> None:
        self._memory: Tensor | None = memory
        result = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
        if result != 0:
            raise ConfigError(
                f"activation offload: the driver refused to pin {gib(memory.nbytes)} of host memory (CUDA error "
                f"{result}): lower {OFFLOAD_FLAG}, or raise the limit of locked memory (ulimit -l)"
            )

    def __call__(self) -> None:
        memory, self._memory = self._memory, None
        if memory is not None:
            torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())
