"""Does the simulator say what runs do? The demo's data and model on CPU ranks, against measured compute, replayed.

python benchmarks/validate.py [--cases 1:hdp,2:static,2x2:hdp] [--profile FILE] [--seconds 60] [--runs 1] [--steps 3]

Measures profiles of the demo's model on CPU ranks of one thread each, with as many processes as the cases have, and
trains with them and with --hdp-timeline, once for each case: ranks (x pipeline stages) and algorithm. The measured
compute of every micro-batch is CPU time, so ranks may share cores. It is replayed: ranks wait for each other where the
simulator says so. The span that comes out is held against the one that the simulator says from the profile alone.
Prints Markdown and ends with code 1 unless every step of every case is within 10 %; docs/validation.md has a run of it.
It takes about eight minutes where nothing else runs. Meanwhile no core is idle: processes of the lowest priority
compute on all of them, because a core may be faster while its neighbour does nothing, and the profile and the runs must
have the same cores.
"""

import argparse
import dataclasses
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from attention_machine import Others, every_core_busy, machine
from validate_compare import LIMIT, Compared, Verdict, compare, median_of, micro_batch_errors, verdict

from megatron_hdp.errors import HdpError
from megatron_hdp.timeline import MeasuredStep, read_timeline
from megatron_hdp.timeline_setting import RunSetting

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

import demo  # noqa: E402  # its corpus and flags, so that this is the demo's run and stays it

WARM_UP = 2
"""Steps whose times do not count: memory is touched for the first time in them."""


@dataclass(frozen=True)
class Case:
    """One way to train."""

    ranks: int
    stages: int
    algorithm: str

    def __str__(self) -> str:
        stages = f" x {self.stages} stages" if self.stages > 1 else ""
        return f"{self.ranks} rank{'s' if self.ranks > 1 else ''}{stages}, {self.algorithm}"

    @property
    def name(self) -> str:
        """For files."""
        return f"{self.ranks}x{self.stages}-{self.algorithm}"


@dataclass(frozen=True, kw_only=True)
class Options:
    """One call of the benchmark."""

    out: Path
    cases: tuple[Case, ...]
    profile: str | None
    """None: measured first."""
    seconds: float
    runs: int
    steps: int
    context: int
    tokens_per_rank: int
    batch_tokens: int

    @property
    def iterations(self) -> int:
        """Training steps of a run."""
        return WARM_UP + self.steps

    def flags(self, ranks: int, stages: int = 1) -> list[str]:
        """The training script's; later ones count. A rank alone holds the whole context."""
        capacity = max(self.tokens_per_rank, -(-self.context // ranks))
        return [
            *demo._model_flags(),
            *demo._data_flags(self.out / "stdlib", self.iterations),
            *("--seq-length", str(self.context), "--max-position-embeddings", str(self.context)),
            *("--hdp", "--hdp-tokens-per-rank", str(capacity), "--hdp-batch-tokens", str(self.batch_tokens)),
            *("--pipeline-model-parallel-size", str(stages)),
        ]


@dataclass(frozen=True)
class Result:
    """One case."""

    case: str
    rows: tuple[Compared, ...]
    """Of the medians over runs."""
    errors: tuple[float, ...]
    """Least, quartiles and largest of the micro-batches' errors; compute alone."""


def main() -> None:
    options = parse(sys.argv[1:])
    print(f"{machine()}\n", flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    demo._corpus(options.out)
    try:
        with every_core_busy() as busy:
            profiles = measure_profiles(options, busy)
            runs = train_all(profiles, options, busy)
        results = [judge(case, runs[case]) for case in options.cases]
    except HdpError as error:
        sys.exit(f"validate.py: {error}")
    print("\n".join(line for result in results for line in table(result)))
    print("\n".join(summary(results)))
    saved = [dataclasses.asdict(result) for result in results]
    (options.out / "results.json").write_text(json.dumps(saved, indent=2) + "\n", encoding="utf-8")
    sys.exit(0 if all(judged(result).holds for result in results) else 1)


def parse(words: Sequence[str]) -> Options:
    """Options from the command line; ends the program with a message for wrong ones."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "demo_out" / "validate", help="folder for all that is made")
    default = "1:hdp,2:hdp,2:static,4:hdp,4:static,2x2:hdp,2x2:static"
    parser.add_argument("--cases", default=default, help=f"RANKS[xSTAGES]:ALGORITHM, ... (default {default})")
    parser.add_argument("--profile", help="a profile of this model and machine (default: measure)")
    parser.add_argument("--seconds", type=float, default=60.0, help="time to measure a profile in (default 60)")
    parser.add_argument("--runs", type=int, default=1, help="of each case; medians count (default 1)")
    parser.add_argument("--steps", type=int, default=3, help=f"of each run that count, after {WARM_UP} (default 3)")
    parser.add_argument("--context", type=int, default=demo.CONTEXT, help="longest sequence (default: the demo's)")
    parser.add_argument(
        "--tokens-per-rank", type=int, default=demo.TOKENS_PER_RANK, help="capacity (default: the demo's)"
    )
    parser.add_argument("--batch-tokens", type=int, default=49152, help="of a step (default 49152)")
    given = parser.parse_args(words)
    for name in ("runs", "steps"):
        if getattr(given, name) < 1:
            parser.error(f"--{name} {getattr(given, name)}: it must be at least 1")
    try:
        given.cases = tuple(_case(text) for text in given.cases.split(","))
    except ValueError:
        parser.error(f"--cases {given.cases}: write RANKS:ALGORITHM or RANKSxSTAGES:ALGORITHM, with commas between")
    given.out = given.out.resolve()
    return Options(**vars(given))


def _case(text: str) -> Case:
    size, algorithm = text.split(":")
    ranks, _, stages = size.partition("x")
    case = Case(int(ranks), int(stages or 1), algorithm)
    if case.ranks < 1 or case.stages < 1 or algorithm not in ("hdp", "static"):
        raise ValueError(text)
    return case


def measure_profiles(options: Options, busy: Sequence[int]) -> dict[int, str]:
    """The profile for each number of processes: that of --profile, or one measured with so many, as users should.

    Where processes share cores, they push each other out of caches, and a second of CPU time does less.
    """
    found = {}
    for processes in sorted({case.ranks * case.stages for case in options.cases}):
        if options.profile is not None:
            found[processes] = options.profile
            continue
        others = Others(busy)
        found[processes] = str(options.out / f"profile-{processes}.json")
        print(f"measuring a profile of {processes} ranks for {options.seconds:.0f} s ...", flush=True)
        words = ["profile", "--out", found[processes], "--seconds", str(options.seconds)]
        words.append(str(ROOT / "scripts" / "pretrain_gpt.py"))
        capacity = ["--hdp-tokens-per-rank", str(options.context)]  # sequences of the whole context count as well
        launch([*words, *options.flags(processes), *capacity], processes, options, f"profile-{processes}.log")
        print(f"{used(others)} meanwhile", flush=True)
    return found


type Runs = list[tuple[RunSetting, tuple[MeasuredStep, ...]]]
"""What each run of a case was, and its steps after the warm-up."""


def used(others: Others) -> str:
    """What a measurement was disturbed by."""
    return f"other programs used {100 * others.share():.0f} % of all cores"


def train_all(profiles: dict[int, str], options: Options, busy: Sequence[int]) -> dict[Case, Runs]:
    """Train ``options.runs`` times in every case; the cases take turns, so that what disturbs them disturbs all."""
    runs: dict[Case, Runs] = {case: [] for case in options.cases}
    for number in range(options.runs):
        for case in options.cases:
            others = Others(busy)
            runs[case].append(train(case, profiles[case.ranks * case.stages], options))
            print(f"{case}, run {number + 1} of {options.runs}: {used(others)}", flush=True)
    return runs


def judge(case: Case, runs: Runs) -> Result:
    """The medians of a case's runs against the simulator."""
    setting = runs[0][0]
    steps = median_of([steps for _, steps in runs])
    rows = tuple(compare(step, setting) for step in steps)
    errors = tuple(np.percentile(micro_batch_errors(steps, setting), (0, 25, 50, 75, 100)).tolist())
    return Result(str(case), rows, errors)


def train(case: Case, profile: str, options: Options) -> tuple[RunSetting, tuple[MeasuredStep, ...]]:
    """One run."""
    folder = options.out / f"timeline-{case.name}"
    shutil.rmtree(folder, ignore_errors=True)
    words = [str(ROOT / "scripts" / "pretrain_gpt.py"), *options.flags(case.ranks, case.stages)]
    words += ["--hdp-algorithm", case.algorithm, "--hdp-profile", profile, "--hdp-timeline", str(folder)]
    launch(words, case.ranks * case.stages, options, f"{case.name}.log")
    run = read_timeline(folder)
    return run.setting, tuple(step for step in run.steps if step.step >= WARM_UP)


def launch(words: Sequence[str], processes: int, options: Options, log: str) -> None:
    """Run the launcher on so many processes, its output in the file ``log``; ends the program if it fails."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    console = options.out / log
    with console.open("w", encoding="utf-8") as file:
        done = subprocess.run(
            [*command, "-m", "megatron_hdp", "--cpu", *words],
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            cwd=ROOT,
        )
    if done.returncode:
        tail = console.read_text(encoding="utf-8", errors="replace").splitlines()[-30:]
        sys.exit("\n".join([*tail, f"validate.py: exit code {done.returncode}; all output: {console}"]))


def table(result: Result) -> list[str]:
    """Markdown: every step of a case."""
    low, first, middle, third, high = (f"{100 * error:+.1f}" for error in result.errors)
    return [
        f"\n{result.case}\n",
        "| step | tokens | sequences (shared) | micro-batches | simulated, s | of it compute, s | replayed, s "
        "| simulated / replayed | lanes' ends | compute / measured | wall clock, s |",
        "|" + "---:|" * 11,
        *(
            f"| {row.step} | {row.tokens:,} | {row.sequences} ({row.shared}) | {row.micro_batches} | "
            f"{row.simulated:.3f} | {row.compute:.3f} | {row.replayed:.3f} | {row.ratio:.3f} | {100 * row.lanes:.1f} % "
            f"| {row.work:.3f} | {row.wall:.3f} |"
            for row in result.rows
        ),
        f"\nsingle micro-batches, compute: {low} % to {high} %, quartiles {first}, {middle}, {third} %",
    ]


def judged(result: Result) -> Verdict:
    """The criterion's numbers of a case."""
    return verdict([row.simulated for row in result.rows], [row.replayed for row in result.rows])


def summary(results: Sequence[Result]) -> list[str]:
    """Markdown: all cases, one line each."""
    lines = [
        "\n| case | simulated / replayed: median | worst step | of the sums | within "
        f"{100 * LIMIT:.0f} % | wall clock / replayed |",
        "|---|" + "---:|" * 5,
    ]
    for result in results:
        found = judged(result)
        wall = sum(row.wall for row in result.rows) / sum(row.replayed for row in result.rows)
        lines.append(
            f"| {result.case} | {found.median:.3f} | {found.worst:.3f} | {found.overall:.3f} | "
            f"{'yes' if found.holds else 'NO'} | {wall:.3f} |"
        )
    return lines


if __name__ == "__main__":
    main()
