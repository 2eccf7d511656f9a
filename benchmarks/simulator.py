"""How long planning and simulating a step takes, and what memory: the table of docs/simulator.md, from this machine.

python benchmarks/simulator.py [--gpus 1024,16384,131072] [--models llama-7b,llama-70b] [--strategy hdp] [--no-timeline]

Needs numpy only; one thread. Each row runs in a process of its own, so that its peak of memory is its own.
"""

import argparse
import multiprocessing
import os
import platform
import resource
import time
from dataclasses import dataclass

from megatron_hdp.lengths import format_size
from megatron_hdp.mixes import mix_batches, parse_mix
from megatron_hdp.planner.entry import MAX_BATCH_TOKENS
from megatron_hdp.simulator import simulate_step
from megatron_hdp.simulator.control import plan_bytes
from megatron_hdp.simulator.strategies import STRATEGIES, Asked, Setting

CONTEXT = 2 << 20
TOKENS_PER_GPU = 32 << 10
"""As in the paper's runs with 1,024 GPUs; a step holds at most 2^31 - 1."""


@dataclass(frozen=True)
class Row:
    """Seconds are CPU time."""

    ranks: int
    tokens: int
    sequences: int
    micro_batches: int
    plan_seconds: float
    plan_bytes: int
    simulate_seconds: float
    peak_bytes: int
    before_bytes: int
    """Peak up to when the plan was made."""
    step_seconds: float


def measure(model: str, gpus: int, strategy: str, timeline: bool) -> Row:
    setting = Setting(model=model, gpus=gpus, context=CONTEXT, hardware="h100")
    context = min(CONTEXT, setting.ranks * setting.tokens_per_rank)  # what the pool holds
    tokens = min(gpus * TOKENS_PER_GPU, MAX_BATCH_TOKENS - CONTEXT)
    lengths = mix_batches(parse_mix("byted"), tokens, context, 1234)(0)
    start = time.process_time()
    plan = STRATEGIES[strategy].plan(Asked(lengths, setting, context))
    planned, before = time.process_time(), peak_bytes()
    result = simulate_step(plan, setting.job(one_slice=STRATEGIES[strategy].one_slice), timeline=timeline)
    done = time.process_time()
    return Row(
        ranks=plan.num_ranks,
        tokens=plan.tokens,
        sequences=plan.num_sequences,
        micro_batches=int(plan.microbatch_counts.sum()),
        plan_seconds=planned - start,
        plan_bytes=plan_bytes(plan),
        simulate_seconds=done - planned,
        peak_bytes=peak_bytes(),
        before_bytes=before,
        step_seconds=result.seconds,
    )


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def show(model: str, gpus: int, row: Row) -> None:
    cells = [
        model,
        f"{gpus:,}",
        f"{row.ranks:,}",
        format_size(row.tokens),
        f"{row.sequences:,}",
        f"{row.micro_batches:,}",
        f"{row.plan_seconds:.2f}",
        f"{row.plan_bytes / 2**20:.1f}",
        f"{row.simulate_seconds:.2f}",
        f"{row.before_bytes / 2**30:.2f}",
        f"{row.peak_bytes / 2**30:.2f}",
        f"{row.step_seconds:.1f}",
    ]
    print("| " + " | ".join(cells) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", default="1024,16384,131072")
    parser.add_argument("--models", default="llama-7b,llama-70b")
    parser.add_argument("--strategy", default="hdp", choices=sorted(STRATEGIES))
    parser.add_argument("--no-timeline", action="store_true")
    asked = parser.parse_args()
    os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")
    print(f"{platform.processor() or platform.machine()}, Python {platform.python_version()}, {asked.strategy}\n")
    titles = ["model", "GPUs", "ranks", "tokens", "sequences", "micro-batches", "planning, s", "plan, MiB"]
    titles += ["simulating, s", "peak GiB, planning", "peak GiB", "simulated step, s"]
    print("| " + " | ".join(titles) + " |\n|---|" + "---:|" * (len(titles) - 1))
    context = multiprocessing.get_context("spawn")
    for model in asked.models.split(","):
        for gpus in map(int, asked.gpus.split(",")):
            with context.Pool(1) as pool:
                show(model, gpus, pool.apply(measure, (model, gpus, asked.strategy, not asked.no_timeline)))


if __name__ == "__main__":
    main()
