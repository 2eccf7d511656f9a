"""Packs that share one gather, or one swap of rows for heads: against single sequences, and by hand."""

import dataclasses

import numpy as np
import pytest

from megatron_hdp.cost import CostModel, load_profile
from megatron_hdp.errors import ConfigError, PlanError
from megatron_hdp.planner import plan
from megatron_hdp.planner.baselines import packed_picoseconds
from megatron_hdp.planner.exchange import choose_exchanges
from megatron_hdp.planner.span import microbatch_picoseconds

RING, GATHER, HEADS = range(3)
BYTESCALE = load_profile("bytescale")
CALLS = dataclasses.replace(BYTESCALE.layer(), ring_step_forward=3e-4, ring_step_backward=7e-4)
CALLS = dataclasses.replace(BYTESCALE, layers={"llama-7b": CALLS}, default_layer="llama-7b")
COST = CostModel(CALLS, 3, heads=16, kv_heads=4, pad_multiple=4)
WAYS = [(RING, 1), (GATHER, 1), (HEADS, 2), (HEADS, 4), (HEADS, 8), (HEADS, 16)]


@pytest.mark.parametrize("window", [None, 3000])
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize(("exchange", "head_ranks"), WAYS)
def test_a_pack_of_one_sequence_costs_what_the_sequence_costs(exchange, head_ranks, recompute, window):
    cost = dataclasses.replace(COST, recompute=recompute, window=window)
    for length in (16, 2999, 40_000, 311_111):
        for ring in (16, 32):
            for tier in (0, 1):
                for phase in ("forward", "backward", "total"):
                    packed = cost.packed_attention_picoseconds([length], ring, tier, phase, exchange, head_ranks)
                    besides = cost.picoseconds(length, ring, tier, phase)
                    besides -= cost.attention_picoseconds(length, ring, tier, phase)
                    alone = cost.exchange_picoseconds(length, ring, tier, exchange, head_ranks, phase) - besides
                    inside = exchange == HEADS and tier == 1 and head_ranks <= cost.ranks_per_node
                    if window is None and inside:
                        assert packed < alone  # swapped inside nodes
                    elif window is None:
                        assert packed == alone
                    elif inside:
                        continue
                    elif length <= window:  # here a window cuts padding off
                        assert packed == pytest.approx(alone, rel=0.03)
                    else:  # it walks all steps, or fetches everything
                        assert packed >= alone // 2


def test_a_pack_gathers_once_and_swaps_once():
    """By hand, from the profile: two sequences on 8 ranks of several nodes, one layer, forward."""
    cost = CostModel(load_profile("bytescale"), 1, heads=16, kv_heads=4)
    link, layer = cost.profile.across_nodes, cost.layer_profile
    step = layer.attention_forward * (1000**2 + 3000**2)
    gathered = link.latency + 7 * 4000 * layer.kv_per_token / link.bandwidth
    found = cost.packed_attention_picoseconds([8000, 24000], 8, 1, "forward", GATHER)
    assert found == pytest.approx(1e12 * (8 * step + max(0, gathered - step)), rel=1e-5)
    backward = layer.attention_backward_factor * step
    home = link.latency + 7 * 4000 * layer.kv_gradient_per_token / link.bandwidth
    found = cost.packed_attention_picoseconds([8000, 24000], 8, 1, "backward", GATHER)
    assert found == pytest.approx(1e12 * (8 * backward + max(0, gathered - backward) + home), rel=1e-5)
    # Four ranks swap: 4 of 16 query heads each, 1 of 4 of keys and values; a quarter of a query head's bytes is half of
    # a token's keys and values over its four heads
    unit = layer.kv_per_token / (2 * 4)
    node = cost.profile.inside_node  # that holds four ranks
    there = 2 * node.latency + 3 * 4000 * unit * (4 + 2 + 4) / node.bandwidth
    walk = max(4 * step, link.latency + 4000 * layer.kv_per_token / link.bandwidth) + 4 * step
    found = cost.packed_attention_picoseconds([8000, 24000], 8, 1, "forward", HEADS, 4)
    assert found == pytest.approx(1e12 * (walk + there), rel=1e-5)


def test_compute_of_a_pack_is_never_less_than_that_of_its_sequences_and_sharing_never_costs():
    random = np.random.RandomState(3)
    free = COST.with_free_links("all")
    for _ in range(30):
        lengths = random.randint(1, 60_000, size=random.randint(2, 9))
        for exchange, head_ranks in WAYS:
            for phase in ("forward", "backward"):
                pack = COST.packed_attention_picoseconds(lengths, 16, 1, phase, exchange, head_ranks)
                besides = COST.picoseconds(lengths, 16, 1, phase) - COST.attention_picoseconds(lengths, 16, 1, phase)
                alone = COST.exchange_picoseconds(lengths, 16, 1, exchange, head_ranks, phase) - besides
                compute = free.packed_attention_picoseconds(lengths, 16, 1, phase, exchange, head_ranks)
                assert compute <= pack
                assert pack <= int(alone.sum()) + lengths.size  # each rounded down


@pytest.mark.parametrize("exchange", ["ring", "gather", "heads"])
def test_packs_of_a_plan_cost_what_their_sequences_cost_together(exchange):
    lengths = [3000, 20_000, 7000, 500, 41_000, 8, 900, 15_000]
    made = choose_exchanges(plan(lengths, 8, 8192, cost=COST, pad_multiple=4, algorithm="static"), COST, exchange)
    packed, apart = packed_picoseconds(made, COST), microbatch_picoseconds(made, COST)
    seen = 0
    for microbatch in range(packed[0].size):
        pieces = made.piece_sequence[made.microbatch_offsets[microbatch] : made.microbatch_offsets[microbatch + 1]]
        if pieces.size < 2:
            continue
        seen += 1
        tier = int(COST.tier(0, 8))
        way = int(made.exchange[pieces[0]]), int(made.head_ranks[pieces[0]])
        for phase, together, sum_ in zip(("forward", "backward"), packed, apart):
            own = made.lengths[pieces]
            rest = COST.picoseconds(own, 8, tier, phase) - COST.attention_picoseconds(own, 8, tier, phase)
            expected = COST.microbatch_picoseconds(phase) + int(rest.sum())
            expected += COST.packed_attention_picoseconds(own, 8, tier, phase, *way)
            assert together[microbatch] == expected
            assert together[microbatch] < sum_[microbatch]
    assert seen >= 8


def test_what_cannot_be_shared_is_refused():
    with pytest.raises(PlanError, match="head_ranks is 32"):
        COST.packed_attention_picoseconds([1000], 32, 1, "total", HEADS, 32)
    with pytest.raises(ConfigError, match="give CostModel heads"):
        CostModel(load_profile("h100"), 1).packed_attention_picoseconds([1000], 4, 1, "total", GATHER)
