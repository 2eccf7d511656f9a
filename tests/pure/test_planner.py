"""The planner keeps every invariant, refuses what cannot work with numbers and a remedy, and balances decently."""

import os
import subprocess
import sys
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_twins import assert_invariants, deadlocks

from megatron_hdp.cost import CostModel, load_profile
from megatron_hdp.errors import ConfigError, PlanError
from megatron_hdp.planner import check, plan, summarize
from megatron_hdp.planner.baselines import plan_static
from megatron_hdp.planner.check import peers
from megatron_hdp.planner.entry import default_cost
from megatron_hdp.planner.span import rank_ends
from megatron_hdp.types import Plan


@st.composite
def requests(draw: st.DrawFn, max_ranks: int = 50, max_sequences: int = 25) -> dict:
    """Arguments of `plan`, with the lengths around which off-by-one errors live drawn often."""
    num_ranks = draw(st.integers(1, max_ranks))
    pad_multiple = draw(st.sampled_from([2, 2, 2, 4, 6, 8]))
    capacity = draw(st.integers(1, 64 // pad_multiple)) * pad_multiple
    most = num_ranks * capacity
    d = draw(st.integers(1, num_ranks))
    edges = [s for s in (1, capacity, capacity + 1, most, 2 * d - 1, 2 * d + 1, d * capacity) if s <= most]
    length = st.one_of(st.sampled_from(edges), st.integers(1, most), st.integers(1, min(most, 2 * capacity)))
    stages = draw(st.integers(1, 4))
    expert_group = draw(st.sampled_from([1, 1, *(g for g in range(2, num_ranks + 1) if num_ranks % g == 0)]))
    return {
        "lengths": draw(st.lists(length, min_size=1, max_size=max_sequences)),
        "num_ranks": num_ranks,
        "tokens_per_rank": capacity,
        "algorithm": draw(st.sampled_from(["hdp", "hdp", "static"])),
        "balance": draw(st.sampled_from(["dp", "pp"])) if stages == expert_group == 1 else "pp",
        "expert_group": expert_group,
        "pad_multiple": pad_multiple,
        "stages": stages,
        "virtual_stages": draw(st.integers(1, 3)) if stages > 1 else 1,
    }


def assert_follows(result: Plan, request: dict) -> None:
    assert result.lengths.tolist() == list(request["lengths"])
    assert (result.num_ranks, result.capacity) == (request["num_ranks"], request["tokens_per_rank"])
    assert_invariants(result)
    if request.get("algorithm", "hdp") == "hdp":
        smallest = [-(-s // result.capacity) for s in request["lengths"]]
        assert all(ring >= least for ring, least in zip(result.ring_size.tolist(), smallest, strict=True))
    else:
        assert set(result.ring_size.tolist()) == {result.num_ranks}
    counts, group = result.microbatch_counts, request.get("expert_group", 1)
    if request.get("algorithm") == "static":
        assert len(set(counts.tolist())) == 1
    assert not np.ptp(counts.reshape(-1, group), axis=1).any()
    if request.get("virtual_stages", 1) > 1:
        assert not (counts % request["stages"]).any()


@settings(max_examples=300, deadline=None)
@given(requests())
def test_no_invariant_is_broken(request_):
    result = plan(**request_)
    assert_follows(result, request_)
    assert Plan.from_json(result.to_json()) == result
    assert plan(**request_).digest() == result.digest()


@settings(max_examples=80, deadline=None)
@given(requests(max_ranks=8, max_sequences=16))
def test_no_plan_deadlocks(request_):
    assert not deadlocks(plan(**request_), request_["stages"], request_["virtual_stages"])


STRADDLING = (
    "168376 124081 115818 88799 43497 41611 38659 36731 30491 24453 21823 19307 "
    "18400 17148 16600 14709 14277 12505 12410 11345 7035 935 262"
)
KNOWN_HARD = [  # (ranks, lengths) on which schedulers with rings of powers of two fail, with capacity 8192
    (64, [int(length) for length in STRADDLING.split()]),
    (6, [16033, 19069, 518]),
    (12, [10412, 7501]),
    (24, [1938, 14665]),
    (48, [8693, 133]),
    (4, [17087, 32768, 371, 612, 6949, 261, 949, 11474]),
    (12, [9 * 8192, 10 * 8192, 11 * 8192, 12 * 8192]),
]


@pytest.mark.parametrize(("num_ranks", "lengths"), KNOWN_HARD)
@pytest.mark.parametrize("options", [{}, {"balance": "pp", "stages": 4, "virtual_stages": 2}])
def test_inputs_that_broke_other_schedulers(num_ranks, lengths, options):
    for order in (lengths, lengths[::-1], sorted(lengths)):
        request = {"lengths": order, "num_ranks": num_ranks, "tokens_per_rank": 8192, **options}
        result = plan(**request)
        assert_follows(result, request)
        if num_ranks <= 12:
            assert not deadlocks(result, options.get("stages", 1), options.get("virtual_stages", 1))


@pytest.mark.parametrize("balance", ["dp", "pp"])
def test_ten_thousand_sequences_of_one_token(balance):
    result = plan([1] * 10_000, 7, 64, balance=balance)
    assert_follows(result, {"lengths": [1] * 10_000, "num_ranks": 7, "tokens_per_rank": 64, "balance": balance})
    assert result.microbatch_counts.max() == -(-10_000 // (7 * 32))  # a piece is two chunks of at least one token


@pytest.mark.parametrize("algorithm", ["hdp", "static"])
def test_same_bytes_in_a_fresh_process_with_other_hash_seed(algorithm):
    lengths = np.random.default_rng(3).integers(1, 900, 300)
    code = (
        "import numpy as np; from megatron_hdp.planner import plan\n"
        f"lengths = np.random.default_rng(3).integers(1, 900, 300)\n"
        f"for b in ('dp', 'pp'): print(plan(lengths, 13, 96, algorithm={algorithm!r}, balance=b).digest().hex())"
    )
    expected = [plan(lengths, 13, 96, algorithm=algorithm, balance=b).digest().hex() for b in ("dp", "pp")]
    for seed in ("1", "4242"):
        env = {**os.environ, "PYTHONHASHSEED": seed}
        out = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout
        assert out.split() == expected


def test_planning_needs_neither_torch_nor_megatron():
    code = "import sys; from megatron_hdp.planner import plan; plan([9, 30], 4, 8); print('|'.join(sys.modules))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert not {"torch", "megatron"} & {name.split(".")[0] for name in out.strip().split("|")}


def test_python_core_makes_the_same_plan(monkeypatch):
    lengths = np.random.default_rng(4).integers(1, 900, 300)
    before = [plan(lengths, 13, 96, balance=b).digest() for b in ("dp", "pp")]
    monkeypatch.setattr("megatron_hdp.planner.packing._core", None)
    assert [plan(lengths, 13, 96, balance=b).digest() for b in ("dp", "pp")] == before


def test_list_and_array_give_the_same_plan():
    assert plan([9, 1, 30], 4, 8) == plan(np.array([9, 1, 30], dtype=np.int32), 4, 8)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "words"),
    [
        (([3, 99], 2, 8), {}, PlanError, ["sequence 1", "99 tokens", "13 ranks", "16", "tokens-per-rank to 50 "]),
        (([], 2, 8), {}, PlanError, ["empty", "--global-batch-size"]),
        (([4, 0, 2], 2, 8), {}, PlanError, ["sequence 1 has 0 tokens"]),
        (([4, 5, -2], 2, 8), {}, PlanError, ["sequence 2 has -2 tokens"]),
        (([2.0, 3.0], 2, 8), {}, PlanError, ["whole numbers", "float64"]),
        (([[2, 3]], 2, 8), {}, PlanError, ["flat", "[1, 2]"]),
        (([2**30, 2**30], 2, 2**30), {}, PlanError, ["2147483648 tokens", "int32", "--hdp-batch-tokens"]),
        (([3], 2, 0), {}, ConfigError, ["--hdp-tokens-per-rank is 0", "positive"]),
        (([3], 2, -8), {}, ConfigError, ["--hdp-tokens-per-rank is -8"]),
        (([3], 2, 7), {}, ConfigError, ["--hdp-tokens-per-rank is 7", "6 or 8"]),
        (([3], 2, 12), {"pad_multiple": 8}, ConfigError, ["is 12", "8 or 16"]),
        (([3], 2, 1), {}, ConfigError, ["use 2"]),
        (([3], 2, 9), {"pad_multiple": 3}, ConfigError, ["pad_multiple is 3", "even"]),
        (([3], 0, 8), {}, ConfigError, ["0 ranks"]),
        (([3], 2, 8), {"algorithm": "magic"}, ConfigError, ["'magic'", "hdp, static"]),
        (([3], 2, 8), {"balance": "tp"}, ConfigError, ["'tp'", "dp, pp"]),
        (([3], 2, 8), {"balance": "dp", "stages": 2}, ConfigError, ["--hdp-balance dp", "2 pipeline stages", "pp"]),
        (([3], 2, 8), {"stages": 0}, ConfigError, ["stages is 0"]),
        (([3], 2, 8), {"virtual_stages": 2}, ConfigError, ["virtual_stages is 2"]),
    ],
)
def test_what_cannot_work_is_refused_with_numbers_and_remedy(arguments, options, error, words):
    with pytest.raises(error) as caught:
        plan(*arguments, **options)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def lognormal(median: float, sigma: float, tokens: int, longest: int, seed: int) -> np.ndarray:
    lengths = np.random.default_rng(seed).lognormal(np.log(median), sigma, 2 * tokens // int(median))
    lengths = np.clip(lengths.astype(np.int64), 1, longest)
    return lengths[: int(np.searchsorted(np.cumsum(lengths), tokens)) + 1]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("median", "sigma"), [(1500, 1.6), (1000, 2.2)])
@pytest.mark.parametrize("num_ranks", [8, 32, 128, 512])
def test_span_is_near_the_bound(num_ranks, median, sigma, seed):
    lengths = lognormal(median, sigma, 2**25, min(2**21, num_ranks * 8192), seed)
    assert summarize(plan(lengths, num_ranks, 8192)).efficiency >= 0.95
    assert summarize(plan(lengths, num_ranks, 8192, balance="pp")).efficiency >= 0.75


def test_hdp_beats_static_context_parallelism():
    lengths = lognormal(1500, 1.6, 2**24, 2**18, 0)
    hdp, static = (summarize(plan(lengths, 32, 8192, algorithm=a)) for a in ("hdp", "static"))
    assert static.imbalance == pytest.approx(1.0)  # equal by construction; its price is padding and ring traffic
    assert hdp.span_seconds < static.span_seconds
    assert hdp.padding_tokens < static.padding_tokens
    assert set(static.ring_sizes) == {32}
    assert max(hdp.ring_sizes, key=hdp.ring_sizes.__getitem__) == 1


@settings(max_examples=60)
@given(st.data())
def test_static_rings_are_aligned_blocks(data):
    ring_size, blocks = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 4))
    lengths = np.array(data.draw(st.lists(st.integers(1, 8 * ring_size), min_size=1, max_size=20)))
    result = plan_static(lengths, ring_size * blocks, 8, 2, cost=default_cost(), ring_size=ring_size)
    check(result)
    assert_invariants(result)
    assert set(result.ring_size.tolist()) == {ring_size}
    assert not (result.ring_start % ring_size).any()
    assert len(set(result.microbatch_counts.tolist())) == 1
    assert not deadlocks(result)


def test_static_refuses_rings_that_do_not_fit():
    with pytest.raises(ConfigError, match=r"ring_size is 3.* 8 ranks"):
        plan_static(np.array([4]), 8, 8, 2, cost=default_cost(), ring_size=3)
    with pytest.raises(PlanError, match=r"sequence 1 has 40 tokens, .* 4 ranks holds 32"):
        plan_static(np.array([4, 40]), 8, 8, 2, cost=default_cost(), ring_size=4)


@settings(max_examples=60)
@given(requests(max_ranks=12))
def test_summary_counts_what_a_walk_over_the_pieces_counts(request_):
    result = plan(**request_)
    stages = request_["stages"]
    layout = {name: request_[name] for name in ("stages", "virtual_stages", "expert_group")}
    summary = summarize(result, **layout)
    held = [sum(mb.tokens for mb in mbs) for mbs in result]
    real = sum(piece.real_tokens for mbs in result for mb in mbs for piece in mb.pieces)
    assert (summary.sequences, summary.tokens) == (len(request_["lengths"]), real)
    assert summary.padding_tokens == sum(held) - real
    assert summary.padding_fraction == pytest.approx(1 - real / sum(held))
    assert summary.tokens_per_rank_max == max(held)
    assert summary.tokens_per_rank_mean == pytest.approx(sum(held) / len(held))
    assert sum(summary.ring_sizes.values()) == summary.sequences
    assert summary.microbatches_min == min(len(mbs) for mbs in result)
    assert summary.microbatches_max == max(len(mbs) for mbs in result)
    assert summary.imbalance >= 1
    # pieces by a walk, and the micro-batches' constants
    cost = CostModel(load_profile("bytescale"), max(1, 32 // stages), pad_multiple=result.pad_multiple)
    work = [
        sum(
            cost.microbatch_picoseconds()
            + sum(int(cost.picoseconds(p.length, p.ring.size, cost.tier(p.ring.start, p.ring.size))) for p in mb.pieces)
            for mb in mbs
        )
        for mbs in result
    ]
    assert summary.imbalance == pytest.approx(max(work) * len(work) / sum(work))
    assert summary.span_seconds == pytest.approx(1e-12 * int(rank_ends(result, cost, **layout).max()))
    assert summary.span_seconds >= 1e-12 * max(work) * (1 - 1e-6)
    assert summary.bound_seconds == max(summary.bound_parts.values()) == summary.bound_parts[summary.binding]
    assert 0 < summary.efficiency <= 1
    walked = [set() for _ in range(result.num_ranks)]
    for rank, mbs in enumerate(result):
        for mb in mbs:
            for piece in mb.pieces:
                walked[rank] |= set(piece.ring.neighbours(rank)) - {rank}
    assert peers(result).tolist() == [len(others) for others in walked]


def test_summary_of_a_plan_by_hand():
    """Two ranks: a ring of both, then a local sequence on rank 0 that decides the span."""
    cost = CostModel(load_profile("bytescale"), layers_per_stage=4)
    both, alone = 12000, 8000
    result = Plan(2, 8192, 2, [both, alone], [0, 0], [2, 1], [0, 0], [0, 2, 3], [0, 1, 2, 3], [0, 1, 0])
    check(result)
    ring = int(cost.picoseconds(both, 2, cost.tier(0, 2))) + cost.microbatch_picoseconds()
    local = int(cost.picoseconds(alone)) + cost.microbatch_picoseconds()
    summary = summarize(result, cost)
    assert summary.span_seconds == pytest.approx(1e-12 * (ring + local))
    assert summary.imbalance == pytest.approx((ring + local) / (ring + local / 2))
    assert summary.bound_seconds >= 1e-12 * (ring + local / 2) * 0.999
    assert (summary.microbatches_min, summary.microbatches_max, summary.peers_max) == (1, 2, 1)


def test_huge_batch_plans_and_checks_fast():
    lengths = lognormal(1500, 1.6, 2**25, 2**21, 0)
    plan(lengths, 512, 8192)
    begin = time.perf_counter()
    result = plan(lengths, 512, 8192)
    planned = time.perf_counter()
    check(result)
    assert time.perf_counter() - planned < 0.25  # about 8 ms on one idle core
    assert planned - begin < 2.0  # about 30 ms


def span(result: Plan, stages: int = 1, model: CostModel | None = None) -> int:
    return int(rank_ends(result, model or default_cost(stages), stages).max())


@pytest.mark.parametrize("lengths", [[60_000], [60_000] + [1000] * 20])
@pytest.mark.parametrize("stages", [1, 2])
def test_a_sequence_that_one_rank_holds_is_cut_where_that_shortens_the_step(lengths, stages):
    options = {"balance": "pp", "stages": stages} if stages > 1 else {}
    ours, static = (plan(lengths, 8, 65536, algorithm=a, **options) for a in ("hdp", "static"))
    assert ours.ring_size[0] > 4
    assert span(ours, stages) <= span(static, stages)


@pytest.mark.parametrize("stages", [1, 4])
def test_more_memory_never_makes_a_step_much_longer(stages):
    lengths = lognormal(4000, 1.5, 1 << 20, 65536, 3)
    options = {"balance": "pp", "stages": stages} if stages > 1 else {}
    spans = [span(plan(lengths, 16, capacity, **options), stages) for capacity in (8192, 32768, 131072)]
    assert max(spans) <= (1.02 if stages == 1 else 1.1) * spans[0]


@pytest.mark.parametrize("capacity", [8192, 32768])
def test_offload_never_makes_a_step_longer(capacity):
    lengths = lognormal(4000, 2, 1 << 20, 8 * 8192, 5)
    for options, stages in (({}, 1), ({"balance": "pp", "stages": 2}, 2)):
        without, with_ = (plan(lengths, 16, capacity, offload=offload, **options) for offload in (False, True))
        assert span(with_, stages) <= span(without, stages)


def test_the_constant_of_a_micro_batch_counts_where_rings_are_placed():
    model = CostModel(load_profile("h100"), 8, layer="llama-70b")  # 0.8 ms a micro-batch, and much less for 8 tokens
    result = plan([8, 6], 16, 4, cost=model)
    assert result.ring_start[0] != result.ring_start[1]
    assert span(result, model=model) == model.microbatch_picoseconds() + max(model.picoseconds([8, 6], 2, 1).tolist())


@pytest.mark.parametrize(
    ("arguments", "options", "words"),
    [
        (([8], 2.5, 8), {}, "num_ranks is 2.5: it must be a whole number"),
        (([8], True, 8), {}, "num_ranks is True"),
        (([8], 2, "8"), {}, "--hdp-tokens-per-rank is '8'"),
        (([8], 2, 8.0), {}, "--hdp-tokens-per-rank is 8.0"),
        (([8], 2, float("nan")), {}, "--hdp-tokens-per-rank is nan"),
        (([8], 2, 2**62), {}, "--hdp-tokens-per-rank is 4611686018427387904: it may be at most 2147483647"),
        (([8], 10**9, 8), {}, "num_ranks is 1000000000: it may be at most 1048576"),
        (([8], 2, 8), {"stages": 10**9, "balance": "pp"}, "stages is 1000000000: it may be at most 1024"),
        (([8], 2, 8), {"stages": 2, "virtual_stages": 17, "balance": "pp"}, "with 16 layers per stage"),
        (([8], 2, 8), {"cost": "x"}, "cost is 'x'"),
    ],
)
def test_settings_of_another_kind_are_refused(arguments, options, words):
    with pytest.raises(ConfigError) as caught:
        plan(*arguments, **options)
    assert words in str(caught.value)


@pytest.mark.parametrize("lengths", [np.array([2**63 + 5, 3], dtype=np.uint64), [[1, 2], [3]], np.array([1], "m8[s]")])
def test_lengths_of_another_kind_are_refused(lengths):
    with pytest.raises(PlanError, match="flat list of whole numbers"):
        plan(lengths, 2, 8)


def test_small_numpy_integers_do_not_overflow():
    assert plan([10, 3], np.int16(2), np.uint8(8)) == plan([10, 3], 2, 8)


def test_balance_is_chosen_by_the_layout():
    lengths = [90, 30, 8, 8]
    assert plan(lengths, 8, 16) == plan(lengths, 8, 16, balance="dp")
    assert plan(lengths, 8, 16, stages=2) == plan(lengths, 8, 16, balance="pp", stages=2)
    assert plan(lengths, 8, 16, expert_group=4) == plan(lengths, 8, 16, balance="pp", expert_group=4)
