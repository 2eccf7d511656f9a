"""A figure's rows: published, simulated, and how far apart."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self

import numpy as np

from megatron_hdp.reproduce.paper import Range, Tag

Basis = Literal["calibrated", "predicted", "given"]
"""calibrated: the profile was fitted to it; predicted: it was not; given: it chose the batches that are simulated."""

Choice = Literal["backward", "stages", "loading"]
CHOICES: dict[Choice, str] = {
    "backward": "backward of attention takes 2.5 times forward: chosen knowing labels of Figure 18b, and after seeing "
    "that it helps Figure 20; the fitted Figure 21 says 2.2",
    "stages": "2 stages for llama-70b and 4 for mixtral-8x22b: 4 and 8 were tried first, and with 8 balanced HDP came "
    "out below naive",
    "loading": "the loading time is the ratio of the last two rungs of Figure 20, so that + balance and + remote "
    "dataloader are one prediction",
}
"""What was chosen with values in sight that are judged here: a prediction that it touches is not blind."""

_UNEXPLAINED = "no reason is known; averages over few batches are far from each other, and more --seeds say more"
_ROUNDING = 1e-9
"""An error of exactly the limit is within it, whatever its last bits."""


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
    uncertain: float | None = None
    """Standard error of ``simulated``, relative: batches differ, and these are some of them."""
    layouts: Range | None = None
    """Least and most over sizes that could have been assumed for what is not published; means over steps."""
    basis: Basis = "predicted"
    limit: float | None = None
    """Error up to which the value counts as met; None: it is shown, not judged."""
    note: str = ""
    """Why it is off, or what to know about it."""
    choices: tuple[Choice, ...] = ()
    """What its simulated value depends on of `CHOICES`."""

    @classmethod
    def over(cls, values: Sequence[float], **fields: Any) -> Self:
        """Mean and spread of single steps."""
        return cls(simulated=float(np.mean(values)), spread=(min(values), max(values)), **fields)

    @property
    def error(self) -> float | None:
        """Simulated over published, less one; from the nearer end of a range, 0 inside it."""
        if self.paper is None:
            return None
        return self._error_of(self.simulated)

    def _error_of(self, value: float) -> float:
        """As if ``value`` had been simulated."""
        assert self.paper is not None
        low, high = self.paper if isinstance(self.paper, tuple) else (self.paper, self.paper)
        return value / min(max(value, low), high) - 1

    @property
    def predicted(self) -> bool:
        """Whether there is a value in the paper to which the profile was not fitted."""
        return self.paper is not None and self.basis == "predicted"

    @property
    def in_sight(self) -> tuple[Choice, ...]:
        """Why the prediction is not blind; none if it is, or is no prediction."""
        return self.choices if self.predicted else ()

    @property
    def judged(self) -> bool:
        """Whether it counts as met or not."""
        return self.limit is not None and self.predicted

    @property
    def off(self) -> bool:
        """It is judged, and farther off than the limit with the sizes that are assumed."""
        return self.judged and self._beyond(self.simulated)

    def _beyond(self, value: float) -> bool:
        return self.limit is not None and abs(self._error_of(value)) > self.limit + _ROUNDING

    @property
    def missed(self) -> bool:
        """It is off, with the other sizes too."""
        return self.off and all(self._beyond(value) for value in self.layouts or ())

    @property
    def reason(self) -> str:
        """The note; a value that is missed is not left without one."""
        return self.note or (_UNEXPLAINED if self.missed else "")

    def to_json(self) -> dict[str, Any]:
        """All of it."""
        return {
            "name": self.name,
            "unit": self.unit,
            "paper": self.paper,
            "tag": None if self.paper is None else self.tag,
            "simulated": self.simulated,
            "spread": self.spread,
            "uncertain": self.uncertain,
            "layouts": self.layouts,
            "error": self.error,
            "basis": None if self.paper is None else self.basis,
            "choices": list(self.in_sight),
            "limit": self.limit,
            "judged": self.judged,
            "off": self.off,
            "missed": self.missed,
            "note": self.reason,
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
