"""What every planner gives back: the columns of a `Plan` that it decides."""

from dataclasses import dataclass
from typing import NamedTuple

from megatron_hdp.types import IntArray


class Columns(NamedTuple):
    """Columns of a `megatron_hdp.types.Plan`, see there; int64."""

    ring_start: IntArray
    ring_size: IntArray
    rank_offsets: IntArray
    microbatch_offsets: IntArray
    piece_sequence: IntArray


@dataclass(frozen=True, slots=True)
class Layout:
    """What else the model is cut into: it constrains counts and the order of micro-batches."""

    stages: int = 1
    """Pipeline stages."""
    virtual_stages: int = 1
    """Model parts per stage."""
    expert_group: int = 1
    """Consecutive ranks that share experts."""

    def balance(self, asked: str) -> str:
        """``asked``, or for "auto" what the layout needs: "pp" with pipeline stages or experts, else "dp"."""
        if asked != "auto":
            return asked
        return "pp" if self.stages > 1 or self.expert_group > 1 else "dp"

    @property
    def count_multiple(self) -> int:
        """Micro-batch counts are a multiple of this: Megatron's interleaved schedule demands it."""
        return self.stages if self.virtual_stages > 1 else 1
