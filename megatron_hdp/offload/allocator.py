"""Where the tensors that left a device lie in one block of host memory: offsets only. No torch.

`Arena` is csrc/arena.cpp where that is built, else `PythonArena`; both give the same offsets for the same calls.

Sizes vary with every sequence, so blocks are not kept by shape. Best fit with merging suits what a step does: the
tensors of a micro-batch come and go in runs, each run fills the hole of an equal or larger one, and large blocks stay
whole.
"""

import bisect
from typing import cast

from megatron_hdp.planner.native import _core

ALIGNMENT = 256
"""Bytes: more than a cache line, so that no two tensors share one, and the largest payload of a PCIe packet."""


class PythonArena:
    """Hands out bytes of one block by best fit: the smallest free block that is large enough, the lowest of equals.

    ``bytes`` is rounded down to `ALIGNMENT`; ValueError if nothing is left.
    """

    def __init__(self, bytes: int) -> None:
        if bytes < ALIGNMENT:
            raise ValueError(f"an arena needs at least {ALIGNMENT} bytes, not {bytes}")
        self.bytes = bytes // ALIGNMENT * ALIGNMENT
        self.bytes_in_use = 0
        """Bytes handed out, each rounded up to `ALIGNMENT`."""
        self.high_water = 0
        self._used: dict[int, int] = {}
        self._free_by_size: list[tuple[int, int]] = []
        self._free_starts: dict[int, int] = {}
        self._free_ends: dict[int, int] = {}
        self._insert_free(0, self.bytes)

    @property
    def largest_free(self) -> int:
        """Bytes of the largest free block."""
        return self._free_by_size[-1][0] if self._free_by_size else 0

    def reset_high_water(self) -> None:
        """From here on, the high-water mark starts at what is in use."""
        self.high_water = self.bytes_in_use

    def allocate(self, bytes: int) -> int | None:
        """Offset of ``bytes`` bytes, a multiple of `ALIGNMENT`; None if no free block is that large."""
        if bytes < 1:
            raise ValueError(f"cannot hand out {bytes} bytes, must be at least 1")
        wanted = -(-bytes // ALIGNMENT) * ALIGNMENT
        place = bisect.bisect_left(self._free_by_size, (wanted, 0))
        if place == len(self._free_by_size):
            return None
        size, offset = self._free_by_size[place]
        self._remove_free(offset, size)
        if size > wanted:
            self._insert_free(offset + wanted, size - wanted)
        self._used[offset] = wanted
        self.bytes_in_use += wanted
        self.high_water = max(self.high_water, self.bytes_in_use)
        return offset

    def free(self, offset: int) -> None:
        """Give back what `allocate` handed out at ``offset``, merged with free neighbours; ValueError if nothing is."""
        size = self._used.pop(offset, None)
        if size is None:
            raise ValueError(f"nothing is handed out at offset {offset}")
        self.bytes_in_use -= size
        after = self._free_starts.get(offset + size)
        if after is not None:
            self._remove_free(offset + size, after)
            size += after
        before = self._free_ends.get(offset)
        if before is not None:
            offset -= before
            self._remove_free(offset, before)
            size += before
        self._insert_free(offset, size)

    def _insert_free(self, offset: int, size: int) -> None:
        bisect.insort(self._free_by_size, (size, offset))
        self._free_starts[offset] = size
        self._free_ends[offset + size] = size

    def _remove_free(self, offset: int, size: int) -> None:
        del self._free_by_size[bisect.bisect_left(self._free_by_size, (size, offset))]
        del self._free_starts[offset]
        del self._free_ends[offset + size]


def make_arena(bytes: int) -> PythonArena:
    """The compiled allocator, or the twin (they have the same methods)."""
    return PythonArena(bytes) if _core is None else cast(PythonArena, _core.Arena(bytes))
