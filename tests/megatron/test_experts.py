"""Models with experts against stock Megatron on one rank with one sequence per micro-batch, router losses included."""

import functools
import json

import numpy as np
import pytest
import torch
from conftest import ADAM, MODEL, NO_EVALUATION, SEQUENCES_PER_STEP, SGD, train
from record import read_steps, read_weights
from test_exactness import RECOMPUTE, relative

STEPS = 4
BATCH = ["--global-batch-size", str(SEQUENCES_PER_STEP), "--train-iters", str(STEPS)]
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32".split()
EXPERTS += ["--make-vocab-size-divisible-by", "192"]  # 384 entries, with two tensor-parallel ranks as well
# large, so that a wrong scale shows; the two types are the same thing, and add up
LOSSES = "--moe-router-load-balancing-type aux_loss seq_aux_loss --moe-aux-loss-coeff 0.3 0.2 --moe-z-loss-coeff 0.05"
LOSSES = LOSSES.split()
OPTIMIZERS = {"sgd": SGD, "smooth_adam": [*ADAM, "--adam-eps", "1e-2"]}
DISTRIBUTED = ["--use-distributed-optimizer", "--overlap-grad-reduce"]
TP2 = ["--tensor-model-parallel-size", "2", "--sequence-parallel"]
PP2 = ["--pipeline-model-parallel-size", "2"]
ETP1 = ["--expert-tensor-parallel-size", "1"]
MOE_AGAIN = "--recompute-granularity selective --recompute-modules core_attn moe".split()
ALLTOALL, ALLGATHER = (["--moe-token-dispatcher-type", kind] for kind in ("alltoall", "allgather"))


def ep(size, *others):
    return ["--expert-model-parallel-size", str(size), *others]


def read_router_losses(folder):
    return [json.loads(line) for line in (folder / "record" / "router_losses.jsonl").read_text().splitlines()]


def run_stock(flags, corpus, folder):
    flags = [*MODEL, *EXPERTS, *LOSSES, *NO_EVALUATION, *BATCH, *ALLTOALL, *flags, "--data-path", corpus]
    flags += ["--micro-batch-size", "1", "--calculate-per-token-loss", "--dataloader-type", "external"]
    environment = {"SCRIPT": "oracle.py"}
    train(1, flags, folder, script="router_metrics.py", environment=environment, launcher=False).check()
    return folder


@pytest.fixture(scope="session")
def first_weights(corpus, tmp_path_factory):
    """Flags to start with the weights of a checkpoint by model flags: Megatron's initial ones depend on the layout."""

    @functools.cache
    def load(model=()):
        folder = tmp_path_factory.mktemp("first")
        save = ["--save", str(folder / "ckpt"), "--save-interval", "1", "--train-iters", "1"]
        run_stock([*SGD, *model, *save], corpus, folder)
        return ["--load", str(folder / "ckpt"), "--finetune", "--no-load-optim", "--no-load-rng"]

    return load


@pytest.fixture(scope="session")
def stock_runs(corpus, first_weights, tmp_path_factory):
    """Folder of a run of stock Megatron by optimizer and model flags, each run at most once."""

    @functools.cache
    def run(optimizer, model=()):
        flags = [*OPTIMIZERS[optimizer], *model, *first_weights(model)]
        return run_stock(flags, corpus, tmp_path_factory.mktemp("stock"))

    return run


def run_hdp(ranks, capacity, flags, corpus, folder):
    flags = [*MODEL, *EXPERTS, *LOSSES, *NO_EVALUATION, *BATCH, *flags]
    flags += ["--data-path", corpus, "--hdp", "--hdp-tokens-per-rank", str(capacity)]
    flags += ["--hdp-log", str(folder / "hdp.jsonl")]
    environment = {"SCRIPT": "train.py"}
    return train(ranks, flags, folder, script="router_metrics.py", environment=environment).check()


def assert_same(folder, stock):
    ours, theirs = (read_steps(each / "record") for each in (folder, stock))
    assert len(ours) == len(theirs) == STEPS
    for step, (a, b) in enumerate(zip(ours, theirs), 1):
        assert relative(a["lm loss"], b["lm loss"]) < (1e-6 if step == 1 else 1e-5), (step, a, b)
        assert relative(a["grad_norm"], b["grad_norm"]) < 1e-5, (step, a, b)
    for a, b in zip(read_router_losses(folder), read_router_losses(stock), strict=True):
        assert a.keys() == b.keys()
        for name in b:
            assert max(b[name]) > 0.1
            assert a[name] == pytest.approx(b[name], rel=1e-5)


def assert_same_weights(folder, stock):
    """Rank 0's, which has the first experts; not cut by tensor parallelism."""
    ours, theirs = (read_weights(each / "record") for each in (folder, stock))
    assert ours.keys() <= theirs.keys()
    assert any("local_experts" in key for key in ours)
    assert any("router" in key for key in ours)
    assert max(float((ours[key] - theirs[key]).abs().max()) for key in ours) < 1e-5


# (processes, tokens per rank, optimizer, flags): rings over all of the pool, ranks with fewer micro-batches than others
FAST = [
    (3, 32, "sgd", ALLTOALL),
    (4, 24, "smooth_adam", ep(2) + ALLGATHER + DISTRIBUTED + RECOMPUTE),
    (4, 48, "sgd", TP2 + ep(4, *ETP1) + ALLTOALL + MOE_AGAIN),
]


def run_and_compare(case, corpus, first_weights, stock_runs, folder, model=()):
    ranks, capacity, optimizer, flags = case
    stock = stock_runs(optimizer, model)
    run_hdp(ranks, capacity, [*OPTIMIZERS[optimizer], *model, *first_weights(model), *flags], corpus, folder)
    assert_same(folder, stock)
    if not any(flag.startswith("--pipeline") for flag in flags):  # else the last rank logs a stage, and plans a column
        lines = [json.loads(line) for line in (folder / "hdp.jsonl").read_text().splitlines()]
        sent = np.diff([0, *(line["own_ring_bytes_sent_total"] for line in lines)])
        assert sent.tolist() == [line["own_bytes_planned"] for line in lines]
        assert sum(sent) > 0
    # parts of rows, and layers of two parts under one number, are not compared
    if not {"--tensor-model-parallel-size", "--num-layers-per-virtual-pipeline-stage"} & {*flags}:
        assert_same_weights(folder, stock)


@pytest.mark.parametrize("case", FAST, ids=str)
def test_equal_to_stock_megatron(case, corpus, first_weights, stock_runs, tmp_path):
    run_and_compare(case, corpus, first_weights, stock_runs, tmp_path)


REST = [
    (2, 48, "sgd", ep(2) + ALLTOALL),
    (4, 24, "sgd", ep(4) + ALLTOALL + MOE_AGAIN),
    (4, 24, "sgd", ep(4) + ALLGATHER),
    (6, 16, "sgd", ep(2) + ALLTOALL + RECOMPUTE),
    (4, 48, "sgd", TP2 + ALLTOALL),
    (4, 48, "smooth_adam", TP2 + ALLGATHER + DISTRIBUTED),
    (4, 48, "sgd", TP2 + ep(2) + ALLTOALL),
    (4, 48, "sgd", TP2 + ep(2, *ETP1) + ALLTOALL),
    (4, 48, "smooth_adam", TP2 + ep(4, *ETP1) + ALLTOALL + DISTRIBUTED + RECOMPUTE),
    (6, 32, "sgd", TP2 + ep(2, *ETP1) + ALLGATHER),
    (8, 24, "smooth_adam", TP2 + ep(2) + ALLGATHER + DISTRIBUTED + MOE_AGAIN),
    (8, 24, "smooth_adam", PP2 + ep(2) + ALLTOALL + DISTRIBUTED),
    (6, 32, "sgd", PP2 + ALLTOALL + RECOMPUTE),
    (8, 24, "sgd", PP2 + ep(4) + ALLGATHER + MOE_AGAIN),
    (8, 48, "smooth_adam", TP2 + PP2 + ep(2) + ALLTOALL + DISTRIBUTED + RECOMPUTE),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", REST, ids=str)
def test_equal_to_stock_megatron_everywhere(case, corpus, first_weights, stock_runs, tmp_path):
    run_and_compare(case, corpus, first_weights, stock_runs, tmp_path)


VARIANTS = {
    "shared experts": "--moe-shared-expert-intermediate-size 48",
    "shared experts beside messages": "--moe-shared-expert-intermediate-size 48 --moe-shared-expert-overlap",
    "bias in place of losses": (
        "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-bias-update-rate 0.05 "
        "--moe-router-load-balancing-type none --moe-aux-loss-coeff 0"
    ),
    "sigmoid and groups of experts": (
        "--moe-router-score-function sigmoid --moe-router-num-groups 2 --moe-router-group-topk 1 "
        "--moe-router-topk-scaling-factor 1.5"
    ),
    "dense layers between": "--num-layers 4 --moe-layer-freq [0,1,1,0]",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_other_models_with_experts(name, corpus, first_weights, stock_runs, tmp_path):
    model = tuple(VARIANTS[name].split())
    case = (4, 48, "sgd", PP2 + ep(2) + ALLTOALL)
    run_and_compare(case, corpus, first_weights, stock_runs, tmp_path, model)
    bias = read_weights(tmp_path / "record").get("decoder.layers.0.mlp.router.expert_bias")
    assert (bias is not None and float(bias.abs().max()) > 0) == ("bias" in name)


@pytest.mark.slow
@pytest.mark.parametrize("flags", [ep(2) + ALLTOALL, ep(2) + ALLGATHER + RECOMPUTE], ids=str)
def test_interleaved_pipeline(flags, corpus, first_weights, stock_runs, tmp_path):
    flags = [*PP2, "--num-layers-per-virtual-pipeline-stage", "1", *DISTRIBUTED, *flags]
    case = (8, 24, "smooth_adam", flags)
    run_and_compare(case, corpus, first_weights, stock_runs, tmp_path, ("--num-layers", "4"))


@pytest.mark.slow
def test_gradients_of_router_losses_do_not_depend_on_the_layout(corpus, first_weights, tmp_path):
    """Coefficients so large that the gradient is theirs; capacities put 1 to many sequences into a micro-batch."""
    heavy = "--moe-aux-loss-coeff 3000 2000 --moe-z-loss-coeff 500 --train-iters 1".split()
    run_stock([*SGD, *first_weights(), *heavy], corpus, tmp_path / "stock")
    expected = read_steps(tmp_path / "stock" / "record")[0]["grad_norm"]
    light = [*SGD, *first_weights(), "--train-iters", "1"]
    run_stock(light, corpus, tmp_path / "light")
    assert expected > 1000 * read_steps(tmp_path / "light" / "record")[0]["grad_norm"]
    layouts = [(1, 96, []), (1, 384, []), (3, 32, []), (4, 24, ep(4)), (4, 48, TP2 + ep(2)), (4, 48, PP2 + ep(2))]
    for number, (ranks, capacity, layout) in enumerate(layouts):
        folder = tmp_path / str(number)
        run_hdp(ranks, capacity, [*SGD, *first_weights(), *heavy, *ALLTOALL, *layout], corpus, folder)
        assert relative(read_steps(folder / "record")[0]["grad_norm"], expected) < 1e-5, layout


@pytest.mark.slow
def test_offload_evaluation_and_gathered_parameters(corpus, first_weights, stock_runs, tmp_path):
    """What else runs through the layers of experts: none of it may change what is trained."""
    model = ("--num-layers", "4")
    flags = [*ep(2), *ALLTOALL, *DISTRIBUTED, "--overlap-param-gather", "--hdp-offload", "--hdp-offload-gib", "0.01"]
    flags += ["--eval-iters", "1", "--eval-interval", "2", "--split", "1,1,0", "--train-iters", "4"]
    flags += [*OPTIMIZERS["smooth_adam"], *model, *first_weights(model)]
    stock_flags = [*OPTIMIZERS["smooth_adam"], *model, *first_weights(model), "--split", "1,1,0"]
    run_stock(stock_flags, corpus, tmp_path / "stock")
    run_hdp(4, 24, flags, corpus, tmp_path / "hdp")
    assert_same(tmp_path / "hdp", tmp_path / "stock")
    assert_same_weights(tmp_path / "hdp", tmp_path / "stock")
    assert len((tmp_path / "hdp" / "record" / "evaluations.jsonl").read_text().splitlines()) >= 2
    logged = [json.loads(line) for line in (tmp_path / "hdp" / "hdp.jsonl").read_text().splitlines()]
    assert max(line["own_offload_bytes_out"] for line in logged) > 0


@pytest.mark.slow
def test_two_runs_give_the_same_bits(corpus, first_weights, tmp_path):
    flags = [*SGD, *first_weights(), *ep(2), *ALLTOALL]
    for name in ("first", "second"):
        run_hdp(4, 24, flags, corpus, tmp_path / name)
    assert read_steps(tmp_path / "first" / "record") == read_steps(tmp_path / "second" / "record")
    assert read_router_losses(tmp_path / "first") == read_router_losses(tmp_path / "second")
    first, second = (read_weights(tmp_path / name / "record") for name in ("first", "second"))
    assert all(torch.equal(first[key], second[key]) for key in first)


LAYOUTS = [
    (tensor, stages, pool, experts, parts)
    for tensor in (1, 2, 4)
    for stages in (1, 2)
    for pool in (1, 2, 3, 4, 6, 8)
    for experts in (1, 2, 3, 4, 8)
    for parts in (1, 2, 4)
]


def groups_of_megatron(tensor, stages, pool, experts, parts):
    """Pool ranks of every expert group as Megatron numbers processes, with their stage."""
    from megatron.core.parallel_state import RankGenerator

    order, world = "tp-cp-ep-dp-pp", tensor * stages * pool
    columns = RankGenerator(tp=tensor, ep=1, dp=pool, pp=stages, cp=1, order=order)
    share = world // (experts * parts * stages)
    mixed = RankGenerator(tp=parts, ep=experts, dp=share, pp=stages, cp=1, order=order)
    pool_rank = {process: rank for ranks in columns.get_ranks("dp") for rank, process in enumerate(ranks)}
    return [sorted({pool_rank[process] for process in group}) for group in mixed.get_ranks("tp-ep")]


def test_expert_groups_are_those_of_megatron():
    from types import SimpleNamespace

    from megatron_hdp.errors import ConfigError
    from megatron_hdp.seams.expert_layout import expert_group_from_args

    refused = accepted = 0
    for tensor, stages, pool, experts, parts in LAYOUTS:
        args = SimpleNamespace(
            tensor_model_parallel_size=tensor,
            pipeline_model_parallel_size=stages,
            world_size=tensor * stages * pool,
            num_experts=24,
            expert_model_parallel_size=experts,
            expert_tensor_parallel_size=parts,
        )
        possible = tensor * pool % (experts * parts) == 0
        found = groups_of_megatron(tensor, stages, pool, experts, parts) if possible else []
        size = max((len(group) for group in found), default=0)
        blocks = [list(range(first, first + size)) for first in range(0, pool, max(size, 1))]
        if possible and all(group in blocks for group in found):
            assert expert_group_from_args(args) == size
            accepted += 1
        else:
            with pytest.raises(ConfigError, match="experts: groups of --expert-model-parallel-size"):
                expert_group_from_args(args)
            refused += 1
    assert accepted > 100
    assert refused > 100
    args = SimpleNamespace(**{**vars(args), "pipeline_model_parallel_size": 2, "expert_tensor_parallel_size": 1})
    args.use_tp_pp_dp_mapping, args.expert_model_parallel_size = True, 8
    with pytest.raises(ConfigError, match="drop the mapping"):
        expert_group_from_args(args)


def test_router_losses_equal_those_of_each_sequence_alone():
    """Gradients and sums of a micro-batch of local pieces with padding, against autograd on one sequence at a time."""
    from megatron_hdp.planner import plan
    from megatron_hdp.router_loss import Routing, add_balance_loss, ring_sums, token_rows

    lengths, experts, chosen_per_token, coefficient = np.array([5, 1, 8, 3]), 6, 2, 0.7
    micro_batch = plan(lengths, num_ranks=1, tokens_per_rank=32).micro_batch(0, 0)
    rows, generator = micro_batch.tokens + 4, torch.Generator().manual_seed(1)
    logits = torch.randn(rows, experts, generator=generator, dtype=torch.float64).requires_grad_()
    scores = logits.softmax(1)
    chosen = torch.zeros(rows, experts, dtype=torch.bool).scatter(1, scores.topk(chosen_per_token).indices, True)
    total, logged, begin = torch.zeros((), dtype=torch.float64), 0.0, 0
    for piece in micro_batch.pieces:
        own = slice(begin, begin + piece.length)
        frequency = chosen[own].double().mean(0) / chosen_per_token
        loss = experts * (frequency * scores[own].mean(0)).sum()
        total, logged = total + coefficient * piece.length * loss, logged + loss.item()
        begin += piece.tokens
    (expected,) = torch.autograd.grad(total, logits, retain_graph=True)

    routing = Routing(token_rows(micro_batch, rows, slice(None), torch.device("cpu")), 1)
    routing.note_choice(0, chosen, scores)
    routing.note_choice(0, ~chosen, scores)  # a second forward changes nothing
    output = torch.ones(3, dtype=torch.float64, requires_grad=True)
    result = add_balance_loss(output, scores, routing, 0, coefficient, lambda: 3.0)
    routing.add_up(lambda counts: ring_sums(counts, micro_batch, 0, None), chosen_per_token)
    result.sum().backward()
    assert output.grad.tolist() == [1.0, 1.0, 1.0]
    assert torch.allclose(logits.grad, 3.0 * expected, rtol=1e-5, atol=1e-8)
    assert float(expected.abs().max()) > 0.01
    assert float(routing.balance_losses()[0]) == pytest.approx(logged, rel=1e-6)
