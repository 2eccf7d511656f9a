"""`check` names every broken invariant, and never accepts a plan whose ranks would wait forever."""

import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_twins import assert_invariants, deadlocks

from megatron_hdp.errors import PlanError
from megatron_hdp.planner import check, plan
from megatron_hdp.planner.check import check_python, held_tokens, peers
from megatron_hdp.types import Plan, Ring


def make(num_ranks: int, rings: list[tuple[int, int]], ranks: list[list[list[int]]], **changes) -> Plan:
    """A plan from rings (start, size) and every rank's micro-batches as lists of sequences; piece of 4 tokens each."""
    lists = [mb for mbs in ranks for mb in mbs]
    columns = {
        "num_ranks": num_ranks,
        "capacity": 64,
        "pad_multiple": 2,
        "lengths": [4 * size for _, size in rings],
        "ring_start": [start for start, _ in rings],
        "ring_size": [size for _, size in rings],
        "offload": [0.0] * len(rings),
        "rank_offsets": np.cumsum([0, *(len(mbs) for mbs in ranks)]),
        "microbatch_offsets": np.cumsum([0, *(len(mb) for mb in lists)]),
        "piece_sequence": [s for mb in lists for s in mb],
    }
    return Plan(**{**columns, **changes})


GOOD = ([(0, 2), (1, 2), (2, 1), (0, 1)], [[[0], [3]], [[0], [1]], [[2], [1]]])


def good(**changes) -> Plan:
    return dataclasses.replace(make(3, *GOOD), **changes)


def test_good_plan_passes():
    check(good())
    check(good(), expert_group=3)
    check(good(), stages=2)
    check(good(), stages=2, virtual_stages=2)
    check(good(exchange=[1, 2, 0, 0], head_ranks=[1, 2, 1, 1]))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_ranks": 0}, ["columns", "num_ranks 0"]),
        ({"capacity": 0}, ["columns", "capacity 0"]),
        ({"pad_multiple": 3}, ["columns", "pad_multiple 3"]),
        ({"ring_size": [2, 2, 1]}, ["columns", "ring_size", "[3]", "4 sequences"]),
        ({"lengths": [[8], [8], [4], [4]]}, ["columns", "lengths", "[4, 1]"]),
        ({"rank_offsets": [0, 2, 4]}, ["columns", "rank_offsets", "[3]", "[4]"]),
        ({"rank_offsets": [0, 2, 4, 5]}, ["columns", "rank_offsets", "0 to 6", "ends at 5"]),
        ({"rank_offsets": [1, 2, 4, 6]}, ["columns", "rank_offsets", "starts at 1"]),
        ({"rank_offsets": [0, 4, 2, 6]}, ["columns", "rank_offsets", "falls"]),
        ({"microbatch_offsets": [0, 1, 2, 3, 4, 5, 7]}, ["columns", "microbatch_offsets", "0 to 6", "ends at 7"]),
        ({"microbatch_offsets": []}, ["columns"]),
        ({"piece_sequence": [0, 3, 0, 1, 2, 4]}, ["columns", "piece 5", "sequence 4", "0 to 3"]),
        ({"piece_sequence": [0, 3, 0, 1, -1, 1]}, ["columns", "piece 4", "sequence -1"]),
        ({"lengths": [8, 8, 0, 4]}, ["length", "sequence 2", "0 tokens"]),
        ({"ring_size": [2, 2, 0, 1]}, ["ring", "sequence 2", "0 ranks"]),
        ({"ring_size": [2, 4, 1, 1]}, ["ring", "sequence 1", "4 ranks", "0 to 2"]),
        ({"ring_start": [0, 2, 2, 0]}, ["ring", "sequence 1", "rank 2", "0 to 2"]),
        ({"ring_start": [-1, 1, 2, 0]}, ["ring", "sequence 0", "rank -1"]),
        ({"offload": [0, 1.5, 0, 0]}, ["offload", "sequence 1", "1.5"]),
        ({"offload": [0, 0, -0.1, 0]}, ["offload", "sequence 2", "-0.1"]),
        ({"offload": [float("nan"), 0, 0, 0]}, ["offload", "sequence 0", "nan"]),
        ({"exchange": [0, 0, 0]}, ["columns", "exchange", "[3]", "4 sequences"]),
        ({"head_ranks": [1] * 5}, ["columns", "head_ranks", "[5]", "4 sequences"]),
        ({"exchange": [0, 3, 0, 0]}, ["exchange", "sequence 1", "exchange 3", "0 (ring), 1 (gather), 2 (heads)"]),
        ({"exchange": [-1, 0, 0, 0]}, ["exchange", "sequence 0", "exchange -1"]),
        ({"exchange": [0, 0, 1, 0]}, ["exchange", "sequence 2 is local", "gather", "head_ranks 1", "ring with 1"]),
        ({"head_ranks": [1, 1, 1, 2]}, ["exchange", "sequence 3 is local", "head_ranks 2"]),
        ({"exchange": [2, 0, 0, 0]}, ["exchange", "sequence 0", "heads with head_ranks 1", "at least 2"]),
        ({"exchange": [2, 0, 0, 0], "head_ranks": [-2, 1, 1, 1]}, ["exchange", "sequence 0", "head_ranks -2"]),
        ({"exchange": [1, 0, 0, 0], "head_ranks": [2, 1, 1, 1]}, ["exchange", "sequence 0", "gather", "must have 1"]),
        ({"head_ranks": [1, 2, 1, 1]}, ["exchange", "sequence 1", "ring with head_ranks 2", "must have 1"]),
        ({"head_ranks": [1, 0, 1, 1]}, ["exchange", "sequence 1", "ring with head_ranks 0", "must have 1"]),
        (
            {"exchange": [2, 0, 0, 0], "head_ranks": [4, 1, 1, 1]},
            ["exchange", "sequence 0 has head_ranks 4", "does not divide its ring of 2 ranks"],
        ),
        ({"ring_start": [0, 1, 1, 0]}, ["pieces", "rank 2", "sequence 2", "ranks 1 to 1"]),
        ({"ring_size": [3, 2, 1, 1]}, ["pieces", "rank 2 has 0 pieces of sequence 0"]),
        (
            {"piece_sequence": [0, 0, 3, 0, 1, 2, 1], "microbatch_offsets": [0, 1, 3, 4, 5, 6, 7]},
            ["pieces", "rank 0 has 2 pieces of sequence 0"],
        ),
        ({"rank_offsets": [0, 2, 2, 6]}, ["pieces"]),
        (
            {"piece_sequence": [3, 0, 0, 1, 2, 1], "microbatch_offsets": [0, 2, 2, 3, 4, 5, 6]},
            ["order", "rank 0, slot 0", "sequence 3 before sequence 0", "ascending"],
        ),
        ({"capacity": 2}, ["capacity", "rank 0, slot 0", "holds 4 tokens", "is 2"]),
        ({"lengths": [8, 8, 70, 4]}, ["capacity", "rank 2, slot 0", "holds 70 tokens", "is 64"]),
    ],
)
def test_broken_plan_is_refused_by_name(changes, words):
    with pytest.raises(PlanError) as caught:
        check(good(**changes))
    assert all(word in str(caught.value) for word in words), str(caught.value)


BOTH = pytest.mark.parametrize("how", [check, check_python])
HUGE = [pytest.param(10**5000, id="10^5000"), pytest.param(-(10**5000), id="-10^5000")]


def one_rank(num: int, **changes) -> Plan:
    """``num`` sequences in the one micro-batch of one rank."""
    return make(1, [(0, 1)] * num, [[list(range(num))]], **changes)


@BOTH
def test_sums_that_would_wrap_are_refused(how):
    with pytest.raises(PlanError, match=rf"sequence 0 has {2**61} tokens, must have fewer than {2**31}"):
        how(one_rank(8, lengths=[2**61] * 8, capacity=8))
    with pytest.raises(PlanError, match=rf"capacity is {2**63 - 1}, must be a whole number below {2**31}"):
        how(one_rank(1, lengths=[10], pad_multiple=2**62, capacity=2**63 - 1))
    with pytest.raises(PlanError, match=rf"pad_multiple is {2**62}, must be a whole number below {2**31}"):
        how(one_rank(1, lengths=[10], pad_multiple=2**62))
    with pytest.raises(PlanError, match=rf"the batch has {2**31} tokens, must have fewer than {2**31}"):
        how(make(2, [(0, 1), (1, 1)], [[[0]], [[1]]], lengths=[2**30] * 2, capacity=2**30))
    with pytest.raises(PlanError, match=r"microbatch_offsets must rise .* falls"):
        how(good(microbatch_offsets=[0, 2**62, -(2**63), -(2**62), 0, 5, 6]))
    how(make(2, [(0, 1), (1, 1)], [[[0]], [[1]]], lengths=[2**30, 2**30 - 1], capacity=2**30))
    how(one_rank(1, lengths=[10], pad_multiple=2**31 - 2, capacity=2**31 - 1))
    with pytest.raises(PlanError, match=rf"holds {2**31 - 2} tokens, capacity is 8"):
        how(one_rank(1, lengths=[10], pad_multiple=2**31 - 2, capacity=8))


@BOTH
@pytest.mark.parametrize("name", ["num_ranks", "capacity", "pad_multiple"])
@pytest.mark.parametrize("value", ["2", 2.5, 2.0, None, float("nan"), True, 2**31, 2**70, *HUGE])
def test_sizes_that_are_no_whole_numbers_are_refused(how, name, value):
    with pytest.raises(PlanError, match=rf"columns: {name} is .*, must be a whole number below {2**31}"):
        how(good(**{name: value}))


@BOTH
@pytest.mark.parametrize("name", ["stages", "virtual_stages", "expert_group"])
@pytest.mark.parametrize("value", [0, -1, 2.0, "2", None, True, float("nan"), 2**31, 2**70, *HUGE])
def test_settings_that_no_run_can_have_are_refused(how, name, value):
    settings = {"stages": 2, name: value}
    with pytest.raises(PlanError, match=rf"settings: {name} is .*, must be a whole number from 1 to \d+"):
        how(good(), **settings)


@BOTH
def test_settings_that_do_not_go_together_are_refused(how):
    with pytest.raises(PlanError, match="virtual_stages is 2 with 1 pipeline stage"):
        how(good(), virtual_stages=2)
    with pytest.raises(PlanError, match="stages is 4097, must be a whole number from 1 to 4096"):
        how(good(), stages=4097)
    with pytest.raises(PlanError, match="64 stages of 65 virtual stages are 4160 model parts, at most 4096"):
        how(good(), stages=64, virtual_stages=65)
    with pytest.raises(PlanError, match="expert groups of 4 ranks do not divide the pool of 3"):
        how(good(), expert_group=4)
    how(good(), stages=4096)
    how(good(), stages=np.int64(2), virtual_stages=np.int64(2), expert_group=np.int64(3))


@BOTH
@pytest.mark.parametrize("stages", [1, 2])
def test_lockstep_of_experts_is_checked(how, stages):
    case = make(2, [(0, 2)], [[[0], []], [[], [0]]])
    how(case, stages=stages)
    with pytest.raises(PlanError, match=r"experts: groups of 2 ranks run every slot together, .* same slot on all"):
        how(case, stages=stages, expert_group=2)
    how(make(2, [(0, 2)], [[[0], []], [[0], []]]), stages=stages, expert_group=2)


def test_rank_without_micro_batch_is_refused():
    with pytest.raises(PlanError, match="rank 1 has no micro-batch"):
        check(make(2, [(0, 1)], [[[0]], []]))
    check(make(2, [(0, 1)], [[[0]], [[]]]))


def test_capacity_is_counted_after_offload():
    case = make(1, [(0, 1), (0, 1)], [[[0, 1]]], lengths=[40, 40], offload=[0.39, 0.0])
    with pytest.raises(PlanError, match="holds 65 tokens, capacity is 64"):
        check(case)
    check(dataclasses.replace(case, offload=np.array([0.4, 0.0])))
    assert held_tokens(np.array([10, 10, 10]), np.array([0.0, 0.25, 1.0])).tolist() == [10, 8, 0]


def test_more_than_four_peers_are_refused(monkeypatch):
    # only another walk than even-up, odd-down can make more peers: then check must see it
    monkeypatch.setattr(Ring, "ranks", property(lambda self: tuple(range(self.start, self.start + self.size))))
    rings = [(0, size) for size in range(2, 9)]
    ranks = [[[s for s, (_, size) in enumerate(rings) if rank < size]] for rank in range(8)]
    with pytest.raises(PlanError, match=r"peers: rank 0 exchanges data along rings with 7 ranks, at most 4"):
        check_python(make(8, rings, ranks))
    check_python(make(8, rings, ranks, exchange=[1] * len(rings)))


def dull_peers(case: Plan) -> list[int]:
    """Whom every piece talks to, by what its exchange means; walks are those of `Ring`."""
    met: list[set[int]] = [set() for _ in range(case.num_ranks)]
    for micro_batches in case:
        for piece in (piece for micro_batch in micro_batches for piece in micro_batch.pieces):
            ranks, at = piece.ring.ranks, piece.position
            if piece.exchange == "gather":
                others = set(ranks)
            else:
                a = piece.head_ranks
                first = at // a * a
                others = {*ranks[first : first + a], ranks[at - a], ranks[(at + a) % len(ranks)]}
            met[ranks[at]] |= others - {ranks[at]}
    return [len(others) for others in met]


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_peers_are_those_of_the_exchanges(data):
    num_ranks = data.draw(st.integers(1, 13))
    rings, exchange, head_ranks = [], [], []
    for _ in range(data.draw(st.integers(1, 6))):
        size = data.draw(st.integers(1, num_ranks))
        rings.append((data.draw(st.integers(0, num_ranks - size)), size))
        divisors = [a for a in range(2, size + 1) if size % a == 0]
        exchange.append(data.draw(st.sampled_from([0, 1, 2])) if divisors else 0)
        head_ranks.append(data.draw(st.sampled_from(divisors)) if exchange[-1] == 2 else 1)
    ranks = [
        [[s] for s, (start, size) in enumerate(rings) if start <= rank < start + size] or [[]]
        for rank in range(num_ranks)
    ]
    case = make(num_ranks, rings, ranks, exchange=exchange, head_ranks=head_ranks)
    check(case)
    assert peers(case).tolist() == dull_peers(case)
    rings_only = dataclasses.replace(case, exchange=np.zeros(len(rings), int), head_ranks=np.ones(len(rings), int))
    assert peers(rings_only).max() <= 4


def test_unequal_counts_are_refused_where_the_model_needs_equal_ones():
    case = make(4, [(0, 1)], [[[0]], [[]], [[], []], [[], []]])
    check(case)
    check(case, expert_group=2)
    with pytest.raises(PlanError, match=r"ranks 0 to 3 share experts and have \[1, 1, 2, 2\]"):
        check(case, expert_group=4)
    with pytest.raises(PlanError, match="expert groups of 3 ranks do not divide the pool of 4"):
        check(case, expert_group=3)
    check(case, stages=2)


def test_interleaved_count_rule():
    three = make(1, [(0, 1)], [[[0], [], []]])
    check(three, stages=2)
    check(three, stages=3, virtual_stages=2)
    for stages in (2, 4):
        with pytest.raises(PlanError, match=f"3 micro-batches, .* multiple of the {stages} pipeline stages"):
            check(three, stages=stages, virtual_stages=2)


def test_interleaved_count_rule_holds_for_every_rank():
    case = make(2, [(0, 1)], [[[0], []], [[], [], []]])
    check(case, stages=2)
    with pytest.raises(PlanError, match=r"rank 1 has 3 micro-batches, .* multiple of the 2 pipeline stages"):
        check(case, stages=2, virtual_stages=2)


def test_ring_in_unequal_slots_passes_a_pipeline_if_nobody_waits_forever():
    check(make(2, [(0, 2)], [[[0], []], [[], [0]]]), stages=2)


def test_deadlock_of_a_pipeline_is_named_as_a_cycle():
    case = make(2, [(0, 2), (0, 2)], [[[0], [], [], [1]], [[], [0], [1], []]])
    check(case)
    with pytest.raises(PlanError) as caught:
        check(case, stages=3)
    waits = str(caught.value).removeprefix("order: deadlock: ").split("; ")
    assert len(waits) > 1
    for this, other in zip(waits, waits[1:] + waits[:1]):
        assert other.startswith(this.split(" for ")[-1] + " waits")  # each waits for the next, the last for the first
    assert any("(sequence 0)" in wait for wait in waits)


def test_opposite_order_of_two_rings_is_named_as_a_cycle():
    case = make(2, [(0, 2), (0, 2)], [[[0], [1]], [[1], [0]]])
    assert deadlocks(case)
    with pytest.raises(PlanError, match=r"rank 0 waits in slot 0 \(sequence 0\) for rank 1; rank 1 waits .* rank 0"):
        check(case)


def test_two_slots_of_a_rank_tied_together_are_refused():
    case = make(2, [(0, 2), (0, 2)], [[[0], [1]], [[0, 1]]])
    assert deadlocks(case)
    with pytest.raises(PlanError, match="slot 0 of rank 0 to its slot 1"):
        check(case)


@st.composite
def any_order(draw: st.DrawFn) -> Plan:
    """Well-formed plans whose ranks run their pieces in any order and grouping."""
    num_ranks = draw(st.integers(2, 5))
    rings = []
    for _ in range(draw(st.integers(1, 6))):
        size = draw(st.integers(1, num_ranks))
        rings.append((draw(st.integers(0, num_ranks - size)), size))
    shuffled = draw(st.booleans())
    ranks = []
    for rank in range(num_ranks):
        mine = [s for s, (start, size) in enumerate(rings) if start <= rank < start + size]
        if shuffled:
            mine = draw(st.permutations(mine))
        micro_batches: list[list[int]] = [[]]
        for s in mine:
            if draw(st.integers(0, 2)):
                micro_batches.append([])
            micro_batches[-1].append(s)
        ranks.append([sorted(mb) for mb in micro_batches])
    return make(num_ranks, rings, ranks)


def accepted(case: Plan, **options) -> bool:
    try:
        check(case, **options)
    except PlanError:
        return False
    return True


@settings(max_examples=1500, deadline=None)
@given(any_order())
def test_check_says_deadlock_exactly_when_the_ranks_do(case):
    assert accepted(case) == (not deadlocks(case))


@st.composite
def near_pipeline(draw: st.DrawFn) -> tuple[Plan, int, int]:
    """Plans for pipelines with some slots swapped."""
    stages, parts = draw(st.integers(2, 3)), draw(st.integers(1, 2))
    num_ranks = draw(st.integers(2, 4))
    lengths = draw(st.lists(st.integers(1, 4 * num_ranks), min_size=1, max_size=8))
    case = plan(lengths, num_ranks, 4, balance="pp", stages=stages, virtual_stages=parts)
    ranks = [[[p.sequence for p in mb.pieces] for mb in mbs] for mbs in case]
    for _ in range(draw(st.integers(0, 2))):
        mbs = ranks[draw(st.integers(0, num_ranks - 1))]
        a, b = draw(st.integers(0, len(mbs) - 1)), draw(st.integers(0, len(mbs) - 1))
        mbs[a], mbs[b] = mbs[b], mbs[a]
    flat = [mb for mbs in ranks for mb in mbs]
    sizes = np.cumsum([0, *map(len, flat)])
    sequences = np.array([s for mb in flat for s in mb], dtype=np.int64)
    return dataclasses.replace(case, microbatch_offsets=sizes, piece_sequence=sequences), stages, parts


@settings(max_examples=300, deadline=None)
@given(near_pipeline())
def test_check_never_accepts_a_deadlock_of_a_pipeline(drawn):
    case, stages, parts = drawn
    if accepted(case, stages=stages, virtual_stages=parts):
        assert not deadlocks(case, stages, parts)


def test_pipeline_twin_sees_a_deadlock_that_free_order_does_not():
    # without stages this runs; under 1F1B on two stages rank 0 is still in forward where rank 1 is in backward
    case = make(2, [(0, 2)], [[[0], [], []], [[], [], [0]]])
    assert accepted(case)
    assert not deadlocks(case)
    case = make(2, [(0, 2), (0, 2)], [[[0], [], [1], []], [[], [0], [], [1]]])
    assert not deadlocks(case)
    assert deadlocks(make(2, [(0, 2), (0, 2)], [[[0], [], [], [1]], [[], [0], [1], []]]), 3)


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_one_changed_number_is_refused_or_harmless(data):
    """Change one number of one column of a planned batch: either check refuses, or the plan is still sound."""
    lengths = data.draw(st.lists(st.integers(1, 20), min_size=1, max_size=8))
    before = plan(lengths, 5, 4)
    columns = json.loads(before.to_json())
    name = data.draw(st.sampled_from([k for k, v in columns.items() if isinstance(v, list)]))
    where = data.draw(st.integers(0, len(columns[name]) - 1))
    columns[name][where] = data.draw(st.integers(-2, 12))
    after = Plan.from_json(json.dumps(columns))
    if accepted(after):
        assert_invariants(after)
        assert not deadlocks(after)
