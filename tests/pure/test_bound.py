"""No plan is faster than the bound: random plans, best plans of tiny batches, and what its proofs stand on."""

import itertools
import statistics
from dataclasses import replace

import numpy as np
import pytest
from exact import best_plan, to_plan
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_hdp.cost import CostModel, LinkProfile, load_profile
from megatron_hdp.errors import PlanError
from megatron_hdp.planner import check, core_backend
from megatron_hdp.planner.bound import _Search, lower_bound, lower_bound_python
from megatron_hdp.planner.check import held_tokens
from megatron_hdp.planner.span import rank_ends
from megatron_hdp.planner.summary import bound_of

NONE = np.zeros(0, dtype=np.int64)
H100 = load_profile("h100")


def random_cost(rng, layers=2, window=None):
    """Constants from nothing to much, links from fast to slow, nodes of 1 to 8 ranks; links inside may be worse."""

    def scale(*choices):
        return float(rng.choice(choices))

    layer = H100.layers["llama-7b"]
    layer = replace(
        layer,
        sequence_constant=layer.sequence_constant * scale(0, 1, 30),
        microbatch_constant=layer.microbatch_constant * scale(0, 1, 10),
        linear_forward=layer.linear_forward * scale(0, 1, 1),
        attention_forward=layer.attention_forward * scale(0, 1, 1, 30),
        ring_step_forward=scale(0, 0, 1e-5, 1e-3),
        ring_step_backward=scale(0, 0, 1e-5, 1e-3),
    )
    links = [LinkProfile(scale(0, 1e-5, 1e-4), scale(1e9, 1e11, 1e12)) for _ in range(2)]
    profile = replace(
        H100,
        layers={"llama-7b": layer},
        default_layer="llama-7b",
        gpus_per_node=int(rng.choice([1, 2, 4, 8])),
        inside_node=links[0],
        across_nodes=links[1],
    )
    recompute = str(rng.choice(["none", "full"]))
    return CostModel(profile, layers, window=window, recompute=recompute, pad_multiple=int(rng.choice([2, 4])))


def with_heads(rng, cost):
    heads, kv_heads = [(8, 8), (8, 2), (12, 4), (32, 8), (4, 1)][int(rng.integers(5))]
    return replace(cost, heads=heads, kv_heads=kv_heads)


def with_exchanges(rng, plan, cost, *, inside=False):
    """The plan with an exchange drawn for each ring, inside nodes only or anywhere."""
    exchange, head_ranks = 0 * plan.ring_size, 0 * plan.ring_size + 1
    for s, (start, size) in enumerate(zip(plan.ring_start.tolist(), plan.ring_size.tolist())):
        if size == 1 or (inside and cost.tier(start, size)):
            continue
        ranks = [a for a in range(2, size + 1) if size % a == 0 and cost.swaps_heads(a)]
        exchange[s] = int(rng.integers(3 if ranks else 2))
        head_ranks[s] = int(rng.choice(ranks)) if exchange[s] == 2 else 1
    return replace(plan, exchange=exchange, head_ranks=head_ranks)


def random_batch(rng, num_ranks, capacity, most=40):
    lengths = np.exp(rng.uniform(0, np.log(num_ranks * capacity), int(rng.integers(1, most)))).astype(np.int64)
    if rng.random() < 0.3:
        lengths = lengths * 0 + int(lengths.max())
    return np.maximum(lengths, 1)


def random_plan(rng, lengths, num_ranks, capacity, pad, stages=1, parts=1, offload=None):
    """Rings of random size and place; rounds of sequences in random order, each round one micro-batch per rank."""
    offload = np.zeros(lengths.size) if offload is None else offload
    size, start, piece = (np.zeros_like(lengths) for _ in range(3))
    for s, length in enumerate(lengths.tolist()):
        rings = np.arange(1, num_ranks + 1)
        tokens = -(-length // (rings * pad)) * pad
        fits = held_tokens(tokens, np.full(num_ranks, offload[s])) <= capacity
        good = rings[fits]
        size[s] = good[0] if rng.random() < 0.6 else rng.choice(good)
        start[s] = rng.integers(0, num_ranks - size[s] + 1)
        piece[s] = held_tokens(tokens[size[s] - 1], offload[s : s + 1])[0]
    rounds, free, eager = [], [], rng.random()
    for s in rng.permutation(lengths.size).tolist():
        ring = slice(start[s], start[s] + size[s])
        fitting = [i for i, left in enumerate(free) if np.all(left[ring] >= piece[s])]
        if not fitting or rng.random() > eager:
            rounds.append([])
            free.append(np.full(num_ranks, capacity))
            fitting = [len(rounds) - 1]
        chosen = int(rng.choice(fitting))
        rounds[chosen].append(s)
        free[chosen][ring] -= piece[s]
    if parts > 1:
        rounds += [[] for _ in range(-len(rounds) % stages)]
    ranks = [[[s for s in one if start[s] <= r < start[s] + size[s]] for one in rounds] for r in range(num_ranks)]
    if stages == 1:
        ranks = [[one for one in rank if one] or [[]] for rank in ranks]
    return to_plan(lengths, num_ranks, capacity, pad, start, size, ranks, offload)


@pytest.mark.parametrize("seed", range(60))
def test_no_random_plan_is_faster(seed):
    rng = np.random.default_rng(seed)
    stages, parts = [(1, 1), (2, 1), (4, 1), (2, 2), (3, 3)][seed % 5]
    num_ranks, capacity = int(rng.integers(1, 13)), int(rng.choice([16, 512, 4096]))
    cost = random_cost(rng, window=None if seed % 3 else int(rng.integers(1, 3 * capacity)))
    lengths = random_batch(rng, num_ranks, capacity)
    offload = rng.choice([0.0, 0.3, 0.77, 1.0], lengths.size) if seed % 4 == 1 else None
    bound = lower_bound(
        lengths, num_ranks, capacity, cost, stages=stages, virtual_stages=parts, offload=offload
    ).picoseconds
    assert bound >= 0
    for _ in range(30):
        plan = random_plan(rng, lengths, num_ranks, capacity, cost.pad_multiple, stages, parts, offload)
        check(plan, stages=stages, virtual_stages=parts)
        assert rank_ends(plan, cost, stages, parts).max() >= bound


@pytest.mark.parametrize("seed", range(60))
def test_no_random_plan_is_faster_with_any_exchange(seed):
    rng = np.random.default_rng(seed + 1000)
    stages, parts = [(1, 1), (1, 1), (2, 1), (4, 1), (2, 2)][seed % 5]
    num_ranks, capacity = int(rng.integers(2, 17)), int(rng.choice([16, 512, 4096]))
    cost = with_heads(rng, random_cost(rng, window=None if seed % 3 else int(rng.integers(1, 3 * capacity))))
    lengths = random_batch(rng, num_ranks, capacity)
    offload = rng.choice([0.0, 0.3, 0.77, 1.0], lengths.size) if seed % 4 == 1 else None
    options = {"stages": stages, "virtual_stages": parts, "offload": offload}
    inside, anywhere = (lower_bound(lengths, num_ranks, capacity, cost, **options, free=free).picoseconds
                        for free in ("inside", "all"))  # fmt: skip
    rings = lower_bound(lengths, num_ranks, capacity, cost, **options, free="none").picoseconds
    assert 0 <= anywhere <= inside <= rings
    assert inside == lower_bound(lengths, num_ranks, capacity, cost, **options).picoseconds
    for draw in range(30):
        plan = random_plan(rng, lengths, num_ranks, capacity, cost.pad_multiple, stages, parts, offload)
        plan = with_exchanges(rng, plan, cost, inside=bool(draw % 2))
        check(plan, stages=stages, virtual_stages=parts)
        assert rank_ends(plan, cost, stages, parts).max() >= (inside if draw % 2 else anywhere)
        assert bound_of(plan, cost, stages=stages, virtual_stages=parts).picoseconds >= anywhere


def test_without_heads_the_bound_is_that_of_rings():
    cost, lengths = CostModel(replace(H100, gpus_per_node=8), 4), np.array([3000] * 5 + [200])
    knowing = replace(cost, heads=8, kv_heads=2)
    plain = lower_bound(lengths, 8, 512, cost)
    assert plain == lower_bound(lengths, 8, 512, knowing, free="none")
    assert plain.picoseconds > lower_bound(lengths, 8, 512, knowing).picoseconds
    assert lower_bound(lengths, 8, 512, knowing, free="all") == lower_bound(lengths, 8, 512, knowing)  # one node


@pytest.mark.parametrize("parts", [2, 3, 7])
def test_rounding_of_a_stage_to_model_parts_is_not_forgotten(parts):
    """Operations of a few picoseconds, of which much is rounded away."""
    rng = np.random.default_rng(parts)
    layer = replace(
        H100.layers["llama-7b"],
        attention_forward=0.0,
        linear_forward=1e-14,
        sequence_constant=1e-12,
        microbatch_constant=0.0,
        kv_per_token=0.0,
        kv_gradient_per_token=0.0,
    )
    links = {name: LinkProfile(0.0, 1e12) for name in ("inside_node", "across_nodes")}
    cost = CostModel(replace(H100, layers={"llama-7b": layer}, default_layer="llama-7b", **links), 1)
    for _ in range(20):
        lengths = rng.integers(1, 300, 12)
        bound = lower_bound(lengths, 3, 512, cost, stages=2, virtual_stages=parts).picoseconds
        for _ in range(10):
            plan = random_plan(rng, lengths, 3, 512, 2, 2, parts)
            assert rank_ends(plan, cost, 2, parts).max() >= bound


def tiny_case(seed):
    rng = np.random.default_rng(seed)
    num_ranks, capacity = int(rng.integers(1, 6)), 4096
    cost = random_cost(rng) if seed % 2 else CostModel(replace(H100, gpus_per_node=int(rng.choice([2, 8]))), 2)
    return random_batch(rng, num_ranks, capacity, most=7), num_ranks, capacity, cost


def ratio_of_best(seed):
    lengths, num_ranks, capacity, cost = tiny_case(seed)
    plan = best_plan(lengths.tolist(), num_ranks, capacity, cost)
    if plan is None:
        return None
    check(plan)
    span = int(rank_ends(plan, cost).max())
    bound = lower_bound(lengths, num_ranks, capacity, cost).picoseconds
    assert span >= bound, (seed, span, bound)
    return span / bound if bound else 1.0


def test_best_plans_of_tiny_batches_are_at_most_a_little_slower():
    ratios = [ratio for seed in range(16) if (ratio := ratio_of_best(seed)) is not None]
    assert len(ratios) >= 14
    assert statistics.median(ratios) < 1.1
    assert max(ratios) < 2


@pytest.mark.slow
def test_many_best_plans_of_tiny_batches():
    ratios = sorted(ratio for seed in range(1000, 1200) if (ratio := ratio_of_best(seed)) is not None)
    points = {f"{p} %": round(ratios[min(p * len(ratios) // 100, len(ratios) - 1)], 4) for p in (10, 50, 75, 90, 99)}
    print(f"best span / bound over {len(ratios)} batches: {points}, largest {ratios[-1]:.3f}")
    assert len(ratios) >= 150
    assert statistics.median(ratios) < 1.1


def test_random_plans_are_never_faster_than_the_best():
    """Holds the solver itself against the evaluator."""
    for seed in range(8):
        lengths, num_ranks, capacity, cost = tiny_case(seed)
        found = best_plan(lengths.tolist(), num_ranks, capacity, cost)
        if found is None:
            continue
        best = rank_ends(found, cost).max()
        rng = np.random.default_rng(seed)
        for _ in range(100):
            plan = random_plan(rng, lengths, num_ranks, capacity, cost.pad_multiple)
            assert rank_ends(plan, cost).max() >= best * (1 - 1e-3)


@pytest.mark.skipif(core_backend() == "python", reason="megatron_hdp._core is not built")
@pytest.mark.parametrize("seed", range(40))
def test_cpp_equals_python(seed):
    from megatron_hdp import _core
    from megatron_hdp.cost.core import core_arguments

    rng = np.random.default_rng(seed)
    stages, parts = [(1, 1), (2, 1), (4, 1), (4, 3)][seed % 4]
    num_ranks, capacity = int(rng.choice([1, 2, 7, 33, 100, 300])), int(rng.choice([16, 512, 8192]))
    cost = random_cost(rng, layers=1 + seed % 9, window=None if seed % 3 else int(rng.integers(1, 3 * capacity)))
    lengths = random_batch(rng, num_ranks, capacity, most=300)
    shares = rng.choice([0, 1, 300_000, 1 << 20], lengths.size) if seed % 5 == 1 else NONE
    numbers = (num_ranks, capacity, stages, parts)
    cost = [cost, cost.with_free_links("inside"), cost.with_free_links("all")][seed % 7 % 3]
    got = _core.lower_bound(core_arguments(cost), lengths, shares, *numbers)
    bound = lower_bound_python(lengths, shares, cost, *numbers)
    assert got.tolist() == [bound.picoseconds, bound.work, bound.longest, bound.pipeline, bound.crowded, bound.window]


# What the proofs stand on


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.none() | st.integers(1, 9000))
def test_rank_time_is_at_most_that_of_any_ring(seed, window):
    rng = np.random.default_rng(seed)
    cost, num_ranks = random_cost(rng, window=window), int(rng.integers(1, 200))
    search = _Search(random_batch(rng, num_ranks, 512), NONE, cost, num_ranks, 512, 1, 1)
    for length, ring in zip(search.lengths.tolist(), search.rings.tolist()):
        rings = np.arange(ring, num_ranks + 1)
        inside = np.where(rings <= cost.ranks_per_node, 0, 1)
        for phase in ("total", "forward", "backward"):
            best = cost.picoseconds(length, rings, inside, phase)
            if num_ranks > cost.ranks_per_node:
                best = np.minimum(best, cost.picoseconds(length, rings, 1, phase))
            assert search.rank_time(length, ring, phase) <= int((rings * best).min())


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.none() | st.integers(1, 9000))
def test_unpadded_rank_time_never_falls_with_the_ring(seed, window):
    rng = np.random.default_rng(seed)
    search = _Search(NONE, NONE, random_cost(rng, window=window), 64, 512, 1, 1)
    for length in (2, 100, 6000, 300_000, 4_000_000):
        times = [search.unpadded(length, d) for d in range(2, 65)]
        assert all(a <= b + 1 for a, b in itertools.pairwise(times))  # one division is rounded down


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.none() | st.integers(1, 9000))
def test_least_time_never_falls_with_the_length(seed, window):
    """So the longest sequence decides `longest`, and the shortest big one the fill of a pipeline."""
    rng = np.random.default_rng(seed)
    search = _Search(random_batch(rng, 32, 512), NONE, random_cost(rng, window=window), 32, 512, 4, 1)
    fills = [search.ramp(i, 1) for i in range(search.lengths.size)]
    assert fills == sorted(fills)


def test_the_threshold_is_the_best_of_all_but_for_the_tolerance():
    rng = np.random.default_rng(1)
    for _ in range(50):
        fall = sorted(rng.integers(0, 10**9, 300).tolist(), reverse=True)
        rise = sorted(rng.integers(0, 10**9, 300).tolist())
        search = _Search(NONE, NONE, random_cost(rng), 2, 512, 2, 1)
        best = max(a + b for a, b in zip(fall, rise))
        got = search.threshold(300, fall.__getitem__, rise.__getitem__)
        assert best - best / 4096 - 1 <= got <= best


# Where it is exact, and what it says


def test_equal_local_sequences_meet_the_bound():
    cost = CostModel(load_profile("bytescale"), 32)
    one = int(cost.picoseconds(8192)) + cost.microbatch_picoseconds()
    assert lower_bound(np.full(12, 8192), 4, 8192, cost).picoseconds == 3 * one


def test_rings_wider_than_half_the_pool_run_one_after_the_other():
    cost = CostModel(load_profile("bytescale"), 32)
    one = int(cost.picoseconds(5 * 8192, np.arange(5, 9)).min())
    bound = lower_bound(np.full(6, 5 * 8192), 8, 8192, cost)
    assert bound.crowded == 6 * one + cost.microbatch_picoseconds() > bound.work


def test_a_pipeline_fills_and_drains():
    cost = CostModel(load_profile("bytescale"), 8)
    bound = lower_bound(np.full(16, 8192), 4, 8192, cost, stages=4)
    assert bound.longest == 4 * int(cost.picoseconds(8192, 4, 0))  # four ranks share a node
    local = int(cost.picoseconds(8192))
    assert local * 4 < bound.pipeline <= local * (4 + 3)


def test_offload_makes_rings_smaller():
    cost = CostModel(load_profile("bytescale"), 32)
    lengths = np.array([4 * 8192])
    lower_bound(lengths, 2, 8192, cost, offload=np.array([0.5]))
    with pytest.raises(PlanError, match="32768 tokens needs 4 ranks of 8192 tokens, the pool has 2"):
        lower_bound(lengths, 2, 8192, cost)


def test_wrong_arguments_are_refused():
    cost = CostModel(load_profile("bytescale"), 32)
    with pytest.raises(PlanError, match="length is 0"):
        lower_bound(np.array([3, 0]), 2, 8192, cost)
    with pytest.raises(PlanError, match="stages 0"):
        lower_bound(np.array([3]), 2, 8192, cost, stages=0)
    with pytest.raises(PlanError, match="capacity of 1 tokens"):
        lower_bound(np.array([3]), 2, 1, cost)
    with pytest.raises(PlanError, match="offload must be 1 fractions"):
        lower_bound(np.array([3]), 2, 8192, cost, offload=np.array([1.5]))


def test_an_empty_batch_takes_the_constants_of_empty_micro_batches():
    cost = CostModel(H100, 8)
    assert lower_bound(NONE, 3, 8192, cost).picoseconds == cost.microbatch_picoseconds()
    assert lower_bound(NONE, 3, 8192, cost, stages=4).picoseconds == 4 * cost.microbatch_picoseconds()
