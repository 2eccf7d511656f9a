"""Figures 20 and 19: the same run as Figure 18, averaged over many steps."""

import dataclasses

import numpy as np

from megatron_hdp.reproduce import paper
from megatron_hdp.reproduce.one_step import CASE
from megatron_hdp.reproduce.result import Choice, Figure, Row
from megatron_hdp.reproduce.steps import STANDARD_ERROR, Speedup, Steps, speedup, throughput

LIMIT = 0.10
_DYNAMIC, _OFFLOAD, _BALANCE, _LOADER = paper.LADDER

_DYNAMIC_NOTE = (
    "the simulator finds nothing to gain by offload here: rings of 8K pieces hide their transfers, so that a smaller "
    "ring takes as many rank-seconds, in fewer and longer micro-batches. By Equation 3 as printed, a 2M sequence would "
    "even run on 16 ranks; that cannot be what ran, for Figure 18a has 312K on 39 ranks, 8K each. So both rungs are "
    "the same naive HDP. If rings without offload had to recompute (Figure 21 compares the two), the rung would be "
    "where the last row is; the paper does not say so"
)
_OFFLOAD_NOTE = "the same as the rung before it, see there"
_LOADING_NOTE = "its loading time is calibrated: the ratio of this rung to the next"


def loading_seconds(balanced_s: float) -> float:
    """What reading the whole batch adds to a step without the remote dataloader, by the last two rungs."""
    return balanced_s * (paper.LADDER[_LOADER] / paper.LADDER[_BALANCE] - 1)


def figure_20(steps: Steps, count: int) -> Figure:
    """Mean over ``count`` steps; static over fewer."""
    few = steps.static_count(count)
    static = steps.run(CASE, "static", range(few))
    naive, balanced, ours = (steps.run(CASE, name, range(count)) for name in ("naive", "balanced", "ours"))
    recomputing = steps.run(dataclasses.replace(CASE, recompute="full"), "naive", range(count))
    fewer = max(2, count // 4)
    leaving = steps.run(dataclasses.replace(CASE, offload=True), "naive", range(fewer))
    loading = loading_seconds(float(np.mean([step.seconds for step in balanced])))
    slow_naive, slow_balanced = speedup(static, naive, loading), speedup(static, balanced, loading)
    rows = (
        _rung(_DYNAMIC, slow_naive, _DYNAMIC_NOTE),
        _rung(_OFFLOAD, slow_naive, _OFFLOAD_NOTE),
        _rung(_BALANCE, slow_balanced, _LOADING_NOTE),
        _rung(_LOADER, speedup(static, balanced)),
        _unpublished("this package's planner", speedup(static, ours)),
        _unpublished("naive, offload by Equation 3 as printed", speedup(static, leaving, loading)),
        _unpublished("naive, full recompute instead of offload", speedup(static, recomputing, loading)),
    )
    words = (
        f"throughput over that of static, {count} steps (static: {few}, Equation 3: {fewer}); the paper: "
        f"{paper.ITERATIONS}. {STANDARD_ERROR}",
        f"without the remote dataloader every rank reads the whole batch, {loading:.1f} s a step that nothing hides; "
        "static reads its own part",
        "the paper's Figures 17 and 20 are the same run and differ: 2.43 and 4.26 there, 2.01 and 3.89 here",
    )
    values = [1.0, *(row.simulated for row in rows[:4])]
    orders = {"1 < dynamic rings <= offload < balance < remote dataloader": values == sorted(values) and values[1] > 1}
    title = "ablation, LLaMA-7B, context 2M, Byted, 1,024 GPUs"
    return Figure(key="figure-20", title=title, rows=rows, words=words, orders=orders)


def _rung(name: str, found: Speedup, note: str = "") -> Row:
    words = name if name == _DYNAMIC else f"+ {name}"
    choices: tuple[Choice, ...] = ("backward",) if name == _LOADER else ("backward", "loading")
    return Row(
        name=words,
        unit="x",
        paper=paper.LADDER[name],
        simulated=found.value,
        spread=(found.least, found.most),
        uncertain=found.uncertain,
        limit=LIMIT,
        note=note,
        choices=choices,
    )


def _unpublished(name: str, found: Speedup) -> Row:
    spread = found.least, found.most
    return Row(name=name, unit="x", paper=None, simulated=found.value, spread=spread, uncertain=found.uncertain)


_PEAK_NOTE = (
    "a NIC's peak is that of any 10 ms here; the paper's is read off a curve over two hours, whose resolution is not "
    "published. Static's ring is as fast as in Figure 18a, 85 Gb/s"
)
_TOUCHED: tuple[Choice, ...] = ("backward",)
"""All of Figure 19: the peaks too, because bytes go out in the time that a ring step computes."""


def figure_19(steps: Steps, count: int) -> Figure:
    """Ratios of NIC peaks and of tensor-core activity."""
    few = steps.static_count(count)
    static = steps.run(CASE, "static", range(few))
    naive, balanced = (steps.run(CASE, name, range(count)) for name in ("naive", "balanced"))
    peaks = [[8e-9 * step.peak for step in found] for found in (static, naive)]
    before, after = paper.RDMA_PEAK_GBPS
    low, high = paper.TENSOR_ACTIVITY_PERCENT
    base = float(np.mean(peaks[0]))
    rows = (
        Row.over(peaks[0], name="static, peak of a NIC", unit="Gb/s", paper=before, note=_PEAK_NOTE, choices=_TOUCHED),
        Row.over(peaks[1], name="naive, peak of a NIC", unit="Gb/s", paper=after, choices=_TOUCHED),
        Row.over(
            [peak / base for peak in peaks[1]],
            name="peak, naive / static",
            unit="x",
            paper=after / before,
            note=_PEAK_NOTE,
            choices=_TOUCHED,
        ),
        Row(
            name="tensor-core activity, balanced / static",
            unit="x",
            paper=high / low,
            simulated=throughput(balanced) / throughput(static),
            note="a token needs the same products of matrices in every run, so activity goes with tokens per second",
            choices=_TOUCHED,
        ),
        Row(
            name="tensor-core activity, naive / static",
            unit="x",
            paper=None,
            simulated=throughput(naive) / throughput(static),
            note="the text has 40 % for naive too, at times",
        ),
    )
    orders = {"naive's peak is lower": rows[1].simulated < rows[0].simulated}
    return Figure(
        key="figure-19",
        title="NIC traffic and tensor cores, the same run",
        rows=rows,
        words=(
            "not judged: neither NIC nor GPU is named, so that only ratios say something; that of peaks depends on a "
            "resolution that is not published, and that of activity is the last rung of Figure 20",
        ),
        orders=orders,
    )
