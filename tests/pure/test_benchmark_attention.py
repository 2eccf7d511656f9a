"""The benchmark of attention runs, and its small run finds every exchange exact and its traffic as predicted.

So does the program in the documentation.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

from megatron_hdp.planner import check

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "attention.py"
DOCUMENT = Path(__file__).parents[2] / "docs" / "attention.md"


def test_small_run(tmp_path):
    results, trace = tmp_path / "results.json", tmp_path / "trace.json"
    sizes = ["--ranks", "1,2", "--tokens", "240", "--mix-tokens", "100", "--short-tokens", "32", "--repeats", "1"]
    heads = ["--heads", "4", "--kv-heads", "2", "--head-dim", "16"]
    command = [sys.executable, SCRIPT, *sizes, *heads, "--json", results, "--trace", trace]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    rows = json.loads(results.read_text())["rows"]
    shared = [row for row in rows if row["ranks"] == 2 and row["as_predicted"] is not None]
    exchanges = ["ring", "ring", "gather", "gather", "heads", "heads"]
    assert [row["variant"] for row in shared] == 2 * exchanges
    assert all(row["as_predicted"] and row["sent_bytes"] > 0 for row in shared)
    assert all(row["error"] < 1e-5 for row in rows if row["ranks"] == 2)
    assert all(0 <= row["hidden"] <= 1 for row in shared)
    rivals = [row for row in rows if row["variant"].startswith("torch ring")]
    assert len(rivals) == 2 or "ring cannot be called" in done.stdout
    assert "| NO |" not in done.stdout
    events = json.loads(trace.read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1}
    assert {"X", "b", "e", "M"} == {event["ph"] for event in events}


@pytest.mark.parametrize("kernel", ["auto", "reference"])
def test_blocks_alone(kernel, monkeypatch):
    monkeypatch.syspath_prepend(SCRIPT.parent)
    from attention_blocks import block_tables
    from attention_ranks import Shape

    text, rows = block_tables(Shape(2, 1, 16, "float32", None, kernel), [16, 30], "cpu", repeats=1)
    for rival in ("flash-attn", "ring-flash-attn", "Transformer Engine"):
        assert f"- {rival}" in text
    assert [row["tokens"] for row in rows if row.get("with") == "hdp_attention"] == [16, 30]
    assert [row["rows"] for row in rows if "all x half" in row] == [16, 30]
    assert all(row["causal"] > 0 for row in rows if "causal" in row)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--cases short", "--cases is 'short'"),
        ("--tokens x", "--tokens is 'x'"),
        ("--tokens 7", "--tokens is 7, and --ranks goes up to 4: give two tokens for each, 8 or more"),
        ("--short-tokens 15", "--short-tokens is 15: give at least 16"),
        ("--ranks 0", "--ranks is '0': give numbers of processes from 1 to 64"),
        ("--ranks 2,1K", "--ranks is '2,1K': give numbers"),
        ("--heads 8 --kv-heads 3", "--heads is 8 and --kv-heads is 3"),
        ("--kv-heads 0", "--kv-heads is 0: give at least 1"),
        ("--repeats 0", "--repeats is 0: give at least 1"),
        ("--kernel foo", "--kernel foo: there is no such kernel"),
        (
            "--exchanges heads --heads 3 --ranks 2,4",
            "3 query and 3 key/value heads cannot be swapped on a ring of 2 or 4",
        ),
        ("--exchanges heads,ring --ranks 1", "cannot be swapped on one rank"),
        ("--ranks 1 --trace t.json", "--trace t.json: there is no exchange to show; give --ranks above 1"),
        ("--trace nowhere/t.json", "--trace nowhere/t.json: there is no folder nowhere"),
        ("--json .", "--json .: that is a folder"),
        ("--blocks 1K --window 4 --no-rivals", "has no use for --window, --no-rivals"),
        ("--device cuda", "ranks are processes on CPU: give --blocks with it"),
    ],
)
def test_what_cannot_run_is_refused(arguments, words, monkeypatch, tmp_path, capsys):
    monkeypatch.syspath_prepend(SCRIPT.parent)
    from attention_flags import arguments as understood

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["attention.py", *arguments.split()])
    with pytest.raises(SystemExit):
        understood("")
    assert words in capsys.readouterr().err


def test_what_is_given_twice_runs_once(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPT.parent)
    from attention_flags import arguments

    twice = "--ranks 2,2,1 --cases mix,mix --exchanges gather,ring,gather"
    monkeypatch.setattr(sys, "argv", ["attention.py", *twice.split()])
    args = arguments("")
    assert (args.ranks, args.cases, args.exchanges) == ([2, 1], ["mix"], ["gather", "ring"])


def test_rings_that_cannot_swap_heads_are_named(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPT.parent)
    import attention as benchmark
    from attention_flags import arguments, head_groups, unswappable

    assert head_groups(8, 8, 8) == [8, 4, 2]
    assert head_groups(8, 4, 2) == [4, 2]
    assert head_groups(6, 12, 2) == [6, 2]  # 3 neither divides 2 key/value heads nor is a multiple
    assert head_groups(4, 3, 3) == []
    monkeypatch.setattr(sys, "argv", ["attention.py", "--heads", "4", "--ranks", "1,2,3,5"])
    args = arguments("")
    expected = "no rows for heads on 3 and 5 ranks: 4 query and 4 key/value heads cannot be swapped there"
    assert unswappable(args) == expected
    assert f"- {expected}" in benchmark.notes(args, [], None)
    args.exchanges = ["ring"]
    assert unswappable(args) == ""


def test_every_column_is_explained(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPT.parent)
    import attention as benchmark

    columns = [cell.strip() for cell in benchmark.table([]).splitlines()[0].strip("|").split("|")]
    described = columns[columns.index("overlap") + 1 :]
    document = DOCUMENT.read_text().split("| column | meaning |")[1]
    rows = [line.split("|")[1].strip() for line in document.split("\n\n")[0].splitlines()[2:]]
    assert rows == described


def test_the_documented_program_prints_what_the_document_says(tmp_path):
    text = DOCUMENT.read_text()
    program, printed = re.findall(r"```python\n(.*?)```.*?```\n(rank 0: .*?)```", text, re.DOTALL)[0]
    path = tmp_path / "attention_example.py"
    path.write_text(program)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--redirects", "3", "--log-dir", tmp_path / "logs", path]  # else the ranks' lines may mix
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, [path.read_text() for path in (tmp_path / "logs").rglob("stderr.log")]
    found = {path.parent.name: path.read_text() for path in (tmp_path / "logs").rglob("stdout.log")}
    assert found["0"] == printed
    assert "rank 1: exact" in found["1"]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_cases_are_sound_plans_and_hold_every_token_once(ranks, monkeypatch):
    monkeypatch.syspath_prepend(SCRIPT.parent)
    import attention_ranks as benchmark

    case = benchmark.Case("mix", 101, (7, 1, 30, 12, 5))
    made = benchmark.case_plan(case, ranks, benchmark.Variant("gather"))
    check(made)
    rows = np.concatenate([benchmark.token_rows(made, rank).numpy() for rank in range(ranks)])
    assert sorted(rows[rows >= 0].tolist()) == list(range(made.tokens))
    held = [made.micro_batch(rank, 0) for rank in range(ranks)]
    assert all(len(micro_batch.pieces) > 1 for micro_batch in held)


def test_the_rival_holds_every_token_once(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPT.parent)
    import attention_ranks as benchmark

    rows = [benchmark._rival_rows(24, 3, rank).tolist() for rank in range(3)]
    assert rows[1] == [4, 5, 6, 7, 16, 17, 18, 19]
    assert sorted(token for held in rows for token in held) == list(range(24))
