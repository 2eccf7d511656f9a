"""Everything around the step: evaluation, resume, changed pools, budgets, blends, TP and PP, logs, --hdp absent."""

import json
import re

import numpy as np
import pytest
import torch
from conftest import ADAM, MODEL, NO_EVALUATION, stock, train
from record import read_steps, read_weights

from megatron_hdp.data.corpus import SequenceCount, open_corpus

SMOOTH = [*ADAM, "--adam-eps", "1e-2"]
HDP = ["--hdp", "--hdp-tokens-per-rank", "32"]


def losses(folder):
    return [step["lm loss"] for step in read_steps(folder / "record")]


def run(ranks, flags, folder, **options):
    train(ranks, flags, folder, **options).check()
    return losses(folder)


def base(corpus, steps, *more):
    # 4 layers so that pipelines can be interleaved
    return [
        *MODEL,
        *SMOOTH,
        *NO_EVALUATION,
        "--num-layers",
        "4",
        "--train-iters",
        str(steps),
        "--data-path",
        corpus,
        *more,
    ]


@pytest.fixture(scope="module")
def six_steps(corpus, tmp_path_factory):
    """Losses of six steps of 7 sequences on a pool of 3, which 7 does not divide by."""
    folder = tmp_path_factory.mktemp("six_steps")
    run(3, base(corpus, 6, "--global-batch-size", "7", *HDP), folder)
    return read_steps(folder / "record"), read_weights(folder / "record")


@pytest.fixture(scope="module")
def after_three(corpus, six_steps, tmp_path_factory):
    """Flags that load a checkpoint made after three of the six steps (by a run that stopped there)."""
    folder = tmp_path_factory.mktemp("after_three")
    flags = base(corpus, 6, "--global-batch-size", "7")
    save = ["--save", str(folder / "ckpt"), "--save-interval", "3", "--exit-interval", "3"]
    assert run(3, [*flags, *HDP, *save], folder) == [step["lm loss"] for step in six_steps[0][:3]]
    return [*flags, "--load", str(folder / "ckpt")]


def test_resume_is_bit_equal(six_steps, after_three, tmp_path):
    assert run(3, [*after_three, *HDP], tmp_path) == [step["lm loss"] for step in six_steps[0][3:]]
    weights = read_weights(tmp_path / "record")
    assert all(torch.equal(weights[key], six_steps[1][key]) for key in weights)


def test_stock_megatron_resumes_our_checkpoint(six_steps, after_three, tmp_path):
    """Without the plugin, and on the same learning-rate curve although 7 sequences do not divide by the pool of 3."""
    compare(stock(after_three, tmp_path), six_steps[0][3:])


def test_tied_embeddings_in_a_pipeline(corpus, tmp_path):
    """The last stage's copy of the embedding gets its gradient from another stage; from one stage to two."""
    flags = [flag for flag in base(corpus, 4, "--global-batch-size", "7") if not flag.startswith("--untie")]
    one = [*flags, "--hdp", "--hdp-tokens-per-rank", "96", "--save", str(tmp_path / "ckpt"), "--save-interval", "2"]
    whole = run(1, one, tmp_path / "one")
    (tmp_path / "ckpt" / "latest_checkpointed_iteration.txt").write_text("2")
    run(4, [*flags, "--load", str(tmp_path / "ckpt"), "--hdp", *PIPELINE], tmp_path / "pp2")
    assert losses(tmp_path / "pp2") == pytest.approx(whole[2:], rel=1e-5)
    compare(read_steps(tmp_path / "pp2" / "record"), read_steps(tmp_path / "one" / "record")[2:])


PIPELINE = ["--pipeline-model-parallel-size", "2", "--hdp-tokens-per-rank", "48"]
CUT_ROWS = "--tensor-model-parallel-size 2 --sequence-parallel --make-vocab-size-divisible-by 64".split()
LAYOUTS = {
    "pool of 4": (4, ["--hdp-tokens-per-rank", "24"]),
    "folded cp2": (2, ["--context-parallel-size", "2", "--hdp-tokens-per-rank", "48"]),
    # the vocabulary is padded to a multiple of 128 in all layouts
    "tp2": (4, "--tensor-model-parallel-size 2 --make-vocab-size-divisible-by 64 --hdp-tokens-per-rank 48".split()),
    "tp2, rows cut": (4, [*CUT_ROWS, "--hdp-tokens-per-rank", "48"]),
    "tp2, rows cut, loss in chunks": (4, [*CUT_ROWS, "--hdp-tokens-per-rank", "48", "--hdp-loss-chunk", "10"]),
    "tp2, rows cut, pp2": (4, [*CUT_ROWS, *PIPELINE[:2], "--hdp-tokens-per-rank", "96"]),
    "pp2": (4, PIPELINE),
    "pp2 static": (4, [*PIPELINE, "--hdp-algorithm", "static"]),
    "pp2 interleaved": (4, [*PIPELINE, "--num-virtual-stages-per-pipeline-rank", "2"]),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_another_layout_goes_on_with_the_same_training(layout, six_steps, after_three, tmp_path):
    ranks, flags = LAYOUTS[layout]
    run(ranks, [*after_three, "--hdp", *flags], tmp_path)
    compare(read_steps(tmp_path / "record"), six_steps[0][3:])


def compare(ours, theirs):
    assert len(ours) == len(theirs) > 0
    for a, b in zip(ours, theirs):
        # a step whose only sequence has one token has no loss: 0 / 0 in Megatron's report, on both sides
        assert a["lm loss"] == pytest.approx(b["lm loss"], rel=1e-5, nan_ok=True)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-5)
        assert a["lr"] == pytest.approx(b["lr"], rel=1e-12)


def test_evaluation_uses_the_same_path(corpus, tmp_path):
    flags = [*MODEL, *SMOOTH, "--split", "70,30,0", "--eval-iters", "2", "--eval-interval", "2", "--train-iters", "4"]
    flags += ["--data-path", corpus, "--global-batch-size", "8"]
    stock(flags, tmp_path / "stock")
    run(3, [*flags, *HDP], tmp_path / "hdp")
    ours, theirs = (
        [
            json.loads(line)["lm loss"]
            for line in (tmp_path / name / "record/evaluations.jsonl").read_text().splitlines()
        ]
        for name in ("hdp", "stock")
    )
    # after steps 2 and 4, and once more at the end
    assert len(ours) == len(theirs) == 3
    assert ours == pytest.approx(theirs, rel=1e-5)
    assert losses(tmp_path / "hdp") == pytest.approx(losses(tmp_path / "stock"), rel=1e-5)


def test_token_budget_and_blend_do_not_depend_on_the_pool(corpus, tmp_path):
    from megatron_hdp.data.indexed import write_indexed

    write_indexed(tmp_path / "other", [np.arange(n % 90 + 1) % 250 for n in range(200)], np.uint16)
    flags = [*MODEL, *SMOOTH, *NO_EVALUATION, "--train-iters", "4", "--hdp-batch-tokens", "300"]
    flags += ["--data-path", "0.3", corpus, "0.7", str(tmp_path / "other")]
    log = tmp_path / "log.jsonl"
    one = run(1, [*flags, "--hdp", "--hdp-tokens-per-rank", "96", "--hdp-log", str(log)], tmp_path / "one")
    three = run(3, [*flags, *HDP], tmp_path / "three")
    assert three == pytest.approx(one, rel=1e-5)
    tokens = [json.loads(line)["tokens"] for line in log.read_text().splitlines()]
    assert all(300 - 96 < count < 300 + 2 * 96 for count in tokens)


def test_without_hdp_the_launcher_changes_no_bit(corpus, tmp_path):
    flags = base(corpus, 3, "--global-batch-size", "4", "--micro-batch-size", "1", "--num-workers", "0")
    assert run(2, flags, tmp_path / "with") == run(2, flags, tmp_path / "without", launcher=False)
    ours, theirs = (read_weights(tmp_path / name / "record") for name in ("with", "without"))
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    # the other --hdp flags do nothing without --hdp
    assert run(2, [*flags, "--hdp-tokens-per-rank", "32"], tmp_path / "ignored") == losses(tmp_path / "with")


def test_log_line_tensorboard_and_json(corpus, tmp_path):
    log, board = tmp_path / "logs" / "hdp.jsonl", tmp_path / "board"
    flags = base(corpus, 3, "--global-batch-size", "7", *HDP, "--hdp-log", str(log), "--tensorboard-dir", str(board))
    flags += ["--log-throughput", "--tensorboard-log-interval", "1"]
    outcome = train(3, flags, tmp_path).check()
    assert "hdp/max-ring: 3.000000E+00" in outcome.outputs[2]
    assert "throughput per GPU" in outcome.outputs[2]
    assert "megatron_hdp: pool of 3 ranks x 32 tokens" in outcome.outputs[0]
    assert "megatron_hdp: seams, megatron-core 0.19" in outcome.outputs[0]
    assert re.search(r"schedule +applied", outcome.outputs[0])
    assert "seams, megatron-core" not in outcome.outputs[1]
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["iteration"] for line in lines] == [1, 2, 3]
    assert [line["loss"] for line in lines] == losses(tmp_path)
    # Megatron computes throughput and MFU from these, not from --seq-length
    steps = read_steps(tmp_path / "record")
    assert [step["tokens_for_flops"] for step in steps] == [line["tokens"] for line in lines]
    true = open_corpus([corpus], context=96, seed=7, size=SequenceCount(7), shares=[1.0, 0.0, 0.0])
    assert [step["squares_for_flops"] for step in steps] == [int((true.batch(k).lengths ** 2).sum()) for k in range(3)]
    assert all(line["padding_tokens"] >= 0 and line["bytes_sent"] > 0 for line in lines)

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(board))
    events.Reload()
    names = set(events.Tags()["scalars"])
    assert {"lm loss", "hdp/tokens", "hdp/imbalance", "hdp/padding", "hdp/sent-MiB", "hdp/plan-ms"} <= names
    assert [event.value for event in events.Scalars("hdp/tokens")] == [line["tokens"] for line in lines]


def test_bytes_sent_are_what_the_plan_predicts(corpus, tmp_path):
    """One rank's own count grows by its part of the prediction; checked on two ranks, which send equally."""
    for name, recompute in {
        "plain": [],
        "recompute": "--recompute-granularity full --recompute-method uniform".split(),
    }.items():
        log = tmp_path / f"{name}.jsonl"
        flags = base(
            corpus, 3, "--global-batch-size", "7", "--hdp", "--hdp-tokens-per-rank", "48", "--hdp-log", str(log)
        )
        train(2, [*flags, *recompute, *(["--recompute-num-layers", "1"] if recompute else [])], tmp_path / name).check()
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        sent = np.diff([0, *(line["own_ring_bytes_sent_total"] for line in lines)])
        assert sent.tolist() == [line["own_bytes_planned"] for line in lines]
        assert sent.sum() > 0


def test_one_sequence_a_step_leaves_ranks_without_work(corpus, tmp_path):
    """Most steps leave ranks with nothing but padding, whose loss mask is all zero."""
    flags = base(corpus, 6, "--global-batch-size", "1", "--use-distributed-optimizer")
    stock(flags, tmp_path / "stock")
    run(5, [*flags, "--hdp", "--hdp-tokens-per-rank", "24"], tmp_path / "hdp")
    compare(*(read_steps(tmp_path / name / "record") for name in ("hdp", "stock")))


def test_ten_thousand_tiny_documents_in_a_step(tmp_path):
    from megatron_hdp.data.indexed import write_indexed

    random = np.random.RandomState(1)
    write_indexed(tmp_path / "tiny", [random.randint(0, 250, size=n % 6) for n in range(12_500)], np.uint16)
    log = tmp_path / "log.jsonl"
    flags = base(str(tmp_path / "tiny"), 2, "--global-batch-size", "10000", "--hdp-log", str(log))
    two = run(2, [*flags, "--hdp", "--hdp-tokens-per-rank", "4096"], tmp_path / "two")
    one = run(1, [*flags, "--hdp", "--hdp-tokens-per-rank", "16384"], tmp_path / "one")
    assert two == pytest.approx(one, rel=1e-5)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert {line["sequences"] for line in lines} == {10_000}
