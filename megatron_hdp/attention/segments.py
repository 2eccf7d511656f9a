"""Blocks of attention as row counts and limits. No torch."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, eq=False)
class Segments:
    """Independent blocks of attention in one call; their rows lie one after the other in the packed tensors.

    Row r of a segment's queries sees row c of its keys iff r - left <= c <= r + right, both counted from the segment's
    first row; None is no limit. Three kinds are asked for, and in each every query sees at least one key:

    full    left None, right None
    causal  left None or at least 0 (window of left + 1 tokens), right 0, as many keys as queries
    edge    left at least 0, right None, at least as many keys as queries, keys - queries the same in all segments: rows
            of a window that reaches back beyond their chunk
    """

    queries: tuple[int, ...]
    """Query rows of every segment, each at least 1."""
    keys: tuple[int, ...]
    """Key rows of every segment, each at least 1."""
    left: int | None = None
    right: int | None = None
    _derived: dict[Any, Any] = field(default_factory=dict, repr=False)

    def derive[T](self, key: Any, make: Callable[[], T]) -> T:
        """What a kernel needs of the segments (index tensors, say), made once: all layers use the same segments."""
        if key not in self._derived:
            self._derived[key] = make()
        result: T = self._derived[key]
        return result
