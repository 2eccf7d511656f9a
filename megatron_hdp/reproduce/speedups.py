"""Figure 17: six models, four contexts, two data sets; the cells that are known, and how throughput falls."""

import dataclasses
from dataclasses import dataclass

import numpy as np

from megatron_hdp.lengths import format_size
from megatron_hdp.reproduce import paper
from megatron_hdp.reproduce.case import STAGES, Case, setting_of
from megatron_hdp.reproduce.result import Choice, Figure, Row
from megatron_hdp.reproduce.steps import Speedup, Steps, speedup, throughput

LIMIT = 0.15
OTHER_STAGES = {"llama-70b": 4, "mixtral-8x22b": 2}
"""Another pipeline that could have been assumed."""
_ORDER = "balanced > naive > static in all cells"
SLOPE_MODEL, SLOPE_DATA = "llama-7b", "github"

_GITHUB_NOTE = (
    "by the paper's numbers a balanced step of GitHub takes half as long as one of Byted, by the simulator a third, "
    "because GitHub has a third of Byted's attention work. Either the documents are longer than Figure 4 is read here "
    "(its text takes labels as the beginning of bars where it counts tokens, and as the end where it counts samples), "
    "or every micro-batch pays something that is missing here: the sensitivity has both. Labels of Figure 18b say 8 s "
    "more than the simulator for a static micro-batch, and nothing says what they are"
)
_PIPELINE_NOTE = (
    "tensor-parallel and pipeline sizes are not published; layouts: as assumed, and 4 instead of 2 stages for "
    "llama-70b, 2 instead of 4 for mixtral-8x22b. Algorithm 2 leaves open how sequences are dealt to pipelines, and as "
    "it reads here it gains less than in the paper: beside it is this package's planner, on the same batches"
)


@dataclass(frozen=True)
class Found:
    """A cell, simulated."""

    case: Case
    naive: Speedup
    balanced: Speedup
    ours: Speedup | None


def run_cell(steps: Steps, case: Case, count: int, ours: bool = False) -> Found:
    """Mean over ``count`` steps; static over fewer."""
    static = steps.run(case, "static", range(steps.static_count(count)))
    naive, balanced = (speedup(static, steps.run(case, name, range(count))) for name in ("naive", "balanced"))
    return Found(case, naive, balanced, speedup(static, steps.run(case, "ours", range(count))) if ours else None)


def layouts(case: Case) -> list[Case]:
    """The case as assumed, and with another size of what is not published."""
    other = OTHER_STAGES.get(case.model)
    return [case] if other is None else [case, dataclasses.replace(case, stages=other)]


def figure_17(steps: Steps, count: int) -> Figure:
    """Known cells at 2M, the range at 256K, and slopes."""
    large, piped, small = max(2, count // 2), max(2, count // 6), max(2, count // 12)
    rows: list[Row] = []
    cells: list[Found] = []
    for cell in paper.CELLS:
        case = Case(model=cell.model, data=cell.data, context=cell.context)
        number = piped if setting_of(case).stages > 1 else large
        found = [run_cell(steps, one, number, ours=one is case) for one in layouts(case)]
        cells.append(found[0])
        rows += _rows(found, cell.naive, cell.balanced)
        rows.append(_ours(found))
    for model in paper.MODELS:
        for data in paper.DATA:
            case = Case(model=model, data=data, context=paper.CONTEXTS[0])
            cells.append(run_cell(steps, case, small))
            rows += _rows(cells[-1:], *paper.RANGES_256K)
    slopes = _slopes(steps, piped)
    falls = [row.simulated for row in slopes]
    orders = {
        f"{_ORDER} at 2M": not _out_of_order(cells, paper.CONTEXTS[-1]),
        f"{_ORDER} at 256K": not _out_of_order(cells, paper.CONTEXTS[0]),
        "static falls most with the context, balanced least": falls == sorted(falls, reverse=True),
    }
    words = (
        f"{large} steps at 2M without pipelines, {piped} with, {small} at 256K (static: "
        f"{', '.join(str(steps.static_count(number)) for number in (large, piped, small))}); per doubling: {piped} "
        "steps, geometric mean from 256K to 2M, and the least and most of the three; data by Figure 4; static packs "
        "are dealt in the order in which they come",
        *(f"in the wrong order: {words}" for at in paper.CONTEXTS for words in _out_of_order(cells, at)),
        *(_spread_words(model) for model in paper.MODELS),
        "43 of the 48 pairs of bars could not be read and are not here; those at 256K are known by their range only",
    )
    title = "throughput over that of static"
    return Figure(key="figure-17", title=title, rows=(*rows, *slopes), words=words, orders=orders)


def _out_of_order(cells: list[Found], context: int) -> list[str]:
    """Cells of that context in which balanced is not above naive, or naive not above static."""
    of_context = [found for found in cells if found.case.context == context]
    return [_where(found.case) for found in of_context if not found.balanced.value > found.naive.value > 1]


def _choices(case: Case) -> tuple[Choice, ...]:
    """What the cell depends on: all models' layers are made from that of LLaMA-7B."""
    return ("backward", "stages") if case.model in STAGES else ("backward",)


def _rows(found: list[Found], naive: float | paper.Range, balanced: float | paper.Range) -> list[Row]:
    """Rows of a cell; ``found`` has the assumed layout first."""
    case, rows = found[0].case, []
    pipeline = setting_of(case).stages > 1
    note = _PIPELINE_NOTE if pipeline else _GITHUB_NOTE if case.data == "github" else ""
    for name, value in (("naive", naive), ("balanced", balanced)):
        all_layouts: list[Speedup] = [getattr(one, name) for one in found]
        means = [one.value for one in all_layouts]
        rows.append(
            Row(
                name=f"{_where(case)}: {name}",
                unit="x",
                paper=value,
                simulated=means[0],
                spread=(all_layouts[0].least, all_layouts[0].most),
                layouts=(min(means), max(means)) if len(means) > 1 else None,
                limit=LIMIT,
                note=note,
                choices=_choices(case),
            )
        )
    return rows


def _ours(found: list[Found]) -> Row:
    ours = found[0].ours
    assert ours is not None
    name = f"{_where(found[0].case)}: this package's"
    return Row(name=name, unit="x", paper=None, simulated=ours.value, spread=(ours.least, ours.most))


def _where(case: Case) -> str:
    return f"{case.model}, {format_size(case.context)}, {case.data}"


def _slopes(steps: Steps, count: int) -> list[Row]:
    """How many times throughput falls when the context doubles, geometric mean from 256K to 2M."""
    rows = []
    cases = [Case(model=SLOPE_MODEL, data=SLOPE_DATA, context=context) for context in paper.CONTEXTS]
    for name, published in paper.PER_DOUBLING.items():
        number = steps.static_count(count) if name == "static" else count
        found = np.array([throughput(steps.run(case, name, range(number))) for case in cases])
        falls = found[:-1] / found[1:]
        rows.append(
            Row(
                name=f"{SLOPE_MODEL}, {SLOPE_DATA}: {name}, per doubling",
                unit="x",
                paper=published,
                simulated=float((found[0] / found[-1]) ** (1 / (found.size - 1))),
                spread=(float(falls.min()), float(falls.max())),
                limit=LIMIT,
                choices=_choices(cases[0]),
            )
        )
    return rows


def _spread_words(model: str) -> str:
    """How a model is assumed to be spread."""
    setting = setting_of(Case(model=model, data="byted", context=2 << 20))
    pipeline = f", pipeline {setting.stages}" if setting.stages > 1 else ""
    return (
        f"{model}: {setting.gpus:,} GPUs, tensor parallel {setting.tensor_parallel}{pipeline}: {setting.ranks} ranks; "
        f"{setting.spec.assumed}"
    )
