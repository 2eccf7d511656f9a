"""Where the time of every op goes: computing, and waiting for whom; bars of a timeline, sums of lanes."""

from dataclasses import dataclass

import numpy as np

from megatron_hdp.simulator.durations import Durations
from megatron_hdp.simulator.job import Job
from megatron_hdp.simulator.order import Groups, Ops, Run, node_of
from megatron_hdp.simulator.result import CAUSES, KINDS, Seconds, Timeline
from megatron_hdp.types import IntArray

PICOSECONDS = 1e12


@dataclass(frozen=True)
class Spent:
    """What every op's time went to, picoseconds, int64 [num_ops]; with `bubble` and `gate` it is all of a lane's."""

    gate: IntArray
    """Ahead of the op: parameters or tokens are under way."""
    bubble: IntArray
    """Ahead of the op: the stage before is not done, or its message is under way."""
    compute: IntArray
    ring: IntArray
    partner: IntArray
    expert: IntArray
    copy: IntArray


def spent_by(ops: Ops, run: Run, durations: Durations, together: Groups, job: Job) -> Spent:
    """Split the time of every op, and of the wait ahead of it, by cause.

    What a lane waits for from when it is ready is charged to those that share rings with it up to when they are ready
    too, and to those that share experts from there; the same for what others take longer.
    """
    parts = job.virtual_stages
    total = durations.total[ops.microbatch, ops.phase] // parts
    ring = durations.ring[ops.microbatch, ops.phase] // parts
    copy = durations.copy[ops.microbatch, ops.phase] // parts
    by_ring = node_of(ops, together.rings, job)
    ready, longest = _largest(by_ring, run.ready), _largest(by_ring, total)
    if together.all is together.rings:
        everybody, slowest = ready, longest
    else:
        by_all = node_of(ops, together.all, job)
        everybody, slowest = _largest(by_all, run.ready), _largest(by_all, total)
    gate = np.maximum(run.gate - run.free, 0)
    return Spent(
        gate=gate,
        bubble=run.ready - run.free - gate,
        compute=total - ring - copy,
        ring=ring,
        partner=(ready - run.ready) + (longest - total),
        expert=(everybody - ready) + (slowest - longest),
        copy=copy,
    )


def op_picoseconds(ops: Ops, durations: Durations, together: Groups, job: Job) -> IntArray:
    """How long every op lasts, with all that wait for each other in it; int64 [num_ops]."""
    total = durations.total[ops.microbatch, ops.phase] // job.virtual_stages
    return _largest(node_of(ops, together.all, job), total)


def _largest(node: IntArray, values: IntArray) -> IntArray:
    """Of each op, the largest value of all ops at its node."""
    most = np.zeros(int(node.max(initial=-1)) + 1, dtype=np.int64)
    np.maximum.at(most, node, values)
    found: IntArray = most[node]
    return found


def by_lane(ops: Ops, values: IntArray) -> IntArray:
    """Sum of every lane's ops, int64 [num_lanes]."""
    ahead: IntArray = np.concatenate([np.zeros(1, np.int64), np.cumsum(values)])
    return np.asarray(ahead[ops.offsets[1:]] - ahead[ops.offsets[:-1]], dtype=np.int64)


@dataclass(frozen=True)
class Frame:
    """What surrounds the ops of a step, picoseconds."""

    late: int
    """The step's plan and tokens come so much later than the step before ends; the zero of all other times."""
    load: IntArray
    """When each lane's tokens are there, int64 [num_lanes]."""
    reduced: IntArray
    """When each stage's gradients are summed over the pool, int64 [stages]."""
    optimizer: int
    """It starts when all gradients are summed, because the norm is of all."""

    @property
    def end(self) -> int:
        """Of the step."""
        return int(self.reduced.max()) + self.optimizer


@dataclass(frozen=True)
class Ends:
    """How each lane's last op, and all that it waits for, follow each other, picoseconds; int64 [num_lanes] each."""

    own: IntArray
    """Its last op ends."""
    column: IntArray
    """The last op of all stages of its rank ends."""
    stage: IntArray
    """The last op of its stage ends on the slowest rank: reducing goes on, or starts, from here."""
    reduced: IntArray


def ends_of(ops: Ops, run: Run, frame: Frame) -> Ends:
    """The end of the step on every lane."""
    stages = frame.reduced.size
    own = run.end[ops.offsets[1:] - 1].reshape(-1, stages)
    ranks = own.shape[0]
    return Ends(
        own.reshape(-1),
        np.repeat(own.max(axis=1), stages),
        np.tile(own.max(axis=0), ranks),
        np.tile(frame.reduced, ranks),
    )


def idle_by_cause(ops: Ops, spent: Spent, ends: Ends, frame: Frame) -> dict[str, Seconds]:
    """Seconds of every lane by cause, [num_lanes] each; keys are `CAUSES`.

    While stages of its own rank still run, a lane that is done sees a bubble; from there it waits for other ranks.
    """
    everybody = int(frame.reduced.max())
    first = np.maximum(np.minimum(ends.column, ends.stage) - ends.own, 0)
    second = np.maximum(np.minimum(ends.column, everybody) - ends.reduced, 0)
    picoseconds = {
        "load": frame.load + frame.late,
        "gather": by_lane(ops, spent.gate) - frame.load,
        "ring": by_lane(ops, spent.ring),
        "partner": by_lane(ops, spent.partner),
        "expert": by_lane(ops, spent.expert),
        "copy": by_lane(ops, spent.copy),
        "bubble": by_lane(ops, spent.bubble) + first + second,
        "sync": ends.stage - ends.own - first + everybody - ends.reduced - second,
        "reduce": ends.reduced - ends.stage,
    }
    return {cause: picoseconds[cause] / PICOSECONDS for cause in CAUSES}


def timeline_of(ops: Ops, run: Run, spent: Spent, ends: Ends, frame: Frame) -> Timeline:
    """All bars, in seconds from the start of the step."""
    num_lanes = ops.offsets.size - 1
    lanes, zero = np.arange(num_lanes), np.zeros(num_lanes, dtype=np.int64)
    none = np.full(ops.lane.size, -1)
    loaded = np.zeros(ops.lane.size, dtype=np.int64)
    loaded[ops.offsets[:-1]] = frame.load
    reduced = zero + frame.reduced.max()
    bars = (
        (ops.lane, ops.slot, ops.part, run.ready, run.end),
        (ops.lane, none, ops.part, run.free + loaded, run.free + spent.gate),
        (lanes, none[:num_lanes], zero, zero - frame.late, frame.load),
        (lanes, none[:num_lanes], zero, ends.stage, ends.reduced),
        (lanes, none[:num_lanes], zero, reduced, reduced + frame.optimizer),
    )
    kinds = [KINDS.index(name) for name in ("gather", "load", "reduce", "optimizer")]
    kind = np.concatenate([KINDS.index("forward") + ops.phase, np.repeat(kinds, [ops.lane.size, *[num_lanes] * 3])])
    lane, slot, part, start, end = (np.concatenate(column) for column in zip(*bars, strict=True))
    keep = np.flatnonzero(end > start)
    keep = keep[np.lexsort((start[keep], lane[keep]))]
    return Timeline(
        lane[keep],
        kind[keep].astype(np.int8),
        slot[keep],
        part[keep].astype(np.int8),
        (start[keep] + frame.late) / PICOSECONDS,
        (end[keep] + frame.late) / PICOSECONDS,
        *(_padded(getattr(spent, name), keep) for name in ("compute", "ring", "partner", "expert", "copy")),
    )


def _padded(of_ops: IntArray, keep: IntArray) -> Seconds:
    """Values of the ops among the bars that are kept, as seconds; 0 for all other bars."""
    is_op = keep < of_ops.size
    return np.where(is_op, of_ops[np.where(is_op, keep, 0)], 0) / PICOSECONDS
