"""Every baseline's plan keeps every invariant and every token, and small cases come out as the method says."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_twins import assert_invariants, deadlocks

from megatron_hdp.cost import CostModel, load_profile
from megatron_hdp.errors import PlanError
from megatron_hdp.planner.baselines import (
    BASELINES,
    packed_picoseconds,
    packed_rank_ends,
    plan_bytescale,
    plan_naive,
    plan_pow2,
    plan_rounds,
    plan_static,
    plan_static_smallest,
)
from megatron_hdp.planner.check import check
from megatron_hdp.planner.span import microbatch_picoseconds, rank_ends
from megatron_hdp.planner.units import soonest

COST = CostModel(load_profile("bytescale"), layers_per_stage=32)


def slots(plan):
    """Per rank, per micro-batch, the sequences."""
    return [[[p.sequence for p in mb.pieces] for mb in rank] for rank in plan]


@st.composite
def batches(draw, max_ranks=16):
    num_ranks = draw(st.integers(1, max_ranks))
    pad = draw(st.sampled_from([2, 2, 4, 8]))
    capacity = draw(st.integers(1, 16)) * pad
    edges = [s for s in (1, capacity, capacity + 1, num_ranks * capacity) if s <= num_ranks * capacity]
    length = st.one_of(st.sampled_from(edges), st.integers(1, num_ranks * capacity), st.integers(1, capacity))
    lengths = np.array(draw(st.lists(length, min_size=1, max_size=24)), dtype=np.int64)
    return lengths, num_ranks, capacity, pad


@settings(max_examples=60, deadline=None)
@given(batches(), st.sampled_from(sorted(BASELINES)), st.booleans(), st.booleans(), st.sampled_from([1, 1, 3]))
def test_no_invariant_is_broken(batch, name, equal_counts, offload, multiple):
    lengths, num_ranks, capacity, pad = batch
    cost = CostModel(COST.profile, 32, pad_multiple=pad)
    options = {"cost": cost, "equal_counts": equal_counts, "offload": offload, "count_multiple": multiple}
    result = BASELINES[name](lengths, num_ranks, capacity, pad, **options)
    assert result.lengths.tolist() == lengths.tolist()
    assert_invariants(result)
    check(result)
    assert np.all(result.microbatch_counts % multiple == 0)
    if offload and name in ("naive", "bytescale", "bytescale-pp"):
        assert np.all(result.ring_size <= -(-lengths // capacity))
    else:
        assert not result.offload.any()
    if equal_counts or name in ("pow2", "static", "static-smallest"):
        assert len(set(result.microbatch_counts.tolist())) == 1
        check(result, stages=3, virtual_stages=2 if multiple == 3 else 1)
        if num_ranks <= 4:
            assert not deadlocks(result, 3, 2 if multiple == 3 else 1)
    assert BASELINES[name](lengths, num_ranks, capacity, pad, **options).digest() == result.digest()


@settings(max_examples=25, deadline=None)
@given(batches(max_ranks=6))
def test_unequal_counts_of_pp_balance_cannot_deadlock_in_a_pipeline(batch):
    """Equal slots are enough: the shorter column's order is the longer one's with the missing slots taken out."""
    result = BASELINES["bytescale-pp"](*batch, cost=CostModel(COST.profile, 8, pad_multiple=batch[3]))
    assert not deadlocks(result, 3)
    rank_ends(result, CostModel(COST.profile, 8), stages=3)


def plan_of(function, lengths, num_ranks, capacity=64, **options):
    return function(np.array(lengths, dtype=np.int64), num_ranks, capacity, 2, cost=COST, **options)


def test_static_takes_the_smallest_divisor_that_holds_the_longest():
    result = plan_of(plan_static_smallest, [100, 60, 64, 128, 40], 6)
    assert set(result.ring_size.tolist()) == {2}
    assert set((result.ring_start % 2).tolist()) == {0}
    assert set(plan_of(plan_static_smallest, [129], 8).ring_size.tolist()) == {4}
    assert set(plan_of(plan_static_smallest, [64, 2], 8, longest=8 * 64).ring_size.tolist()) == {8}
    assert set(plan_static(np.array([3]), 6, 64, 2, cost=COST).ring_size.tolist()) == {6}
    with pytest.raises(PlanError, match="6 ranks"):
        plan_of(plan_static_smallest, [10], 6, longest=6 * 64 + 1)


def test_naive_deals_out_waves_in_the_order_of_the_batch():
    # ring of 3, ring of 2 (does not fit beside it: the pack of 64 does), then packs in order
    result = plan_of(plan_naive, [64, 150, 30, 100, 20], 4)
    assert slots(result) == [[[1], [3]], [[1], [3]], [[1], [2, 4]], [[0]]]
    assert result.ring_size.tolist() == [1, 3, 1, 2, 1]
    assert plan_of(plan_naive, [64, 150, 30, 100, 20], 4, equal_counts=True).microbatch_counts.tolist() == [2] * 4


def test_naive_offloads_what_hides_and_saves_ranks():
    lengths = [1 << 20, 300, 8192]
    plain = plan_of(plan_naive, lengths, 128, 8192)
    result = plan_of(plan_naive, lengths, 128, 8192, offload=True)
    assert plain.ring_size.tolist() == [128, 1, 1]
    assert result.ring_size.tolist() == [8, 1, 1]  # r = 1: D = 2 s / (l C)
    assert result.offload.tolist() == [30 / 32, 0, 0]
    check(result)


def test_dp_balance_gives_more_to_ranks_that_lag():
    # one ring on two ranks takes far longer than a local sequence, so the other two ranks run the rest
    lengths = [2 * 8192] + [4096] * 8
    result = plan_of(plan_bytescale, lengths, 4, 8192, delta_percent=10)
    assert slots(result)[:2] == [[[0]], [[0]]]
    assert sorted(s for rank in slots(result)[2:] for mb in rank for s in mb) == list(range(1, 9))
    assert result.microbatch_counts.tolist() == [1, 1, 2, 2]


def test_pp_balance_keeps_length_levels_apart():
    lengths = [8192] * 4 + [512] * 64
    work = [int(np.sum(COST.picoseconds(part))) for part in (lengths[:4], lengths[4:])]
    assert 0.5 < work[0] / sum(work) < 0.6  # so that two groups of equal work part about where the lengths do
    result = plan_of(plan_bytescale, lengths, 4, 8192, strategy="pp", levels=2)
    assert [{int(result.lengths[s]) for mb in rank for s in mb} for rank in slots(result)] == [{8192}, {512}] * 2


def test_pow2_rings_are_aligned_powers_of_two_or_the_pool():
    random = np.random.default_rng(5)
    for num_ranks in (6, 8, 12):
        result = plan_of(plan_pow2, random.integers(1, num_ranks * 64, 40), num_ranks)
        for start, size in zip(result.ring_start.tolist(), result.ring_size.tolist(), strict=True):
            assert size == num_ranks or (size & (size - 1) == 0 and start % size == 0)


def test_pow2_widens_the_longest_where_that_is_faster():
    lengths = np.array([4 * 8192])  # four of eight ranks would hold it, and the others would idle
    result = plan_pow2(lengths, 8, 8192, 2, cost=COST)
    assert result.ring_size.tolist() == [8]
    busy = np.array([4 * 8192] * 2 + [8192] * 400)  # enough else to do
    result = plan_pow2(busy, 8, 8192, 2, cost=COST)
    assert result.ring_size[:2].tolist() == [4, 4]


@pytest.mark.parametrize("name", ["naive", "bytescale", "pow2", "static-smallest"])
def test_too_long_a_sequence_is_refused(name):
    with pytest.raises(PlanError, match="more ranks"):
        plan_of(BASELINES[name], [5, 64 * 4 + 1], 4)


def test_soonest_interval_equals_trying_all():
    random = np.random.default_rng(0)
    for _ in range(200):
        ends = random.integers(0, 6, 12)
        allowed = random.random(12) < 0.7
        size = int(random.integers(1, 14))
        starts = [s for s in range(12 - size + 1) if allowed[s : s + size].all()]
        best = min(starts, key=lambda s: (ends[s : s + size].max(), -ends[s : s + size].sum(), s), default=None)
        if size == 1:
            best = min(starts, key=lambda s: (ends[s], s), default=None)
        assert soonest(ends, size, allowed) == best


def test_a_pack_costs_the_ring_once():
    lengths = np.array([3000] * 5 + [100] * 3)
    result = plan_static(lengths, 8, 8192, 2, ring_size=4, cost=COST)
    forward, backward = packed_picoseconds(result, COST)
    plain = microbatch_picoseconds(result, COST)
    tier = int(COST.tier(0, 4))
    for index in range(forward.size):
        pack = result.lengths[result.piece_sequence[slice(*result.microbatch_offsets[index : index + 2])]]
        for phase, got in (("forward", forward[index]), ("backward", backward[index])):
            expected = COST.microbatch_picoseconds(phase)
            if pack.size:
                rest = COST.picoseconds(pack, 4, tier, phase) - COST.attention_picoseconds(pack, 4, tier, phase)
                expected += int(rest.sum()) + COST.packed_attention_picoseconds(pack, 4, tier, phase)
            assert got == expected
    assert np.all(forward <= plain[0])
    assert packed_rank_ends(result, COST).max() < rank_ends(result, COST).max()
    local = plan_of(plan_naive, [50] * 9, 3)
    assert packed_rank_ends(local, COST).tolist() == rank_ends(local, COST).tolist()


# Answers of other systems

SYSTEM = {"system": "rival", "packed": True}


def rounds_plan(rounds, lengths, num_ranks=4, capacity=64, **options):
    return plan_rounds(np.array(lengths, dtype=np.int64), num_ranks, capacity, 2, rounds, **{**SYSTEM, **options})


def test_rounds_become_a_plan():
    rounds = [[[0], [0], [1, 2], [3]], [[4], [4], [4], [4]]]
    lengths = [100, 30, 20, 64, 200]
    packed = rounds_plan(rounds, lengths)
    assert slots(packed) == [[[0], [4]], [[0], [4]], [[1, 2], [4]], [[3], [4]]]
    assert packed.ring_size.tolist() == [2, 1, 1, 1, 4]
    alone = rounds_plan(rounds, lengths, packed=False)
    assert slots(alone) == [[[0], [4]], [[0], [4]], [[1], [2], [4]], [[3], [4]]]
    for plan in (packed, alone):
        check(plan)
    check(rounds_plan(rounds, lengths, equal_counts=True, count_multiple=2), stages=2, virtual_stages=2)


def test_a_pack_too_full_by_its_padding_gives_up_its_shortest():
    rounds = [[[0, 1, 2], [0, 1, 2], [3], [4]]]
    lengths = [61, 41, 26, 60, 50]  # 128 tokens on two ranks, but pieces are 32 + 22 + 14 = 68 with padding
    result = rounds_plan(rounds, lengths)
    check(result)
    assert slots(result) == [[[0, 1]], [[0, 1]], [[3]], [[4], [2]]]
    assert result.ring_size.tolist() == [2, 2, 1, 1, 1]


@pytest.mark.parametrize(
    ("rounds", "complaint"),
    [
        ([[[0], [0], [0], [1]]], "ring of ranks 0 to 2, for which it has no communicator"),
        ([[[1], [0], [0], [1]]], "ring of ranks 1 to 2, for which it has no communicator"),
        ([[[0, 0], [1], [], []]], "two rings"),
        ([[[0], [1], [0], [1]]], "two rings"),
        ([[[0], [0], [1], [1]], [[0], [0], [0], [0]]], "two rings"),
        ([[[0], [0], [], []]], "lacks sequence 1"),
        ([[[0], [0], [1]]], "has 3 ranks"),
        ([[[0], [0], [1], [2]]], "no such sequence"),
    ],
)
def test_answers_that_are_no_plan_are_refused(rounds, complaint):
    with pytest.raises(PlanError, match=complaint) as caught:
        rounds_plan(rounds, [70, 60])
    assert str(caught.value).startswith("rival: ")


def test_any_ring_may_be_accepted():
    result = rounds_plan([[[0], [1], [1], [1]]], [70, 150], any_ring=True, capacity=128)
    assert result.ring_size.tolist() == [1, 3]
    check(result)
