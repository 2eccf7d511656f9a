"""Activation offloading inside Megatron: the bits of the same plan without copies, an arena that is empty after."""

import dataclasses
import json
from types import SimpleNamespace

import pytest
import torch
from conftest import ADAM, MODEL, NO_EVALUATION, train
from record import read_steps, read_weights

from megatron_hdp.cost import load_profile
from megatron_hdp.errors import ConfigError
from megatron_hdp.types import MicroBatch, Piece, Ring

STEPS = 3
EVALUATION = "--split 70,30,0 --eval-iters 1 --eval-interval 2".split()
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1".split()
PAIRS = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2".split()
BLOCK = "--recompute-granularity full --recompute-method block --recompute-num-layers 2".split()
SELECTIVE = ["--recompute-granularity", "selective"]
OVERLAP = ["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"]
PP2 = ["--pipeline-model-parallel-size", "2"]
INTERLEAVED = [*PP2, "--num-virtual-stages-per-pipeline-rank", "2"]
TP2 = "--tensor-model-parallel-size 2 --make-vocab-size-divisible-by 64".split()
IN_TURN = "0.3 0 1 0.5"
# name -> ranks, layers, capacity, flags
FAST = {
    "rings, evaluation first": (2, 5, 48, [*OVERLAP, *EVALUATION]),
    "interleaved, full recompute": (2, 12, 96, [*INTERLEAVED, *FULL]),
}
REST = {
    f"{name}, {again}": (ranks, layers, capacity, [*flags, *more])
    for again, more in {"all kept": [], "selective": SELECTIVE, "full": FULL, "pairs": PAIRS, "block": BLOCK}.items()
    for name, ranks, layers, capacity, flags in [
        ("one rank", 1, 4, 96, []),
        ("ring of 3", 3, 5, 32, [*OVERLAP, *EVALUATION]),
        ("ring of 4", 4, 4, 24, EVALUATION),
        ("tp", 4, 4, 48, TP2),
        ("pipeline", 4, 8, 48, PP2),
        ("interleaved", 4, 16, 48, INTERLEAVED),
    ]
}


def run(corpus, case, ratios, folder):
    """Recorded steps and weights, and what each rank's arena held after every step."""
    ranks, layers, capacity, more = case
    flags = [*MODEL, *ADAM, *NO_EVALUATION, "--num-layers", str(layers), "--global-batch-size", "8"]
    flags += ["--train-iters", str(STEPS), "--data-path", corpus, "--hdp", "--hdp-tokens-per-rank", str(capacity)]
    environment = {"RATIOS": ratios, "EVALUATE": "1" if "--eval-interval" in more else ""}
    flags += [*more, "--hdp-offload", "--hdp-offload-gib", "0.02"]
    train(ranks, flags, folder, script="train_offload.py", environment=environment).check()
    record = folder / "record"
    arenas = [read_lines(record / f"arena{rank}.jsonl") for rank in range(ranks)]
    return read_steps(record), read_weights(record), arenas


def read_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def assert_same_bits(corpus, case, all_ratios, folder):
    steps, weights, arenas = run(corpus, case, "0", folder / "plain")
    assert all(line["out"] == 0 for arena in arenas for line in arena)
    for ratios in all_ratios:
        moved, moved_weights, arenas = run(corpus, case, ratios, folder / ratios)
        assert [without_offload(step) for step in moved] == [without_offload(step) for step in steps]
        assert len(steps) == STEPS
        assert all(torch.equal(moved_weights[key], weights[key]) for key in weights)
        for arena in arenas:
            assert len(arena) == STEPS
            assert sum(line["out"] for line in arena) > 0
            for line in arena:
                assert line["in_use"] == line["kept"] == 0
                assert line["in"] == line["out"]
                assert line["most"] > 0 or line["out"] == 0


def without_offload(step):
    return {key: value for key, value in step.items() if key in ("iteration", "lr", "grad_norm", "lm loss")}


@pytest.mark.parametrize("name", FAST)
def test_the_bits_of_the_same_plan_without_copies(name, corpus, tmp_path):
    assert_same_bits(corpus, FAST[name], [IN_TURN], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAST)
def test_the_bits_of_the_same_plan_with_every_ratio(name, corpus, tmp_path):
    assert_same_bits(corpus, FAST[name], ["0.3", "0.5", "1"], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", REST)
def test_the_bits_of_the_same_plan_everywhere(name, corpus, tmp_path):
    assert_same_bits(corpus, REST[name], [IN_TURN], tmp_path)


@pytest.fixture(scope="module")
def fast_copies(tmp_path_factory):
    """A profile by which copies take no time, of a node with host memory."""
    path = tmp_path_factory.mktemp("profile") / "fast.json"
    profile = load_profile("bytescale")
    layer = dataclasses.replace(profile.layer(), activation_per_token=2000.0, activation_constant=0.0)
    dataclasses.replace(
        profile,
        d2h_bandwidth=1e15,
        h2d_bandwidth=1e15,
        host_memory=8 * 2.0**24,
        gpus_per_node=8,
        layers={**profile.layers, profile.default_layer: layer},
    ).save(path)
    return str(path)


@pytest.mark.parametrize("layout", ["rings", pytest.param("pipeline", marks=pytest.mark.slow)])
def test_a_plan_sends_away_what_it_says(layout, corpus, fast_copies, tmp_path):
    """Smaller rings, the same training to rounding; the log says what went, and the arena is that of the profile."""
    ranks, layers, more = {"rings": (2, 8, []), "pipeline": (4, 12, PP2)}[layout]
    flags = [*MODEL, *ADAM, "--adam-eps", "1e-2", *NO_EVALUATION, "--num-layers", str(layers), *more]
    flags += ["--global-batch-size", "8", "--train-iters", str(STEPS), "--data-path", corpus]
    flags += ["--hdp", "--hdp-tokens-per-rank", "48", "--hdp-profile", fast_copies]
    outcomes, logged, steps = {}, {}, {}
    for name, offload in {"off": [], "on": ["--hdp-offload"]}.items():
        log = tmp_path / f"{name}.jsonl"
        outcomes[name] = train(ranks, [*flags, *offload, "--hdp-log", str(log)], tmp_path / name).check()
        logged[name], steps[name] = read_lines(log), read_steps(tmp_path / name / "record")
    assert "megatron_hdp: offload: 0.016 GiB of host memory in each process" in outcomes["on"].outputs[0]
    for off, on in zip(steps["off"], steps["on"], strict=True):
        assert on["lm loss"] == pytest.approx(off["lm loss"], rel=1e-5)
        assert on["grad_norm"] == pytest.approx(off["grad_norm"], rel=1e-5)
    for name in ("hdp/offload-out-MiB", "hdp/offload-in-MiB", "hdp/offload-wait-ms", "hdp/arena-MiB"):
        assert outcomes["on"].output.count(f"{name}: ") == STEPS  # on the rank that logs
        assert name not in outcomes["off"].output
    assert not [key for line in logged["off"] for key in line if "offload" in key or "arena" in key]
    for field in ("own_offload_bytes_out", "own_offload_wait_seconds"):
        assert sum(line[field] for line in logged["on"]) > 0
    for line in logged["on"]:
        assert line["own_offload_bytes_in"] == line["own_offload_bytes_out"]
        assert (line["own_arena_bytes_most"] > 0) == (line["own_offload_bytes_out"] > 0)
        assert (line["own_offload_wait_seconds"] > 0) == (line["own_offload_bytes_out"] > 0)
    rings = {
        name: sum(int(d) * n for line in lines for d, n in line["ring_sizes"].items()) for name, lines in logged.items()
    }
    assert rings["on"] < rings["off"]


def test_an_exhausted_arena_is_said_on_every_rank(corpus, tmp_path):
    flags = [*MODEL, *ADAM, *NO_EVALUATION, "--num-layers", "4", "--global-batch-size", "8", "--train-iters", "3"]
    flags += ["--data-path", corpus, "--hdp", "--hdp-tokens-per-rank", "48"]
    flags += ["--hdp-offload", "--hdp-offload-gib", "0.00002"]
    environment = {"RATIOS": "1"}
    outcome = train(2, flags, tmp_path, script="train_offload.py", environment=environment, timeout=60)
    assert set(outcome.codes) <= {1, 70}
    for output in outcome.outputs:
        assert "to move to the host, whose arena of 21248 bytes has" in output
        assert "raise --hdp-offload-gib" in output


def test_host_memory_that_is_not_there_is_said_on_every_rank(corpus, tmp_path):
    flags = [*MODEL, *ADAM, *NO_EVALUATION, "--num-layers", "4", "--global-batch-size", "8", "--train-iters", "3"]
    flags += ["--data-path", corpus, "--hdp", "--hdp-tokens-per-rank", "48"]
    outcome = train(2, [*flags, "--hdp-offload", "--hdp-offload-gib", "100000"], tmp_path, timeout=60)
    assert set(outcome.codes) <= {1, 70}
    for output in outcome.outputs:
        # the device of a CPU rank is its host: the estimate refuses before any process group is made
        assert "arena 100000.00 GiB" in output
        assert "lower --hdp-offload-gib, which takes the same memory" in output
        assert "Traceback" not in output


def test_ratio_of_a_micro_batch():
    from megatron_hdp.seams.offload import micro_batch_ratio

    def piece(tokens, offload):
        return Piece(0, tokens, Ring(0, 1), 0, tokens // 2, offload)

    assert micro_batch_ratio(MicroBatch(()), 8) == 0.0
    assert micro_batch_ratio(MicroBatch((piece(8, 0.0),)), 8) == 0.0
    # a quarter of 8 layers are 2 of the 6 in the middle
    assert micro_batch_ratio(MicroBatch((piece(8, 0.25),)), 8) == pytest.approx(1 / 3)
    # the mean over tokens: 24 of 32 with 0.5
    assert micro_batch_ratio(MicroBatch((piece(8, 0.0), piece(24, 0.5))), 8) == pytest.approx(0.375 * 8 / 6)
    assert micro_batch_ratio(MicroBatch((piece(8, 0.75),)), 8) == 1.0
    assert micro_batch_ratio(MicroBatch((piece(8, 0.9),)), 8) == 1.0
    assert micro_batch_ratio(MicroBatch((piece(8, 0.5),)), 2) == 0.0


def test_views_of_a_larger_storage_get_memory_of_their_own():
    from megatron_hdp.seams.spec import owning_memory

    weight = torch.randn(8, 24, requires_grad=True)
    q, k, v = (torch.randn(5, 8) @ weight).split([8, 8, 8], dim=1)

    def copied(*tensors):
        found = owning_memory(tensors)
        assert all(torch.equal(mine, given) for mine, given in zip(found, tensors, strict=True))
        assert all(
            mine is given or mine.untyped_storage().nbytes() == mine.nbytes for mine, given in zip(found, tensors)
        )
        return [mine is not given for mine, given in zip(found, tensors)]

    assert copied(q * 2, k * 2, v) == [False, False, True]
    assert copied(q * 2, k, v) == [False, True, True]
    assert copied(q, k, v) == [False, False, False]  # all of the storage is needed
    assert copied(q * 2, k * 2, v.detach().requires_grad_()) == [False, False, False]  # somebody else's
    with torch.no_grad():
        assert copied(q * 2, k * 2, v) == [False, False, False]
    gradients = [torch.autograd.grad(x.square().sum(), weight, retain_graph=True) for x in (v, *owning_memory([v]))]
    assert torch.equal(*(gradient for (gradient,) in gradients))


def test_fused_gradients_with_overlap_are_refused():
    """Not through the launcher: the CPU mode has no fused kernel to turn on."""
    from megatron_hdp.seams.refuse import refuse_offload

    args = {"num_layers": 8, "pipeline_model_parallel_size": 1, "virtual_pipeline_model_parallel_size": None}
    fused = {"gradient_accumulation_fusion": True, "overlap_grad_reduce": True}
    with pytest.raises(ConfigError, match="add --no-gradient-accumulation-fusion, or drop --overlap-grad-reduce"):
        refuse_offload(SimpleNamespace(**args, **fused))
    for name in fused:
        refuse_offload(SimpleNamespace(**args, **{**fused, name: False}))


@pytest.mark.parametrize(("stages", "parts"), [(4, None), (2, 2)])
def test_model_parts_of_two_layers_are_refused(stages, parts):
    from megatron_hdp.seams.refuse import refuse_offload

    args = {"pipeline_model_parallel_size": stages, "virtual_pipeline_model_parallel_size": parts}
    with pytest.raises(ConfigError, match=f"8 layers on {stages} pipeline stages of {parts or 1} model parts are 2"):
        refuse_offload(SimpleNamespace(num_layers=8, **args))
    refuse_offload(SimpleNamespace(num_layers=12, **args))
