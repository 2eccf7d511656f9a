"""A figure's rows: published, simulated, and how far apart."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self

import numpy as np

from megatron_hdp.reproduce.paper import Range, Tag

Basis = Literal["calibrated", "predicted", "given"]
"""calibrated: the profile was fitted to it; predicted: nothing was; given: it chose the batches that are simulated."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One value."""

    name: str
    unit: str
    paper: float | Range | None
    """None: not published."""
    tag: Tag = "text"
    simulated: float
    """Mean over steps, or what the steps come to together."""
    spread: Range | None = None
    """Least and most of single steps."""
    layouts: Range | None = None
    """Least and most over sizes that could have been assumed for what is not published; means over steps."""
    basis: Basis = "predicted"
    limit: float | None = None
    """Error up to which the value counts as met; None: it is shown, not judged."""
    note: str = ""
    """Why it is off, or what to know about it."""

    @classmethod
    def over(cls, values: Sequence[float], **fields: Any) -> Self:
        """Mean and spread of single steps."""
        return cls(simulated=float(np.mean(values)), spread=(min(values), max(values)), **fields)

    @property
    def error(self) -> float | None:
        """Simulated over published, less one; from the nearer end of a range, 0 inside it."""
        if self.paper is None:
            return None
        low, high = self.paper if isinstance(self.paper, tuple) else (self.paper, self.paper)
        near = min(max(self.simulated, low), high)
        return self.simulated / near - 1

    @property
    def judged(self) -> bool:
        """Whether it counts as met or not."""
        return self.limit is not None and self.paper is not None and self.basis == "predicted"

    @property
    def off(self) -> bool:
        """It is judged, and farther off than the limit with the sizes that are assumed."""
        return self.judged and self.limit is not None and self.error is not None and abs(self.error) > self.limit

    @property
    def missed(self) -> bool:
        """It is off, and not between what other sizes give."""
        if not self.off or self.layouts is None or self.paper is None:
            return self.off
        low, high = self.paper if isinstance(self.paper, tuple) else (self.paper, self.paper)
        return not (self.layouts[0] <= high and low <= self.layouts[1])

    def to_json(self) -> dict[str, Any]:
        """All of it."""
        return {
            "name": self.name,
            "unit": self.unit,
            "paper": self.paper,
            "tag": self.tag,
            "simulated": self.simulated,
            "spread": self.spread,
            "layouts": self.layouts,
            "error": self.error,
            "basis": self.basis,
            "limit": self.limit,
            "judged": self.judged,
            "off": self.off,
            "missed": self.missed,
            "note": self.note,
        }


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One figure of the paper."""

    key: str
    """"figure-18b"."""
    title: str
    rows: tuple[Row, ...]
    words: tuple[str, ...] = ()
    """What was assumed, what was simulated, how many steps."""
    orders: dict[str, bool] = field(default_factory=dict)
    """What should be larger than what -> is it?"""

    def to_json(self) -> dict[str, Any]:
        """All of it."""
        return {
            "figure": self.key,
            "title": self.title,
            "rows": [row.to_json() for row in self.rows],
            "words": list(self.words),
            "orders": self.orders,
        }
