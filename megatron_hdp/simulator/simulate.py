"""One training step of a plan on a cluster; docs/simulator.md says what is simulated and what is not."""

import numpy as np

from megatron_hdp.simulator.control import control_times, exposed_ahead
from megatron_hdp.simulator.durations import Durations, durations
from megatron_hdp.simulator.flops import batch_flops
from megatron_hdp.simulator.job import Job
from megatron_hdp.simulator.lanes import (
    PICOSECONDS,
    Frame,
    by_lane,
    ends_of,
    idle_by_cause,
    op_picoseconds,
    spent_by,
    timeline_of,
)
from megatron_hdp.simulator.links import ring_links
from megatron_hdp.simulator.messages import message_picoseconds
from megatron_hdp.simulator.order import groups_of, later, ops_of, run_step
from megatron_hdp.simulator.result import StepResult
from megatron_hdp.simulator.sent import sent_by_sequences
from megatron_hdp.simulator.sync import gates_of, optimizer_picoseconds, over_pool, reduced_at, weights_of
from megatron_hdp.simulator.traffic import bytes_by_link, nic_peak
from megatron_hdp.types import Plan


def simulate_step(plan: Plan, job: Job, *, timeline: bool = True, times: Durations | None = None) -> StepResult:
    """One step, deterministic: equal arguments give equal results.

    Args:
        plan: what every rank runs; `planner.check` has passed it.
        job: the model on the cluster.
        timeline: also give every lane's bars.
        times: of the plan's micro-batches, for estimates of what no plan can say; None: by the cost model.

    Raises:
        ConfigError: the cluster is too small or too coarse for the job.
        PlanError: ranks of the plan would wait for each other forever.
    """
    job.require(plan)
    weights = weights_of(job, plan.num_ranks)
    gather = over_pool(job, plan.num_ranks, weights, job.sync.parameter_bytes)
    reduce = over_pool(job, plan.num_ranks, weights, job.sync.gradient_bytes)
    optimizer = optimizer_picoseconds(job, plan.num_ranks, weights)

    ops, together = ops_of(plan, job), groups_of(plan, job.expert_group)
    times = durations(plan, job) if times is None else times
    lasting = op_picoseconds(ops, times, together, job)
    control = control_times(plan, job)
    load = np.repeat(0 * control.ready if job.control.ahead else control.ready, job.stages)
    gates = later(ops, gates_of(ops, lasting, gather, job), load)
    run = run_step(plan, job, ops, together, times, message_picoseconds(plan, job), gates)

    reduced = reduced_at(ops, run, lasting, reduce, job)
    late = exposed_ahead(control, int(reduced.max()) + optimizer) if job.control.ahead else 0
    frame = Frame(late, load, reduced, optimizer)
    spent, ends = spent_by(ops, run, times, together, job), ends_of(ops, run, frame)
    seconds = (frame.end + late) / PICOSECONDS

    sent = sent_by_sequences(plan, job)
    links = bytes_by_link(plan, job, sent, weights)
    gpus, peak, flops = job.gpus(plan.num_ranks), job.cluster.peak_flops, batch_flops(plan.lengths, job)
    nics = -(-gpus // job.cluster.gpus_per_node) * job.cluster.nics_per_node
    return StepResult(
        seconds=seconds,
        span_seconds=(int(run.end.max()) - int(run.ready.min())) / PICOSECONDS,
        ranks=plan.num_ranks,
        stages=job.stages,
        gpus=gpus,
        tokens=plan.tokens,
        mfu=flops / (seconds * gpus * peak) if peak and flops else None,
        compute=by_lane(ops, spent.compute) / PICOSECONDS,
        idle=idle_by_cause(ops, spent, ends, frame),
        optimizer_seconds=optimizer / PICOSECONDS,
        bytes_by_link=links,
        nic_peak=nic_peak(plan, job, sent, ring_links(plan, job), times),
        nic_mean=links["across_nodes"] / seconds / nics,
        control=control.cost(late if job.control.ahead else int(load.max())),
        timeline=timeline_of(ops, run, spent, ends, frame) if timeline else None,
    )
