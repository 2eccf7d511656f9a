"""What `megatron-hdp simulate` does: read lengths, simulate every strategy, look for the best setting, print, write."""

import dataclasses
import datetime
import shlex
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_hdp.errors import HdpError
from megatron_hdp.length_source import read_source
from megatron_hdp.lengths import format_size
from megatron_hdp.memory import sized
from megatron_hdp.plan_flags import own_words
from megatron_hdp.simulate.flags import SimulateFlags
from megatron_hdp.simulate.report import (
    NOTE,
    render_search,
    render_strategies,
    render_sweep,
    render_time,
    render_verdict,
)
from megatron_hdp.simulate.runs import Comparison, Progress, compare
from megatron_hdp.simulate.search import STATIC, Search, search, search_rows
from megatron_hdp.simulate.setting import check_pool, device_memory, read_setting
from megatron_hdp.simulate.sweeps import Asked, Row, sweep
from megatron_hdp.simulate.verdict import closest, verdict
from megatron_hdp.simulator.files import Simulation, layer_numbers, write_simulation
from megatron_hdp.simulator.strategies import MegatronPlanner, Setting
from megatron_hdp.simulator.trace import write_trace
from megatron_hdp.types import IntArray

_HDP = "hdp"


@dataclass(frozen=True)
class _Job:
    """Flags and what was made of them."""

    flags: SimulateFlags
    setting: Setting
    source: str
    """Of the data, for people."""
    document: int
    """Tokens of the longest document."""
    lengths: Callable[[int, int], IntArray]
    """Context and step -> sequences."""
    batches: tuple[IntArray, ...]
    """Sequences of every step, at the asked context."""
    megatron: MegatronPlanner | None

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that may come."""
        return min(self.document, self.setting.context)

    @property
    def batch_tokens(self) -> int:
        """Tokens of a step."""
        return self.flags.sizes()[2]


def run(flags: SimulateFlags, megatron: MegatronPlanner | None = None) -> None:
    """The whole command; errors speak of this command's flags.

    Args:
        flags: what was asked.
        megatron: planner of the strategy "megatron"; without it that one cannot run.

    Raises:
        ConfigError: flags cannot work, or a file cannot be written.
        DataError: lengths cannot be read.
        PlanError: hdp cannot plan a step.
    """
    flags.check()
    planner = None if megatron is None else lambda options, _: megatron(options, flags.megatron_checkout)
    try:
        job = _read(flags, planner)
        compared = _compare(job)
        found = _search(job, compared) if flags.search else None
        swept = _sweep(job, compared)
    except HdpError as error:
        raise type(error)(own_words(str(error))) from error
    memory = device_memory(flags, job.setting)
    sentences = verdict(job.setting, job.batches, compared, found, job.batch_tokens, memory)
    print(
        "\n\n".join(
            [_title(job), render_verdict(sentences), *_tables(compared, found, swept), textwrap.fill(NOTE, 118)]
        )
    )
    rows = {name.replace("-", "_"): rows for name, rows in swept.items()}
    _write(job, compared, rows | ({} if found is None else {"search": search_rows(found)}), sentences)


def _read(flags: SimulateFlags, megatron: MegatronPlanner | None) -> _Job:
    """Everything up to simulating."""
    setting, (_, context, budget) = read_setting(flags), flags.sizes()
    source = read_source(flags.lengths, flags.field)
    check_pool(source.longest, setting)
    of_context = source.batches(budget, context, flags.seed)
    batches = tuple(of_context(step) for step in range(flags.steps))

    def lengths(context: int, step: int) -> IntArray:
        return source.batches(budget, context, flags.seed)(step)

    return _Job(flags, setting, source.text, source.longest, lengths, batches, megatron)


def _compare(job: _Job) -> Comparison:
    names = job.flags.names()
    kept = (_HDP, STATIC) if job.flags.json is not None or job.flags.trace is not None else ()
    return compare(
        names,
        job.batches,
        job.setting,
        longest=job.longest,
        megatron=job.megatron,
        keep=kept,
        progress=Progress(len(names) * len(job.batches)),
    )


def _search(job: _Job, compared: Comparison) -> Search:
    return search(
        job.batches[0],
        job.setting,
        device_memory(job.flags, job.setting),
        longest=job.longest,
        with_static=compared.run(STATIC) is not None,
        progress=Progress,
    )


def _sweep(job: _Job, compared: Comparison) -> dict[str, tuple[Row, ...]]:
    """Name -> rows, for hdp, static and the best of the others."""
    best = closest(compared)
    names = [_HDP, *([STATIC] if compared.run(STATIC) is not None else []), *([] if best is None else [best.name])]
    asked = Asked(
        setting=job.setting,
        lengths=lambda context: job.lengths(context, 0),
        longest=job.document,
        names=names,
        megatron=job.megatron,
        device_bytes=device_memory(job.flags, job.setting)[0],
    )
    return {name: sweep(name, asked, Progress) for name in job.flags.sweeps()}


def _title(job: _Job) -> str:
    """What was asked, in a few lines."""
    flags, setting = job.flags, job.setting
    spec, cost = setting.spec, setting.cost
    steps = f"{flags.steps} step{'s' * (flags.steps > 1)} of {flags.batch_tokens} tokens"
    layout = [f"TP {setting.tensor_parallel}"]
    layout += [f"{setting.stages} stages x {setting.virtual_stages}"] if setting.stages > 1 else []
    layout += [f"experts in groups of {setting.expert_group}"] if setting.expert_group > 1 else []
    capacity = format_size(setting.tokens_per_rank)
    choices = ["full recompute"] if setting.recompute == "full" else []
    limit = "" if setting.host_bytes is None else f" in {sized(setting.host_bytes)} of a GPU's host memory"
    choices += [f"offload{limit}"] if setting.offload else []
    gpus = f"{setting.gpus:,} GPUs, {', '.join(layout)}: {setting.ranks:,} ranks x {capacity} tokens"
    machines = f"profile {cost.profile.name}" + ("" if setting.cluster is None else f", cluster {setting.cluster.name}")
    assumed = {"tensor_parallel": flags.tp, "stages": flags.stages}
    unsaid = [name for name, value in assumed.items() if value is None]
    note = f"\n{spec.name}: {spec.assumed}" if unsaid else ""
    return (
        f"{flags.lengths}: {job.source}\n"
        f"{steps}, context {flags.context}, seed {flags.seed}\n"
        f"{spec.name}, {spec.shape.layers} layers, on {', '.join([gpus, *choices])}; {machines}{note}"
    )


def _tables(compared: Comparison, found: Search | None, swept: dict[str, tuple[Row, ...]]) -> list[str]:
    tables = [render_strategies(compared.runs), render_time(compared.runs)]
    tables += [render_search(found)] if found is not None else []
    for name, rows in swept.items():
        names = [key for key in rows[0] if key not in ("value", "label", "note")]
        tables.append(render_sweep(name, rows, names))
    return tables


def _write(job: _Job, compared: Comparison, swept: dict[str, tuple[Row, ...]], sentences: Sequence[str]) -> None:
    """The files that were asked for."""
    made = simulation(job, compared, swept, sentences)
    if job.flags.json is not None:
        write_simulation(made, job.flags.json)
        print(f"written: {job.flags.json}")
    if job.flags.trace is not None:
        write_trace(made.runs, job.setting.stages, job.flags.trace)
        print(f"written: {job.flags.trace}")


def simulation(
    job: _Job, compared: Comparison, swept: dict[str, tuple[Row, ...]], sentences: Sequence[str]
) -> Simulation:
    """Everything as one object."""
    return Simulation(
        title=f"{job.flags.lengths}: {job.setting.spec.name} on {job.setting.gpus:,} GPUs",
        setting=_setting(job),
        lengths=job.batches[0],
        runs=compared.runs,
        layer=layer_numbers(job.setting.cost),
        sweeps=swept,
        verdict=tuple(sentences),
    )


def _setting(job: _Job) -> dict[str, Any]:
    """Flags, as asked and as derived."""
    import megatron_hdp

    flags, setting = job.flags, job.setting
    return {
        "lengths": flags.lengths,
        "source": job.source,
        "model": setting.spec.name,
        "shape": dataclasses.asdict(setting.spec.shape),
        "experts": setting.spec.experts,
        "experts_per_token": setting.spec.experts_per_token,
        "gpus": setting.gpus,
        "tensor_parallel": setting.tensor_parallel,
        "stages": setting.stages,
        "virtual_stages": setting.virtual_stages,
        "expert_group": setting.expert_group,
        "ranks": setting.ranks,
        "tokens_per_rank": setting.tokens_per_rank,
        "context": setting.context,
        "batch_tokens": job.batch_tokens,
        "steps": flags.steps,
        "seed": flags.seed,
        "profile": setting.cost.profile.name,
        "cluster": setting.machines.name,
        "recompute": setting.recompute,
        "offload": setting.offload,
        "host_bytes": setting.host_bytes,
        "version": megatron_hdp.__version__,
        "date": datetime.date.today().isoformat(),
        "command": shlex.join(["megatron-hdp", *sys.argv[1:]]),
    }
