"""Exchanges, windows and chunks of the loss inside Megatron, against stock Megatron on one rank."""

import functools
import json

import numpy as np
import pytest
from conftest import ADAM, MODEL, NO_EVALUATION, SEQUENCES_PER_STEP, stock, train
from record import count_groups, read_steps

from megatron_hdp.data.indexed import write_indexed

STEPS = 4
SMOOTH = [*ADAM, "--adam-eps", "1e-2"]
# gradients leave while the backward pass runs, parameters come while the forward pass runs: the output layer's weight
# must have one full gradient, and be there, although chunks use it many times
OVERLAP = ["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"]
CHUNKS = ["--hdp-loss-chunk", "5"]
TP2 = "--tensor-model-parallel-size 2 --make-vocab-size-divisible-by 64".split()
EVERY = ["--window-size", "11,0"]
EVERY_SECOND = [*EVERY, "--window-attn-skip-freq", "2"]
YARN = "--position-embedding-type yarn --rotary-scaling-factor 4 --yarn-original-max-position-embeddings 24".split()
SELECTIVE = ["--recompute-granularity", "selective"]
BLOCK = "--recompute-granularity full --recompute-method block --recompute-num-layers 1".split()
TIED = ["tied"]  # stands for the absence of MODEL's --untie-embeddings-and-output-weights
MIXED = [*EVERY_SECOND, *YARN, *TIED]
PIPELINE = ["--pipeline-model-parallel-size", "2", *BLOCK]
FOUR_LAYERS = ["--num-layers", "4", "--window-size", "11,0", "--window-attn-skip-freq", "[1,0,0,1]"]
# (exchange, model, flags of the HDP run); 4 ranks each
FAST = [
    ("ring", MIXED, [*TP2, *CHUNKS]),
    ("gather", MIXED, [*CHUNKS, *OVERLAP]),
    ("heads", MIXED, [*CHUNKS, *OVERLAP]),
]
REST = [
    (exchange, model, [*more, *CHUNKS])
    for exchange in ("auto", "ring", "gather", "heads")
    for model in ([], EVERY, EVERY_SECOND, YARN)
    for more in ([], TP2, [*OVERLAP, *SELECTIVE])
]


def flags_of(corpus, model):
    common = [flag for flag in MODEL if not (flag.startswith("--untie") and TIED[0] in model)]
    common += [*SMOOTH, *NO_EVALUATION, "--global-batch-size", str(SEQUENCES_PER_STEP), "--train-iters", str(STEPS)]
    return [*common, "--data-path", corpus, *(flag for flag in model if flag not in TIED)]


@pytest.fixture(scope="module")
def stock_steps(corpus, tmp_path_factory):
    """Steps of stock Megatron by model flags, each run at most once."""

    @functools.cache
    def run(model):
        return stock(flags_of(corpus, model), tmp_path_factory.mktemp("stock"))

    return lambda model: run(tuple(model))


@pytest.fixture(scope="module")
def megatrons_groups(corpus, tmp_path_factory):
    """Process groups of rank 0 without --hdp, by flags, each run at most once."""

    @functools.cache
    def run(flags):
        folder = tmp_path_factory.mktemp("groups")
        more = ["--train-iters", "1", "--micro-batch-size", "1", "--num-workers", "0"]
        train(4, [*flags_of(corpus, []), *flags, *more], folder).check()
        return count_groups(folder / "record")

    return lambda flags: run(tuple(flags))


def run_hdp(corpus, exchange, model, flags, folder):
    """Recorded steps, and what --hdp-log says of each."""
    log = folder / "hdp.jsonl"
    pool = 2 if {"--tensor-model-parallel-size", "--pipeline-model-parallel-size"} & set(flags) else 4
    capacity = str(96 // pool)  # the longest sequence needs every rank
    hdp = ["--hdp", "--hdp-tokens-per-rank", capacity, "--hdp-exchange", exchange, "--hdp-log", str(log)]
    train(4, [*flags_of(corpus, model), *flags, *hdp], folder).check()
    return read_steps(folder / "record"), [json.loads(line) for line in log.read_text().splitlines()]


def assert_equal(ours, theirs):
    assert len(ours) == len(theirs) > 0
    for a, b in zip(ours, theirs):
        assert a["lm loss"] == pytest.approx(b["lm loss"], rel=1e-5)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-5)


def compare(case, corpus, stock_steps, folder):
    exchange, model, flags = case
    ours, logged = run_hdp(corpus, exchange, model, flags, folder)
    assert len(ours) == STEPS
    assert_equal(ours, stock_steps(model))
    sent = [line["own_ring_bytes_sent_total"] for line in logged]
    predicted = [line["own_bytes_planned"] for line in logged]
    assert [b - a for a, b in zip([0, *sent], sent)] == predicted
    used = {name for line in logged for name, count in line["exchanges"].items() if count}
    assert used
    assert exchange == "auto" or exchange in used


@pytest.mark.parametrize("case", FAST, ids=lambda case: case[0])
def test_equal_to_stock_megatron_with_one_more_communicator(case, corpus, stock_steps, megatrons_groups, tmp_path):
    compare(case, corpus, stock_steps, tmp_path)
    assert count_groups(tmp_path / "record") == megatrons_groups(case[2]) + 1


@pytest.mark.slow
@pytest.mark.parametrize("case", REST, ids=lambda case: " ".join([case[0], *case[1], *case[2]]))
def test_equal_to_stock_megatron_everywhere(case, corpus, stock_steps, tmp_path):
    compare(case, corpus, stock_steps, tmp_path)


@pytest.fixture(scope="module")
def four_layers(corpus, tmp_path_factory):
    """Steps of one rank, and its checkpoint after half of them: with stages training would begin from other weights."""
    folder = tmp_path_factory.mktemp("four_layers")
    save = ["--save", str(folder / "checkpoint"), "--save-interval", str(STEPS // 2)]
    one = ["--hdp", "--hdp-tokens-per-rank", "96"]
    train(1, [*flags_of(corpus, FOUR_LAYERS), *save, *one], folder).check()
    (folder / "checkpoint" / "latest_checkpointed_iteration.txt").write_text(str(STEPS // 2))
    return read_steps(folder / "record"), ["--load", str(folder / "checkpoint")]


@pytest.mark.slow
@pytest.mark.parametrize("virtual", [[], ["--num-virtual-stages-per-pipeline-rank", "2"]], ids=["1F1B", "interleaved"])
@pytest.mark.parametrize("exchange", ["ring", "gather", "heads"])
def test_windows_are_those_of_the_whole_models_layers(exchange, virtual, corpus, four_layers, tmp_path):
    """Layers 2 and 3 of 4 have none, whatever stage they are on."""
    steps, load = four_layers
    ours, _ = run_hdp(corpus, exchange, FOUR_LAYERS, [*PIPELINE, *virtual, *load, *CHUNKS], tmp_path)
    assert_equal(ours, steps[STEPS // 2 :])


def test_rings_that_have_another_slot_on_each_rank_do_not_wait_for_parameters(tmp_path):
    """Rank 3 has in its first micro-batch what rank 2 has in its second: gathers of later layers that start in the
    first micro-batch's forward pass once made them wait for each other."""
    lengths = (28, 39, 66)
    write_indexed(tmp_path / "three", [(3 + 2 * np.arange(length)) % 250 for length in lengths], np.uint16)
    common = [*MODEL, *SMOOTH, *NO_EVALUATION, "--num-layers", "4", "--global-batch-size", "3", "--train-iters", "4"]
    common += ["--data-path", str(tmp_path / "three"), "--hdp", "--hdp-tokens-per-rank", "24"]
    common += ["--use-distributed-optimizer", "--overlap-grad-reduce", "--ddp-bucket-size", "1000"]
    steps = []
    for name, more in {"late": [], "early": ["--overlap-param-gather"]}.items():
        train(4, [*common, *more], tmp_path / name, timeout=90).check()
        steps.append(read_steps(tmp_path / name / "record"))
    assert_equal(*steps)
    assert len(steps[0]) == 4
