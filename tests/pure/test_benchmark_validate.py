"""The benchmark of the simulator: what it compares, what it refuses, and runs of all of it."""

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron_hdp.cost import load_profile
from megatron_hdp.errors import DataError
from megatron_hdp.memory import ModelShape
from megatron_hdp.planner import check, plan
from megatron_hdp.planner.span import microbatch_picoseconds
from megatron_hdp.simulator.order import ops_of
from megatron_hdp.timeline import MeasuredStep
from megatron_hdp.timeline_setting import RunSetting

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

from validate_compare import compare, median_of, micro_batch_errors, verdict  # noqa: E402


def setting_of(stages=1, **changed):
    values = {
        "pool": 3,
        "stages": stages,
        "virtual_stages": 1,
        "expert_group": 1,
        "tensor_parallel": 1,
        "capacity": 2048,
        "context": 6000,
        "algorithm": "hdp",
        "device": "cpu",
        "hardware": "a processor",
        "profile": load_profile("h100"),
        "layer": None,
        "layers_per_stage": 2,
        "window": None,
        "recompute": "none",
        "pad_multiple": 2,
        "heads": None,
        "kv_heads": None,
        "model": None,
    }
    return RunSetting(**(values | changed))


def planned(setting, seed=0):
    lengths = np.random.RandomState(seed).randint(1, 5000, size=30)
    layout = {"stages": setting.stages, "algorithm": setting.algorithm, "exchange": "ring"}
    made = plan(lengths, setting.pool, setting.capacity, cost=setting.cost, **layout)
    check(made)
    return made


def measured(setting, made, factor=1.0, step=0):
    """A step whose micro-batches took ``factor`` times the compute that the cost model says, one after the other."""
    ops = ops_of(made, setting.job())
    free = setting.cost.with_free_links("all").with_stages(setting.stages)
    compute = factor * np.stack(microbatch_picoseconds(made, free))[ops.phase, ops.microbatch] / 1e12
    ends = np.concatenate([np.cumsum(compute[ops.lane == lane]) for lane in range(setting.lanes)])
    lanes = np.zeros(setting.lanes)
    return MeasuredStep(
        step=step,
        plan=made,
        stages=setting.stages,
        virtual_stages=1,
        lane=ops.lane,
        phase=ops.phase,
        slot=ops.slot,
        part=ops.part,
        begin=7 + ends - compute,
        end=7 + ends,
        compute=compute,
        ring=0 * compute,
        asked=lanes,
        done=lanes + 100,
        planned_span=None,
    )


@pytest.mark.parametrize(("stages", "algorithm"), [(1, "hdp"), (1, "static"), (2, "hdp")])
def test_compute_as_predicted_gives_the_predicted_span(stages, algorithm):
    setting = setting_of(stages, algorithm=algorithm)
    made = planned(setting)
    assert np.any(made.ring_size > 1)
    shape = ModelShape(
        layers=2 * stages, hidden=64, ffn=128, heads=4, kv_heads=2, head_dim=16, vocabulary=384, element_bytes=4
    )
    assert compare(measured(setting, made), dataclasses.replace(setting, model=shape)).replayed > 0
    found = compare(measured(setting, made), setting)
    assert found.replayed == pytest.approx(found.compute, rel=1e-9)
    assert found.work == pytest.approx(1, rel=1e-9)
    assert found.simulated >= found.compute
    assert found.wall == pytest.approx(measured(setting, made).lane_ends().max())
    slow = compare(measured(setting, made, 1.25), setting)
    assert slow.replayed == pytest.approx(1.25 * found.replayed, rel=1e-9)
    assert slow.work == pytest.approx(0.8, rel=1e-9)
    assert (slow.simulated, slow.compute) == (found.simulated, found.compute)
    assert slow.ratio == pytest.approx(0.8 * found.ratio)
    errors = micro_batch_errors([measured(setting, made, 1.25)], setting)
    assert errors.size == found.micro_batches
    assert errors == pytest.approx(-0.2)


def test_transfers_are_in_the_simulated_span_only():
    profile = load_profile("h100")
    slow = dataclasses.replace(profile, inside_node=dataclasses.replace(profile.inside_node, latency=0.1))
    setting = setting_of(algorithm="static", profile=slow)
    found = compare(measured(setting, planned(setting)), setting)
    assert found.compute == pytest.approx(found.replayed, rel=1e-9)
    assert found.ratio > 10
    assert found.lanes > 5
    other = compare(measured(setting, planned(setting)), setting, profile)
    assert other.ratio < 2


def test_lanes_ends_tell_what_the_span_hides():
    """Compute of the last rank alone is off; the span is that of another one."""
    setting = setting_of()
    made = planned(setting)
    step = measured(setting, made)
    exact = compare(step, setting)
    assert exact.lanes < 0.05  # transfers
    wrong = np.where((step.lane == 2) & (step.slot == made.microbatch_counts[2] - 1), 0.0, step.compute)
    found = compare(dataclasses.replace(step, compute=wrong), setting)
    assert found.lanes > exact.lanes


def test_medians_of_runs_are_of_micro_batches():
    setting = setting_of(2)
    made = planned(setting)
    runs = [[measured(setting, made, factor)] for factor in (1.0, 1.1, 9.0)]
    runs[0][0].compute[0] *= 50  # one disturbed micro-batch does not spoil its run
    (found,) = median_of(runs)
    truth = measured(setting, made, 1.1)
    assert found.compute[1:] == pytest.approx(truth.compute[1:])
    assert found.compute[0] == pytest.approx(9 * measured(setting, made).compute[0])
    assert np.array_equal(found.begin, runs[0][0].begin)
    with pytest.raises(DataError, match="run 2 had other steps or other plans"):
        median_of([[measured(setting, made)], [measured(setting, planned(setting, 1))]])


def test_verdict_is_of_the_worst_step():
    fine = verdict([0.95, 1.0, 1.09], [1.0, 1.0, 1.0])
    assert (fine.median, fine.worst, fine.holds) == (1.0, 1.09, True)
    assert fine.overall == pytest.approx(3.04 / 3)
    assert not verdict([1.0, 1.0, 0.89], [1.0, 1.0, 1.0]).holds
    assert verdict([0.89, 1.1], [1.0, 1.0]).worst == 0.89


@pytest.fixture
def driver():
    pytest.importorskip("torch")
    import validate

    return validate


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--runs 0", "--runs 0: it must be at least 1"),
        ("--steps 0", "--steps 0: it must be at least 1"),
        ("--cases 2", "--cases 2: write RANKS:ALGORITHM"),
        ("--cases 2:best", "--cases 2:best: write RANKS:ALGORITHM"),
        ("--cases 0:hdp", "--cases 0:hdp: write RANKS:ALGORITHM"),
        ("--cases 2x0:hdp", "--cases 2x0:hdp: write"),
    ],
)
def test_refused(driver, words, message, capsys):
    with pytest.raises(SystemExit):
        driver.parse(words.split())
    assert message in capsys.readouterr().err


def test_a_rank_alone_holds_the_whole_context(driver):
    options = driver.parse(["--context", "1000", "--tokens-per-rank", "400"])
    assert [str(case) for case in options.cases][-1] == "2 ranks x 2 stages, static"
    for ranks, capacity in ((1, "1000"), (2, "500"), (4, "400")):
        flags = options.flags(ranks)
        assert flags[flags.index("--hdp-tokens-per-rank") + 1] == capacity


def run(out, code, *words):
    command = [sys.executable, BENCHMARKS / "validate.py", "--out", out, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1700)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout, json.loads((out / "results.json").read_text())


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_small_run(driver, tmp_path):
    """All of it but the profile: shapes of what comes out, and the criterion fails where the profile is another's."""
    small = "--profile h100 --runs 1 --steps 2 --context 256 --batch-tokens 2048 --cases 1:hdp"
    output, (result,) = run(tmp_path, 1, *small.split())
    assert [row["step"] for row in result["rows"]] == [2, 3]
    assert all(row["replayed"] > 0.002 and row["shared"] == 0 and row["tokens"] > 1500 for row in result["rows"])
    assert re.search(r"^\| 1 rank, hdp \|.*\| NO \|", output, re.MULTILINE)
    assert len(re.findall(r"^\| [23] \|", output, re.MULTILINE)) == 2


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_simulated_spans_are_replayed_spans(driver, tmp_path):
    """The criterion, on the demo's data: within 10 % in every step. On a machine with nothing else to do."""
    output, results = run(tmp_path, 0, *"--seconds 60 --runs 2 --steps 3 --cases 2:hdp,2:static".split())
    assert len(results) == 2
    assert output.count("| yes |") == 2
