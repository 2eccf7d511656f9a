"""The folder of --hdp-timeline: what is written is what is read, and damage is named."""

import dataclasses
import json

import numpy as np
import pytest

from megatron_hdp.cost import CostModel, load_profile
from megatron_hdp.errors import ConfigError, DataError
from megatron_hdp.memory import ModelShape
from megatron_hdp.planner import plan
from megatron_hdp.planner.schedule import schedule
from megatron_hdp.simulator.replay import replay
from megatron_hdp.simulator.result import KINDS
from megatron_hdp.timeline import lane_file, read_timeline
from megatron_hdp.timeline_setting import RunSetting
from megatron_hdp.timeline_writer import StepLine, TimelineWriter, check_folder

MODEL = ModelShape(layers=4, hidden=64, ffn=128, heads=4, kv_heads=2, head_dim=16, vocabulary=384)
ZERO = 1.8e9
"""Seconds since 1970 of the first step."""


def setting_of(pool=3, stages=1, parts=1, tensor=1, **changed):
    values = {
        "pool": pool,
        "stages": stages,
        "virtual_stages": parts,
        "expert_group": 1,
        "tensor_parallel": tensor,
        "capacity": 2048,
        "context": 6000,
        "algorithm": "hdp",
        "device": "cpu",
        "hardware": "a processor",
        "profile": load_profile("h100"),
        "layer": None,
        "layers_per_stage": 4 // stages,
        "window": None,
        "recompute": "none",
        "pad_multiple": 2,
        "heads": 4,
        "kv_heads": 2,
        "model": MODEL,
    }
    return RunSetting(**(values | changed))


def plan_of(setting, seed=0):
    lengths = np.random.RandomState(seed).randint(1, 5000, size=20)
    cost = CostModel(setting.profile, setting.layers_per_stage)
    layout = {"stages": setting.stages, "virtual_stages": setting.virtual_stages}
    return plan(lengths, setting.pool, setting.capacity, cost=cost, exchange="ring", **layout)


def writers(folder, setting, start=1):
    """(rank, stage, tensor) -> writer of that process."""
    return {
        (rank, stage, tensor): TimelineWriter(
            folder, lane_file(rank, stage, tensor), start, None if (rank, stage, tensor) != (0, 0, 0) else setting
        )
        for rank in range(setting.pool)
        for stage in range(setting.stages)
        for tensor in range(setting.tensor_parallel)
    }


def line_of(made, setting, step, rank, stage, tensor=0, slow=1.0):
    """Operations one after the other, each with 10 ms of compute more than the one before, and 1 ms of waiting."""
    begin = ZERO + 100 * step + stage + 0.01 * tensor
    line = StepLine(step, made.digest().hex(), begin)
    now = begin + 0.5
    ops = schedule(int(made.microbatch_counts[rank]), stage, setting.stages, setting.virtual_stages)
    for number, op in enumerate(ops, 1):
        compute = slow * (0.01 * number + 0.001 * tensor)
        line.add(op.phase, op.slot, op.part, (now, now + compute + 0.002, compute, 0.001))
        now += compute + 0.003
    line.done = now + 0.25
    return line


def write_step(there, made, setting, step, slow=1.0, leave_out=None):
    there[0, 0, 0].write_plan(step, made, 1.5)
    for place, writer in there.items():
        if place != leave_out:
            writer.write_step(line_of(made, setting, step, *place, slow))


@pytest.mark.parametrize(("stages", "parts", "tensor"), [(1, 1, 1), (2, 1, 1), (2, 2, 1), (1, 1, 2)])
def test_what_is_written_is_read(tmp_path, stages, parts, tensor):
    setting = setting_of(stages=stages, parts=parts, tensor=tensor)
    there = writers(tmp_path / "new" / "folder", setting)
    plans = [plan_of(setting, seed) for seed in range(3)]
    for step, made in enumerate(plans):
        write_step(there, made, setting, step)
    run = read_timeline(tmp_path / "new" / "folder")
    assert run.setting == setting
    assert (run.incomplete, [step.step for step in run.steps]) == ((), [0, 1, 2])
    for step, made in zip(run.steps, plans):
        assert step.plan == made
        assert step.planned_span == 1.5
        # all lines of a step begin at its zero, or later by the stage
        for rank in range(setting.pool):
            for stage in range(stages):
                of = step.lane == rank * stages + stage
                slow = line_of(made, setting, step.step, rank, stage, tensor - 1)
                first = line_of(made, setting, step.step, rank, stage, 0)
                assert step.phase[of].tolist() == slow.phase
                assert step.slot[of].tolist() == slow.slot
                assert step.part[of].tolist() == slow.part
                assert step.compute[of] == pytest.approx(slow.compute, abs=1e-9)
                assert step.ring[of] == pytest.approx(0.001, abs=1e-9)
                zero = ZERO + 100 * step.step
                assert step.begin[of] == pytest.approx(np.array(first.begin) - zero, abs=1e-6)
                assert step.end[of] == pytest.approx(np.array(slow.end) - zero, abs=1e-6)
        assert step.asked == pytest.approx(np.tile(np.arange(stages), setting.pool), abs=1e-6)
        assert step.span_seconds == pytest.approx(step.end.max() - 0.5, abs=1e-6)
        assert step.seconds == pytest.approx(step.done.max())
        assert step.lane_ends().max() == pytest.approx(step.span_seconds)


def test_op_seconds_are_by_micro_batch_and_place(tmp_path):
    setting = setting_of(stages=2, parts=2)
    there, made = writers(tmp_path, setting), plan_of(setting)
    write_step(there, made, setting, 0)
    (step,) = read_timeline(tmp_path).steps
    forward, backward = step.op_seconds(step.compute)
    assert forward.shape == backward.shape == (int(made.rank_offsets[-1]), 4)
    for place in range(4):
        part, stage = divmod(place, 2)
        for rank in range(setting.pool):
            line = line_of(made, setting, 0, rank, stage)
            for phase, table in ((0, forward), (1, backward)):
                expected = [
                    seconds
                    for slot in range(int(made.microbatch_counts[rank]))
                    for seconds, *op in zip(line.compute, line.phase, line.slot, line.part)
                    if op == [phase, slot, part]
                ]
                found = table[made.rank_offsets[rank] : made.rank_offsets[rank + 1], place]
                assert found == pytest.approx(expected, abs=1e-9)


def test_bars_of_a_measured_step(tmp_path):
    setting = setting_of()
    made = plan_of(setting)
    write_step(writers(tmp_path, setting), made, setting, 0)
    (step,) = read_timeline(tmp_path).steps
    bars = step.timeline()
    for lane in range(3):
        of = bars.lane == lane
        names = [KINDS[kind] for kind in bars.kind[of]]
        assert names[0] == "load"
        assert names[-1] == "reduce"
        assert set(names[1:-1]) == {"forward", "backward"}
        assert bars.start[of][0] == pytest.approx(0, abs=1e-6)
        assert bars.end[of][0] == pytest.approx(0.5, abs=1e-6)
        assert (bars.end - bars.start)[of][-1] == pytest.approx(0.251, abs=1e-6)
        assert (bars.slot[of][0], bars.slot[of][-1]) == (-1, -1)
        assert np.all(np.diff(bars.start[of]) > 0)
    passes = bars.slot >= 0
    assert bars.ring[passes] == pytest.approx(0.001, abs=1e-9)
    assert (bars.end - bars.start - bars.compute - bars.ring)[passes] == pytest.approx(0.001, abs=1e-6)


def test_overlay_shows_the_step_three_times(tmp_path):
    setting = setting_of(stages=2)
    there = writers(tmp_path, setting)
    for number in range(3):
        write_step(there, plan_of(setting, number), setting, number)
    run = read_timeline(tmp_path)
    assert run.step() is run.steps[1]
    found = run.overlay(2)
    step = run.steps[2]
    assert (found.step, found.plan) == (2, step.plan)
    assert np.array_equal(found.measured.start, step.timeline().start)
    again = replay(step.plan, setting.job(), *step.op_seconds(step.compute))
    assert np.array_equal(found.replayed.end, again.timeline.end)
    assert found.spans[:2] == (step.span_seconds, again.span_seconds)
    passes = found.simulated.slot >= 0
    assert passes.sum() == step.lane.size == found.replayed.lane.size
    assert found.spans[2] == pytest.approx(found.simulated.end[passes].max() - found.simulated.start[passes].min())
    faster = dataclasses.replace(setting.profile, name="faster", inside_node=setting.profile.across_nodes)
    assert run.overlay(2, faster).spans[2] != found.spans[2]
    with pytest.raises(DataError, match="step 7 was not recorded: there are 0 to 2"):
        run.overlay(7)


def test_a_step_counts_as_it_ran_last(tmp_path):
    """Resumed at step 1; the second run was killed in step 2, and on one rank it did not even end step 1."""
    setting = setting_of()
    plans = [plan_of(setting, seed) for seed in range(4)]
    first = writers(tmp_path, setting, start=1)
    for step in range(3):
        write_step(first, plans[step], setting, step)
    write_step(first, plans[3], setting, 3, leave_out=(2, 0, 0))
    second = writers(tmp_path, setting, start=2)
    write_step(second, plans[1], setting, 1, slow=2.0)
    write_step(second, plans[2], setting, 2, slow=3.0, leave_out=(1, 0, 0))
    run = read_timeline(tmp_path)
    assert [step.step for step in run.steps] == [0, 1, 2]
    assert run.incomplete == (3,)
    whole = [step.compute.sum() / step.lane.size for step in run.steps]
    single = [np.mean(np.concatenate([line_of(p, setting, 0, r, 0).compute for r in range(3)])) for p in plans[:3]]
    assert whole == pytest.approx([single[0], 2 * single[1], single[2]], rel=1e-6)


def test_half_a_line_at_the_end_is_forgotten(tmp_path):
    setting = setting_of()
    made = plan_of(setting)
    write_step(writers(tmp_path, setting), made, setting, 0)
    for name in (lane_file(1, 0, 0), "plans.jsonl"):
        with (tmp_path / name).open("a") as file:
            file.write('{"start": 1, "step": 1, "pl')
    assert [step.step for step in read_timeline(tmp_path).steps] == [0]
    write_step(writers(tmp_path, setting, start=2), made, setting, 1)
    run = read_timeline(tmp_path)
    assert [step.step for step in run.steps] == [0, 1]


def damaged(folder, name, change):
    text = (folder / name).read_text()
    (folder / name).write_text(change(text))


COLUMNS = ("phase", "slot", "part", "begin", "end", "compute", "ring")


def edited(**changes):
    def change(text):
        line = json.loads(text)
        return json.dumps(line | changes) + "\n"

    return change


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("run.json", lambda text: text[:-20], "run.json: not what --hdp-timeline writes"),
        ("run.json", lambda text: "[]", "run.json: not what --hdp-timeline writes"),
        ("run.json", edited(schema=7), "run.json: not a run of schema 1"),
        ("run.json", edited(lanes=7), "unexpected keyword argument 'lanes'"),
        ("run.json", edited(profile={"schema": 2}), "field name is missing"),
        ("run.json", edited(pool=4), "rank00003-stage00-tensor00.jsonl"),
        ("plans.jsonl", lambda text: "{}\n", "line 1 is not what"),
        ("plans.jsonl", lambda text: "", "no step that all of the 3 processes"),
        ("plans.jsonl", lambda text: "7\n", "line 1 is not what"),
        ("plans.jsonl", edited(plan="{}"), "not a plan of schema"),
        (lane_file(1, 0, 0), lambda text: "x" + text, "line 1 is not what"),
        (lane_file(1, 0, 0), edited(digest="0"), "ran another plan in step 0 than plans.jsonl has"),
        (lane_file(1, 0, 0), edited(begin=[]), "step 0 is not what --hdp-timeline writes"),
        (lane_file(1, 0, 0), edited(asked=None), "step 0 is not what --hdp-timeline writes"),
        (lane_file(1, 0, 0), edited(**{each: [] for each in COLUMNS}), "0 of 20 passes are there, and 0 others"),
        (lane_file(1, 0, 0), edited(slot=list(range(500))), "is not what --hdp-timeline writes"),
        (lane_file(1, 0, 0), lambda text: text.replace("1800000000.5", "1e999"), "times are"),
        (lane_file(1, 0, 0), edited(done=None), "step 0 is not what --hdp-timeline writes"),
    ],
)
def test_damage_is_named(tmp_path, name, change, words):
    setting = setting_of()
    write_step(writers(tmp_path, setting), plan_of(setting), setting, 0)
    damaged(tmp_path, name, change)
    with pytest.raises(DataError, match=words):
        read_timeline(tmp_path)


@pytest.mark.parametrize("name", ["run.json", "plans.jsonl", lane_file(2, 0, 0)])
def test_missing_files_are_named(tmp_path, name):
    setting = setting_of()
    write_step(writers(tmp_path, setting), plan_of(setting), setting, 0)
    (tmp_path / name).unlink()
    with pytest.raises(DataError, match=name):
        read_timeline(tmp_path)
    with pytest.raises(DataError, match="holds no timeline of a run"):
        read_timeline(tmp_path / "nowhere")


def test_slots_out_of_range_are_refused(tmp_path):
    """As many operations as there should be, but not the right ones."""
    setting = setting_of()
    write_step(writers(tmp_path, setting), plan_of(setting), setting, 0)
    line = json.loads((tmp_path / lane_file(1, 0, 0)).read_text())
    damaged(tmp_path, lane_file(1, 0, 0), edited(slot=[slot + 100 for slot in line["slot"]]))
    with pytest.raises(DataError, match=r"0 of (\d+) passes are there, and \1 others"):
        read_timeline(tmp_path)


def test_settings_survive(tmp_path):
    for setting in (setting_of(), setting_of(stages=2, model=None, window=7, algorithm="static", layer="llama-7b")):
        assert RunSetting.from_json(setting.to_json(), "text") == setting
    cost = setting_of(stages=2, heads=8).cost
    assert (cost.layers_per_stage, cost.stages, cost.heads, cost.pad_multiple) == (2, 2, 8, 2)
    job = setting_of(stages=2, overlap_grad_reduce=True).job()
    assert (job.stages, job.sync.overlap_grad_reduce, job.sync.overlap_param_gather) == (2, True, False)
    assert job.model == MODEL


LAYOUT = {"pool": 3, "stages": 1, "virtual_stages": 1, "expert_group": 1, "tensor_parallel": 1}


def test_folders_that_must_not_be_written_to(tmp_path):
    check_folder(tmp_path / "missing", LAYOUT)
    check_folder(tmp_path, LAYOUT)
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(ConfigError, match="file: this is a file; give a folder"):
        check_folder(file, LAYOUT)
    with pytest.raises(ConfigError, match=r"holds other files \(file\): give a folder of its own"):
        check_folder(tmp_path, LAYOUT)
    with pytest.raises(ConfigError, match="cannot be written"):
        TimelineWriter(file / "below", "name", 1, None)
    there = tmp_path / "there"
    TimelineWriter(there, lane_file(0, 0, 0), 1, setting_of())
    check_folder(there, LAYOUT)
    with pytest.raises(ConfigError, match="a run with stages 1, this one has 2: give another folder"):
        check_folder(there, LAYOUT | {"stages": 2})
    with pytest.raises(ConfigError, match="a run that differs in capacity, algorithm: give another folder"):
        TimelineWriter(there, lane_file(0, 0, 0), 2, setting_of(capacity=4096, algorithm="static"))
    TimelineWriter(there, lane_file(0, 0, 0), 2, setting_of())
    (there / "run.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot go on with what is there"):
        check_folder(there, LAYOUT)
    with pytest.raises(ConfigError, match="cannot go on with what is there"):
        TimelineWriter(there, lane_file(0, 0, 0), 3, setting_of())


def test_a_full_disk_ends_the_record_and_not_the_run(tmp_path, capsys, monkeypatch):
    setting = setting_of()
    made, there = plan_of(setting), writers(tmp_path, setting)
    write_step(there, made, setting, 0)
    (tmp_path / lane_file(1, 0, 0)).unlink()
    (tmp_path / lane_file(1, 0, 0)).mkdir()  # nothing can be appended to it
    write_step(there, made, setting, 1)
    write_step(there, made, setting, 2)
    said = capsys.readouterr().err
    assert said.count("--hdp-timeline stops here") == 1
    assert lane_file(1, 0, 0) in said
