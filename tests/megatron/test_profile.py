"""`profile` on real ranks: measures the script's own model, writes a profile that trains, touches nothing else."""

import contextlib
import importlib
import re
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist
from conftest import MODEL, NO_EVALUATION, SGD, train
from forked import run_ranks
from launch import launch
from record import read_steps

from megatron_hdp.cost import CostModel, load_profile
from megatron_hdp.memory import ModelShape, Parallel, layer_bytes_per_token
from megatron_hdp.planner import check, plan

SCRIPT = str(Path(__file__).parents[2] / "scripts" / "pretrain_gpt.py")
FLAGS = [*MODEL, *SGD, *NO_EVALUATION, "--train-iters", "2", "--global-batch-size", "8"]
HDP = ["--hdp", "--hdp-tokens-per-rank", "256"]
LAYER = "h32-f64-glu-q4x8-kv2-32bit-tp1"
ROW = 2 * 2 * 8 * 4
"""Keys and values of a token: two heads of 8, fp32."""


def profile(ranks, out, folder, *more, seconds=12):
    """A busy machine may need so long for enough repeats; an idle one is done sooner."""
    words = ["profile", "--out", str(out), "--seconds", str(seconds), SCRIPT, *FLAGS, *HDP, *more]
    return run_ranks(ranks, words, folder)


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Profile, and output, of three ranks; data and checkpoints are named that do not exist."""
    folder = tmp_path_factory.mktemp("profile")
    nowhere = ["--data-path", str(folder / "no_data"), "--save", str(folder / "saved"), "--save-interval", "1"]
    outcome = profile(3, folder / "mine.json", folder / "run", *nowhere).check()
    assert not (folder / "saved").exists()
    return folder / "mine.json", outcome


def test_profile_loads_and_says_what_it_is(measured):
    path, outcome = measured
    made = load_profile(path)
    layer = made.layer(LAYER)
    assert made.name == "mine"
    assert made.default_layer == LAYER
    assert made.gpus_per_node == 3
    assert made.hardware.startswith("CPU rank: ")
    assert "megatron-core 0.19" in made.software
    assert (layer.kv_per_token, layer.kv_gradient_per_token, layer.checkpoint_per_token) == (ROW, ROW, 32 * 4)
    assert made.d2h_bandwidth_shared is not None
    assert made.device_memory is not None
    assert "one node" in made.assumed["across_nodes"]
    # of so small a model a busy machine can hide any one of them: the fit then gives 0
    measured_times = (layer.attention_forward, layer.linear_forward, layer.loss_per_token, layer.embedding_per_token)
    assert all(0 <= seconds < 1e-2 for seconds in measured_times)
    assert sum(measured_times) > 0
    assert all(0 <= seconds < 0.1 for seconds in (layer.ring_step_forward, layer.ring_step_backward))
    assert "ring_step_forward, ring_step_backward" in made.calibrated
    for said in ("R2", "worst error", "micro-batches that the fit did not see", "outliers", f"written to {path}"):
        assert said in outcome.outputs[0]
        assert said not in outcome.outputs[1]


def test_activation_bytes_are_those_of_the_layer(measured):
    """To the byte what the memory estimate counts of a plain layer in fp32, and nothing besides per micro-batch."""
    layer = load_profile(measured[0]).layer()
    shape = ModelShape(layers=2, hidden=32, ffn=64, heads=4, kv_heads=2, head_dim=8, vocabulary=257, element_bytes=4)
    counted = layer_bytes_per_token(shape, Parallel(ranks=3, fused_kernels=False))
    assert layer.activation_per_token == pytest.approx(counted, rel=1e-6)
    assert layer.activation_constant == pytest.approx(0, abs=1)


def test_planner_takes_it(measured):
    cost = CostModel(load_profile(measured[0]), layers_per_stage=2, heads=4, kv_heads=2)
    lengths = np.random.RandomState(0).randint(1, 500, size=60)
    made = plan(lengths, num_ranks=4, tokens_per_rank=256, cost=cost)
    check(made)


def test_training_takes_it(measured, corpus, tmp_path):
    flags = [*FLAGS, "--data-path", corpus, *HDP, "--hdp-profile", str(measured[0])]
    train(2, flags, tmp_path).check()
    assert len(read_steps(tmp_path / "record")) == 2


def test_training_refuses_the_profile_of_another_model_unless_forced(measured, corpus, tmp_path):
    flags = [*FLAGS, "--ffn-hidden-size", "96", "--data-path", corpus, *HDP, "--hdp-profile", str(measured[0])]
    refused = train(1, flags, tmp_path / "refused")
    assert refused.codes == (1,)
    told = f"measured for layer {LAYER}, this model has {LAYER.replace('f64', 'f96')}. Plans would balance work"
    assert told in refused.output
    assert f"--hdp-profile {measured[0]} (profile mine)" in refused.output
    assert "Traceback" not in refused.output
    forced = train(1, [*flags, "--hdp-force-profile"], tmp_path / "forced").check()
    assert "used all the same, as asked" in forced.output
    assert "measured with 3 processes on a node, this one has 1: plans believe in nodes of 3" in forced.output
    assert len(read_steps(tmp_path / "forced" / "record")) == 2


def test_pipeline_and_tensor_parallel(tmp_path):
    """Only the first stage has an embedding and only the last a loss; layers are cut in two; pools have one rank."""
    parallel = ["--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2", "--data-path", "nowhere"]
    profile(4, tmp_path / "p.json", tmp_path / "run", *parallel, "--recompute-activations").check()
    made = load_profile(tmp_path / "p.json")
    layer = made.layer("h32-f64-glu-q4x8-kv2-32bit-tp2")
    assert layer.tensor_parallel == 2
    assert layer.kv_per_token == ROW / 2
    assert layer.loss_per_token + layer.embedding_per_token > 0
    assert "inside_node, across_nodes" in made.assumed  # a pool of one rank has no neighbours
    assert (layer.ring_step_forward, layer.ring_step_backward) == (0, 0)
    assert "ring_step_forward, ring_step_backward" in made.assumed


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--hdp-tokens-per-rank", "64"], "give at least 256"),
        (["--hdp-profile", "nowhere.json"], "nowhere.json"),
    ],
)
def test_refused(tmp_path, more, message):
    outcome = profile(1, tmp_path / "p.json", tmp_path / "run", "--data-path", "nowhere", *more)
    assert outcome.codes == (1,)
    assert message in outcome.output
    assert "Traceback" not in outcome.output
    assert not (tmp_path / "p.json").exists()


def test_needs_hdp(tmp_path):
    """Said before Megatron refuses a batch of 8 in micro-batches of 3."""
    outcome = run_ranks(1, ["profile", SCRIPT, *FLAGS, "--data-path", "none", "--micro-batch-size", "3"], tmp_path)
    assert outcome.codes == (1,)
    assert "add --hdp and --hdp-tokens-per-rank" in outcome.output
    assert "Traceback" not in outcome.output


def test_folder_that_is_not_there(tmp_path):
    outcome = profile(1, tmp_path / "no" / "p.json", tmp_path / "run", "--data-path", "nowhere")
    assert outcome.codes == (1,)
    assert "is no folder that can be written" in outcome.output


def test_needs_torchrun(monkeypatch, capsys):
    """torch's own words for it, with the arguments that Megatron gives, end in one line."""
    launcher = importlib.import_module("megatron_hdp.__main__")
    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(launcher, "run", lambda launch: dist.init_process_group("gloo", world_size=1, rank=0))
    with pytest.raises(SystemExit) as stopped:
        launcher.main(["profile", SCRIPT])
    assert stopped.value.code == 1
    assert "MASTER_ADDR and MASTER_PORT not set: start this with torchrun" in capsys.readouterr().err


@pytest.mark.slow
def test_unseen_lengths_are_predicted(tmp_path):
    """Within 8 % (median), with two minutes on two real ranks and a model that is large for a CPU."""
    model = (
        "--num-layers 4 --hidden-size 256 --ffn-hidden-size 512 --num-attention-heads 8 --num-query-groups 4".split()
    )
    long = ["--seq-length", "4096", "--max-position-embeddings", "4096", "--hdp-tokens-per-rank", "4096"]
    words = [*FLAGS, "--hdp", "--data-path", "nowhere", *model, *long]
    options = ("--cpu", "profile", "--out", str(tmp_path / "p.json"), "--seconds", "100")
    finished = launch(2, SCRIPT, words, options=options, timeout=180)
    errors = re.findall(r"did not see: median error ([\d.]+) %", finished.output)
    assert len(errors) == 1
    assert float(errors[0]) < 8


def test_launcher_knows_the_word():
    from megatron_hdp.__main__ import parse
    from megatron_hdp.profiler.request import ProfileRequest

    found = parse(["--cpu", "profile", "--out", "x.json", SCRIPT, "--hdp", "--out", "y"])
    assert found.profile == ProfileRequest("x.json")
    assert (found.script, found.argv, found.cpu) == (SCRIPT, ["--hdp", "--out", "y"], True)
    assert parse([SCRIPT, "profile"]).profile is None


def test_asking_does_not_train():
    """The seam finds what the launcher asked for, and only that."""
    seam = importlib.import_module("megatron_hdp.seams.profile")
    from megatron_hdp.profiler.request import ProfileRequest

    assert seam.asked() is None
    request = ProfileRequest("x", 2.0)
    with contextlib.ExitStack() as stack:
        stack.callback(seam._request.clear)
        seam.ask(request)
        assert seam.asked() is request
