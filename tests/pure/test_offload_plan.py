"""Offload in plans: it hides, it fits host memory, and it is there only where it shortens the step."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_hdp.cost import CostModel, Tier, load_profile
from megatron_hdp.errors import ConfigError, PlanError
from megatron_hdp.planner import check, plan
from megatron_hdp.planner.check import held_tokens
from megatron_hdp.planner.host import host_peaks, most_in_flight
from megatron_hdp.planner.offload import Limits, fits, needed_fraction, share_of, smallest_rings
from megatron_hdp.planner.schedule import FORWARD, schedule
from megatron_hdp.planner.span import rank_ends
from megatron_hdp.planner.units import Units, units_plan

BYTESCALE, H100 = load_profile("bytescale"), load_profile("h100")
SHARED = replace(BYTESCALE, d2h_bandwidth_shared=4e9, h2d_bandwidth_shared=7e9)


def batch(seed, count=200, sigma=1.8, longest=120_000):
    rng = np.random.default_rng(seed)
    return np.minimum(np.exp(rng.normal(8.5, sigma, count)).astype(np.int64) + 1, longest)


def span(result, cost, stages=1, parts=1, experts=1):
    return int(rank_ends(result, cost, stages, parts, experts).max())


def stall(result, cost):
    """Picoseconds that copies show, by sequence, where the rings really lie."""
    layers = cost.layers_per_stage
    fraction = np.minimum(np.round(1024 * result.offload * layers / max(layers - 2, 1)) / 1024, 1.0)
    np.testing.assert_allclose(share_of(fraction, cost), result.offload, rtol=0, atol=1e-12)
    tier = cost.tier(result.ring_start, result.ring_size)
    return cost.offload_stall_picoseconds(result.lengths, result.ring_size, tier, fraction)


def dull_peaks(result, cost, stages, parts):
    """Host bytes by walking every stage's schedule, operation by operation."""
    peaks = []
    for rank, micro_batches in enumerate(result):
        held = [
            sum(int(cost.host_bytes(p.length, p.ring.size, p.offload)) for p in micro_batch.pieces)
            for micro_batch in micro_batches
        ]
        most = 0
        for stage in range(stages):
            now = 0
            for op in schedule(len(held), stage, stages, parts):
                now += -(-held[op.slot] // parts) * (1 if op.phase == FORWARD else -1)
                most = max(most, now)
            assert now == 0
        peaks.append(most)
        assert rank < result.num_ranks
    return peaks


@st.composite
def requests(draw):
    stages = draw(st.sampled_from([1, 1, 1, 2, 4]))
    parts = draw(st.integers(1, 2)) if stages > 1 else 1
    layer = {"profile": H100} if draw(st.booleans()) else {"profile": BYTESCALE, "layer": "figure-21"}
    if draw(st.booleans()):
        layer["profile"] = replace(layer["profile"], d2h_bandwidth_shared=6e9, h2d_bandwidth_shared=5e9)
    heads = draw(st.sampled_from([{}, {"heads": 8, "kv_heads": 2}]))
    recompute = draw(st.sampled_from(["none", "none", "full"]))
    return {
        "lengths": batch(draw(st.integers(0, 10**6)), draw(st.integers(1, 60)), longest=60_000),
        "num_ranks": draw(st.sampled_from([8, 12, 24])),
        "tokens_per_rank": draw(st.sampled_from([2048, 6000, 8192])),
        "cost": CostModel(layers_per_stage=draw(st.sampled_from([2, 4, 8])), recompute=recompute, **layer, **heads),
        "stages": stages,
        "virtual_stages": parts,
        "exchange": draw(st.sampled_from(["auto", "auto", "ring", *(["gather"] if heads else [])])),
    }


@settings(max_examples=40, deadline=None)
@given(requests(), st.integers(0, 100))
def test_random_batches_hide_their_copies_and_obey_the_limit(request_, percent):
    request_["lengths"] = np.minimum(request_["lengths"], request_["num_ranks"] * request_["tokens_per_rank"])
    cost, stages, parts = request_["cost"], request_["stages"], request_["virtual_stages"]
    plain = plan(**request_)
    free = plan(**request_, offload=True)
    peak = int(host_peaks(free, cost, stages, parts).max())
    limit = peak * percent // 100
    limited = plan(**request_, offload=True, host_bytes=limit)
    for result in (free, limited):
        assert span(result, cost, stages, parts) <= span(plain, cost, stages, parts)
        assert not stall(result, cost).any()
        alone = np.diff(result.microbatch_offsets) == 1  # so that a micro-batch has one share
        assert np.all(np.repeat(alone, np.diff(result.microbatch_offsets))[result.offload[result.piece_sequence] > 0])
        assert host_peaks(result, cost, stages, parts).tolist() == dull_peaks(result, cost, stages, parts)
        kept = cost.layers_per_stage - 2 * parts  # of each model part the first and the last layer stay
        assert result.offload.max() <= max(kept, 0) / cost.layers_per_stage
    assert host_peaks(limited, cost, stages, parts).max() <= limit
    check(limited, stages=stages, virtual_stages=parts, cost=cost, host_bytes=limit)
    assert plan(**request_, offload=True, host_bytes=0) == plain
    enough = plan(**request_, offload=True, host_bytes=peak)  # other plans, held to the limit, may even be shorter
    assert span(enough, cost, stages, parts) <= span(free, cost, stages, parts)
    assert plan(**request_, offload=True, host_bytes=1 << 50) == free


def test_offload_shortens_a_step_and_each_sequence_chooses():
    """Some long sequences offload on fewer ranks, others are better off on rings that hold everything."""
    cost = CostModel(H100, 32)
    lengths = batch(0, 300, longest=200_000)
    plain, offloading = (plan(lengths, 32, 8192, cost=cost, offload=offload) for offload in (False, True))
    assert span(offloading, cost) < 0.97 * span(plain, cost)
    long = lengths > 8192
    assert 0 < np.count_nonzero(offloading.offload > 0) < np.count_nonzero(long)
    assert not offloading.offload[~long].any()
    assert not stall(offloading, cost).any()


def test_just_what_the_capacity_does_not_hold_leaves():
    cost = CostModel(H100, 32)
    lengths = batch(0, 300, longest=200_000)
    result = plan(lengths, 32, 8192, cost=cost, offload=True)
    leaving = np.flatnonzero(result.offload)
    pieces = lengths[leaving], result.ring_size[leaving]
    needed = needed_fraction(*pieces, 8192, cost)
    assert np.array_equal(share_of(needed, cost), result.offload[leaving])
    assert np.all(fits(*pieces, needed, 8192, cost))
    assert not np.any(fits(*pieces, needed - 1 / 1024, 8192, cost))
    assert np.all(cost.bytes(*pieces, needed) <= cost.bytes(8192))
    assert np.all(held_tokens(2 * result.chunk_tokens, result.offload) <= 8192)


@pytest.mark.parametrize(("stages", "parts"), [(1, 1), (2, 1), (4, 1), (2, 2), (4, 2), (4, 3)])
def test_peaks_count_micro_batches_in_flight(stages, parts):
    """One long sequence after the other on one rank, each in a micro-batch of its own."""
    cost = CostModel(BYTESCALE, 12)
    number = 12
    lengths = np.arange(1, number + 1, dtype=np.int64) * 1000
    units = Units(np.arange(number), np.zeros(number, np.int64), np.ones(number, np.int64), np.arange(number))
    result = units_plan(lengths, 1, 1 << 20, 2, units, offload=np.full(number, 0.5))
    (peak,) = host_peaks(result, cost, stages, parts).tolist()
    assert [peak] == dull_peaks(result, cost, stages, parts)
    each = np.asarray(cost.host_bytes(lengths, 1, 0.5))
    if parts == 1:
        assert peak == each[number - stages :].sum()  # the longest come last
    assert peak <= most_in_flight(stages, parts) * (each.max() + parts)
    check(result, stages=stages, virtual_stages=parts, cost=cost, host_bytes=peak)
    with pytest.raises(PlanError, match=f"host: rank 0 has {peak:,} bytes .*{peak - 1:,} are allowed"):
        check(result, stages=stages, virtual_stages=parts, cost=cost, host_bytes=peak - 1)


def test_host_bytes_are_what_the_share_says():
    cost = CostModel(BYTESCALE, 32)
    act = 32 * np.ceil(cost.layer_profile.activation_per_token)
    assert cost.host_bytes([1000, 8192], [1, 4], [0.5, 1.0]).tolist() == [500 * act, 2048 * act]
    assert cost.host_bytes(1000, 1, 0.0) == 0
    recomputing = replace(cost, recompute="full")
    assert recomputing.host_bytes(1000, 1, 1.0) == 1000 * 32 * cost.layer_profile.checkpoint_per_token


def test_a_limit_makes_rings_wider_not_plans_impossible():
    cost = CostModel(BYTESCALE, 32, layer="figure-21")
    lengths = np.array([65_536, 100_000, 9000, 70])
    sizes = []
    for piece_bytes in (None, 3 << 30, 1 << 30, 1 << 20, 0):
        size, share = smallest_rings(lengths, 32, 8192, cost, Limits(piece_bytes=piece_bytes))
        sizes.append(size.tolist())
        assert np.all(share[size == -(-lengths // 8192)] == 0)
        if piece_bytes is not None:
            assert np.all(cost.host_bytes(lengths, size, share) <= piece_bytes)
    assert all(np.all(np.array(narrow) <= np.array(wide)) for narrow, wide in itertools.pairwise(sizes))
    assert sizes[0] != sizes[1] != sizes[2]
    assert sizes[-1] == (-(-lengths // 8192)).tolist()
    size, _ = smallest_rings(lengths, 32, 8192, cost, Limits(piece_tokens=16_384))
    assert size.tolist() == [max(a, b) for a, b in zip((-(-lengths // 16_384)).tolist(), sizes[0])]


def test_copies_beside_the_nic_let_less_leave():
    plain, shared = CostModel(BYTESCALE, 32, layer="figure-21"), CostModel(SHARED, 32, layer="figure-21")
    across = shared.largest_free_offload(65_536, 4, Tier.ACROSS_NODES)
    assert across == pytest.approx(plain.largest_free_offload(65_536) * 4e9 / BYTESCALE.d2h_bandwidth, abs=2 / 1024)
    assert shared.offload_stall_picoseconds(65_536, 4, Tier.ACROSS_NODES, across) == 0
    assert shared.offload_stall_picoseconds(65_536, 4, Tier.ACROSS_NODES, across + 2 / 1024) > 0
    for ring, tier in ((1, Tier.ACROSS_NODES), (4, Tier.INSIDE_NODE)):  # nothing is sent across nodes
        free = shared.largest_free_offload(65_536, ring, tier)
        assert free == plain.largest_free_offload(65_536, ring, tier)
        assert shared.offload_stall_picoseconds(65_536, ring, tier, free) == 0
    lengths = np.array([60_000])
    sizes = [int(smallest_rings(lengths, 64, 8192, cost, Limits())[0][0]) for cost in (plain, shared)]
    assert sizes[0] < sizes[1] < -(-60_000 // 8192)


def test_baselines_offload_nothing_where_host_memory_does_not_hold_it():
    cost = CostModel(BYTESCALE, 32, layer="figure-21")
    lengths = batch(3, 100)
    free = plan(lengths, 32, 8192, algorithm="naive", cost=cost, offload=True)
    peak = int(host_peaks(free, cost).max())
    assert peak > 0
    assert plan(lengths, 32, 8192, algorithm="naive", cost=cost, offload=True, host_bytes=peak) == free
    limited = plan(lengths, 32, 8192, algorithm="naive", cost=cost, offload=True, host_bytes=peak - 1)
    assert limited == plan(lengths, 32, 8192, algorithm="naive", cost=cost)


def test_wrong_limits():
    for wrong, words in ((-1, "host_bytes is -1: give at least 0"), (1.5, "host_bytes is 1.5"), (1 << 60, "at most")):
        with pytest.raises(ConfigError, match=words):
            plan([8], 2, 8, offload=True, host_bytes=wrong)
    with pytest.raises(PlanError, match="host_bytes without cost"):
        check(plan([8], 2, 8), host_bytes=5)
