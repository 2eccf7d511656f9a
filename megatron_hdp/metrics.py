"""What a step did: scalars for Megatron's log line and TensorBoard, one JSON line per step for --hdp-log."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_hdp.attention.traffic import ring_bytes
from megatron_hdp.cost import CostModel
from megatron_hdp.errors import ConfigError
from megatron_hdp.planner.summary import PlanSummary, summarize
from megatron_hdp.types import IntArray, Plan


@dataclass(frozen=True, kw_only=True)
class RingTraffic:
    """The shape of what rings send, per attention layer of the whole model."""

    layers: int
    kv_heads: int
    """K/V heads of one process (already divided by tensor parallelism)."""
    head_dim: int
    bytes_per_element: int
    recomputed_layers: int
    """Layers whose attention runs forward a second time, in the backward pass."""

    def bytes_by_rank(self, plan: Plan) -> IntArray:
        """Bytes that each rank's processes send over rings in a step of ``plan``, shape [num_ranks]."""
        shape = (self.kv_heads, self.head_dim, self.bytes_per_element)
        forward = ring_bytes(plan, *shape, backward=False)
        both = ring_bytes(plan, *shape, backward=True)
        return np.asarray(both * self.layers + forward * self.recomputed_layers)


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One training step, seen from the plan (equal on every rank)."""

    step: int
    summary: PlanSummary
    bytes_sent: int
    """Bytes that all ranks send over rings in the step."""
    own_bytes_sent: int
    """Bytes that this rank sends over rings in the step."""
    plan_seconds: float
    read_seconds: float

    def scalars(self) -> dict[str, float]:
        """The hdp/* values of the log line and of TensorBoard."""
        summary = self.summary
        rings = summary.ring_sizes
        return {
            "hdp/tokens": float(summary.tokens),
            "hdp/sequences": float(summary.sequences),
            "hdp/max-ring": float(max(rings)),
            "hdp/mean-ring": sum(size * count for size, count in rings.items()) / summary.sequences,
            "hdp/max-micro-batches": float(summary.microbatches_max),
            "hdp/imbalance": summary.imbalance,
            "hdp/efficiency": summary.efficiency,
            "hdp/padding": summary.padding_fraction,
            "hdp/sent-MiB": self.bytes_sent / 2**20,
            "hdp/plan-ms": 1e3 * self.plan_seconds,
        }


def record_step(
    rank: int,
    traffic: RingTraffic,
    step: int,
    plan: Plan,
    seconds: tuple[float, float],
    *,
    cost: CostModel | None = None,
    stages: int = 1,
    virtual_stages: int = 1,
    expert_group: int = 1,
) -> StepRecord:
    """What ``rank`` knows of a step before it runs; ``seconds`` are those of planning and of reading.

    ``cost`` and what the model is cut into as for `summarize`.
    """
    sent = traffic.bytes_by_rank(plan)
    return StepRecord(
        step=step,
        summary=summarize(plan, cost, stages=stages, virtual_stages=virtual_stages, expert_group=expert_group),
        bytes_sent=int(sent.sum()),
        own_bytes_sent=int(sent[rank]),
        plan_seconds=seconds[0],
        read_seconds=seconds[1],
    )


class StepLog:
    """Appends one JSON object per step to a file; every line is complete when it is written."""

    def __init__(self, path: str) -> None:
        """Raises `ConfigError` if the file cannot be written."""
        self._path = Path(path)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.open("a", encoding="utf-8").close()
        except OSError as error:
            raise ConfigError(f"--hdp-log {path}: cannot be written ({error.strerror})") from error

    def write(self, record: StepRecord, measured: dict[str, Any]) -> None:
        """``measured`` holds what only the run knows: iteration, loss, gradient norm, seconds."""
        summary = record.summary
        line = {
            **measured,
            "step": record.step,
            "sequences": summary.sequences,
            "tokens": summary.tokens,
            "padding_tokens": summary.padding_tokens,
            "ring_sizes": {str(size): count for size, count in sorted(summary.ring_sizes.items())},
            "micro_batches_min": summary.microbatches_min,
            "micro_batches_max": summary.microbatches_max,
            "imbalance": summary.imbalance,
            "span_seconds": summary.span_seconds,
            "bound_seconds": summary.bound_seconds,
            "efficiency": summary.efficiency,
            "peers_max": summary.peers_max,
            "bytes_sent": record.bytes_sent,
            "own_bytes_planned": record.own_bytes_sent,
            "plan_seconds": record.plan_seconds,
            "read_seconds": record.read_seconds,
        }
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, sort_keys=True) + "\n")
