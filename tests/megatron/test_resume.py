"""Going on from a checkpoint: the data order is kept, whatever the pool, or the run is refused before it starts."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import ADAM, MODEL, NO_EVALUATION, train
from forked import run_ranks
from record import read_steps, read_weights

from megatron_hdp.seams.state import HdpRun

HERE = Path(__file__).parent
FLAGS = [*MODEL, *ADAM, *NO_EVALUATION, "--train-iters", "4", "--adam-eps", "1e-2", "--hdp"]


def losses(folder):
    return [step["lm loss"] for step in read_steps(folder / "record")]


@pytest.fixture(scope="module", params=["torch_dist", pytest.param("torch", marks=pytest.mark.slow)])
def saved(request, corpus, tmp_path_factory):
    """Flags, checkpoint after two of four steps, and losses of all four, of a pool of 2 with no batch size given."""
    folder = tmp_path_factory.mktemp("saved")
    flags = [*FLAGS, "--data-path", corpus, "--ckpt-format", request.param]
    save = ["--save", str(folder / "ckpt"), "--save-interval", "2", "--hdp-tokens-per-rank", "48"]
    train(2, [*flags, *save], folder).check()
    (folder / "ckpt" / "latest_checkpointed_iteration.txt").write_text("2")
    return [*flags, "--load", str(folder / "ckpt")], losses(folder)


def test_default_batch_does_not_follow_the_pool(saved, tmp_path):
    flags, expected = saved
    outcome = train(1, [*flags, "--hdp-tokens-per-rank", "96"], tmp_path).check()
    assert "--global-batch-size 2, as in the checkpoint" in outcome.outputs[0]
    assert losses(tmp_path) == pytest.approx(expected[2:], rel=1e-5)


@pytest.mark.parametrize(
    ("flags", "steps"),
    [
        ({"eval_interval": None}, 0),  # Megatron then evaluates after training only
        ({"eval_interval": 0}, 0),
        ({"eval_interval": 2}, 5),  # after steps 2, 4, 6, 8, 10
        ({"eval_interval": 2, "start_eval_at_iter": 4}, 4),  # not after 2
        ({"eval_interval": 2, "start_eval_at_iter": 5}, 3),
        ({"eval_interval": 2, "start_eval_at_iter": 100}, 0),
        ({"eval_interval": None, "eval_iters": 0}, 0),
    ],
)
def test_evaluation_goes_on_where_it_was(flags, steps):
    args = SimpleNamespace(
        **{
            "iteration": 10,
            "train_iters": 20,
            "global_batch_size": 8,
            "eval_iters": 3,
            "start_eval_at_iter": None,
            "skip_train": False,
            **flags,
        }
    )
    run = SimpleNamespace(args=args, current_step=10, _iterator=lambda split, step: step)
    HdpRun.data_iterators(run)
    assert args.consumed_train_samples == 80
    assert args.consumed_valid_samples == steps * args.eval_iters * 8


def answers(cases, folder):
    """What each command line was answered, from one process."""
    (folder / "cases.json").write_text(json.dumps(cases))
    script = [str(HERE / "refusals.py"), str(folder / "cases.json"), str(folder / "answers.json")]
    outcome = run_ranks(1, script, folder).check()
    return json.loads((folder / "answers.json").read_text()), outcome.output


def test_another_batch_is_refused(saved, tmp_path):
    flags = [*saved[0], "--hdp-tokens-per-rank", "96"]
    cases = [
        [*flags, "--global-batch-size", "3"],
        [*flags, "--hdp-batch-tokens", "200"],
        [*flags, "--non-persistent-ckpt-type", "local"],
        [*flags, "--non-persistent-ckpt-type", "global", "--global-batch-size", "3"],
        [*flags, "--ckpt-step", "4", "--global-batch-size", "3"],
        [*flags, "--seed", "8"],  # last: what is accepted ends the process
    ]
    (other, budget, local, also_global, step, seed), output = answers(cases, tmp_path)
    assert "iteration 2, was made with --global-batch-size 2, and this run asks for --global-batch-size 3" in other
    assert other.startswith("ConfigError: --load ")
    assert "and this run asks for --hdp-batch-tokens 200" in budget
    assert "--non-persistent-ckpt-type" in local
    assert "iteration 2, was made with --global-batch-size 2" in also_global
    assert "iteration 4, was made with --global-batch-size 2" in step
    assert seed == "accepted"
    assert "iteration 2, had --seed 7, this run has 8: the data goes on in another order" in output


@pytest.mark.slow
def test_finetune_starts_anew_with_any_batch(saved, tmp_path):
    flags = [*saved[0], "--hdp-tokens-per-rank", "96", "--global-batch-size", "3", "--finetune"]
    train(1, flags, tmp_path).check()
    assert [step["iteration"] for step in read_steps(tmp_path / "record")] == [1, 2, 3, 4]


@pytest.mark.slow
def test_a_release_is_weights_alone(saved, tmp_path):
    flags, _ = saved
    place = flags.index("--load") + 1
    shutil.copytree(Path(flags[place]) / "iter_0000002", tmp_path / "ckpt" / "release")
    (tmp_path / "ckpt" / "latest_checkpointed_iteration.txt").write_text("release")
    flags = [*flags[:place], str(tmp_path / "ckpt"), *flags[place + 1 :], "--hdp-tokens-per-rank", "96"]
    train(1, [*flags, "--global-batch-size", "3"], tmp_path).check()
    assert [step["iteration"] for step in read_steps(tmp_path / "record")] == [1, 2, 3, 4]


def test_checkpoint_of_one_file_with_the_distributed_optimizer(corpus, tmp_path):
    """Megatron itself cannot load one into fp32 parameters: it copies into leaves that require gradients."""
    flags = [*FLAGS, "--data-path", corpus, "--ckpt-format", "torch", "--use-distributed-optimizer"]
    flags += ["--global-batch-size", "7", "--hdp-tokens-per-rank", "48"]
    save = ["--save", str(tmp_path / "ckpt"), "--save-interval", "2"]
    train(2, [*flags, *save], tmp_path / "whole").check()
    (tmp_path / "ckpt" / "latest_checkpointed_iteration.txt").write_text("2")
    train(2, [*flags, "--load", str(tmp_path / "ckpt")], tmp_path / "resumed").check()
    assert losses(tmp_path / "resumed") == losses(tmp_path / "whole")[2:]
    ours, theirs = (read_weights(tmp_path / name / "record") for name in ("resumed", "whole"))
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
