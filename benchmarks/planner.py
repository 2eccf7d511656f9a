"""How good and how fast plans are: the tables of docs/planner.md, as Markdown, from this machine and this run.

python benchmarks/planner.py [--quick] [--wikipedia FILE] [--batches 10] [--only quality,pipelines,speed]
                             [--megatron-checkout FOLDER]

Needs numpy only; Megatron's scheduler is timed where megatron-core is installed. The planner has one thread.
"""

import argparse
import datetime
import functools
import importlib.metadata
import itertools
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_hdp.cost import CostModel, load_profile
from megatron_hdp.data.stream import cut_documents
from megatron_hdp.errors import HdpError, SeamError
from megatron_hdp.length_files import read_lengths
from megatron_hdp.lengths import format_size
from megatron_hdp.mixes import mix_batches, parse_mix
from megatron_hdp.plan_step import PlannedStep, Planner, PlanOptions, plan_step
from megatron_hdp.planner import check, core_backend, plan
from megatron_hdp.planner.bound import lower_bound
from megatron_hdp.planner.dp import plan_dp, widest_rings
from megatron_hdp.planner.dp_python import plan_dp_python
from megatron_hdp.planner.offload import smallest_rings
from megatron_hdp.planner.span import rank_ends
from megatron_hdp.types import IntArray, Plan

CAPACITY = 8192
LONGEST = 2 << 20
LAYERS = 32
RIVALS = ("naive", "bytescale", "pow2", "static-smallest")
PIPELINES = ((4, 1, 1), (8, 1, 1), (4, 2, 1), (8, 2, 1), (1, 1, 8), (4, 1, 8))
"""(stages, virtual stages, ranks that share experts)"""
PIPELINE_RIVALS = ("bytescale", "pow2")


@dataclass(frozen=True)
class Data:
    name: str
    longest: int
    batch: Callable[[int, int, int], IntArray]
    """(batch tokens, context, step) -> sequences."""

    def context(self, num_ranks: int) -> int:
        """What the pool holds, 2M at most."""
        return min(LONGEST, num_ranks * CAPACITY)


def data_sets(wikipedia: Path | None) -> list[Data]:
    names = ["byted", "github", "lognormal:1024,8192,4096,1.1", "lognormal:100,4096,2048,1.1"]
    names += ["lognormal:128,8192,1024,1.5"]
    found = [of_mix(name) for name in names]
    real = of_mix("wikipedia-like") if wikipedia is None else of_file(wikipedia)
    return [*found[:2], real, *found[2:]]


def of_mix(name: str) -> Data:
    mix = parse_mix(name)
    return Data(name, mix.longest, lambda tokens, context, step: mix_batches(mix, tokens, context, 1234)(step))


def of_file(path: Path) -> Data:
    """Documents of a file in an order shuffled for each step; more than the file holds come from a new shuffle."""
    documents = read_lengths(path)
    documents = documents[documents > 0]

    def batch(tokens: int, context: int, step: int) -> IntArray:
        random = np.random.RandomState((1234, step))
        order = np.concatenate([random.permutation(documents) for _ in range(tokens // int(documents.sum()) + 1)])
        ends = np.cumsum(order)
        last = int(np.searchsorted(ends, tokens))
        order[last] -= ends[last] - tokens
        return cut_documents(order, 0, last + 1, context).lengths.astype(np.int64)

    return Data(path.stem, int(documents.max()), batch)


def cost_of(stages: int = 1) -> CostModel:
    return CostModel(load_profile("bytescale"), max(1, LAYERS // stages))


def options_of(
    data: Data, num_ranks: int, algorithm: str, stages: int = 1, virtual: int = 1, experts: int = 1
) -> PlanOptions:
    return PlanOptions(
        num_ranks=num_ranks,
        tokens_per_rank=CAPACITY,
        cost=cost_of(stages),
        algorithm=algorithm,
        balance="pp" if stages * experts > 1 else "dp",
        stages=stages,
        virtual_stages=virtual,
        expert_group=experts,
        longest=min(data.context(num_ranks), data.longest),
    )


def spread(values: Iterable[float], worst: Callable[[list[float]], float], digits: int = 2) -> str:
    """Mean and worst."""
    found = list(values)
    return f"{statistics.fmean(found):.{digits}f} ({worst(found):.{digits}f})"


def table(titles: Iterable[str], rows: Iterable[Iterable[str]]) -> None:
    titles = list(titles)
    print("| " + " | ".join(titles) + " |")
    print("|---|" + "---:|" * (len(titles) - 1))
    for row in rows:
        print("| " + " | ".join(row) + " |", flush=True)


# Quality


class Score:
    """How often ours was the longer span, and how close a rival came."""

    def __init__(self) -> None:
        self.compared, self.behind, self.nearest = 0, 0, math.inf

    def add(self, ours: list[PlannedStep], theirs: list[PlannedStep]) -> None:
        for mine, other in zip(ours, theirs, strict=True):
            best = min(other.summary.span_seconds, other.one_slice_seconds or math.inf)
            ratio = best / mine.summary.span_seconds
            self.compared, self.behind = self.compared + 1, self.behind + (ratio < 1)
            self.nearest = min(self.nearest, ratio)

    def show(self) -> None:
        print(f"\nhdp has the longer span in {self.behind} of {self.compared} comparisons; ", end="")
        print(f"least rival span / own: {self.nearest:.4f}")


def quality(data: list[Data], pools: list[int], tokens: int, batches: int) -> None:
    title = f"Efficiency (bound / span, %), {format_size(tokens)} tokens a batch: mean (worst) of {batches} batches"
    print(f"\n### {title}\n")
    score = Score()

    def rows() -> Iterator[list[str]]:
        for one, pool in itertools.product(data, pools):
            ours, others = quality_of(one, pool, tokens, batches)
            for steps in others.values():
                score.add(ours, steps)
            together = (100 * s.summary.bound_seconds / (s.one_slice_seconds or 1) for s in others["static-smallest"])
            widest = max(max(step.summary.ring_sizes) for step in ours)
            padding = 100 * max(step.summary.padding_fraction for step in ours)
            row = [one.name, f"{pool:,}", efficiency(ours), *(efficiency(others[name]) for name in RIVALS)]
            yield [*row, spread(together, min), f"{widest}", f"{padding:.3f}"]

    titles = ["data", "ranks", "hdp", *RIVALS, "the same, a pack in one slice", "widest ring of hdp"]
    table([*titles, "padding of hdp, % (worst)"], rows())
    score.show()


def quality_of(
    data: Data, pool: int, tokens: int, batches: int
) -> tuple[list[PlannedStep], dict[str, list[PlannedStep]]]:
    ours: list[PlannedStep] = []
    others: dict[str, list[PlannedStep]] = {name: [] for name in RIVALS}
    for step in range(batches):
        lengths = data.batch(tokens, data.context(pool), step)
        ours.append(plan_step(lengths, options_of(data, pool, "hdp")))
        for name in RIVALS:
            others[name].append(plan_step(lengths, options_of(data, pool, name)))
    return ours, others


def efficiency(steps: list[PlannedStep]) -> str:
    return spread((100 * step.summary.efficiency for step in steps), min)


# Pipelines


def pipelines(data: list[Data], pools: list[int], tokens: int, batches: int) -> None:
    title = (
        f"Pipelines and experts: span / bound, {format_size(tokens)} tokens a batch: mean (worst) of {batches} batches"
    )
    print(f"\n### {title}\n")
    score = Score()

    def rows() -> Iterator[list[str]]:
        for one, layout, pool in itertools.product(data, PIPELINES, pools):
            lengths = [one.batch(tokens, one.context(pool), step) for step in range(batches)]
            spans, steps = [], []
            for name in ("hdp", *PIPELINE_RIVALS):
                steps.append([plan_step(batch, options_of(one, pool, name, *layout)) for batch in lengths])
                spans.append(spread((1 / step.summary.efficiency for step in steps[-1]), max, 3))
                if name != "hdp":
                    score.add(steps[0], steps[-1])
            fewest = min(step.summary.microbatches_min for step in steps[0]) / layout[0]
            milliseconds = statistics.median(1e3 * step.seconds for step in steps[0])
            yield [one.name, " x ".join(map(str, layout)), f"{pool}", f"{fewest:.1f}", *spans, f"{milliseconds:.0f}"]

    titles = ["data", "stages x parts x experts", "ranks", "fewest micro-batches / stages", "hdp", *PIPELINE_RIVALS]
    table([*titles, "median plan time of hdp, ms"], rows())
    score.show()


# Speed


def timed(call: Callable[[], object], repeats: int, clock: Callable[[], float] = time.perf_counter) -> float:
    """Median seconds."""
    found = []
    for _ in range(repeats):
        begin = clock()
        call()
        found.append(clock() - begin)
    return statistics.median(found)


def hdp(lengths: IntArray, pool: int, cost: CostModel) -> Plan:
    return plan(lengths, pool, CAPACITY, cost=cost)


def speed(data: list[Data], sizes: list[tuple[int, int]], batches: int, repeats: int) -> None:
    print(
        f"\n### Plan time, ms: plan() with its checks, and parts of it; medians of {batches} batches x {repeats} runs\n"
    )
    cost, rows = cost_of(), []
    for one in data:
        for pool, tokens in sizes:
            found: dict[str, list[float]] = {"wall": [], "plan": [], "bound": [], "check": [], "span": []}
            number = []
            for step in range(batches):
                lengths = one.batch(tokens, one.context(pool), step)
                made = hdp(lengths, pool, cost)
                calls: dict[str, Callable[[], object]] = {
                    "wall": functools.partial(hdp, lengths, pool, cost),
                    "plan": functools.partial(hdp, lengths, pool, cost),
                    "bound": functools.partial(lower_bound, lengths, pool, CAPACITY, cost),
                    "check": functools.partial(check, made),
                    "span": functools.partial(rank_ends, made, cost),
                }
                for name, call in calls.items():
                    clock = time.perf_counter if name == "wall" else time.process_time
                    found[name].append(1e3 * timed(call, repeats, clock))
                number.append(lengths.size)
            medians = [f"{statistics.median(values):.1f}" for values in found.values()]
            slowest = f"{max(found['plan']):.1f}"
            row = [one.name, f"{pool:,}", format_size(tokens), f"{statistics.median(number):,.0f}"]
            rows.append([*row, *medians[:2], slowest, *medians[2:]])
    titles = ["data", "ranks", "tokens", "sequences", "plan, wall", "plan, CPU"]
    table([*titles, "slowest batch, CPU", "of it bound", "of it check", "(evaluate the span)"], rows)


def growth(data: list[Data], pool: int, sizes: list[int], repeats: int) -> None:
    print(f"\n### Growth with tokens, {pool:,} ranks: median CPU time of plan(), ms, and the exponent of a fit\n")
    cost, rows = cost_of(), []
    for one in data:
        seconds = []
        for tokens in sizes:
            lengths = one.batch(tokens, one.context(pool), 0)
            hdp(lengths, pool, cost)
            seconds.append(timed(functools.partial(hdp, lengths, pool, cost), repeats, time.process_time))
        exponent = float(np.polyfit(np.log(sizes), np.log(seconds), 1)[0])
        rows.append([one.name, *(f"{1e3 * s:.1f}" for s in seconds), f"{exponent:.2f}"])
    table(["data", *map(format_size, sizes), "exponent"], rows)


def twin(data: list[Data], pool: int, tokens: int, repeats: int) -> None:
    print(f"\n### C++ core and Python twin, {pool:,} ranks, {format_size(tokens)} tokens: CPU time\n")
    if core_backend() != "c++":
        print("megatron_hdp._core is not built")
        return
    cost, rows = cost_of(), []
    for one in data:
        lengths = one.batch(tokens, one.context(pool), 0)
        smallest, _ = smallest_rings(lengths, pool, CAPACITY, cost)
        widest = widest_rings(cost, lengths, smallest, pool)
        bound = lower_bound(lengths, pool, CAPACITY, cost).picoseconds
        arguments = (lengths, smallest, widest, pool, CAPACITY, cost, bound)
        same = all(np.array_equal(a, b) for a, b in zip(plan_dp(*arguments), plan_dp_python(*arguments), strict=True))
        core = timed(functools.partial(plan_dp, *arguments), 3 * repeats, time.process_time)
        dull = timed(functools.partial(plan_dp_python, *arguments), repeats, time.process_time)
        row = [one.name, f"{1e3 * core:.2f}", f"{1e3 * dull:.0f}", f"{dull / core:.0f}", "yes" if same else "NO"]
        rows.append(row)
    table(["data", "C++, ms", "Python, ms", "ratio", "same plan"], rows)


def megatron(data: list[Data], sizes: list[tuple[int, int, int]], checkout: Path | None) -> None:
    print("\n### Megatron-LM's own schedulers beside ours, on the same batches\n")
    print("Installed: its search alone, without training. Checkout: with the start of its process.\n")
    from megatron_hdp.seams.scheduler import plan_megatron

    try:
        plan_megatron(np.array([CAPACITY]), 2, CAPACITY, 2)  # importing Megatron takes seconds
    except SeamError as error:
        print(error)
        return
    systems = [("installed", None), *([("checkout", checkout)] if checkout is not None else [])]
    rows = (
        megatron_row(one, pool, tokens, system, batches, folder, plan_megatron)
        for (pool, tokens, batches), one, (system, folder) in itertools.product(sizes, data, systems)
    )
    titles = ["data", "ranks", "tokens", "system", "plan, ms", "ours, ms", "efficiency, %", "a pack in one slice, %"]
    table([*titles, "ours, %"], rows)


def planner_of_megatron(pool: int, folder: Path | None, planner: Callable[..., Plan]) -> Planner:
    return lambda lengths: planner(lengths, pool, CAPACITY, 2, checkout=folder, any_ring=True)


def megatron_row(
    data: Data,
    pool: int,
    tokens: int,
    system: str,
    batches: int,
    folder: Path | None,
    planner: Callable[..., Plan],
) -> list[str]:
    head = [data.name, f"{pool:,}", format_size(tokens), system]
    ours: list[PlannedStep] = []
    theirs: list[PlannedStep] = []
    for step in range(batches):
        lengths = data.batch(tokens, data.context(pool), step)
        ours.append(plan_step(lengths, options_of(data, pool, "hdp")))
        try:
            options = options_of(data, pool, "megatron")
            theirs.append(plan_step(lengths, options, planner_of_megatron(pool, folder, planner)))
        except HdpError as error:
            return [*head, f"cannot: {str(error)[:90]}", "", "", "", efficiency(ours)]
    return [
        *head,
        f"{statistics.median(1e3 * s.seconds for s in theirs):,.0f}",
        f"{statistics.median(1e3 * s.seconds for s in ours):.1f}",
        efficiency(theirs),
        spread((100 * s.summary.bound_seconds / (s.one_slice_seconds or 1) for s in theirs), min),
        efficiency(ours),
    ]


def machine() -> str:
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [
            line.partition(":")[2].strip() for line in info.read_text().splitlines() if line.startswith("model name")
        ]
        name = names[0] if names else name
    versions = [f"Python {platform.python_version()}", f"numpy {np.__version__}", f"core {core_backend()}"]
    try:
        versions.append(f"megatron-core {importlib.metadata.version('megatron-core')}")
    except importlib.metadata.PackageNotFoundError:
        versions.append("no megatron-core")
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg()) if hasattr(os, "getloadavg") else "unknown"
    day = datetime.date.today().isoformat()
    return f"{name}, {os.cpu_count()} cores, {day}; {', '.join(versions)}; load {load}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="smoke run of some seconds")
    parser.add_argument("--wikipedia", type=Path, help="file of lengths to use instead of the mix wikipedia-like")
    parser.add_argument("--batches", type=int, default=10)
    parser.add_argument("--only", default="quality,pipelines,speed,megatron", help="parts, with commas between")
    parser.add_argument("--megatron-checkout", type=Path, help="tree of Megatron-LM's dev branch")
    args = parser.parse_args()
    parts, quick = args.only.split(","), args.quick
    data = data_sets(args.wikipedia)
    real = data[:3]
    print(machine())
    if "quality" in parts:
        pools, tokens = ([64], 2 << 20) if quick else ([64, 128, 256, 512, 1024, 2048], 32 << 20)
        quality(data, pools, tokens, 1 if quick else args.batches)
    if "pipelines" in parts:
        pools, tokens = ([8], 2 << 20) if quick else ([32, 64, 128], 32 << 20)
        pipelines(real[:1] if quick else real, pools, tokens, 1 if quick else args.batches)
    if "speed" in parts:
        sizes = [(512, 32 << 20), (4096, 32 << 20), (16384, 512 << 20)]
        speed(real, [(64, 2 << 20)] if quick else sizes, 1 if quick else 5, 1 if quick else 5)
        millions = [1, 2] if quick else [8, 16, 32, 64, 128, 256, 512]
        growth(real, 64 if quick else 512, [m << 20 for m in millions], 1 if quick else 5)
        twin(real, 64 if quick else 512, (2 << 20) if quick else (32 << 20), 1 if quick else 5)
    if "megatron" in parts:
        most = [(8, 1 << 20, 1)] if quick else [(64, 8 << 20, 3), (512, 32 << 20, 1)]
        megatron(real[:1] if quick else real, most, args.megatron_checkout)
    print(f"\n{machine()}")


if __name__ == "__main__":
    main()
