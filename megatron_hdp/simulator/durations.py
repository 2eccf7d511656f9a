"""How long each micro-batch takes on one pipeline stage: computing, waiting for its own transfers, for its copies."""

import dataclasses
from dataclasses import dataclass

import numpy as np

from megatron_hdp.cost import CostModel, LinkProfile, Phase
from megatron_hdp.cost.over_links import Shared, attention_over, pack_over, stage_over
from megatron_hdp.cost.stage import StageCoefficients
from megatron_hdp.errors import ConfigError
from megatron_hdp.planner.span import PHASES
from megatron_hdp.simulator.copies import copy_waits
from megatron_hdp.simulator.job import Job
from megatron_hdp.simulator.links import RingLinks, ring_links
from megatron_hdp.simulator.messages import sum_by_microbatch
from megatron_hdp.types import IntArray, Plan


@dataclass(frozen=True)
class Durations:
    """Picoseconds of every micro-batch by phase, forward and backward; int64 [num_microbatches, 2]."""

    compute: IntArray
    ring: IntArray
    """Transfers that stick out of compute."""
    copy: IntArray
    """Copies of offloaded activations that stick out of both."""
    attention: IntArray
    """Of every sequence's pieces: core attention with its transfers, int64 [num_sequences, 2]."""

    @property
    def total(self) -> IntArray:
        """All three."""
        return self.compute + self.ring + self.copy


def durations(plan: Plan, job: Job) -> Durations:
    """Durations of a plan's micro-batches; those of ranks that share a ring are not yet made equal.

    Raises:
        ConfigError: links so slow that integers do not hold the picoseconds of the longest sequence.
    """
    cost, sent = job.stage_cost(plan), ring_links(plan, job)
    _require_integers(plan, job, cost, sent)
    stage = stage_over(cost, sent.links)
    free, linked = _columns(plan, sent, free=True), _columns(plan, sent)
    of_phase = [_phase(plan, cost, stage, free, linked, phase, job.one_slice) for phase in PHASES]
    compute, ring, attention = (np.stack(parts, axis=1) for parts in zip(*of_phase, strict=True))
    return Durations(compute, ring, copy_waits(plan, job, compute + ring), attention)


def _require_integers(plan: Plan, job: Job, cost: CostModel, sent: RingLinks) -> None:
    """Refuse links with which the cost model's integers could wrap."""
    used = sent.links[1:]
    if not used:
        return
    worst = LinkProfile(max(link.latency for link in used), min(link.bandwidth for link in used))
    slow = dataclasses.replace(cost, profile=dataclasses.replace(cost.profile, inside_node=worst, across_nodes=worst))
    longest = int(plan.lengths.max())
    if longest > slow.max_length:
        raise ConfigError(
            f"on links of {worst.bandwidth:.3g} byte/s and {worst.latency:.3g} s a sequence can have "
            f"{slow.max_length:,} tokens, and one has {longest:,}: check the units of cluster {job.cluster.name}"
        )


def _columns(plan: Plan, sent: RingLinks, *, free: bool = False) -> Shared:
    """All sequences of a plan, over their links or over free ones."""
    keep = 0 if free else 1
    return Shared(plan.lengths, plan.ring_size, plan.exchange, plan.head_ranks, keep * sent.link, keep * sent.swap_link)


def _phase(
    plan: Plan, cost: CostModel, stage: StageCoefficients, free: Shared, linked: Shared, phase: Phase, one_slice: bool
) -> tuple[IntArray, IntArray, IntArray]:
    """Compute and ring of every micro-batch, attention of every sequence."""
    alone, attention = (attention_over(cost, stage, shared, phase) for shared in (free, linked))
    local = cost.with_free_links("all")
    besides = local.picoseconds(plan.lengths, plan.ring_size, phase=phase)
    besides = besides - local.attention_picoseconds(plan.lengths, plan.ring_size, phase=phase)
    compute = sum_by_microbatch(plan, besides + alone) + cost.microbatch_picoseconds(phase)
    ring = sum_by_microbatch(plan, attention - alone)
    if one_slice:
        saved = _saved_by_packs(plan, cost, stage, (free, linked), (alone, attention), phase)
        compute, ring = compute - saved[0], ring - (saved[1] - saved[0])
    return compute, ring, attention


def _saved_by_packs(
    plan: Plan,
    cost: CostModel,
    stage: StageCoefficients,
    columns: tuple[Shared, Shared],
    apart: tuple[IntArray, IntArray],
    phase: Phase,
) -> IntArray:
    """What each micro-batch saves where pieces on the same ranks share one exchange, int64 [2, num_microbatches].

    The first row is over free links, the second over those that there are. Ranks of a ring hold the same packs, so each
    is looked at once.
    """
    saved = np.zeros((2, plan.microbatch_offsets.size - 1), dtype=np.int64)
    known: dict[bytes, tuple[int, int]] = {}
    offsets = plan.microbatch_offsets
    for microbatch in np.flatnonzero(np.diff(offsets) > 1).tolist():
        pieces = plan.piece_sequence[offsets[microbatch] : offsets[microbatch + 1]]
        key = pieces.tobytes()
        if key not in known:
            packs = _packs(plan, pieces)
            known[key] = (
                sum(_saved(cost, stage, columns[0], apart[0], pack, phase) for pack in packs),
                sum(_saved(cost, stage, columns[1], apart[1], pack, phase) for pack in packs),
            )
        saved[:, microbatch] = known[key]
    return saved


def _packs(plan: Plan, pieces: IntArray) -> list[IntArray]:
    """Those of some sequences that have rings, exchanges and head ranks in common with others, together."""
    columns = np.stack([column[pieces] for column in (plan.ring_start, plan.ring_size, plan.exchange, plan.head_ranks)])
    _, kind = np.unique(columns, axis=1, return_inverse=True)
    kind = kind.reshape(-1)
    packs = [pieces[kind == number] for number in range(int(kind.max()) + 1)]
    return [pack for pack in packs if pack.size > 1 and plan.ring_size[pack[0]] > 1]


def _saved(
    cost: CostModel, stage: StageCoefficients, columns: Shared, apart: IntArray, pack: IntArray, phase: Phase
) -> int:
    """What moving together saves."""
    own = Shared(
        columns.lengths[pack],
        columns.ring[pack],
        columns.exchange[pack],
        columns.head_ranks[pack],
        columns.link[pack],
        columns.swap_link[pack],
    )
    return int(apart[pack].sum()) - pack_over(cost, stage, own, phase)
