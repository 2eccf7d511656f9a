"""From inputs to the parts of a report."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_hdp.errors import DataError
from megatron_hdp.lengths import format_size
from megatron_hdp.report import strategy_charts, training_charts
from megatron_hdp.report.chart import Part, Section, Tile
from megatron_hdp.report.chart import seconds as in_words
from megatron_hdp.report.data_charts import RingShares, length_section, ring_section
from megatron_hdp.report.flags import PlanSetting
from megatron_hdp.report.from_plan import simulated
from megatron_hdp.report.inputs import Input, PlanFile, RunFile, SimulationFile, TimelineFolder
from megatron_hdp.report.sweep_charts import sweep_section
from megatron_hdp.report.timeline_charts import overlay_section, timeline_section
from megatron_hdp.report.what_if import what_if_data
from megatron_hdp.simulator.files import Simulation, StrategyRun

_SETTING = {
    "lengths": "data",
    "source": "where its lengths come from",
    "model": "model",
    "shape": "its shape",
    "experts": "experts of a layer",
    "experts_per_token": "experts that a token meets",
    "gpus": "GPUs",
    "tensor_parallel": "tensor-parallel GPUs",
    "stages": "pipeline stages",
    "virtual_stages": "model parts of a stage",
    "expert_group": "ranks that share experts",
    "ranks": "ranks of the pool",
    "tokens_per_rank": "capacity, tokens per rank",
    "context": "context, tokens",
    "batch_tokens": "tokens of a step",
    "profile": "profile",
    "layer": "layer of the profile",
    "cluster": "cluster",
    "recompute": "recompute",
    "offload": "offload",
    "host_bytes": "host memory for it, byte",
    "steps": "steps",
    "seed": "seed",
    "version": "version",
    "date": "date",
    "command": "command",
}
_SIZES = ("tokens_per_rank", "context", "batch_tokens")


def parts_of(inputs: Sequence[Input], setting: PlanSetting) -> list[Part]:
    """One part for each plan and simulation and measured timeline, one for all logs of training runs together.

    Raises:
        ConfigError, PlanError: a plan cannot be simulated with ``setting``.
        DataError: a simulation lacks what a report needs.
    """
    parts: list[Part] = []
    logs = [given for given in inputs if isinstance(given, RunFile)]
    for given in inputs:
        name = f"p{len(parts)}"
        if isinstance(given, SimulationFile):
            parts.append(_simulation_part(name, given.simulation, str(given.path)))
        elif isinstance(given, PlanFile):
            parts.append(_simulation_part(name, simulated(given, setting), str(given.path)))
        elif isinstance(given, TimelineFolder):
            parts.append(_timeline_part(name, given))
        elif given is logs[0]:
            parts.append(_training_part(name, logs))
    return parts


def _simulation_part(name: str, simulation: Simulation, source: str) -> Part:
    runs = simulation.runs
    able = strategy_charts.ran(runs)
    if not able or able[0] is not runs[0]:
        why = runs[0].failed if runs else "it has no runs"
        raise DataError(f"{source}: nothing to show: {runs[0].name if runs else 'hdp'} could not run: {why}")
    ranks, capacity = _whole(simulation, "ranks"), _whole(simulation, "tokens_per_rank")
    shown, rival = simulation.shown_step, strategy_charts.rival_of(runs)
    rings = {run.words: _rings(run, shown) for run in (able[0], rival) if run is not None}
    sections: list[Section | None] = [
        length_section(name, simulation.lengths, capacity),
        ring_section(name, rings, ranks),
        _timelines(name, simulation, rival),
        strategy_charts.idle_section(name, runs),
        strategy_charts.comparison_section(name, runs),
        strategy_charts.bytes_section(name, runs),
        sweep_section(name, simulation.sweeps, {run.name: run.words for run in runs}),
        strategy_charts.planning_section(name, runs) if able[0].steps[0]["plan_seconds"] else None,
    ]
    return Part(
        title=simulation.title,
        sources=(source,),
        tiles=strategy_charts.tiles(runs),
        verdict=simulation.verdict,
        setting=setting_rows(simulation.setting),
        sections=tuple(section for section in sections if section is not None),
        what_if=_what_if(simulation, capacity, ranks),
    )


def _whole(simulation: Simulation, name: str) -> int | None:
    """A whole number of the setting, as it may be there."""
    value = simulation.setting.get(name)
    return value if type(value) is int and value > 0 else None


def _rings(run: StrategyRun, shown: int) -> RingShares:
    """Of the step that is shown."""
    step = run.steps[min(shown, len(run.steps) - 1)]
    return {int(size): (float(pair[0]), float(pair[1])) for size, pair in step["ring_sizes"].items()}


def _timelines(name: str, simulation: Simulation, rival: StrategyRun | None) -> Section | None:
    """The rival on top, then HDP, where they are there."""
    runs = [run for run in (rival, simulation.runs[0]) if run is not None and run.timeline is not None]
    runs = [run for run in runs if run.timeline is not None and run.timeline.lane.size and run.timeline.end.max() > 0]
    if not runs:
        return None
    stages = _whole(simulation, "stages") or 1
    steps, number = max(len(run.steps) for run in runs), simulation.shown_step + 1
    one_of_several = "the first step" if number == 1 else f"step {number:,}"
    return timeline_section(
        name,
        {run.words: run.timeline for run in runs if run.timeline is not None},
        stages,
        f"This is step {number:,} of the {steps:,} that were simulated. " if steps > 1 else "",
        one_of_several if steps > 1 else "the step",
    )


def _what_if(simulation: Simulation, capacity: int | None, ranks: int | None) -> dict[str, Any] | None:
    """None where the file lacks what the panel starts with."""
    layer = simulation.layer
    needed = ("attention_forward", "attention_backward_factor", "kv_per_token", "kv_gradient_per_token", "link_latency")
    if capacity is None or any(key not in layer for key in (*needed, "link_bandwidth")):
        return None
    if not layer["link_bandwidth"] or not layer["attention_forward"]:
        return None
    longest = int(simulation.lengths.max())
    context = max(_whole(simulation, "context") or longest, longest)
    profile = simulation.setting.get("profile")
    source = f"from the profile {profile}" if profile else "from the simulation"
    return what_if_data(
        layer,
        simulation.lengths,
        capacity=capacity,
        context=context,
        ranks=ranks or -(-context // capacity),
        source=source,
    )


def setting_rows(setting: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """Flags and values for people; in our order first, then what else there is."""
    order = [key for key in _SETTING if key in setting] + [key for key in setting if key not in _SETTING]
    return tuple((_SETTING.get(key, key), _value(key, setting[key])) for key in order if setting[key] is not None)


def _value(key: str, value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if key in _SIZES and isinstance(value, int):
        return format_size(value)
    if isinstance(value, Mapping):
        return ", ".join(f"{name.replace('_', ' ')} {_value(name, one)}" for name, one in value.items())
    return f"{value:,}" if isinstance(value, int) and key != "seed" else str(value)


def _training_part(name: str, logs: Sequence[RunFile]) -> Part:
    runs = {words: log.steps for words, log in zip(short_names([log.path for log in logs]), logs)}
    notes = []
    for words, log in zip(runs, logs):
        if log.repeated:
            notes.append(
                f"{words}: {log.repeated:,} steps were trained again after a restart; the later ones are shown."
            )
        if log.cut:
            notes.append(f"{words}: the last line is incomplete and left out: the run was stopped while it wrote.")
    count = ", ".join(f"{words} {len(steps):,} steps" for words, steps in runs.items())
    return Part(
        title="Training run" if len(runs) == 1 else f"{len(runs)} training runs",
        sources=tuple(str(log.path) for log in logs),
        tiles=training_charts.tiles(runs),
        verdict=(f"Recorded: {count}.",),
        sections=tuple(training_charts.training_sections(name, runs)),
        notes=tuple(notes),
    )


def short_names(paths: Sequence[Path]) -> list[str]:
    """File names without their ends, with as many folders as it takes to tell them apart."""
    for depth in range(1, max(len(path.parts) for path in paths) + 1):
        found = ["/".join((*path.parts[-depth:-1], path.stem)) for path in paths]
        if len(set(found)) == len(found):
            return found
    return [f"{path.stem} ({index + 1})" for index, path in enumerate(paths)]


def _timeline_part(name: str, given: TimelineFolder) -> Part:
    run, step = given.run, given.run.overlay()
    stages = run.setting.stages
    section = overlay_section(
        step.measured,
        step.simulated,
        f"{name}-overlay",
        stages,
        replayed=step.replayed,
        shared_cores=run.setting.device == "cpu",
    )
    notes = [f"{len(run.incomplete):,} steps that not all processes finished are left out."] if run.incomplete else []
    return Part(
        title=f"Step {step.step} of a run, measured and simulated",
        sources=(str(given.path),),
        tiles=(
            Tile(value=in_words(run.step(step.step).span_seconds), words="measured, first micro-batch to last"),
            Tile(value=f"{len(run.steps):,}", words="steps recorded"),
        ),
        setting=setting_rows(
            {
                "hardware": run.setting.hardware,
                "device": run.setting.device,
                "ranks": run.setting.pool,
                "stages": stages,
                "tokens_per_rank": run.setting.capacity,
                "context": run.setting.context,
                "algorithm": run.setting.algorithm,
                "profile": run.setting.profile.name,
            }
        ),
        sections=(section,),
        notes=tuple(notes),
    )
