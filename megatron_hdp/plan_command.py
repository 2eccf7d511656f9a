"""What `megatron-hdp plan` does: read lengths, plan steps by one algorithm or by all, print, write."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megatron_hdp.errors import HdpError
from megatron_hdp.length_source import read_source
from megatron_hdp.memory import sized
from megatron_hdp.plan_flags import PlanFlags, own_words
from megatron_hdp.plan_json import to_pieces_json
from megatron_hdp.plan_memory import render_memory, require_memory
from megatron_hdp.plan_report import render_comparison, render_steps, write_plans
from megatron_hdp.plan_step import ALGORITHMS, MEGATRON, PlannedStep, Planner, PlanOptions, check_fits, plan_step
from megatron_hdp.types import IntArray

MegatronPlanner = Callable[[PlanOptions, Path | None], Planner]
"""Makes the planner of `MEGATRON` from options and --megatron-checkout."""


@dataclass(frozen=True)
class _Job:
    """Flags and what was made of them."""

    flags: PlanFlags
    options: PlanOptions
    batches: Callable[[int], IntArray]
    """Step -> sequences."""
    title: str
    megatron: MegatronPlanner

    def steps(self, algorithm: str, *, keep: bool = False) -> list[PlannedStep]:
        """All steps, planned by one algorithm."""
        options = dataclasses.replace(self.options, algorithm=algorithm)
        planner = self.megatron(options, self.flags.megatron_checkout) if algorithm == MEGATRON else None
        return [plan_step(self.batches(step), options, planner, keep=keep) for step in range(self.flags.steps)]


def run(flags: PlanFlags, megatron: MegatronPlanner) -> None:
    """The whole command; errors speak of this command's flags.

    Raises:
        ConfigError: flags cannot work, or a file cannot be written.
        DataError: lengths cannot be read.
        PlanError: a step cannot be planned.
        SeamError: Megatron's scheduler is not there.
    """
    flags.check()
    try:
        job = _read(flags, megatron)
        if flags.compare:
            text = render_comparison(_compare(job))
            steps = []
        else:
            keep = flags.json is not None or flags.json_pieces is not None or flags.estimate.memory
            steps = job.steps(flags.algorithm, keep=keep)
            text = render_steps(steps)
        if flags.estimate.memory:
            text += "\n\n" + render_memory(flags, job.options, [step.plan for step in steps if step.plan is not None])
    except HdpError as error:
        raise type(error)(own_words(str(error))) from error
    print(job.title)
    print(text)
    plans = [step.plan for step in steps if step.plan is not None]
    for flag, out, write in (
        ("--json", flags.json, lambda plan: plan.to_json()),
        ("--json-pieces", flags.json_pieces, to_pieces_json),
    ):
        if out is not None:
            write_plans(out, flag, map(write, plans))
            print(f"written: {out}")


def _read(flags: PlanFlags, megatron: MegatronPlanner) -> _Job:
    """Everything up to planning."""
    _, context, budget = flags.sizes()
    source = read_source(flags.lengths, flags.field)
    options = dataclasses.replace(flags.options(), longest=min(context, source.longest))
    check_fits(source.longest, context, options)
    if flags.estimate.memory:
        require_memory(flags, options)
    return _Job(
        flags, options, source.batches(budget, context, flags.seed), _title(flags, options, source.text), megatron
    )


def _title(flags: PlanFlags, options: PlanOptions, source: str) -> str:
    """What was asked, in three lines."""
    cost = options.cost
    layout = [f"{flags.stages} stages x {flags.virtual_stages}"] if flags.stages > 1 else []
    layout += [f"experts in groups of {flags.expert_group}"] if flags.expert_group > 1 else []
    choices = [] if flags.compare else [flags.algorithm]
    choices += [f"balance {options.balance}", *layout, *_offload_words(options)]
    choices += [f"exchange {options.exchange}"] if options.exchange != "auto" else []
    layer = cost.layer or cost.profile.default_layer
    assumed = f" ({flags.layers_source})" if flags.layers_per_stage is None else ""
    model = [f"profile {cost.profile.name}", f"layer {layer}", f"{cost.layers_per_stage} layers a stage{assumed}"]
    model += ["full recompute"] if cost.recompute == "full" else []
    model += [f"window {cost.window:,}"] if cost.window is not None else []
    model += [f"{cost.heads} heads, {cost.kv_heads} of keys and values"] if cost.heads is not None else []
    steps = f"{flags.steps} step{'s' * (flags.steps > 1)} of {flags.batch_tokens} tokens"
    return (
        f"{flags.lengths}: {source}\n"
        f"{steps}, context {flags.context}, seed {flags.seed}; {flags.ranks} ranks x {flags.tokens_per_rank} tokens\n"
        f"{', '.join(choices)}; {', '.join(model)}\n"
    )


def _offload_words(options: PlanOptions) -> list[str]:
    """Whether activations may leave, and how much host memory they may take."""
    if not options.offload:
        return []
    limit = "" if options.host_bytes is None else f" in {sized(options.host_bytes)} of a GPU's host memory"
    return [f"offload{limit}"]


def _compare(job: _Job) -> dict[str, list[PlannedStep] | str]:
    """Algorithm -> its steps, or why it cannot plan them."""
    found: dict[str, list[PlannedStep] | str] = {}
    for algorithm in ALGORITHMS:
        try:
            found[algorithm] = job.steps(algorithm)
        except HdpError as error:
            if algorithm == ALGORITHMS[0]:  # what this planner refuses, the command refuses
                raise
            found[algorithm] = own_words(str(error))
    return found
