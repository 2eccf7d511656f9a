"""The benchmark of scale runs, and its limits hold: 2 s for 1,024 GPUs, 20 s for 16,384, 3 min for 131,072, 4 GB."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_hdp.planner import core_backend

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "simulator.py"
ROW = r"^\| (\S+) \| ([\d,]+) \|.*\| ([\d.]+) \| [\d.]+ \| ([\d.]+) \| [\d.]+ \| ([\d.]+) \| [\d.]+ \|$"


def measured(gpus: int, models: str) -> list[tuple[float, float]]:
    """Seconds of planning and simulating, and GiB, of each model."""
    command = [sys.executable, SCRIPT, "--gpus", str(gpus), "--models", models]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr
    rows = re.findall(ROW, done.stdout, re.M)
    assert [row[0] for row in rows] == models.split(",")
    assert all(row[1] == f"{gpus:,}" for row in rows)
    return [(float(plan) + float(simulate), float(peak)) for _, _, plan, simulate, peak in rows]


@pytest.mark.skipif(core_backend() != "c++", reason="limits are those of the compiled planner")
def test_a_thousand():
    for seconds, gib in measured(1024, "llama-7b,llama-70b"):
        assert seconds < 2
        assert gib < 0.5


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.skipif(core_backend() != "c++", reason="limits are those of the compiled planner")
@pytest.mark.parametrize(("gpus", "limit"), [(16_384, 20), (131_072, 180)])
def test_many_thousands(gpus, limit):
    for seconds, gib in measured(gpus, "llama-7b,llama-70b"):
        assert seconds < limit
        assert gib < 4e9 / 2**30
