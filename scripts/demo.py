"""The main job in a few minutes on CPU ranks: train a small LLaMA-shaped model on real documents, twice.

Run it with `make demo`. Both runs go through Megatron-Core's own training loop with the same data order and the same
attention code; one plans with HDP, the other cuts every sequence over all ranks, as static context parallelism does.
Results go to demo_out/: a corpus, the logs, results.json and a short README.txt of what was shown.
"""

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_hdp.data.stdlib_corpus import VOCABULARY_SIZE, build_stdlib_corpus

ROOT = Path(__file__).resolve().parent.parent
RANKS = 4
CONTEXT = 16384
TOKENS_PER_RANK = 8192
BATCH_TOKENS = 65536
SEED = 1234


@dataclass(frozen=True)
class Run:
    """What one training run left behind, one entry per iteration."""

    algorithm: str
    steps: list[dict[str, Any]]
    seconds: float


def main() -> None:
    """Build the corpus, train twice, print the table, write the results."""
    options = _options()
    out = Path(options.out).resolve()
    out.mkdir(parents=True, exist_ok=True)
    corpus = _corpus(out)
    runs = [_train(algorithm, out, options.iterations) for algorithm in ("hdp", "static")]
    results = _results(corpus, *runs)
    (out / "results.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    table = _table(results)
    (out / "README.txt").write_text(table, encoding="utf-8")
    print(table)
    print(f"written: {out / 'results.json'} and {out / 'README.txt'}")
    if results["largest_loss_difference"] > 1e-4:
        sys.exit(f"the two runs differ by {results['largest_loss_difference']:.1e} in loss: they must not")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--iterations", type=int, default=6, help="training steps of each run (default 6)")
    parser.add_argument("--out", default=ROOT / "demo_out", help="folder for corpus, logs and results")
    options = parser.parse_args()
    if options.iterations < 1:
        parser.error(f"--iterations {options.iterations}: it must be at least 1")
    return options


def _corpus(out: Path) -> dict[str, Any]:
    prefix = out / "stdlib"
    summary_file = out / "corpus.json"
    if not summary_file.exists():
        print("building a corpus from Python's standard library ...", flush=True)
        summary = build_stdlib_corpus(prefix)
        summary_file.write_text(
            json.dumps({"documents": summary.documents, "tokens": summary.tokens, "longest": summary.longest}),
            encoding="utf-8",
        )
    data: dict[str, Any] = json.loads(summary_file.read_text(encoding="utf-8"))
    print(f"corpus: {data['documents']} documents, {data['tokens']} tokens (bytes), longest {data['longest']}")
    return data


def _train(algorithm: str, out: Path, iterations: int) -> Run:
    log = out / f"{algorithm}.jsonl"
    log.unlink(missing_ok=True)
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS)),
        "--standalone",
        *("-m", "megatron_hdp", "--cpu", str(ROOT / "scripts" / "pretrain_gpt.py")),
        *_model_flags(),
        *_data_flags(out / "stdlib", iterations),
        *("--hdp", "--hdp-tokens-per-rank", str(TOKENS_PER_RANK), "--hdp-batch-tokens", str(BATCH_TOKENS)),
        *("--hdp-algorithm", algorithm, "--hdp-log", str(log)),
    ]
    print(f"\n{algorithm}: {RANKS} ranks, {iterations} iterations (starting takes about 15 seconds)", flush=True)
    start = time.perf_counter()
    console = out / f"{algorithm}.log"
    for line in _lines(command, console):
        match = re.search(r"iteration +(\d+)/ +(\d+) .*elapsed time per iteration \(ms\): ([\d.]+)", line)
        if match:
            print(f"  iteration {match[1]}/{match[2]}  {float(match[3]) / 1e3:.1f} s", flush=True)
    steps = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()] if log.exists() else []
    if len(steps) != iterations:
        sys.exit(f"{algorithm}: {len(steps)} of {iterations} iterations were logged; see {console}")
    return Run(algorithm, steps, time.perf_counter() - start)


def _model_flags() -> list[str]:
    """A LLaMA in small: RMSNorm, SwiGLU, rotary positions, grouped queries, no biases, no dropout."""
    flags = (
        "--num-layers 2 --hidden-size 64 --ffn-hidden-size 172 --num-attention-heads 2 --group-query-attention "
        "--num-query-groups 1 --normalization RMSNorm --swiglu --disable-bias-linear --position-embedding-type rope "
        "--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --use-distributed-optimizer "
        f"--seq-length {CONTEXT} --max-position-embeddings {CONTEXT}"
    )
    return flags.split()


def _data_flags(prefix: Path, iterations: int) -> list[str]:
    warm_up = min(2, iterations - 1)  # Megatron wants it shorter than the run
    flags = (
        f"--data-path {prefix} --split 98,2,0 --tokenizer-type NullTokenizer --vocab-size {VOCABULARY_SIZE} "
        f"--train-iters {iterations} --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --lr-warmup-iters {warm_up} "
        f"--log-interval 1 --eval-iters 0 --eval-interval 1000 --seed {SEED}"
    )
    return flags.split()


def _lines(command: list[str], console: Path) -> Iterator[str]:
    """Output lines of the command, also written to ``console``. Exits with their tail if the command fails."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    tail: list[str] = []
    with console.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, cwd=ROOT
        )
        assert process.stdout is not None
        for line in process.stdout:
            file.write(line)
            tail = [*tail[-30:], line]
            yield line
    if process.wait() != 0:
        sys.exit("".join(tail) + f"\ntraining ended with exit code {process.returncode}; all output: {console}")


def _results(corpus: dict[str, Any], hdp: Run, static: Run) -> dict[str, Any]:
    pairs = list(zip(hdp.steps, static.steps))
    return {
        "hardware": f"{os.cpu_count()} cores shared by {RANKS} ranks, {platform.machine()}",
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
        "corpus": corpus,
        "ranks": RANKS,
        "context": CONTEXT,
        "tokens_per_rank": TOKENS_PER_RANK,
        "batch_tokens": BATCH_TOKENS,
        "losses": [[a["loss"], b["loss"]] for a, b in pairs],
        "largest_loss_difference": max(abs(a["loss"] - b["loss"]) for a, b in pairs),
        "runs": {run.algorithm: _totals(run) for run in (hdp, static)},
    }


def _totals(run: Run) -> dict[str, Any]:
    rings: dict[str, int] = {}
    for step in run.steps:
        for size, count in step["ring_sizes"].items():
            rings[size] = rings.get(size, 0) + count
    # the first step warms caches up and the second one starts its clock late: rates are over the rest
    timed = run.steps[1:] if len(run.steps) > 1 else run.steps
    tokens = sum(step["tokens"] for step in run.steps)
    return {
        "seconds_with_start": run.seconds,
        "tokens": tokens,
        "sequences": sum(step["sequences"] for step in run.steps),
        "ring_sizes": dict(sorted(rings.items(), key=lambda item: int(item[0]))),
        "bytes_sent": sum(step["bytes_sent"] for step in run.steps),
        "padding_fraction": sum(step["padding_tokens"] for step in run.steps) / tokens,
        "micro_batches_max": max(step["micro_batches_max"] for step in run.steps),
        "tokens_per_second": sum(step["tokens"] for step in timed) / sum(step["seconds"] for step in timed),
        "plan_milliseconds": 1e3 * sum(step["plan_seconds"] for step in run.steps) / len(run.steps),
    }


def _table(results: dict[str, Any]) -> str:
    hdp, static = results["runs"]["hdp"], results["runs"]["static"]
    rows = [
        ("tokens trained on", *(f"{run['tokens']:,}" for run in (hdp, static))),
        ("sequences", *(f"{run['sequences']:,}" for run in (hdp, static))),
        ("ring size: sequences", *(_rings(run["ring_sizes"]) for run in (hdp, static))),
        ("sent over rings, MiB", *(f"{run['bytes_sent'] / 2**20:,.1f}" for run in (hdp, static))),
        ("padding, % of tokens", *(f"{100 * run['padding_fraction']:.3f}" for run in (hdp, static))),
        ("planning, ms a step", *(f"{run['plan_milliseconds']:.1f}" for run in (hdp, static))),
        ("tokens/s (see note)", *(f"{run['tokens_per_second']:,.0f}" for run in (hdp, static))),
    ]
    lines = [
        "megatron_hdp demo: one LLaMA-shaped model, real documents, the same order of data, trained twice",
        f"HDP (a ring for each sequence) and static context parallelism (every sequence over all {RANKS} ranks),",
        "same attention code, both through Megatron-Core's own training loop on CPU ranks.",
        "",
        f"{'iteration':>9}  {'loss, HDP':>12}  {'loss, static':>12}  {'difference':>10}",
        *(f"{i:>9}  {a:>12.7f}  {b:>12.7f}  {a - b:>10.1e}" for i, (a, b) in enumerate(results["losses"], 1)),
        f"largest difference: {results['largest_loss_difference']:.1e}",
        "",
        f"{'':<24}{'HDP':>28}{'static':>28}",
        *(f"{name:<24}{left:>28}{right:>28}" for name, left, right in rows),
        "",
        f"Note: {results['hardware']}, {results['date']}. Ranks that share cores take turns, so tokens/s shows the",
        "work saved, not the speed-up of a cluster, where waiting for other ranks and slow links count as well.",
    ]
    return "\n".join(lines) + "\n"


def _rings(sizes: dict[str, int]) -> str:
    return ", ".join(f"{size}: {count}" for size, count in sizes.items())


if __name__ == "__main__":
    main()
