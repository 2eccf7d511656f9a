"""Every exchange, with and without windows: results, traffic, peers, repeats."""

import random

import numpy as np
import pytest
import torch
from attention_cases import (
    Heads,
    How,
    errors,
    exchanges,
    make_plan,
    on_pool,
    packed_tensors,
    random_pack,
    random_plans,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pool import RankContext

from megatron_hdp.attention.attend import hdp_attention
from megatron_hdp.attention.comm import RingComm
from megatron_hdp.attention.kernels import pick_kernel
from megatron_hdp.attention.traffic import exchange_bytes
from megatron_hdp.errors import ConfigError
from megatron_hdp.planner.check import peers
from megatron_hdp.types import Plan

KERNELS = ["reference", "torch_cpu_flash"]


def check_exact(plan, by_rank, heads, window=None, limit=1e-5):
    """Results as float64 attention has them, and traffic to the byte as foretold."""
    assert errors(plan, by_rank, heads, window).max() < limit
    size = heads.dtype.itemsize
    foretold = exchange_bytes(plan, heads.query, heads.kv, heads.dim, size, window=window)
    assert [sent for _, sent, _ in by_rank] == foretold.tolist()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("window", [None, 1, 5, 30])
def test_every_exchange_with_lengths_at_the_edges(rank_pool, kernel, window):
    """Rings of 2..8 ranks, all exchanges, 1, 2d-1, 2d, 2d+1 and 5d+3 tokens."""
    heads = Heads(8, 2, 8)
    pack = [
        (length, (3 * size) % (9 - size), size, *how)
        for size in range(2, 9)
        for how in exchanges(size, heads)
        for length in (1, 2 * size - 1, 2 * size, 2 * size + 1, 5 * size + 3)
    ]
    plan = make_plan(8, [pack])
    (by_rank,) = on_pool(rank_pool, [plan], heads, How(kernel, window=window))
    check_exact(plan, by_rank, heads, window)


@st.composite
def cases(draw):
    """Plans on 8 ranks, heads, a window."""
    kv = draw(st.sampled_from([1, 2, 3, 4, 8]))
    query = kv * draw(st.integers(1, 16 // kv))
    heads = Heads(query, kv, draw(st.sampled_from([8, 16])))
    rng = random.Random(draw(st.integers(0, 2**32)))
    packs = [random_pack(rng, 8, draw(st.sampled_from([20, 90])), heads) for _ in range(draw(st.integers(1, 2)))]
    plan = make_plan(8, packs, draw(st.sampled_from([2, 4, 6])))
    longest = int(plan.lengths.max())
    window = draw(st.one_of(st.none(), st.integers(1, longest)))
    return plan, heads, window, draw(st.sampled_from(KERNELS))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cases())
def test_random_packs(rank_pool, case):
    plan, heads, window, kernel = case
    (by_rank,) = on_pool(rank_pool, [plan], heads, How(kernel, window=window))
    check_exact(plan, by_rank, heads, window)


@pytest.mark.slow
@settings(max_examples=2000, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cases())
def test_many_random_packs(rank_pool, case):
    plan, heads, window, kernel = case
    (by_rank,) = on_pool(rank_pool, [plan], heads, How(kernel, window=window))
    check_exact(plan, by_rank, heads, window)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("window", [None, 40])
def test_float64_is_exact_to_float64(rank_pool, kernel, window):
    heads = Heads(8, 4, 24, torch.float64)
    plans = random_plans(8, 3, 11, heads)
    for plan, by_rank in zip(plans, on_pool(rank_pool, plans, heads, How(kernel, window=window))):
        check_exact(plan, by_rank, heads, window, 1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("window", [None, 100])
def test_half_precision_is_as_good_as_one_rank(rank_pool, dtype, window):
    heads = Heads(8, 4, 64, dtype)
    lengths = [400, 261, 90]
    alone = make_plan(1, [[(length, 0, 1) for length in lengths]])
    on_one = errors(alone, on_pool(rank_pool, [alone], heads, How(window=window))[0], heads, window)
    for how in (("ring", 1), ("gather", 1), ("heads", 2), ("heads", 8)):
        plan = make_plan(8, [[(length, 0, 8, *how) for length in lengths]])
        on_ring = errors(plan, on_pool(rank_pool, [plan], heads, How(window=window))[0], heads, window)
        assert (on_ring <= 2 * on_one).all(), f"{how}: {on_ring}, one rank {on_one}"


@pytest.mark.parametrize("window", [None, 13])
def test_repeats_recompute_and_overlap_change_no_bit(rank_pool, window):
    heads = Heads(8, 2, 16)
    rng = random.Random(3)
    plan = make_plan(8, [random_pack(rng, 8, heads=heads) for _ in range(3)])
    ways = [How(), How(), How(recompute="reentrant"), How(recompute="hooks"), How(overlap=False)]
    results = [
        on_pool(rank_pool, [plan], heads, How(recompute=how.recompute, overlap=how.overlap, window=window))[0]
        for how in ways
    ]
    assert errors(plan, results[0], heads, window).max() < 1e-5
    forward = exchange_bytes(plan, heads.query, heads.kv, heads.dim, 4, window=window, backward=False)
    for how, other in zip(ways, results):
        for rank in range(8):
            for expected, got in zip(results[0][rank][0], other[rank][0]):
                for a, b in zip(expected, got):
                    np.testing.assert_array_equal(a, b)
        foretold = exchange_bytes(plan, heads.query, heads.kv, heads.dim, 4, window=window)
        assert [sent for _, sent, _ in other] == (foretold + bool(how.recompute) * forward).tolist()


def test_ranks_meet_the_peers_that_the_plan_says(rank_pool):
    """And with windows at most the four neighbours that rings have."""
    heads = Heads(8, 2, 8)
    rng = random.Random(8)
    for _ in range(4):
        plan = make_plan(8, [random_pack(rng, 8, 20, heads) for _ in range(4)])
        (by_rank,) = on_pool(rank_pool, [plan], heads)
        met = [len(peers_met) for _, _, peers_met in by_rank]
        assert all(seen <= said for seen, said in zip(met, peers(plan).tolist()))
    rings = make_plan(8, [[(200, start, size)] for size in range(2, 9) for start in range(9 - size)])
    (by_rank,) = on_pool(rank_pool, [rings], heads, How(window=70))
    for rank, (_, _, met) in enumerate(by_rank):
        assert all(0 < abs(peer - rank) <= 2 for peer in met)


def heads_that_do_not_fit(context: RankContext, plan_json: str) -> list[str]:
    """Case: what the attention says, twice over one communicator, and then a good call."""
    plan, heads = Plan.from_json(plan_json), Heads(3, 1, 8)
    comm = RingComm(context.group, context.ranks)
    kernel = pick_kernel(torch.device("cpu"), heads.dtype, heads.dim)
    said = []
    for micro_batch in plan.micro_batches(context.rank):
        q, k, v, _ = packed_tensors(micro_batch, heads, 0)
        try:
            hdp_attention(q, k, v, micro_batch, context.rank, comm, softmax_scale=1.0, kernel=kernel)
            said.append("fine")
        except ConfigError as error:
            said.append(str(error))
    return said


def test_heads_that_do_not_fit_are_refused_before_anything_is_sent(rank_pool):
    """So that ranks that share another ring of the micro-batch with those that refuse are not left in the middle."""
    rings = [(70, 0, 2, "ring", 1), (64, 0, 2, "heads", 2)]
    plan = make_plan(2, [rings, rings, [(70, 0, 2, "ring", 1)]])
    for said in rank_pool.run(heads_that_do_not_fit, plan.to_json(), ranks=2):
        assert said[0] == said[1]
        assert "3 query and 1 key/value heads cannot be swapped among 2 ranks" in said[0]
        assert said[2] == "fine"
