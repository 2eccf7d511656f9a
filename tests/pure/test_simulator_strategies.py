"""Strategies: what each may do, what each costs by hand, and that ours is never longer."""

import dataclasses

import numpy as np
import pytest

from megatron_hdp.cost import load_profile
from megatron_hdp.errors import ConfigError, PlanError
from megatron_hdp.mixes import mix_batches, parse_mix
from megatron_hdp.plan_step import MEGATRON
from megatron_hdp.planner import check, plan
from megatron_hdp.planner.baselines import packed_rank_ends
from megatron_hdp.simulator import simulate_step
from megatron_hdp.simulator.models import MODELS
from megatron_hdp.simulator.strategies import STRATEGIES, Setting, run_strategy
from megatron_hdp.simulator.strategy_blocks import BLOCK, plan_blocks
from megatron_hdp.simulator.strategy_setting import Asked
from megatron_hdp.types import EXCHANGES

K = 1024
SMALL = Setting(model="llama-7b", gpus=64, context=128 * K)
PIPELINE = Setting(model="llama-70b", gpus=512, context=128 * K)


def batch(mix: str, setting: Setting, tokens: int, step: int = 0) -> np.ndarray:
    return mix_batches(parse_mix(mix), tokens, setting.context, 5)(step)


LENGTHS = batch("byted", SMALL, 2 << 20)


def layout(setting: Setting) -> dict[str, int]:
    return {
        "stages": setting.stages,
        "virtual_stages": setting.virtual_stages,
        "expert_group": setting.expert_group,
    }


def test_the_order_in_which_people_read_them():
    names = ["hdp", "bytescale", "naive", "pow2", "megatron", "static", "all-gather", "ulysses", "heads-ring", "blocks"]
    assert list(STRATEGIES) == names
    assert [name for name in names if STRATEGIES[name].estimate] == ["blocks"]


@pytest.mark.parametrize("setting", [SMALL, PIPELINE], ids=["no pipeline", "pipeline"])
@pytest.mark.parametrize("mix", ["byted", "github"])
def test_every_strategy_trains_on_the_whole_batch_and_ours_is_never_longer(setting, mix):
    lengths = batch(mix, setting, 2 << 20)
    ours = run_strategy("hdp", lengths, setting)
    ran = set()
    for name, strategy in STRATEGIES.items():
        try:
            step = run_strategy(name, lengths, setting)
        except PlanError:
            continue
        ran.add(name)
        result = step.result
        assert result.tokens == step.plan.tokens == 2 << 20
        assert (result.ranks, result.stages, result.gpus) == (setting.ranks, setting.stages, setting.gpus)
        spent = result.compute + sum(result.idle.values()) + result.optimizer_seconds
        np.testing.assert_allclose(spent, result.seconds, rtol=1e-9)
        if not strategy.estimate:
            check(step.plan, **layout(setting), cost=setting.cost)
            assert ours.result.seconds <= result.seconds, name
    assert ran == set(STRATEGIES) - {"megatron", *(() if "ulysses" in ran else ("ulysses",))}


def test_settings_take_what_the_model_says_and_refuse_what_does_not_divide():
    setting = Setting(model="mixtral-8x22b", context=2 << 20)
    model = MODELS["mixtral-8x22b"]
    assert (setting.gpus, setting.tensor_parallel, setting.stages) == (model.gpus, model.tensor_parallel, model.stages)
    assert setting.ranks == model.gpus // (model.tensor_parallel * model.stages)
    assert setting.cost.layers_per_stage == 56 // setting.stages
    assert (setting.cost.heads, setting.cost.kv_heads, setting.cost.pad_multiple) == (6, 1, 8)
    job = setting.job(one_slice=True)
    assert job.one_slice
    assert (job.experts, job.experts_per_token) == (8, 2)
    with pytest.raises(ConfigError, match="model 'gpt' is not known"):
        Setting(model="gpt", context=K)
    with pytest.raises(ConfigError, match=r"100 GPUs do not divide into ranks of 8 x 4 GPUs .*multiple of 32"):
        Setting(model="llama-70b", gpus=100, context=K)
    with pytest.raises(ConfigError, match="32 layers of llama-7b do not divide into 5 stages of 1 parts"):
        Setting(model="llama-7b", gpus=1000, stages=5, context=K)
    with pytest.raises(ConfigError, match="stages is 0: it must be at least 1"):
        Setting(model="llama-7b", stages=0, context=K)
    with pytest.raises(ConfigError, match="strategy 'best' is not known: choose one of hdp, bytescale"):
        run_strategy("best", LENGTHS, SMALL)


def test_a_cluster_replaces_the_links_of_the_profile():
    cluster = dataclasses.replace(SMALL.machines, nic_bandwidth=SMALL.machines.nic_bandwidth / 10)
    slow = dataclasses.replace(SMALL, cluster=cluster)
    profile = load_profile("bytescale")
    assert slow.cost.profile.across_nodes.bandwidth == pytest.approx(profile.across_nodes.bandwidth / 10)
    assert SMALL.cost.profile.across_nodes.bandwidth == profile.across_nodes.bandwidth
    fast, late = (run_strategy("static", LENGTHS, setting).result.seconds for setting in (SMALL, slow))
    assert late > 1.5 * fast


def test_static_meshes_hold_the_context_and_move_packs_together():
    step = run_strategy("static", LENGTHS, SMALL)
    assert set(step.plan.ring_size.tolist()) == {16}  # 128K tokens, 8K a rank
    assert step.words == "static CP, ring of 16"
    apart = simulate_step(step.plan, SMALL.job())
    assert step.result.seconds < apart.seconds
    assert step.result.span_seconds == pytest.approx(packed_rank_ends(step.plan, SMALL.cost).max() / 1e12, rel=0.05)
    longer = run_strategy("static", LENGTHS, SMALL, longest=256 * K)
    assert set(longer.plan.ring_size.tolist()) == {32}
    with pytest.raises(PlanError, match="does not fit in a pool of 32 ranks"):
        run_strategy("static", LENGTHS, SMALL, longest=512 * K)


def test_gather_and_heads_are_the_same_mesh_with_another_exchange():
    ring = run_strategy("static", LENGTHS, SMALL).plan
    for name, exchange, heads in (("all-gather", "gather", 1), ("ulysses", "heads", 16), ("heads-ring", "heads", None)):
        made = run_strategy(name, LENGTHS, SMALL).plan
        assert set(made.exchange.tolist()) == {EXCHANGES.index(exchange)}
        assert len(set(made.head_ranks.tolist())) == 1
        if heads is not None:
            assert made.head_ranks[0] == heads
        for column in ("ring_start", "ring_size", "rank_offsets", "microbatch_offsets", "piece_sequence"):
            assert np.array_equal(getattr(made, column), getattr(ring, column))


def test_ulysses_cannot_have_more_ranks_than_heads():
    wide = dataclasses.replace(SMALL, context=256 * K)
    with pytest.raises(PlanError, match=r"mesh of 32 ranks holds 262,144 tokens.*16 heads.*hold 131,072 tokens"):
        run_strategy("ulysses", LENGTHS, wide)
    alone = dataclasses.replace(SMALL, context=8 * K)
    short = np.minimum(LENGTHS, 8 * K)
    assert set(run_strategy("ulysses", short, alone).plan.exchange.tolist()) == {0}  # nothing to share


@pytest.mark.parametrize("setting", [SMALL, PIPELINE], ids=["no pipeline", "pipeline"])
def test_heads_and_ring_have_the_best_of_all_group_sizes(setting):
    lengths = batch("github", setting, 1 << 20)
    step = run_strategy("heads-ring", lengths, setting)
    sizes = [a for a in range(2, 17) if 16 % a == 0 and setting.cost.swaps_heads(a)]
    spans = {}
    for size in sizes:
        other = dataclasses.replace(step.plan, head_ranks=np.full_like(step.plan.head_ranks, size))
        spans[size] = int(packed_rank_ends(other, setting.cost, **layout(setting)).max())
    assert len(sizes) > 1
    assert spans[int(step.plan.head_ranks[0])] == min(spans.values())
    assert step.words == f"heads x ring, {step.plan.head_ranks[0]} x {16 // step.plan.head_ranks[0]} ranks"


def test_megatron_runs_where_a_planner_is_brought():
    with pytest.raises(PlanError, match="no megatron-core at hand"):
        run_strategy(MEGATRON, LENGTHS, SMALL)

    def of(options, checkout):
        assert checkout is None
        assert (options.num_ranks, options.tokens_per_rank, options.balance) == (32, 8192, "dp")
        return lambda lengths: plan(lengths, 32, 8192, algorithm="pow2", pad_multiple=2)

    step = run_strategy(MEGATRON, LENGTHS, SMALL, megatron=of)
    assert step.plan == run_strategy("pow2", LENGTHS, SMALL).plan
    assert step.words == "Megatron-LM's scheduler"


def test_bytescale_balances_pipelines_in_its_own_way():
    step = run_strategy("bytescale", LENGTHS, PIPELINE)
    arguments = (LENGTHS, PIPELINE.ranks, 8192)
    options = {**layout(PIPELINE), "cost": PIPELINE.cost, "pad_multiple": PIPELINE.cost.pad_multiple}
    assert step.plan == plan(*arguments, algorithm="bytescale-pp", **options)
    assert step.plan != plan(*arguments, algorithm="bytescale", **options)


# Blocks: an estimate


def blocks(setting: Setting, lengths: np.ndarray):
    asked = Asked(lengths, setting, setting.context)
    return plan_blocks(asked), run_strategy("blocks", lengths, setting).result


def test_blocks_do_all_work_and_share_it_evenly():
    made, result = blocks(SMALL, LENGTHS)
    assert made.num_sequences == made.num_ranks * made.microbatch_counts[0]
    assert made.lengths.max() - made.lengths.min() <= 1
    assert made.lengths.max() <= SMALL.tokens_per_rank
    cost = SMALL.cost
    work = float(cost.with_free_links("all").picoseconds(LENGTHS).sum()) / 1e12
    longest = LENGTHS.max()
    number = -(-longest // BLOCK)
    alone = float(cost.with_free_links("all").attention_picoseconds(longest)) / 1e12 / (number * (number + 1) / 2)
    assert alone * SMALL.ranks < work  # one pair of blocks is no limit here
    assert float(result.compute.sum()) == pytest.approx(work, rel=1e-6)
    assert np.ptp(result.compute) < 1e-9
    assert result.seconds >= work / SMALL.ranks


def test_blocks_fetch_no_more_than_a_ring_and_less_than_nothing_is_not_possible():
    one = np.array([128 * K])
    quiet = Setting(model="llama-7b", gpus=32, context=128 * K)  # 16 ranks: each has the sixteenth part
    _, result = blocks(quiet, one)
    ring = run_strategy("static", one, quiet).result
    sent = ring.bytes_by_link["across_nodes"] + ring.bytes_by_link["inside_node"]
    reduced = blocks(quiet, np.array([8 * K] * 16))[1].bytes_by_link  # nothing is shared: gradients and parameters only
    fetched = result.bytes_by_link["across_nodes"] - reduced["across_nodes"]
    layer, layers = quiet.cost.layer_profile, 32
    # forward half of the keys and values, backward these and the gradients, for all GPUs of 16 ranks
    exact = 16 * 2 * layers * 64 * K * (2 * layer.kv_per_token + layer.kv_gradient_per_token)
    assert fetched == pytest.approx(exact, rel=1e-6)
    assert fetched < sent


def test_a_pair_of_blocks_is_on_one_rank():
    wide = Setting(model="llama-7b", gpus=4096, context=128 * K)
    _, result = blocks(wide, np.array([128 * K] + [64] * 64 * K))
    cost = wide.cost.with_free_links("all")
    pair = float(cost.attention_picoseconds(128 * K)) / 1e12 / (32 * 33 / 2)
    share = float(cost.attention_picoseconds(128 * K)) / 1e12 / wide.ranks
    assert pair > 3 * share
    assert float(result.compute.min()) > pair


def test_blocks_in_a_pipeline_take_the_number_of_waves_that_is_best():
    lengths = batch("github", PIPELINE, 2 << 20)
    made, result = blocks(PIPELINE, lengths)
    fewest = -(-(2 << 20) // (PIPELINE.ranks * PIPELINE.tokens_per_rank))
    assert made.microbatch_counts[0] > fewest  # smaller ones fill the pipeline faster
    assert len(set(made.microbatch_counts.tolist())) == 1
    assert result.seconds < run_strategy("hdp", lengths, PIPELINE).result.seconds * 1.05
    interleaved = dataclasses.replace(PIPELINE, virtual_stages=2)
    assert blocks(interleaved, lengths)[0].microbatch_counts[0] % 4 == 0
