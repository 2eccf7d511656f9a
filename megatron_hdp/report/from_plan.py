"""A plan as a simulation: its step, and that of static context parallelism with the same sequences."""

import dataclasses
import math

from megatron_hdp.errors import HdpError
from megatron_hdp.planner import check
from megatron_hdp.planner.baselines import plan_static_smallest
from megatron_hdp.planner.entry import DEFAULT_HEADS
from megatron_hdp.report.chart import faster, percent
from megatron_hdp.report.chart import seconds as in_words
from megatron_hdp.report.flags import PlanSetting
from megatron_hdp.report.inputs import PlanFile
from megatron_hdp.simulator import Job, cluster_of_profile, simulate_step
from megatron_hdp.simulator.files import Simulation, StrategyRun, layer_numbers, step_numbers
from megatron_hdp.types import Plan


def simulated(given: PlanFile, setting: PlanSetting) -> Simulation:
    """The plan's steps on the profile's cluster. Without a model's shape: no optimizer, no sums of gradients.

    Raises:
        ConfigError: the setting cannot be, or does not fit the plan.
        PlanError: the plan is none that could run.
    """
    first = given.plans[0]
    job = _job(first, setting)
    steps, timelines = [], []
    for index, plan in enumerate(given.plans):
        _check(plan, setting, given)
        result = simulate_step(plan, job, timeline=index == 0)
        steps.append(step_numbers(plan, result, 0.0))  # how long planning took is not in the file
        timelines.append(result.timeline)
    own = StrategyRun(name="hdp", words="this plan", steps=tuple(steps), timeline=timelines[0])
    static = _static(given, setting, job)
    return Simulation(
        title=f"Plan {given.path.name}",
        setting={
            "ranks": first.num_ranks,
            "tokens_per_rank": first.capacity,
            "batch_tokens": first.tokens,
            "stages": setting.stages,
            "virtual_stages": setting.virtual_stages,
            "expert_group": setting.expert_group,
            "profile": job.cost.profile.name,
            "layer": job.cost.layer or job.cost.profile.default_layer,
            "recompute": setting.recompute,
        },
        lengths=first.lengths,
        runs=(own, static),
        layer=layer_numbers(job.cost),
        verdict=tuple(_sentences(own, static)),
    )


def _job(plan: Plan, setting: PlanSetting) -> Job:
    cost = dataclasses.replace(setting.cost, pad_multiple=plan.pad_multiple)
    if plan.exchange.any():  # gather and heads are timed by the numbers of heads, which a plan does not hold
        cost = dataclasses.replace(cost, heads=DEFAULT_HEADS[0], kv_heads=DEFAULT_HEADS[1])
    return Job(
        cost=cost,
        cluster=cluster_of_profile(cost.profile),
        stages=setting.stages,
        virtual_stages=setting.virtual_stages,
        expert_group=setting.expert_group,
    )


def _check(plan: Plan, setting: PlanSetting, given: PlanFile) -> None:
    try:
        check(
            plan,
            stages=setting.stages,
            virtual_stages=setting.virtual_stages,
            expert_group=setting.expert_group,
        )
    except HdpError as error:
        raise type(error)(f"{given.path}: {error}") from error


def _static(given: PlanFile, setting: PlanSetting, job: Job) -> StrategyRun:
    """The same sequences over equal blocks, each pack's keys and values in one slice, as real static runs do."""
    steps, shown = [], None
    longest = max(int(plan.lengths.max()) for plan in given.plans)
    packed = dataclasses.replace(job, one_slice=True)
    ring = 0
    try:
        for index, plan in enumerate(given.plans):
            made = plan_static_smallest(
                plan.lengths,
                plan.num_ranks,
                plan.capacity,
                plan.pad_multiple,
                cost=job.cost,
                count_multiple=setting.stages if setting.virtual_stages > 1 else 1,
                longest=longest,
            )
            ring = int(made.ring_size.max())
            result = simulate_step(made, packed, timeline=index == 0)
            steps.append(step_numbers(made, result, 0.0))
            shown = result.timeline if index == 0 else shown
    except HdpError as error:
        return StrategyRun(name="static", words="static CP", steps=(), failed=str(error))
    return StrategyRun(name="static", words=f"static CP, ring of {ring:,}", steps=tuple(steps), timeline=shown)


def _sentences(own: StrategyRun, static: StrategyRun) -> list[str]:
    """What the simulation says of the plan."""
    step = own.steps[0]
    which = "the plan's step" if len(own.steps) == 1 else "the first plan's step"
    found = [
        f"Simulated with the profile's times, {which} takes {in_words(step['seconds'])}; ranks compute "
        f"{percent(step['computing'])} of it. The optimizer and the sum of gradients are not in it."
    ]
    if static.steps:
        seconds = (math.fsum(s["seconds"] for s in run.steps) / len(run.steps) for run in (own, static))
        found.append(f"Against {static.words} with the same sequences it is {faster(*seconds)}.")
    return found
