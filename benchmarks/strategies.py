"""Ours against all: every strategy in the simulator on the same batches; the tables of docs/strategies.md.

python benchmarks/strategies.py [--quick] [--out FILE] [--parts grid,few,variants,offload] [--batches 3]
                                [--wikipedia FILE] [--hardware bytescale] [--strategies NAMES] [--models NAMES]
                                [--megatron] [--keep] [--render FILE]

Six models, four contexts, two data sets, 32M tokens a batch, layouts as assumed for Figure 17 of the ByteScale paper
(megatron_hdp/simulator/models.py). Results are written after every batch; a run with the same --out goes on where it
was stopped, if profile and planner are still the same. Needs numpy only; Megatron's scheduler runs with --megatron,
where megatron-core is installed.
"""

import argparse
import dataclasses
import datetime
import functools
import hashlib
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import megatron_hdp
from megatron_hdp.cost import load_profile
from megatron_hdp.errors import HdpError
from megatron_hdp.length_files import read_lengths
from megatron_hdp.lengths import format_size
from megatron_hdp.mixes import corpus_batches, mix_batches, parse_mix
from megatron_hdp.planner import check, core_backend
from megatron_hdp.planner.baselines import plan_bytescale
from megatron_hdp.simulator import simulate_step
from megatron_hdp.simulator.models import MODELS
from megatron_hdp.simulator.strategies import STRATEGIES, MegatronPlanner, Setting, StrategyStep, run_strategy
from megatron_hdp.types import IntArray

SEED = 1234
TOKENS = 32 << 20
CONTEXTS = (256 << 10, 512 << 10, 1 << 20, 2 << 20)
DATA = ("byted", "github")
FEW = {"llama-7b": (2048, 4096, 8192), "llama-70b": (16384, 32768)}
"""Model -> GPUs with which a rank has four, two and one micro-batches; with four stages eight and four."""

VARIANTS = {
    f"bytescale, {levels} groups, delta {delta} %": (levels, delta)
    for levels in (1, 2, 4, 8, 16)
    for delta in (0, 70, 400)
}
"""What the paper leaves open: groups of sequences, and delta in percent of the time of a full local micro-batch."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Cell:
    """One setting on one kind of data."""

    part: str
    model: str
    data: str
    context: int
    gpus: int
    hardware: str
    offload: bool = False

    def setting(self) -> Setting:
        return Setting(
            model=self.model, gpus=self.gpus, context=self.context, hardware=self.hardware, offload=self.offload
        )

    @property
    def words(self) -> str:
        more = ", offload" if self.offload else ""
        return f"{self.model}, {self.gpus:,} GPUs, {self.data}, {format_size(self.context)}{more}"


def cells(args: argparse.Namespace) -> list[Cell]:
    """All cells that are asked for, in the order of the tables."""
    found: list[Cell] = []
    data = [*DATA, *(["wikipedia"] if args.wikipedia is not None else [])]
    models = list(MODELS) if args.models is None else args.models.split(",")
    contexts = CONTEXTS[:1] if args.quick else CONTEXTS
    make = functools.partial(Cell, hardware=args.hardware)
    if "grid" in args.parts.split(","):
        found += [
            make("grid", model, name, context, MODELS[model].gpus)
            for name in data
            for model in models
            for context in contexts
        ]
    if "few" in args.parts.split(","):
        found += [
            make("few", model, name, context, gpus)
            for name in data
            for model in models
            for gpus in FEW.get(model, ())
            for context in (contexts[0], contexts[-1])[: 1 if args.quick else 2]
        ]
    if "variants" in args.parts.split(","):
        found += [make("variants", model, name, contexts[-1], MODELS[model].gpus) for name in data for model in models]
    if "offload" in args.parts.split(","):
        found += [
            make("offload", model, name, contexts[-1], MODELS[model].gpus, offload=True)
            for name in data
            for model in models
        ]
    return found


def batches_of(cell: Cell, tokens: int, wikipedia: Path | None) -> Callable[[int], IntArray]:
    """Step -> sequences."""
    if cell.data == "wikipedia":
        assert wikipedia is not None
        return corpus_batches(_documents(wikipedia), wikipedia.name, tokens, cell.context, SEED)
    return mix_batches(parse_mix(cell.data), tokens, cell.context, SEED)


@functools.cache
def _documents(path: Path) -> IntArray:
    documents = read_lengths(path)
    return np.asarray(documents[documents > 0], dtype=np.int64)


def strategies_of(cell: Cell, args: argparse.Namespace) -> list[str]:
    names = list(STRATEGIES) if args.strategies is None else args.strategies.split(",")
    if cell.part == "variants":
        return ["hdp", "bytescale", *VARIANTS]
    if cell.offload:
        names = [name for name in names if name in ("hdp", "bytescale", "naive")]
    stages = MODELS[cell.model].stages
    return [name for name in names if name != "megatron" or (args.megatron and stages == 1)]


def run_cell(cell: Cell, name: str, lengths: IntArray, batch: int, megatron: MegatronPlanner | None) -> Row:
    """One strategy on one batch."""
    row: Row = {**dataclasses.asdict(cell), "batch": batch, "strategy": name, "failed": None}
    try:
        if name in VARIANTS:
            step = run_variant(name, lengths, cell.setting())
        else:
            step = run_strategy(name, lengths, cell.setting(), megatron=megatron)
    except HdpError as error:
        return {**row, "failed": str(error)}
    result = step.result
    return {
        **row,
        "words": step.words,
        "seconds": result.seconds,
        "span": result.span_seconds,
        "tokens": result.tokens,
        "computing": result.computing,
        "idle": {cause: round(seconds, 6) for cause, seconds in result.idle_seconds().items()},
        "plan_seconds": step.plan_seconds,
        "microbatches": [int(step.plan.microbatch_counts.min()), int(step.plan.microbatch_counts.max())],
        "widest": int(step.plan.ring_size.max()),
        "nic_peak": result.nic_peak,
        "across_nodes": result.bytes_by_link["across_nodes"],
    }


def run_variant(name: str, lengths: IntArray, setting: Setting) -> StrategyStep:
    """ByteScale's balance with other settings of what the paper leaves open."""
    levels, delta = VARIANTS[name]
    begin = time.perf_counter()
    made = plan_bytescale(
        lengths,
        setting.ranks,
        setting.tokens_per_rank,
        setting.cost.pad_multiple,
        cost=setting.cost,
        strategy="pp" if setting.stages > 1 else "dp",
        count_multiple=setting.layout.count_multiple,
        equal_counts=setting.stages > 1,
        levels=levels,
        delta_percent=delta,
    )
    check(made, stages=setting.stages, virtual_stages=setting.virtual_stages, expert_group=setting.expert_group)
    seconds = time.perf_counter() - begin
    return StrategyStep(made, simulate_step(made, setting.job(), timeline=False), seconds, name)


class Results:
    """Rows of a file, written whole after every batch."""

    def __init__(self, path: Path | None, mark: str) -> None:
        self.path, self.mark = path, mark
        self.rows: list[Row] = []
        if path is not None and path.exists():
            data = json.loads(path.read_text())
            if mark in ("any", data["mark"]):
                self.rows = data["rows"]
            else:
                print(f"{path}: of another profile, planner or batch size, begun again")
        self.done = {self.key(row) for row in self.rows}

    @staticmethod
    def key(row: Row) -> tuple[Any, ...]:
        return (*(row[field.name] for field in dataclasses.fields(Cell)), row["batch"], row["strategy"])

    def add(self, rows: Iterable[Row]) -> None:
        for row in rows:
            self.rows.append(row)
            self.done.add(self.key(row))
        if self.path is not None:
            draft = self.path.with_suffix(".draft")
            draft.write_text(json.dumps({"mark": self.mark, "machine": machine(), "rows": self.rows}, indent=0))
            draft.replace(self.path)


def mark_of(args: argparse.Namespace) -> str:
    """What results depend on besides their cells: the profile and all code that plans and simulates."""
    sha = hashlib.sha256(load_profile(args.hardware).to_json().encode())
    folder = Path(megatron_hdp.__file__).parent
    for name in ("cost", "planner", "simulator"):
        for file in sorted((folder / name).rglob("*.py")):
            sha.update(file.read_bytes())
    return f"{sha.hexdigest()[:16]} {core_backend()} {format_size(tokens_of(args))}"


def tokens_of(args: argparse.Namespace) -> int:
    return (4 << 20) if args.quick else TOKENS


def measure(args: argparse.Namespace) -> list[Row]:
    """All rows that are asked for: from the file, or run now."""
    results, wanted = Results(args.out, "any" if args.keep else mark_of(args)), []
    megatron = _megatron() if args.megatron else None
    for cell in cells(args):
        batches = batches_of(cell, tokens_of(args), args.wikipedia)
        names = strategies_of(cell, args)
        for batch in range(1 if args.quick else args.batches):
            keys = [(*dataclasses.astuple(cell), batch, name) for name in names]
            wanted += keys
            missing = [name for name, key in zip(names, keys, strict=True) if key not in results.done]
            if missing:
                begin, lengths = time.process_time(), batches(batch)
                results.add([run_cell(cell, name, lengths, batch, megatron) for name in missing])
                print(f"# {cell.words}, batch {batch}: {time.process_time() - begin:.1f} s of CPU", flush=True)
    return [row for row in results.rows if Results.key(row) in set(wanted)]


def _megatron() -> MegatronPlanner:
    from megatron_hdp.cli import _megatron_planner

    return _megatron_planner


# Tables


def table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    print("| " + " | ".join(titles) + " |")
    print("|---|" + "---:|" * (len(titles) - 1))
    for row in rows:
        print("| " + " | ".join(row) + " |", flush=True)


def bars(values: Sequence[float], digits: int = 2) -> str:
    """Mean, least and most."""
    if not values:
        return "-"
    return f"{statistics.fmean(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"


def by_cell(rows: Iterable[Row]) -> dict[Cell, dict[str, dict[int, Row]]]:
    """Cell -> strategy -> batch -> row."""
    found: dict[Cell, dict[str, dict[int, Row]]] = {}
    for row in rows:
        cell = Cell(**{field.name: row[field.name] for field in dataclasses.fields(Cell)})
        found.setdefault(cell, {}).setdefault(row["strategy"], {})[row["batch"]] = row
    return found


def ratios(of: dict[int, Row], to: dict[int, Row]) -> list[float]:
    """Seconds of ``of`` over those of ``to``, batch by batch."""
    return [of[batch]["seconds"] / row["seconds"] for batch, row in sorted(to.items()) if batch in of]


def ran(strategies: dict[str, dict[int, Row]], name: str) -> dict[int, Row]:
    return {batch: row for batch, row in strategies.get(name, {}).items() if row["failed"] is None}


def speed_ups(part: str, found: dict[Cell, dict[str, dict[int, Row]]], base: str) -> None:
    """A table for every data set: how much faster than ``base`` each strategy is."""
    own = {cell: strategies for cell, strategies in found.items() if cell.part == part}
    for data in dict.fromkeys(cell.data for cell in own):
        names = [name for name in STRATEGIES if any(name in strategies for strategies in own.values())]
        print(f"\n### {part}, {data}: speed-up over {base}, mean (least-most) of the batches\n")
        titles = ["model, context", "ranks", f"{base}, s", *(name for name in names if name != base)]
        table(titles, (_speed_row(cell, own[cell], names, base) for cell in own if cell.data == data))


def _speed_row(cell: Cell, strategies: dict[str, dict[int, Row]], names: Sequence[str], base: str) -> list[str]:
    standard = ran(strategies, base)
    seconds = bars([row["seconds"] for row in standard.values()], 1)
    cells_ = [bars(ratios(standard, ran(strategies, name))) for name in names if name != base]
    return [f"{cell.model}, {format_size(cell.context)}", f"{cell.setting().ranks:,}", seconds, *cells_]


def against(found: dict[Cell, dict[str, dict[int, Row]]]) -> None:
    """How much longer every rival's step is than ours, by part and kind of pipeline, and where ours is longer."""
    print("\n### Steps of others over ours: mean over cells and batches (least), and where ours is longer\n")
    groups: dict[tuple[str, str, str], list[Cell]] = {}
    for cell in found:
        kind = "pipelines" if MODELS[cell.model].stages > 1 else "no pipelines"
        groups.setdefault((cell.part, cell.data, kind), []).append(cell)
    rivals = [name for name in STRATEGIES if name != "hdp" and any(name in found[cell] for cell in found)]

    def rows() -> Iterator[list[str]]:
        for (part, data, kind), members in groups.items():
            row = [f"{part}, {data}, {kind}"]
            for name in rivals:
                every = [r for cell in members for r in ratios(ran(found[cell], name), ran(found[cell], "hdp"))]
                row.append(f"{statistics.fmean(every):.3f} ({min(every):.3f})" if every else "-")
            yield row

    table(["cells", *rivals], rows())
    lost_batches, lost_cells, compared = [], [], 0
    for cell, strategies in found.items():
        for name in rivals:
            each = ratios(ran(strategies, name), ran(strategies, "hdp"))
            if STRATEGIES[name].estimate or not each:
                continue
            compared += len(each)
            lost_batches += [f"{cell.words}, batch {b}: {name} {r:.5f}" for b, r in enumerate(each) if r < 1]
            if statistics.fmean(each) < 1:
                lost_cells.append(f"{cell.words}: {name} {statistics.fmean(each):.5f}")
    print(f"\nOf {compared:,} steps of rivals (estimates not counted) {len(lost_batches)} are shorter than ours.")
    print(f"Cells in which a rival's mean is shorter: {len(lost_cells)}.")
    for line in [*lost_cells, *lost_batches]:
        print(f"* {line}")


def targets(found: dict[Cell, dict[str, dict[int, Row]]]) -> None:
    """What was aimed at: steps of ByteScale over ours at a context of 2M."""
    print("\n### ByteScale's step over ours, context 2M: mean (least-most) of the batches\n")
    chosen = [cell for cell in found if cell.context == 2 << 20 and "bytescale" in found[cell]]

    def rows() -> Iterator[list[str]]:
        for cell in chosen:
            strategies = found[cell]
            ours = ran(strategies, "hdp")
            if not ours:
                continue
            counts = [row["microbatches"] for row in ours.values()]
            row = [cell.part, cell.words, f"{cell.setting().ranks:,}"]
            row.append(f"{min(c[0] for c in counts)}-{max(c[1] for c in counts)}")
            yield [*row, *(bars(ratios(ran(strategies, name), ours), 3) for name in ("bytescale", "naive"))]

    table(["part", "cell", "ranks", "micro-batches of a rank", "balanced", "naive"], rows())


def variants(found: dict[Cell, dict[str, dict[int, Row]]]) -> None:
    """What ByteScale's balance reaches with other settings of what the paper leaves open."""
    chosen = [cell for cell in found if cell.part == "variants"]
    if not chosen:
        return
    print("\n### ByteScale's balanced step over ours by its settings, context 2M: mean over batches\n")

    def rows() -> Iterator[list[str]]:
        for cell in chosen:
            ours = ran(found[cell], "hdp")
            means = {
                name: statistics.fmean(ratios(ran(found[cell], name), ours))
                for name in ("bytescale", *VARIANTS)
                if ran(found[cell], name)
            }
            best, worst = (pick(VARIANTS.keys() & means.keys(), key=means.__getitem__) for pick in (min, max))
            ends = [f"{means[name]:.3f} ({name.removeprefix('bytescale, ')})" for name in (best, worst)]
            yield [f"{cell.model}, {cell.data}", f"{means['bytescale']:.3f}", *ends]

    table(["cell", "as tuned here", "best of all", "worst of all"], rows())


def machine() -> str:
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [
            line.partition(":")[2].strip() for line in info.read_text().splitlines() if line.startswith("model name")
        ]
        name = names[0] if names else name
    day = datetime.date.today().isoformat()
    versions = f"Python {platform.python_version()}, numpy {np.__version__}, core {core_backend()}"
    return f"{name}, {os.cpu_count()} cores, {day}; {versions}"


def render(rows: list[Row]) -> None:
    found = by_cell(rows)
    for part in ("grid", "few"):
        speed_ups(part, found, "static")
    targets(found)
    variants(found)
    against({cell: strategies for cell, strategies in found.items() if cell.part in ("grid", "few")})
    seconds = [row["plan_seconds"] for row in rows if row["strategy"] == "hdp" and row["failed"] is None]
    if seconds:
        print(
            f"\nplan time of hdp, s: {bars(seconds, 3)}, median {statistics.median(seconds):.3f}; wall, shared machine"
        )
    failed = {(row["strategy"], row["failed"]) for row in rows if row["failed"] is not None}
    for name in dict.fromkeys(name for name, _ in sorted(failed)):
        texts = [text for strategy, text in sorted(failed) if strategy == name]
        print(f"\n{name} cannot ({len(texts)} different reasons), for example: {texts[0]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one batch of 4M tokens, one context")
    parser.add_argument("--out", type=Path, help="JSON file of all results; read again if it exists")
    parser.add_argument("--keep", action="store_true", help="take results of --out whatever made them")
    parser.add_argument("--parts", default="grid,few,variants,offload")
    parser.add_argument("--batches", type=int, default=3)
    parser.add_argument("--models", help="names, with commas between")
    parser.add_argument("--strategies", help="names, with commas between; hdp and static are needed for the tables")
    parser.add_argument("--hardware", default="bytescale", help="profile")
    parser.add_argument("--wikipedia", type=Path, help="file of lengths, as a third data set")
    parser.add_argument("--megatron", action="store_true", help="also run Megatron-LM's installed scheduler")
    parser.add_argument("--render", type=Path, help="only print the tables of this file")
    args = parser.parse_args()
    rows = json.loads(args.render.read_text())["rows"] if args.render is not None else measure(args)
    print(f"\n{machine()}")
    render(rows)


if __name__ == "__main__":
    main()
