"""What a step did: scalars for Megatron's log line and TensorBoard, one JSON line per step for --hdp-log."""

import json
import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_hdp.attention.traffic import exchange_bytes
from megatron_hdp.cost import CostModel
from megatron_hdp.errors import ConfigError
from megatron_hdp.planner.summary import PlanSummary, summarize
from megatron_hdp.types import IntArray, Plan

if TYPE_CHECKING:  # needs torch
    from megatron_hdp.offload.context import OffloadMetrics


@dataclass(frozen=True, kw_only=True)
class RingTraffic:
    """The shape of what the ranks of a ring send each other, for all attention layers of the whole model.

    Raises ConfigError if ``layer_windows`` and ``recomputed`` do not have one entry per layer each.
    """

    layer_windows: tuple[int | None, ...]
    """Tokens that a query of each layer sees, itself included; None for all before it."""
    recomputed: tuple[bool, ...]
    """Layers whose attention runs forward a second time, in the backward pass."""
    heads: int
    """Query heads of one process (already divided by tensor parallelism)."""
    kv_heads: int
    """K/V heads of one process."""
    head_dim: int
    bytes_per_element: int
    router_counts: int = 0
    """Choices of experts that are counted per sequence, for balance losses: experts x layers that have them."""

    def __post_init__(self) -> None:
        if len(self.layer_windows) != len(self.recomputed):
            raise ConfigError(
                f"traffic of attention: {len(self.layer_windows)} windows for {len(self.recomputed)} layers; "
                "give one window and one recomputed flag per layer"
            )

    def bytes_by_rank(self, plan: Plan) -> IntArray:
        """Bytes that each rank's processes send each other for sequences on rings in a step of ``plan``, [num_ranks].

        That is attention, and counts of choices (int64), which walk once round each ring.
        """
        shape = (self.heads, self.kv_heads, self.head_dim, self.bytes_per_element)
        sent = np.zeros(plan.num_ranks, dtype=np.int64)
        layers = Counter(self.layer_windows)
        twice = Counter(window for window, again in zip(self.layer_windows, self.recomputed) if again)
        for window, count in layers.items():
            sent += count * exchange_bytes(plan, *shape, window=window)
            if twice[window]:
                sent += twice[window] * exchange_bytes(plan, *shape, window=window, backward=False)
        if self.router_counts:
            size = plan.ring_size[plan.piece_sequence]
            rank = np.repeat(
                np.repeat(np.arange(plan.num_ranks), plan.microbatch_counts), np.diff(plan.microbatch_offsets)
            )
            np.add.at(sent, rank, 8 * self.router_counts * (size - 1))
        return sent


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One training step, seen from the plan (equal on every rank)."""

    step: int
    summary: PlanSummary
    bytes_sent: int
    """Bytes that all ranks send each other over rings in the step."""
    own_bytes_sent: int
    """Bytes that this rank sends over rings in the step."""
    plan_seconds: float
    read_seconds: float

    def scalars(self) -> dict[str, float]:
        """The hdp/* values of the log line and of TensorBoard."""
        summary = self.summary
        rings = summary.ring_sizes
        used = {name for name, count in summary.exchanges.items() if count}
        by_exchange = {
            f"hdp/{name}-sequences": float(count) for name, count in summary.exchanges.items() if used - {"ring"}
        }
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
            **by_exchange,
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


def offload_scalars(moved: "OffloadMetrics") -> dict[str, float]:
    """The hdp/* values of what activation offloading did in a step on this process."""
    return {
        "hdp/offload-out-MiB": moved.bytes_out / 2**20,
        "hdp/offload-in-MiB": moved.bytes_in / 2**20,
        "hdp/offload-wait-ms": 1e3 * moved.wait_seconds,
        "hdp/arena-MiB": moved.arena_high_water / 2**20,
    }


def offload_fields(moved: "OffloadMetrics") -> dict[str, Any]:
    """The same for a line of --hdp-log; on this process, as the other fields that begin with "own"."""
    return {
        "own_offload_bytes_out": moved.bytes_out,
        "own_offload_bytes_in": moved.bytes_in,
        "own_offload_wait_seconds": moved.wait_seconds,
        "own_arena_bytes_most": moved.arena_high_water,
    }


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
        """``measured`` holds what only the run knows: iteration, loss, gradient norm, seconds.

        A number that JSON does not have is written as null, as is the loss of a step without tokens that count.
        """
        summary = record.summary
        line = {
            **measured,
            "step": record.step,
            "sequences": summary.sequences,
            "tokens": summary.tokens,
            "padding_tokens": summary.padding_tokens,
            "ring_sizes": {str(size): count for size, count in sorted(summary.ring_sizes.items())},
            "exchanges": summary.exchanges,
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
            file.write(json.dumps(dict(zip(line, map(_json_number, line.values()))), sort_keys=True) + "\n")


def _json_number(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
