"""Pipelines with unequal counts of micro-batches against equal counts, simulated and measured; see docs/planner.md.

python benchmarks/pipeline.py [--batches 10] [--measured-batches 3] [--columns 16] [--stages 4]

Simulated: spans by the planner's evaluator, LLaMA-7B. Measured: the same for plans of a tiny layer on this CPU. Its
costs are measured first and the plans made with them; then every micro-batch of every plan runs forward and backward,
and the evaluator runs the plan with the CPU seconds that they took. Prints Markdown.
"""

import argparse
import itertools
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from attention_machine import machine
from pipeline_layer import FloatArray, measured_profile, microbatch_seconds

from megatron_hdp.cost import CostModel, load_profile
from megatron_hdp.lengths import format_size
from megatron_hdp.mixes import Mix, mix_batches, parse_mix
from megatron_hdp.planner import plan
from megatron_hdp.planner.offload import smallest_rings
from megatron_hdp.planner.span import ends_of_columns, microbatch_picoseconds
from megatron_hdp.planner.units import Units, soonest, units_plan
from megatron_hdp.types import IntArray, Plan, chunk_tokens

MIXES = ("byted", "lognormal:16,131072,1024,1.8")
PROFILES = ("bytescale", "h100")
LAYERS, CAPACITY = 32, 8192
SCALE = 16
"""The tiny layer's capacity and lengths are so many times smaller."""
TINY_LAYERS = 2
"""Of a stage of the tiny model; they take equal times."""
SLOTS = 24
"""Micro-batches of a column, about: a batch has so many times what the pool holds."""


@dataclass(frozen=True)
class Layout:
    """How the processes are cut."""

    columns: int
    stages: int
    parts: int


@dataclass(frozen=True)
class Spans:
    """One batch: seconds of a step, and share of it that a stage of a column computes on average."""

    ours: float
    efficiency: float
    rivals: dict[str, tuple[float, float]]
    """Name -> the same two."""


def shuffled_equal(lengths: IntArray, layout: Layout, capacity: int, cost: CostModel) -> Plan:
    """What runs without a planner: data in the (shuffled) order in which it comes, the same count in every column.

    Sequences fill a micro-batch until the next one does not fit; one that fits in none has the smallest ring that holds
    it. Micro-batches go to the columns that have fewest of them so far; empty ones fill up.
    """
    held = 2 * chunk_tokens(lengths, np.int64(1), cost.pad_multiple)
    rings, _ = smallest_rings(lengths, layout.columns, capacity, cost, None)
    of, sizes = np.empty(lengths.size, dtype=np.int64), []
    room, pack = 0, -1
    for index, (tokens, ring) in enumerate(zip(held.tolist(), rings.tolist(), strict=True)):
        if ring > 1:
            of[index] = len(sizes)
            sizes.append(ring)
            continue
        if tokens > room:
            room, pack = capacity, len(sizes)
            sizes.append(1)
        of[index], room = pack, room - tokens
    counts, starts = np.zeros(layout.columns, dtype=np.int64), []
    for size in sizes:
        start = soonest(counts, size)
        assert start is not None
        counts[start : start + size] = counts[start : start + size].max() + 1
        starts.append(start)
    units = Units(of, np.array(starts), np.array(sizes), np.arange(len(sizes)))
    multiple = layout.stages if layout.parts > 1 else 1
    pad = cost.pad_multiple
    return units_plan(lengths, layout.columns, capacity, pad, units, equal_counts=True, count_multiple=multiple)


def plans(lengths: IntArray, layout: Layout, capacity: int, cost: CostModel) -> dict[str, Plan]:
    """Ours first; "ours, equal counts" is ours under the rule for experts: equal counts in all columns."""
    more = {"balance": "pp", "stages": layout.stages, "virtual_stages": layout.parts, "cost": cost}
    return {
        "ours": plan(lengths, layout.columns, capacity, **more),
        "shuffled, equal counts": shuffled_equal(lengths, layout, capacity, cost),
        "ours, equal counts": plan(lengths, layout.columns, capacity, **more, expert_group=layout.columns),
    }


def span(made: Plan, layout: Layout, forward: FloatArray, backward: FloatArray) -> tuple[float, float]:
    """Seconds of the step, and the mean share of them that a stage computes; times in seconds, [num_microbatches]."""
    columns = (made.rank_offsets, made.microbatch_offsets, made.piece_sequence, made.ring_size)
    times = [np.rint(1e12 * part).astype(np.int64) for part in (forward, backward)]
    last = float(ends_of_columns(*columns, *times, layout.stages, layout.parts).max()) * 1e-12
    return last, float((forward + backward).sum()) / made.num_ranks / last


def compare(made: dict[str, Plan], layout: Layout, seconds: Callable[[Plan], tuple[FloatArray, FloatArray]]) -> Spans:
    found = {name: span(one, layout, *seconds(one)) for name, one in made.items()}
    return Spans(*found.pop("ours"), found)


def shuffled(mix: Mix, tokens: int, context: int, number: int) -> Iterator[IntArray]:
    for step in range(number):
        lengths = mix_batches(mix, tokens, context, 1234)(step)
        yield np.random.RandomState(step).permutation(lengths)


def simulated(mix: Mix, profile: str, layout: Layout, number: int) -> list[Spans]:
    cost = CostModel(load_profile(profile), LAYERS).with_stages(layout.stages)
    held = layout.columns * CAPACITY
    found = []
    for lengths in shuffled(mix, SLOTS * held, held, number):

        def seconds(made: Plan) -> tuple[FloatArray, FloatArray]:
            forward, backward = microbatch_picoseconds(made, cost)
            return 1e-12 * forward, 1e-12 * backward

        found.append(compare(plans(lengths, layout, CAPACITY, cost), layout, seconds))
    return found


def measured(mix: Mix, cost: CostModel, layout: Layout, number: int) -> list[Spans]:
    capacity, held = CAPACITY // SCALE, layout.columns * CAPACITY

    def seconds(made: Plan) -> tuple[FloatArray, FloatArray]:
        forward, backward = microbatch_seconds(made)
        return TINY_LAYERS * forward, TINY_LAYERS * backward

    found = []
    for lengths in shuffled(mix, SLOTS * held, held, number):
        found.append(compare(plans(-(-lengths // SCALE), layout, capacity, cost), layout, seconds))
    return found


def row(name: str, layout: Layout, spans: list[Spans]) -> str:
    cells = [name, f"{layout.stages} x {layout.parts}", f"{100 * statistics.median(s.efficiency for s in spans):.0f}"]
    for rival in spans[0].rivals:
        ratios = sorted(s.ours / s.rivals[rival][0] for s in spans)
        share = statistics.median(s.rivals[rival][1] for s in spans)
        cells += [f"{100 * share:.0f}", f"{statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})"]
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=10)
    parser.add_argument("--measured-batches", type=int, default=3)
    parser.add_argument("--columns", type=int, default=16)
    parser.add_argument("--stages", type=int, default=4)
    args = parser.parse_args()
    layouts = [Layout(args.columns, args.stages, parts) for parts in (1, 2)]
    print(
        f"{machine()}\n{args.columns} columns, batches of {format_size(SLOTS * args.columns * CAPACITY)} tokens, ",
        end="",
    )
    print(f"context {format_size(args.columns * CAPACITY)}\n")
    titles = ["costs, data", "stages x parts", "ours: efficiency, %", "shuffled, equal counts: efficiency, %"]
    titles += ["ours / shuffled", "ours with equal counts: efficiency, %", "ours / ours with equal counts"]
    print("| " + " | ".join(titles) + " |")
    print("|---|" + "---:|" * (len(titles) - 1))
    for profile, data, layout in itertools.product(PROFILES, MIXES, layouts):
        print(row(f"{profile}, {data}", layout, simulated(parse_mix(data), profile, layout, args.batches)), flush=True)
    if args.measured_batches:
        cost = CostModel(measured_profile(), TINY_LAYERS)
        for data, layout in itertools.product(MIXES, layouts):
            spans = measured(parse_mix(data), cost, layout, args.measured_batches)
            print(row(f"measured, {data}", layout, spans), flush=True)


if __name__ == "__main__":
    main()
