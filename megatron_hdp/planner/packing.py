"""Best fit decreasing: items into as few bins of equal capacity as is practical. C++ where built, else Python."""

import heapq
from typing import Literal

import numpy as np

from megatron_hdp.planner.native import _core
from megatron_hdp.types import IntArray

_WORD_BITS = 6
_WORD = 1 << _WORD_BITS


def core_backend() -> Literal["c++", "python"]:
    """Which planner core runs: the compiled ``megatron_hdp._core`` or its Python twin. Plans are the same."""
    return "python" if _core is None else "c++"


def best_fit(sizes: IntArray, capacity: int, rooms: IntArray | None = None) -> IntArray:
    """Bin of every item by best fit decreasing, in O(n log n) (Johnson 1973).

    Items go from large to small (ties: lower index first), each into the open bin that it fills most (ties: lower
    bin), else into a new bin of ``capacity``.

    Args:
        sizes: int64 [num_items], each 1 .. capacity.
        capacity: room of a new bin.
        rooms: int64 [num_rooms]; bins 0 .. num_rooms - 1 are open from the start with these rooms, new bins count
            up from num_rooms. Rooms below 1 hold nothing.

    Returns:
        int64 [num_items], the bin of each item.

    Raises:
        ValueError: an item is not in 1 .. capacity.
    """
    sizes = np.ascontiguousarray(sizes, dtype=np.int64)
    rooms = np.zeros(0, dtype=np.int64) if rooms is None else np.ascontiguousarray(rooms, dtype=np.int64)
    if _core is None:
        return best_fit_python(sizes, capacity, rooms)
    return _core.best_fit(sizes, capacity, rooms)


def best_fit_python(sizes: IntArray, capacity: int, rooms: IntArray) -> IntArray:
    """Twin of the C++ `best_fit`; see there."""
    wrong = np.flatnonzero((sizes < 1) | (sizes > capacity))
    if wrong.size:
        item = int(wrong[0])
        raise ValueError(f"item {item} has size {int(sizes[item])}, which is not in 1 .. capacity {capacity}")
    open_rooms = _RoomSet()
    bins_of_room: dict[int, list[int]] = {}  # room -> heap of bins, so that ties go to the lowest bin

    def put(bin_: int, room: int) -> None:
        if room > 0:
            heap = bins_of_room.setdefault(room, [])
            if not heap:
                open_rooms.add(room)
            heapq.heappush(heap, bin_)

    for bin_, room in enumerate(rooms.tolist()):
        put(bin_, room)
    num_bins = rooms.size
    result = np.empty(sizes.size, dtype=np.int64)
    order = np.argsort(-sizes, kind="stable")
    for item, size in zip(order.tolist(), sizes[order].tolist(), strict=True):
        room = open_rooms.at_least(size)
        if room is None:
            bin_, room = num_bins, capacity
            num_bins += 1
        else:
            heap = bins_of_room[room]
            bin_ = heapq.heappop(heap)
            if not heap:
                open_rooms.discard(room)
        put(bin_, room - size)
        result[item] = bin_
    return result


class _RoomSet:
    """Set of integers that finds its smallest member >= x in O(log max): a sparse tree of 64-bit words.

    A sorted list would move O(n) entries per insert; numpy and the standard library have no ordered set.
    """

    def __init__(self) -> None:
        self._levels: list[dict[int, int]] = [{}]

    def add(self, value: int) -> None:
        for level in self._levels:
            word = level.get(value >> _WORD_BITS, 0)
            level[value >> _WORD_BITS] = word | 1 << (value & _WORD - 1)
            value >>= _WORD_BITS
        while value:  # grow until one word covers everything at the top
            self._grow()
            value >>= _WORD_BITS

    def _grow(self) -> None:
        top: dict[int, int] = {}
        for index in self._levels[-1]:
            top[index >> _WORD_BITS] = top.get(index >> _WORD_BITS, 0) | 1 << (index & _WORD - 1)
        self._levels.append(top)

    def discard(self, value: int) -> None:
        for level in self._levels:
            index = value >> _WORD_BITS
            word = level[index] & ~(1 << (value & _WORD - 1))
            if word:
                level[index] = word
                return
            del level[index]
            value = index

    def at_least(self, value: int) -> int | None:
        """Smallest member >= value."""
        for depth, level in enumerate(self._levels):
            word = level.get(value >> _WORD_BITS, 0) >> (value & _WORD - 1)
            if word:
                value += _lowest_bit(word)
                for lower in reversed(self._levels[:depth]):
                    value = (value << _WORD_BITS) + _lowest_bit(lower[value])
                return value
            value = (value >> _WORD_BITS) + 1
        return None


def _lowest_bit(word: int) -> int:
    return (word & -word).bit_length() - 1
