"""Attention over several ranks against one rank doing the same, as Markdown, from this machine and this run.

python benchmarks/attention.py [--ranks 1,2,4] [--cases long,mix] [--tokens 32K] [--heads 8] [--kv-heads 8]
                               [--head-dim 64] [--dtype float32] [--window N] [--exchanges ring,gather,heads]
                               [--repeats 3] [--patience SECONDS] [--contended] [--json FILE]
                               [--trace FILE]
python benchmarks/attention.py --blocks 1K,4K,16K [--device cuda] ...

Ranks are gloo processes with one thread each. Per case and exchange, with transfers hidden behind compute (overlap) and
not: forward and backward of one layer, wall time and CPU time over those of one rank in the same repeat (medians; all
variants take turns), what was sent next to what `exchange_bytes` predicts, the share of the exchanges' time that was
hidden, memory, and the largest difference from one rank's results. The cases: `long` is one sequence of --tokens; `mix`
is 64 short ones of 64 to 1024 tokens, dealt out to the ranks as local ones, and one of --mix-tokens that all share.

--blocks times the kernels alone, on one device: blocks of a ring by length, and `hdp_attention` next to a kernel called
by itself, and next to what else is installed (flash-attn, ring-flash-attn, Transformer Engine; CUDA only).
--trace writes the last repeat of the first exchange, with overlap, for chrome://tracing or Perfetto.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import numpy as np
import torch
from attention_blocks import block_tables
from attention_flags import arguments, head_groups, unswappable
from attention_machine import cores, machine
from attention_ranks import ONE_RANK, Case, Found, Shape, Variant, Work, serve
from attention_rivals import ROTATIONS, torch_ring_missing, torch_ring_name

from megatron_hdp.attention.trace import chrome_trace
from megatron_hdp.lengths import format_size

TARGETS = {"long": 0.56, "mix": 0.60}
"""Wall time of 2 ranks over that of one, at most; for the defaults of the flags."""
SHORT_SEQUENCES = 64
COLUMNS = (
    "wall: last end less first begin of the ranks. Of one rank: over the wall time of one rank that does all of the "
    "case, in the same repeat; 0.5 is what two ranks can reach. Range: the smallest and the largest of that. Times and "
    "ratios are medians of the repeats",
    "CPU: of all ranks' processes together, transfers by gloo's threads included. Of one: over that of one rank; what "
    "is above 1 is what working together costs. Longest rank's: the CPU time of the rank that took most, over that of "
    "one rank. Others': of all other processes, over that of the ranks; far from 0 %, wall times mean little",
    "MiB sent: by the rank that sent most, forward and backward of one layer. As predicted: every rank sent what "
    "`exchange_bytes` says, to the byte",
    "hidden: share of the time with an exchange in flight that a rank did not spend waiting; median of ranks and "
    "repeats. In flight is from the post until the rank takes the data, not until it has come; with overlap off it "
    "waits at once",
    "peak: resident memory over that before the call, inputs not counted, the rank with most. Error: largest "
    "difference from one rank's output and gradients, over their largest value",
)
"""What the columns of the tables mean."""


@dataclass(frozen=True)
class Row:
    """One variant of one case, over all its ranks and repeats."""

    case: str
    ranks: int
    variant: str
    overlap: bool
    walls_s: tuple[float, ...]
    """Of every repeat."""
    wall_of_one: float
    wall_of_one_range: tuple[float, float]
    cpu_s: float
    """Of all ranks together."""
    cpu_of_one: float
    cpu_of_one_max: float
    """Of the rank that computed longest."""
    sent_bytes: int
    """By the rank that sent most."""
    as_predicted: bool | None
    others: float
    """CPU time of other processes over that of the ranks, median of the repeats; what it slows down is no finding."""
    hidden: float | None
    """Share of the time with an exchange in flight that a rank did not spend waiting; median of ranks and repeats."""
    peak_bytes: int | None
    error: float | None


def main() -> None:
    args = arguments(__doc__)
    shape = Shape(args.heads, args.kv_heads, args.head_dim, args.dtype, args.window, args.kernel)
    print(f"{machine()}\n\n{shape_words(shape)}")
    data: dict[str, Any] = {"command": sys.argv, "machine": machine(), "shape": asdict(shape)}
    if args.blocks:
        torch.set_num_threads(1)  # matters on CPU only
        tables, data["blocks"] = block_tables(shape, args.blocks, args.device, args.repeats)
        print(tables)
    else:
        data["rows"] = [asdict(row) for row in ranks_report(args, shape)]
    if args.json is not None:
        args.json.write_text(json.dumps(data, indent=1))


def ranks_report(args: argparse.Namespace, shape: Shape) -> list[Row]:
    short = np.random.default_rng(1234).integers(args.short_tokens // 16, args.short_tokens + 1, SHORT_SEQUENCES)
    known = {"long": Case("long", args.tokens), "mix": Case("mix", args.mix_tokens, tuple(short.tolist()))}
    variants = {size: variants_of(size, args, shape) for size in args.ranks if size > 1}
    with tempfile.TemporaryDirectory(prefix="attention_") as folder:
        cases = tuple(known[name] for name in args.cases)
        deadline = time.time() + args.patience
        work = Work(shape, cases, variants, args.repeats, args.contended, deadline, f"{folder}/store")
        answers = run_ranks(max(args.ranks), work)
    found = [each for each, _ in answers]
    rows = [row for case in cases for row in rows_of(case.name, found)]
    for case in cases:
        print(f"\n## {case.name}: {case_words(case)}\n\n{table([row for row in rows if row.case == case.name])}")
        print(overlap_words([row for row in rows if row.case == case.name]))
    for line in notes(args, rows, answers[0][1]):
        print(line)
    if args.trace is not None:
        write_trace(args.trace, found)
    return rows


def variants_of(size: int, args: argparse.Namespace, shape: Shape) -> tuple[Variant, ...]:
    """Every exchange that is possible, with overlap and without; then the rival."""
    found: list[Variant] = []
    for exchange in args.exchanges:
        groups = head_groups(size, shape.heads, shape.kv_heads) if exchange == "heads" else [1]
        found += [Variant(exchange, a, overlap) for a in groups for overlap in (True, False)]
    if args.rivals and shape.window is None and not torch_ring_missing():
        found += [Variant(torch_ring_name(rotation), rival=True) for rotation in ROTATIONS]
    return tuple(found)


def run_ranks(ranks: int, work: Work) -> list[tuple[list[Found], str | None]]:
    """The answers of all ranks, which are processes of their own; a rank that dies ends the run."""
    os.environ["OMP_NUM_THREADS"] = "1"
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe(duplex=False) for _ in range(ranks)]
    processes = [
        context.Process(target=serve, args=(rank, ranks, work, pipe[1]), daemon=True) for rank, pipe in enumerate(pipes)
    ]
    for process in processes:
        process.start()
    answers: dict[int, tuple[list[Found], str | None]] = {}
    try:
        while len(answers) < ranks:
            readers = {pipes[rank][0]: rank for rank in range(ranks) if rank not in answers}
            ends = {process.sentinel: rank for rank, process in enumerate(processes) if rank not in answers}
            for ready in wait([*readers, *ends]):
                if ready in readers:
                    answers[readers[ready]] = ready.recv()
                elif not pipes[ends[ready]][0].poll():
                    raise SystemExit(f"rank {ends[ready]} died; its error is above")
        for process in processes:
            process.join(timeout=60)
    finally:
        for process in processes:
            process.kill()
    return [answers[rank] for rank in range(ranks)]


def rows_of(case: str, found: list[list[Found]]) -> list[Row]:
    """One row per variant, in the order in which they ran."""
    by_key: dict[tuple[int, Variant], list[Found]] = {}
    for each in found:
        for one in each:
            if one.case == case:
                by_key.setdefault((one.ranks, one.variant), []).append(one)
    (base,) = by_key[1, ONE_RANK]
    base_wall = [run.end_s - run.begin_s for run in base.runs]
    base_cpu = [run.cpu_s for run in base.runs]
    return [_row(key, each, base_wall, base_cpu) for key, each in by_key.items()]


def _row(key: tuple[int, Variant], each: list[Found], base_wall: list[float], base_cpu: list[float]) -> Row:
    size, variant = key
    repeats = range(len(base_wall))
    wall = [max(f.runs[i].end_s for f in each) - min(f.runs[i].begin_s for f in each) for i in repeats]
    cpu = [sum(f.runs[i].cpu_s for f in each) for i in repeats]
    most = [max(f.runs[i].cpu_s for f in each) for i in repeats]
    ratios = [a / b for a, b in zip(wall, base_wall)]
    others = [max(0.0, run.busy_s / of_ranks - 1) for run, of_ranks in zip(each[0].runs, cpu)]
    hidden = [1 - waited / flying for f in each for flying, waited in (run.exchange_s for run in f.runs) if flying > 0]
    expected = [f.bytes_sent == f.bytes_expected for f in each if f.bytes_expected is not None and size > 1]
    peaks, errors = [f.peak_bytes for f in each if f.peak_bytes is not None], [f.error for f in each]
    return Row(
        case=each[0].case,
        ranks=len(each),
        variant=variant.name(size),
        overlap=variant.overlap,
        walls_s=tuple(wall),
        wall_of_one=_median_ratio(wall, base_wall),
        wall_of_one_range=(min(ratios), max(ratios)),
        cpu_s=statistics.median(cpu),
        cpu_of_one=_median_ratio(cpu, base_cpu),
        cpu_of_one_max=_median_ratio(most, base_cpu),
        sent_bytes=max(f.bytes_sent for f in each),
        as_predicted=all(expected) if expected else None,
        others=statistics.median(others),
        hidden=statistics.median(hidden) if hidden else None,
        peak_bytes=max(peaks, default=None),
        error=max((error for error in errors if error is not None), default=None),
    )


def _median_ratio(values: Sequence[float], bases: Sequence[float]) -> float:
    """Of the values over the bases of the same repeat."""
    return statistics.median(value / base for value, base in zip(values, bases, strict=True))


def table(rows: list[Row]) -> str:
    head = (
        "| ranks | exchange | overlap | wall s | of one rank | range | CPU s, all | of one | longest rank's | "
        "others' | MiB sent | as predicted | hidden | peak MiB | error |\n"
        "|---:|---|---|---:|---:|---|---:|---:|---:|---:|---:|---|---:|---:|---:|"
    )
    lines = [head]
    for row in rows:
        low, high = row.wall_of_one_range
        wall = [f"{statistics.median(row.walls_s):.3f}", f"{row.wall_of_one:.3f}", f"{low:.3f} .. {high:.3f}"]
        cells = [
            str(row.ranks),
            row.variant,
            _overlap_cell(row),
            *(wall if row.ranks <= cores() else ["-", "-", "-"]),
            f"{row.cpu_s:.3f}",
            f"{row.cpu_of_one:.3f}",
            f"{row.cpu_of_one_max:.3f}",
            f"{100 * row.others:.0f} %",
            f"{row.sent_bytes / 2**20:.2f}" if row.as_predicted is not None else "-",
            {True: "yes", False: "NO", None: "-"}[row.as_predicted],
            "-" if row.hidden is None else f"{100 * row.hidden:.1f} %",
            "-" if row.peak_bytes is None else f"{row.peak_bytes / 2**20:.0f}",
            "-" if row.error is None else f"{row.error:.1e}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _overlap_cell(row: Row) -> str:
    if row.as_predicted is None:
        return "-"
    return "on" if row.overlap else "off"


def overlap_words(rows: list[Row]) -> str:
    """What overlap saves of the wall time, per exchange: median over the repeats."""
    off = {(row.ranks, row.variant): row for row in rows if not row.overlap}
    pairs = [(row, off[row.ranks, row.variant]) for row in rows if row.overlap and (row.ranks, row.variant) in off]
    words = [
        f"{with_.variant} on {with_.ranks} ranks {100 * (1 - _median_ratio(with_.walls_s, without.walls_s)):+.1f} %"
        for with_, without in pairs
        if with_.ranks <= cores()
    ]
    return f"\nSaved by overlap, of the wall time without: {'; '.join(words)}." if words else ""


def notes(args: argparse.Namespace, rows: list[Row], error: str | None) -> list[str]:
    lines = [""]
    for row in rows:
        if row.ranks == 2 <= cores() and row.variant == args.exchanges[0] and row.overlap and args.defaults:
            met = "met" if row.wall_of_one <= TARGETS[row.case] else "MISSED"
            lines.append(
                f"- {row.case}, 2 ranks, {row.variant}: {row.wall_of_one:.3f} of one rank's wall time; target "
                f"{TARGETS[row.case]:.2f} {met}"
            )
    shared = [size for size in args.ranks if size > cores()]
    if shared:
        lines.append(
            f"- {' and '.join(map(str, shared))} ranks share {cores()} cores: their wall time says nothing and is not "
            "shown; CPU time does"
        )
    if unswappable(args):
        lines.append(f"- {unswappable(args)}")
    lines += [f"- {line}" for line in COLUMNS]
    if any(variant.startswith("torch ring") for variant in (row.variant for row in rows)):
        lines.append(
            "- torch ring: the ring inside torch's context_parallel with the CPU's flash op plugged in; one "
            "sequence at a time, so not in the packed mix"
        )
    if torch_ring_missing():
        lines.append(f"- torch {torch.__version__}'s ring cannot be called: {torch_ring_missing()}")
    if error is not None:
        lines.append(f"- torch {torch.__version__}'s context_parallel itself does not run on CPU ranks: {error}")
    lines.append("- ring-flash-attn and Transformer Engine need CUDA: see --blocks --device cuda")
    return lines


def write_trace(path: Path, found: list[list[Found]]) -> None:
    """Of the first case and the first exchange, on the most ranks; the last repeat."""
    exchanged = [one for one in found[0] if one.ranks > 1 and one.bytes_expected is not None]
    ranks = max(one.ranks for one in exchanged)
    chosen = next(one for one in exchanged if one.ranks == ranks)
    key = chosen.case, ranks, chosen.variant
    traces = [
        (rank, one.runs[-1].trace)
        for rank, each in enumerate(found)
        for one in each
        if (one.case, one.ranks, one.variant) == key
    ]
    path.write_text(json.dumps(chrome_trace(traces)))
    print(
        f"\nTrace of {chosen.case}, {ranks} ranks, {chosen.variant.name(ranks)}: {path} (an exchange's bar ends where "
        "the rank takes the data, so it is no transfer time)"
    )


def case_words(case: Case) -> str:
    if not case.local:
        return f"one sequence of {format_size(case.shared)} tokens on all ranks"
    return (
        f"{len(case.local)} local sequences of {min(case.local)} to {max(case.local)} tokens, "
        f"{sum(case.local):,} together, and one of {format_size(case.shared)} on all ranks"
    )


def shape_words(shape: Shape) -> str:
    window = "full causal attention" if shape.window is None else f"window of {format_size(shape.window)} tokens"
    return (
        f"{shape.heads} query and {shape.kv_heads} key/value heads of size {shape.head_dim}, {shape.dtype}, {window}, "
        f"forward and backward of one layer."
    )


if __name__ == "__main__":
    main()
