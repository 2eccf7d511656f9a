"""The benchmark of the planner runs, and what its small run prints is true."""

import re
import subprocess
import sys
from pathlib import Path

from megatron_hdp.planner import core_backend

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "planner.py"


def test_small_run():
    command = [sys.executable, SCRIPT, "--quick", "--only", "quality,pipelines,speed"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    out = done.stdout
    assert "hdp has the longer span in 0 of 24 comparisons" in out
    rows = re.findall(r"^\| (byted|github|wikipedia-like|lognormal:\S+) \| 64 \| ([\d.]+) .*$", out, re.M)
    assert len(rows) >= 6
    efficiencies = [float(efficiency) for _, efficiency in rows[:6]]
    assert all(90 < efficiency <= 100 for efficiency in efficiencies), efficiencies
    spans = [float(span) for span in re.findall(r"^\| byted \| \d x \d x \d \| 8 \| [\d.]+ \| ([\d.]+) ", out, re.M)]
    assert len(spans) == 6
    assert all(1 <= span < 2 for span in spans)
    if core_backend() == "c++":
        assert out.count("| yes |") == 3
        assert "| NO |" not in out


def test_batches_from_a_file_hold_the_tokens_that_were_asked_for(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(SCRIPT.parent)
    import planner as benchmark

    file = tmp_path / "some.txt"
    file.write_text("".join(f"{length}\n" for length in (5, 700, 30, 64, 0, 9)))
    data = benchmark.of_file(file)
    batches = [data.batch(2000, 500, step) for step in (0, 1, 0)]
    assert all(batch.sum() == 2000 for batch in batches)
    assert all(batch.max() <= 500 for batch in batches)
    assert batches[0].tolist() == batches[2].tolist() != batches[1].tolist()
    assert (data.name, data.longest) == ("some", 700)
