"""Which bytes leave, so that the fraction comes out right at every moment. No torch."""

from dataclasses import dataclass

STEP = 512
"""Bytes: split tensors are cut at multiples of this, the alignment of CUDA allocations."""


@dataclass
class Quota:
    """Keeps the bytes gone next to ``ratio`` x the bytes seen.

    A tensor leaves or stays as a whole as long as the error stays within ``tolerance`` bytes, else it is split. With
    many layers that happens to none; with one layer in the middle, or one tensor per layer (full recompute), whole
    tensors would be too coarse.
    """

    ratio: float
    tolerance: int = 0
    min_bytes: int = STEP
    """No part of a split is smaller."""
    seen: int = 0
    gone: int = 0

    def take(self, size: int) -> int:
        """How many of the next ``size`` bytes leave, from 0 to all; counted at once."""
        self.seen += size
        leave = self._share(size)
        self.gone += leave
        return leave

    def keep(self, size: int) -> None:
        """``size`` bytes that `take` sent away had to stay."""
        self.gone -= size

    def _share(self, size: int) -> int:
        wanted = self.ratio * self.seen - self.gone  # with ratio 1: at least size, exactly
        if wanted <= 0:
            return 0
        if wanted >= size:
            return size
        if min(wanted, size - wanted) > self.tolerance:
            part = round(wanted / STEP) * STEP
            if self.min_bytes <= part <= size - self.min_bytes:
                return part
        return size if 2 * wanted >= size else 0
