"""The benchmark of strategies runs, goes on where it was stopped, and counts right."""

import json
import re
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "strategies.py"
SMALL = ["--quick", "--models", "llama-7b", "--strategies", "hdp,bytescale,naive,pow2,static,ulysses,blocks"]


def run(*arguments: object) -> str:
    done = subprocess.run(
        [sys.executable, SCRIPT, *SMALL, *arguments], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_small_run_and_again(tmp_path):
    out = tmp_path / "all.json"
    first = run("--out", out, "--parts", "grid")
    rows = json.loads(out.read_text())["rows"]
    assert len(rows) == 2 * 7  # data sets, strategies
    assert {row["strategy"] for row in rows if row["failed"]} == {"ulysses"}
    assert "Of 8 steps of rivals (estimates not counted) 0 are shorter than ours." in first
    seconds = {(row["data"], row["strategy"]): row["seconds"] for row in rows if not row["failed"]}
    for data in ("byted", "github"):
        found = re.search(rf"### grid, {data}: .*?\n\| llama-7b, 256K \| 512 \|([^\n]*)", first, re.S)
        assert found is not None
        cells = [cell.split()[0] for cell in found[1].split("|") if cell.strip()]
        assert float(cells[0]) == round(seconds[data, "static"], 1)
        ratio = seconds[data, "static"] / seconds[data, "hdp"]
        assert cells[1] == f"{ratio:.2f}"

    second = run("--out", out, "--parts", "grid,offload")
    assert second.count(" s of CPU") == 2  # only what is new, the cells with offload
    assert "ulysses cannot" in second
    lost = json.loads(out.read_text())
    for row in lost["rows"]:
        if row["strategy"] == "pow2":
            row["seconds"] = seconds[row["data"], "hdp"] * 0.99
    lost["mark"] = "of another planner"
    out.write_text(json.dumps(lost))
    assert " s of CPU" not in run("--out", out, "--parts", "grid", "--keep")
    third = run("--render", out)
    assert "2 are shorter than ours" in third
    assert "llama-7b, 1,024 GPUs, byted, 256K, batch 0: pow2 0.99000" in third
