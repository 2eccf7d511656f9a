"""What a run's timeline says against what the simulator says: spans, their errors, and a verdict. No torch."""

import dataclasses
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_hdp.cost import CostModel, Profile
from megatron_hdp.cost.fixed import PICOSECONDS
from megatron_hdp.cost.over_links import FREE
from megatron_hdp.errors import DataError
from megatron_hdp.planner.span import microbatch_picoseconds
from megatron_hdp.simulator import cluster_of_profile, simulate_step
from megatron_hdp.simulator.replay import replay
from megatron_hdp.simulator.result import Seconds
from megatron_hdp.timeline import MeasuredStep
from megatron_hdp.timeline_setting import RunSetting

LIMIT = 0.10
"""The criterion: simulated over replayed may be so far from 1."""


def median_of(runs: Sequence[Sequence[MeasuredStep]]) -> tuple[MeasuredStep, ...]:
    """The first run's steps, with the median over runs of what every micro-batch computed.

    Raises:
        DataError: the runs did not have the same steps and plans.
    """
    first = runs[0]
    for number, run in enumerate(runs[1:], 2):
        if [(step.step, step.plan) for step in run] != [(step.step, step.plan) for step in first]:
            raise DataError(f"run {number} had other steps or other plans than run 1: nothing can be averaged")
    return tuple(_median(same) for same in zip(*runs, strict=True))


def _median(same: Sequence[MeasuredStep]) -> MeasuredStep:
    tables = [step.op_seconds(step.compute) for step in same]
    forward, backward = (np.median([table[phase] for table in tables], axis=0) for phase in (0, 1))
    step = same[0]
    rank, stage = np.divmod(step.lane, step.stages)
    at = step.plan.rank_offsets[rank] + step.slot, step.part * step.stages + stage
    return dataclasses.replace(step, compute=np.where(step.phase == 0, forward[at], backward[at]))


@dataclass(frozen=True)
class Compared:
    """One step; times in seconds."""

    step: int
    tokens: int
    sequences: int
    shared: int
    """Sequences on more than one rank."""
    micro_batches: int
    simulated: float
    """Span that the simulator says."""
    compute: float
    """The same with links that take no time: compute alone."""
    replayed: float
    """Span of the measured compute, ranks waiting for each other as the simulator says."""
    wall: float
    """From the begin of the first micro-batch to the end of the last, by the clock."""
    lanes: float
    """Largest difference of a lane's end, simulated and replayed, in parts of the replayed span."""
    work: float
    """Simulated over measured compute of all micro-batches; waiting does not count."""

    @property
    def ratio(self) -> float:
        """Simulated over replayed span; the criterion is on this one."""
        return self.simulated / self.replayed


def computing(cost: CostModel) -> CostModel:
    """The model with links that take no time; steps of rings keep theirs, which a rank computes."""
    return dataclasses.replace(cost, profile=dataclasses.replace(cost.profile, inside_node=FREE, across_nodes=FREE))


def compare(step: MeasuredStep, setting: RunSetting, profile: Profile | None = None) -> Compared:
    """A measured step against a simulated one, with another profile than the run planned with if given."""
    job = setting.job(profile)
    links = computing(job.cost)
    free = dataclasses.replace(job, cost=links, cluster=cluster_of_profile(links.profile), model=None)  # no messages
    measured = step.op_seconds(step.compute)
    replayed = replay(step.plan, job, *measured)
    simulated, alone = simulate_step(step.plan, job), simulate_step(step.plan, free)
    assert simulated.timeline is not None, "asked for"
    passes = simulated.timeline.slot >= 0
    ends = np.zeros(replayed.lane_ends.size)
    np.maximum.at(ends, simulated.timeline.lane[passes], simulated.timeline.end[passes])
    ends -= simulated.timeline.start[passes].min()
    return Compared(
        step=step.step,
        tokens=step.plan.tokens,
        sequences=step.plan.num_sequences,
        shared=int((step.plan.ring_size > 1).sum()),
        micro_batches=int(step.plan.rank_offsets[-1]),
        simulated=simulated.span_seconds,
        compute=alone.span_seconds,
        replayed=replayed.span_seconds,
        wall=step.span_seconds,
        lanes=float(np.abs(ends - replayed.lane_ends).max() / replayed.span_seconds),
        work=float(alone.compute.sum() / (measured[0].sum() + measured[1].sum())),
    )


@dataclass(frozen=True)
class Verdict:
    """Ratios of several steps, predicted over measured."""

    median: float
    worst: float
    """The one farthest from 1."""
    overall: float
    """Sum of the predictions over the sum of the measurements."""

    @property
    def holds(self) -> bool:
        """Is every step within `LIMIT`?"""
        return abs(self.worst - 1) <= LIMIT


def verdict(predicted: Sequence[float], measured: Sequence[float]) -> Verdict:
    """Of spans in seconds, one for each step."""
    ratios = [said / was for said, was in zip(predicted, measured, strict=True)]
    worst = max(ratios, key=lambda ratio: abs(ratio - 1))
    return Verdict(statistics.median(ratios), worst, sum(predicted) / sum(measured))


def micro_batch_errors(steps: Sequence[MeasuredStep], setting: RunSetting) -> Seconds:
    """Predicted over measured compute, minus 1, of every micro-batch that has pieces; passes and stages together."""
    cost = computing(setting.cost)
    errors = []
    for step in steps:
        forward, backward = microbatch_picoseconds(step.plan, cost)
        measured = sum(part.sum(axis=1) for part in step.op_seconds(step.compute))
        ratio = step.stages * (forward + backward) / PICOSECONDS / measured
        errors.append(ratio[np.diff(step.plan.microbatch_offsets) > 0] - 1)
    return np.concatenate(errors)
