"""--hdp-timeline: every layout leaves a whole timeline, of the training that it would be without it."""

import json
import shutil

import numpy as np
import pytest
from conftest import ADAM, CONTEXT, MODEL, NO_EVALUATION, train
from record import read_steps

from megatron_hdp.simulator.result import KINDS
from megatron_hdp.timeline import read_timeline

HDP = ["--hdp", "--hdp-exchange", "ring", "--global-batch-size", "8"]
FLAGS = [*MODEL, *ADAM, "--num-layers", "4", *HDP]
EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32 --moe-token-dispatcher-type alltoall "
    "--expert-model-parallel-size 2"
).split()
LAYOUTS = {
    "pool of 2": (2, 1, 1, ["--hdp-tokens-per-rank", "48"]),
    "gather": (2, 1, 1, ["--hdp-tokens-per-rank", "48", "--hdp-exchange", "gather"]),
    "stages, model parts": (
        4,
        2,
        2,
        "--hdp-tokens-per-rank 48 --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2".split(),
    ),
    "tensor ranks, offload": (
        2,
        1,
        1,
        "--hdp-tokens-per-rank 96 --tensor-model-parallel-size 2 --hdp-offload --hdp-offload-gib 0.02".split(),
    ),
    "experts": (2, 1, 1, ["--hdp-tokens-per-rank", "48", *EXPERTS]),
    "recompute": (
        1,
        1,
        1,
        "--hdp-tokens-per-rank 96 --recompute-granularity full --recompute-method uniform "
        "--recompute-num-layers 1".split(),
    ),
}


def losses(folder):
    return [(step["lm loss"], step["grad_norm"]) for step in read_steps(folder / "record")]


ALWAYS = ("pool of 2",)
"""Of every run of the tests; the other layouts are slow."""


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=[] if name in ALWAYS else [pytest.mark.slow]) for name in LAYOUTS]
)
def test_whole_timeline_of_the_same_training(layout, corpus, tmp_path):
    """With evaluation in between, which leaves nothing."""
    ranks, stages, parts, more = LAYOUTS[layout]
    flags = [*FLAGS, "--data-path", corpus, "--train-iters", "3", *more]
    flags += "--split 70,30,0 --eval-iters 2 --eval-interval 2".split()
    train(ranks, flags, tmp_path / "plain").check()
    folder = tmp_path / "timeline"
    train(ranks, [*flags, "--hdp-timeline", str(folder)], tmp_path / "noted").check()
    assert losses(tmp_path / "noted") == losses(tmp_path / "plain")
    run = read_timeline(folder)
    assert [step.step for step in run.steps] == [0, 1, 2]
    assert run.incomplete == ()
    setting = run.setting
    assert (setting.stages, setting.virtual_stages, setting.context) == (stages, parts, CONTEXT)
    for step in run.steps:
        check_step(step, setting)


def check_step(step, setting):
    """What must hold of any step."""
    plan, places = step.plan, setting.stages * setting.virtual_stages
    num = int(plan.rank_offsets[-1])
    assert step.lane.size == 2 * num * places  # with `read_timeline`'s own check: each op once
    assert np.all(step.end > step.begin)
    assert np.all(step.compute > 0)
    assert np.all(step.ring >= 0)
    assert np.all(step.compute <= step.end - step.begin + 1e-3)  # two clocks
    for lane in range(setting.lanes):
        of = step.lane == lane
        # one thing after the other; tensor ranks of a lane go by clocks of their own
        assert np.all(step.begin[of][1:] >= (step.end if setting.tensor_parallel == 1 else step.begin)[of][:-1])
        assert step.asked[lane] <= step.begin[of].min()
        assert step.done[lane] >= step.end[of].max()
    forward, backward = step.op_seconds(step.begin)
    assert np.all(forward < backward)
    by_place = np.argsort(forward, axis=1)
    assert np.array_equal(by_place, np.broadcast_to(np.arange(places), by_place.shape))  # through the parts in order
    waited = step.op_seconds(step.ring)[0].sum(axis=1) > 0
    rings = [any(piece.ring.size > 1 for piece in each.pieces) for rank in plan for each in rank]
    assert waited.tolist() == rings
    bars = step.timeline()
    assert bars.kind.size == step.lane.size + 2 * setting.lanes
    assert {KINDS[kind] for kind in bars.kind} == {"load", "forward", "backward", "reduce"}
    assert np.all(bars.end >= bars.start)


@pytest.mark.slow
def test_resumed_run_goes_on_in_the_folder(corpus, tmp_path):
    """A step that ran again counts once, half a line is forgotten, and another layout is refused early."""
    folder = tmp_path / "timeline"
    flags = [*FLAGS, *NO_EVALUATION, "--data-path", corpus, "--train-iters", "4", "--hdp-tokens-per-rank", "48"]
    flags += ["--hdp-timeline", str(folder)]
    save = ["--save", str(tmp_path / "ckpt"), "--save-interval", "2"]
    train(2, [*flags, *save, "--exit-interval", "3"], tmp_path / "first").check()
    first = read_timeline(folder)
    assert [step.step for step in first.steps] == [0, 1, 2]
    (tmp_path / "ckpt" / "latest_checkpointed_iteration.txt").write_text("2")
    torn = folder / "rank00001-stage00-tensor00.jsonl"
    with torn.open("a") as file:
        file.write('{"start": 5, "st')
    train(2, [*flags, "--load", str(tmp_path / "ckpt")], tmp_path / "second").check()
    both = read_timeline(folder)
    assert [step.step for step in both.steps] == [0, 1, 2, 3]
    assert both.incomplete == ()
    assert [step.plan for step in both.steps[:3]] == [step.plan for step in first.steps]
    assert np.array_equal(both.steps[1].begin, first.steps[1].begin)
    assert not np.array_equal(both.steps[2].begin, first.steps[2].begin)
    refused = train(1, [*flags, "--load", str(tmp_path / "ckpt"), "--hdp-tokens-per-rank", "96"], tmp_path / "third")
    assert 0 not in refused.codes
    assert f"--hdp-timeline {folder}: holds steps of a run with pool 2, this one has 1" in refused.output
    refused = train(2, [*flags, "--hdp-algorithm", "static"], tmp_path / "fourth")
    assert 0 not in refused.codes
    assert "holds steps of a run that differs in algorithm: give another folder" in refused.output


def test_bad_folders_are_refused(corpus, tmp_path):
    flags = [*FLAGS, *NO_EVALUATION, "--data-path", corpus, "--train-iters", "1", "--hdp-tokens-per-rank", "96"]
    file = tmp_path / "file"
    file.write_text("text")
    for folder, words in ((file, "this is a file"), (file / "below", "cannot"), (tmp_path, "holds other files")):
        outcome = train(1, [*flags, "--hdp-timeline", str(folder)], tmp_path / "run")
        assert 0 not in outcome.codes
        assert f"--hdp-timeline {folder}: {words}" in outcome.output
        shutil.rmtree(tmp_path / "run")


def test_run_json_says_what_the_run_was(corpus, tmp_path):
    folder = tmp_path / "timeline"
    flags = [*FLAGS, *NO_EVALUATION, "--data-path", corpus, "--train-iters", "1", "--hdp-tokens-per-rank", "96"]
    train(1, [*flags, "--hdp-timeline", str(folder), "--hdp-profile", "h100"], tmp_path / "run").check()
    data = json.loads((folder / "run.json").read_text())
    assert data["profile"]["name"] == "h100"
    assert (data["device"], data["capacity"], data["layers_per_stage"]) == ("cpu", 96, 4)
    assert data["model"]["layers"] == 4
