"""The benchmark of pipelines runs, its baseline is what it says, and its layer costs what its profile says."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

from megatron_hdp.cost import CostModel, load_profile
from megatron_hdp.planner import check

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "pipeline.py"


def test_small_run():
    command = [sys.executable, SCRIPT, "--batches", "1", "--measured-batches", "0", "--columns", "4", "--stages", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    ratios = [float(ratio) for ratio in re.findall(r"\| \d+ \| \d+ \| ([\d.]+) \(", done.stdout)]
    assert len(ratios) == 8
    assert all(0.3 < ratio < 1 for ratio in ratios)


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPT.parent)
    import pipeline

    return pipeline


@pytest.mark.parametrize("parts", [1, 2])
def test_shuffled_order_has_equal_counts_and_keeps_the_order(benchmark, parts):
    cost = CostModel(load_profile("bytescale"), 8)
    lengths = np.array([30, 40, 40, 150, 60, 50, 10, 350, 7])
    layout = benchmark.Layout(4, 2, parts)
    made = benchmark.shuffled_equal(lengths, layout, 100, cost)
    check(made, stages=2, virtual_stages=parts)
    assert len(set(made.microbatch_counts.tolist())) == 1
    assert made.ring_size.tolist() == [1, 1, 1, 2, 1, 1, 1, 4, 1]
    packs = {tuple(piece.sequence for piece in each.pieces) for rank in made for each in rank if each.pieces}
    assert packs == {(0, 1), (2, 4), (3,), (5, 6, 8), (7,)}  # filled as the sequences come


def test_measured_times_have_the_order_of_the_micro_batches(benchmark):
    from pipeline_layer import microbatch_seconds

    layout = benchmark.Layout(2, 2, 1)
    made = benchmark.shuffled_equal(np.array([8, 400, 8]), layout, 400, CostModel(load_profile("bytescale"), 8))
    forward, backward = microbatch_seconds(made, repeats=3)
    assert forward.shape == backward.shape == (made.microbatch_offsets.size - 1,)
    tokens = [each.tokens for rank in made for each in rank]
    assert int(np.argmax(forward + backward)) == int(np.argmax(tokens))
