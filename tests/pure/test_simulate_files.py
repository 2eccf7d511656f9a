"""Simulations as files: what is written comes back, what is damaged is refused with the place."""

import copy
import json
import os
import stat
from pathlib import Path

import numpy as np
import pytest

from megatron_hdp.errors import ConfigError, DataError
from megatron_hdp.simulator.files import Simulation, StrategyRun, read_simulation, whole_file, write_simulation
from megatron_hdp.simulator.result import CAUSES, KINDS, Timeline

TIMES = ("start", "end", "compute", "ring", "partner", "expert", "copy")


def timeline(seed, lanes=5, most=7):
    """Bars that touch, leave gaps and overlap; lanes without a bar in between."""
    random = np.random.RandomState(seed)
    bars = random.randint(0, most, lanes)
    bars[random.randint(lanes)] = 0
    count = int(bars.sum())
    lane = np.repeat(np.arange(lanes), bars)
    start, end, before = np.zeros(count), np.zeros(count), 0.0
    for bar in range(count):
        if bar == 0 or lane[bar] != lane[bar - 1]:
            before = 0.0
        start[bar] = max(0.0, before + random.choice([0.0, 0.25 * random.rand(), -0.01 * random.rand()]))
        end[bar] = before = start[bar] + random.rand()
    return Timeline(
        lane=lane,
        kind=random.randint(0, len(KINDS), count).astype(np.int8),
        slot=random.randint(-1, 9, count),
        part=random.randint(0, 2, count).astype(np.int8),
        start=start,
        end=end,
        compute=(end - start) * random.rand(count),
        ring=random.rand(count) * 1e-3,
        partner=np.zeros(count),
        expert=np.full(count, 0.5),
        copy=random.rand(count),
    )


def numbers(seconds=2.5):
    return {
        "seconds": seconds,
        "span_seconds": 2.0,
        "tokens": 4096,
        "tokens_per_second": 4096 / seconds,
        "mfu": None,
        "computing": 0.1 + 0.2,
        "idle": {cause: 0.1 * number for number, cause in enumerate(CAUSES)},
        "optimizer_seconds": 0.01,
        "bytes_by_link": {"inside_node": 2**40, "across_nodes": 0},
        "nic_peak": 1e10,
        "nic_mean": 1e9,
        "plan_seconds": 0.02,
        "ring_sizes": {"1": [300, 2048], "39": [1, 2048]},
    }


def simulation(seed=0):
    return Simulation(
        title="byted on 16 GPUs",
        setting={"model": "llama-7b", "gpus": 16, "offload": True, "bandwidths": [1.5, None]},
        lengths=np.array([7, 2048, 2**31], np.int64),
        shown_step=1,
        runs=(
            StrategyRun(name="hdp", words="ours", steps=(numbers(), numbers(3.0)), timeline=timeline(seed)),
            StrategyRun(name="static", words="ring of 16", steps=(numbers(9.0), numbers(8.5))),
            StrategyRun(name="ulysses", words="", steps=(), failed="16 ranks and 8 heads"),
        ),
        layer={"attention_forward": 1.07e-11, "link_latency": 0.0},
        sweeps={"tokens_per_rank": ({"value": 8192, "label": "8K", "hdp": 2.5, "static": None, "note": "too small"},)},
        verdict=("HDP is 3.4 times as fast.", "Größer geht nicht."),
    )


def parts(found, *, bars=True):
    """Everything of a simulation that can be compared; times of bars in whole microseconds."""
    result = {name: value for name, value in vars(found).items() if name not in ("lengths", "runs")}
    result["lengths"] = found.lengths.tolist()
    result["runs"] = [{k: v for k, v in vars(run).items() if k != "timeline"} for run in found.runs]
    lines = [run.timeline for run in found.runs]
    if bars:
        result["bars"] = [
            None
            if line is None
            else {
                name: np.rint(column * 1e6).astype(int).tolist() if name in TIMES else column.tolist()
                for name, column in vars(line).items()
            }
            for line in lines
        ]
    return result


@pytest.mark.parametrize("seed", range(20))
def test_a_simulation_comes_back(tmp_path, seed):
    made = simulation(seed)
    write_simulation(made, tmp_path / "a.json")
    found = read_simulation(tmp_path / "a.json")
    assert parts(found) == parts(made)
    line = found.runs[0].timeline
    for name, column in vars(made.runs[0].timeline).items():
        assert getattr(line, name).dtype == column.dtype
        assert np.abs(getattr(line, name) - column).max(initial=0) <= 0.5000001e-6
    write_simulation(found, tmp_path / "b.json")
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()


def test_rounding_does_not_add_up(tmp_path):
    """A thousand bars of a third of a microsecond and a bit: the last one starts where it did."""
    ends = np.arange(1, 1001) * 1.4e-6
    count = ends.size
    line = Timeline(
        lane=np.zeros(count, np.int64),
        kind=np.full(count, 2, np.int8),
        slot=np.arange(count),
        part=np.zeros(count, np.int8),
        start=ends - 1.4e-6,
        end=ends,
        **{name: np.zeros(count) for name in ("compute", "ring", "partner", "expert", "copy")},
    )
    run = StrategyRun(name="hdp", words="", steps=(numbers(),), timeline=line)
    made = Simulation(title="", setting={}, lengths=np.array([1]), runs=(run,), layer={})
    write_simulation(made, tmp_path / "a.json")
    found = read_simulation(tmp_path / "a.json").runs[0].timeline
    assert found.end[-1] == pytest.approx(1.4e-3, abs=0.51e-6)
    assert (tmp_path / "a.json").stat().st_size < 12 * count


def test_empty_timeline(tmp_path):
    none = np.zeros(0)
    line = Timeline(
        lane=np.zeros(0, np.int64),
        kind=np.zeros(0, np.int8),
        slot=np.zeros(0, np.int64),
        part=np.zeros(0, np.int8),
        **dict.fromkeys(TIMES, none),
    )
    run = StrategyRun(name="hdp", words="", steps=(numbers(),), timeline=line)
    made = Simulation(title="", setting={}, lengths=np.array([1]), runs=(run,), layer={})
    write_simulation(made, tmp_path / "a.json")
    assert read_simulation(tmp_path / "a.json").runs[0].timeline.lane.size == 0


def _set(*place, value):
    def change(data):
        for key in place[:-1]:
            data = data[key]
        data[place[-1]] = value

    return change


def _drop(*place):
    def change(data):
        for key in place[:-1]:
            data = data[key]
        del data[place[-1]]

    return change


LINE = ("runs", 0, "timeline")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_set("simulation_schema", value=2), "a simulation of version 2, this version of megatron_hdp reads 1"),
        (_set("simulation_schema", value=True), "not a simulation: `megatron-hdp simulate --json`"),
        (_drop("simulation_schema"), "not a simulation: `megatron-hdp simulate --json`"),
        (_drop("title"), "field title: field required"),
        (_set("color", value=1), "field color: extra inputs are not permitted"),
        (_set("lengths", value=[]), "field lengths: list should have at least 1 item"),
        (_set("lengths", 1, value=0), "field lengths.1: input should be greater than or equal to 1"),
        (_set("lengths", 1, value=2.5), "field lengths.1: input should be a valid integer"),
        (_set("shown_step", value=2), "shown_step is 2, and the run hdp has 2 steps"),
        (_set("runs", value=[]), "field runs: list should have at least 1 item"),
        (_set("runs", 0, "name", value="naive"), "runs are naive, static, ulysses: the first must be hdp"),
        (_set("runs", 1, "name", value="hdp"), "each comes once"),
        (_set("runs", 2, "failed", value=None), "the run ulysses has 0 steps"),
        (_set("runs", 1, "failed", value="no"), "the run static has 2 steps"),
        (_drop("runs", 0, "steps", 1, "nic_peak"), "field runs.0.steps.1.nic_peak: field required"),
        (_set("runs", 0, "steps", 1, "seconds", value="3"), "field runs.0.steps.1.seconds: input should be a valid"),
        (_set("runs", 0, "steps", 0, "seconds", value=0), "field runs.0.steps.0.seconds: input should be greater"),
        (_set("runs", 0, "steps", 0, "ring_sizes", value={"one": [1, 2]}), "string should match pattern"),
        (_set("runs", 0, "steps", 0, "ring_sizes", value={"1": [1]}), "at least 2 items"),
        (_drop("sweeps", "tokens_per_rank", 0, "value"), "sweep tokens_per_rank: a row without its value"),
        (_set("sweeps", "tokens_per_rank", 0, "value", value=None), "sweep tokens_per_rank: a row without its value"),
        (_set("sweeps", "tokens_per_rank", 0, "hdp", value="2"), "tokens_per_rank: hdp of a row is '2': it must be se"),
        (_set("sweeps", "tokens_per_rank", 0, "hdp", value=0), "hdp of a row is 0: it must be seconds, above 0"),
        (_set("sweeps", value={"a b": [], "a-b": []}), "field sweeps.a b.[key]: string should match pattern"),
        (_set("sweeps", value={"\x1b[2J\u202e": []}), "field sweeps.?[2J?.[key]: string should match pattern"),
        (_set("runs", 0, "steps", 0, "ring_sizes", value={}), "ring_sizes of step 0 hold no sequences or no tokens"),
        (_set("runs", 0, "steps", 0, "ring_sizes", value={"1": [1, 0]}), "ring_sizes of step 0 hold no sequences or"),
        (_set("runs", 0, "steps", 0, "computing", value=1.1), "steps.0.computing: input should be less than"),
        (_set("runs", 0, "steps", 0, "idle", "ring", value=-1.0), "steps.0.idle.ring: input should be greater"),
        (_set("runs", 0, "steps", 0, "idle", "rain", value=1.0), "idle of step 0 has 'rain', and causes are load, "),
        (_set("layer", "link_latency", value=-1.0), "field layer.link_latency: input should be greater"),
        (_set("setting", "stages", value=3), "5 lanes, and stages of the setting is 3, which must divide them"),
        (_set("setting", "stages", value="1"), "stages of the setting is '1', which must divide them"),
        (_set("setting", "stages", value=0), "stages of the setting is 0, which must divide them"),
        (_set(*LINE, "lane_bars", value=[1]), "timeline of the run hdp: column"),
        (_set(*LINE, "lane_bars", value=[2**40]), "bars, at most"),
        (_set(*LINE, "kind", value=len(KINDS)), "timeline of the run hdp: kind 6, and there are 6"),
        (_set(*LINE, "gap", value=-1), "a bar starts before the step"),
        (_set(*LINE, "length", 0, value=-1), "a time below 0"),
        (_set(*LINE, "part", value=300), "a slot or a part that is too large"),
        (_set(*LINE, "compute", 0, value=2**60), "field runs.0.timeline.compute.0: input should be less than"),
    ],
)
def test_damaged_files_name_the_place(tmp_path, change, words):
    path = tmp_path / "a.json"
    write_simulation(simulation(5), path)
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))
    with pytest.raises(DataError) as caught:
        read_simulation(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not a simulation, or only a part of one"),
        ('{"simulation_schema": 1, ', "not a simulation, or only a part of one"),
        ("[1]", "not a simulation: `megatron-hdp simulate --json` writes those"),
        ('{"a": 1, "a": 2}', "field 'a' comes twice"),
        ("[" * 100_000, "not a simulation, or only a part of one"),
        (b"\xff\xfe", "not text in UTF-8"),
    ],
)
def test_files_that_are_none(tmp_path, text, words):
    path = tmp_path / "a.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(DataError, match=words.replace("[", r"\[").replace("`", ".")):
        read_simulation(path)


def test_every_cut_of_a_file_is_refused(tmp_path):
    path = tmp_path / "a.json"
    write_simulation(simulation(1), path)
    text = path.read_bytes().rstrip()
    for end in range(0, len(text), 97):
        path.write_bytes(text[:end])
        with pytest.raises(DataError):
            read_simulation(path)


def test_not_a_number_is_not_written(tmp_path):
    made = simulation()
    bad = copy.deepcopy(made.runs[0].steps[0])
    bad["nic_peak"] = float("nan")
    run = StrategyRun(name="hdp", words="", steps=(bad, bad))
    with pytest.raises(DataError, match=r"runs.0.steps.0.nic_peak: input should be"):
        write_simulation(Simulation(**{**vars(made), "runs": (run,)}), tmp_path / "a.json")
    assert not (tmp_path / "a.json").exists()


def test_files_that_cannot_be_opened(tmp_path):
    with pytest.raises(DataError, match="cannot be read"):
        read_simulation(tmp_path / "none.json")
    with pytest.raises(ConfigError, match="cannot be written"):
        write_simulation(simulation(), tmp_path / "none" / "a.json")


def interrupted(out):
    before = out.read_text() if out.exists() else None
    with whole_file(out) as file:
        file.write("half")
        file.flush()
        assert (out.read_text() if out.exists() else None) == before
        raise KeyboardInterrupt


def test_a_file_is_whole_or_as_it_was(tmp_path):
    out, link = tmp_path / "a.json", tmp_path / "link.json"
    out.write_text("before")
    out.chmod(0o640)
    link.symlink_to(out)
    with pytest.raises(KeyboardInterrupt):
        interrupted(link)
    assert (out.read_text(), sorted(tmp_path.iterdir())) == ("before", [out, link])
    with whole_file(link) as file:
        file.write("after, \ud800")
    assert (out.read_text(), sorted(tmp_path.iterdir())) == ("after, ?", [out, link])
    assert link.is_symlink()
    assert stat.S_IMODE(out.stat().st_mode) == 0o640
    with pytest.raises(KeyboardInterrupt):
        interrupted(tmp_path / "new")
    assert sorted(tmp_path.iterdir()) == [out, link]


def test_devices_are_written_as_they_are(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    with whole_file(tmp_path / "pipe") as file:
        file.write("text")
    assert os.read(reader, 100) == b"text"
    os.close(reader)
    with pytest.raises(ConfigError, match="/dev/full: cannot be written"):
        write_simulation(simulation(), Path("/dev/full"))
