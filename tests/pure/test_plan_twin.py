"""The planner core in C++ and its Python twin make the same plans, bit for bit, valid and as short as promised."""

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_hdp.cost import CostModel, load_profile
from megatron_hdp.cost.core import core_arguments
from megatron_hdp.errors import PlanError
from megatron_hdp.mixes import mix_batches, parse_mix
from megatron_hdp.planner import core_backend, fine
from megatron_hdp.planner.bound import lower_bound
from megatron_hdp.planner.check import check
from megatron_hdp.planner.dp import plan_dp, widest_rings
from megatron_hdp.planner.dp_python import FAR, place_rings_python, plan_and_span
from megatron_hdp.planner.frame import last_enough
from megatron_hdp.planner.level import level_tails
from megatron_hdp.planner.packing import best_fit_python
from megatron_hdp.planner.sand import level_locals, pack_falling, spread_locals
from megatron_hdp.planner.skyline import Place, Placement
from megatron_hdp.planner.span import microbatch_picoseconds, rank_ends
from megatron_hdp.types import IntArray, Plan

if core_backend() == "c++":
    from megatron_hdp import _core
compiled = pytest.mark.skipif(core_backend() == "python", reason="megatron_hdp._core is not built")

BYTESCALE, H100 = load_profile("bytescale"), load_profile("h100")
WAYS = [(tie, share) for tie in (0, 1, 2) for share in (0, 20, 102)]


@dataclass(frozen=True)
class Case:
    lengths: IntArray
    widest: IntArray
    num_ranks: int
    capacity: int
    cost: CostModel
    bound: int

    @property
    def smallest(self) -> IntArray:
        return -(-self.lengths // self.capacity)

    def twin(self):
        return plan_and_span(
            self.lengths, self.smallest, self.widest, self.num_ranks, self.capacity, self.cost, self.bound
        )

    def core(self):
        arguments = core_arguments(self.cost)
        pool = self.num_ranks, self.capacity
        last = last_enough(self.cost, self.capacity)
        return _core.plan_dp(self.lengths, self.smallest, self.widest, *pool, arguments, self.bound, *last)

    def plan(self, columns) -> Plan:
        names = ("ring_start", "ring_size", "rank_offsets", "microbatch_offsets", "piece_sequence")
        return Plan(
            num_ranks=self.num_ranks,
            capacity=self.capacity,
            pad_multiple=self.cost.pad_multiple,
            lengths=self.lengths,
            offload=np.zeros(self.lengths.size),
            **dict(zip(names, columns, strict=True)),
        )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    num_ranks = draw(st.integers(1, 8) | st.integers(1, 100))
    pad = draw(st.sampled_from([2, 2, 4, 6]))
    capacity = pad * draw(st.sampled_from([1, 2]) | st.integers(1, 40) | st.integers(1, 4096))
    nodes = draw(st.sampled_from([1, 2, 3, 8, 8, 64, 10**9]))
    cost = CostModel(
        replace(draw(st.sampled_from([BYTESCALE, BYTESCALE, H100])), gpus_per_node=nodes),
        draw(st.sampled_from([1, 32])),
        window=draw(st.none() | st.integers(1, 3000) | st.just(65_536)),
        recompute=draw(st.sampled_from(["none", "full"])),
        pad_multiple=pad,
        reduce_picoseconds=draw(st.just(0) | st.integers(1, 1 << 30) | st.integers(1, 1 << 40)),
    )
    most = num_ranks * capacity
    local, few = st.integers(1, capacity), st.integers(1, min(most, 4 * capacity))
    edges = st.sampled_from([s for s in (1, capacity, capacity + 1, most - 1, most) if 1 <= s <= most])
    length = st.one_of(local, few, few, edges, st.integers(1, most))
    lengths = np.array(draw(st.lists(length, min_size=1, max_size=80)), dtype=np.int64)
    smallest = -(-lengths // capacity)
    true = lower_bound(lengths, num_ranks, capacity, cost).picoseconds
    bound = draw(st.just(true) | st.integers(0, 3 * true) | st.just(true + true // 20))
    widest = widest_rings(cost, lengths, smallest, num_ranks)
    if draw(st.booleans()):  # the widest ring may be any
        extra = np.array(draw(st.lists(st.integers(0, num_ranks), min_size=lengths.size, max_size=lengths.size)))
        widest = np.where(smallest > 1, smallest + extra, smallest)
    return Case(lengths, widest, num_ranks, capacity, cost, bound)


def batch(mix: str, num_ranks: int, tokens: int = 4 << 20) -> Case:
    """A batch as real ones are."""
    capacity, cost = 8192, CostModel(BYTESCALE, layers_per_stage=32)
    lengths = mix_batches(parse_mix(mix), tokens, min(2 << 20, num_ranks * capacity), 1234)(0)
    widest = widest_rings(cost, lengths, -(-lengths // capacity), num_ranks)
    bound = lower_bound(lengths, num_ranks, capacity, cost).picoseconds
    return Case(lengths, widest, num_ranks, capacity, cost, bound)


def assert_same(case: Case) -> None:
    for core, twin in zip(case.core(), case.twin()[0], strict=True):
        assert core.dtype == twin.dtype == np.int64
        np.testing.assert_array_equal(core, twin)


def assert_valid(case: Case) -> None:
    columns, span = case.twin()
    plan = case.plan(columns)
    check(plan)
    assert np.all(plan.ring_size >= case.smallest)
    if case.cost.microbatch_picoseconds() == 0:  # else micro-batches that are not full cost more than their share
        assert int(rank_ends(plan, case.cost).max()) <= span  # less where a last ring need not wait for all of a gap


def rings_of(plan: Plan, rank: int) -> list[set[int]]:
    """Sequences on rings in each micro-batch of the rank."""
    cuts = plan.microbatch_offsets[plan.rank_offsets[rank] : plan.rank_offsets[rank + 1] + 1].tolist()
    pieces = [plan.piece_sequence[begin:end].tolist() for begin, end in pairwise(cuts)]
    return [{s for s in own if plan.ring_size[s] > 1} for own in pieces]


def max_index(slots: list[set[int]]) -> int:
    """Of the last micro-batch with a ring."""
    return max(slot for slot, own in enumerate(slots) if own)


@pytest.mark.parametrize("mix", ["byted", "github"])
def test_ranks_end_with_long_micro_batches(mix):
    """Gradients are summed while last micro-batches run backward: none of them is a rest, as far as that is free."""
    case = batch(mix, 64)
    plan = case.plan(case.twin()[0])
    rings = [rings_of(plan, rank) for rank in range(plan.num_ranks)]
    last_ring = [next((next(iter(own)) for own in reversed(slots) if own), None) for slots in rings]
    times = np.sum(microbatch_picoseconds(plan, case.cost), axis=0)
    ends_with_ring = 0
    for rank, slots in enumerate(rings):
        ring = last_ring[rank]
        last_of_all = ring is not None and all(last_ring[other] == ring for other in plan.ring(ring).ranks)
        assert last_of_all or not slots[-1]
        if last_of_all and not slots[-1]:  # a pack of one of the ring's ranks takes longer than the ring
            ends = [plan.rank_offsets[other + 1] for other in plan.ring(ring).ranks]
            assert max(times[end - 1] for end in ends) > times[plan.rank_offsets[rank] + max_index(slots)]
            last_of_all = False
        ends_with_ring += last_of_all
        if not last_of_all:  # the longest sequence after the last ring is in the last micro-batch
            tail = plan.micro_batches(rank)[len(slots) - next(i for i, own in enumerate([*slots[::-1], {0}]) if own) :]
            longest = [max(piece.length for piece in micro_batch.pieces) for micro_batch in tail]
            assert longest[-1] == max(longest)
    assert plan.num_ranks // 4 < ends_with_ring < plan.num_ranks
    _, backward = microbatch_picoseconds(plan, case.cost)
    ended = rank_ends(plan, case.cost)
    starts_last = int((ended - backward[plan.rank_offsets[1:] - 1]).max())
    assert int(ended.max()) - starts_last > int(case.cost.picoseconds(case.capacity // 4, phase="backward"))


PADDED_PAST_THE_WINDOW = Case(
    np.array([1, 1, 1, 1, 1, 2, 2]), np.ones(7, dtype=np.int64), 2, 2, CostModel(BYTESCALE, 1, window=1), 729_171_107
)


@compiled
@settings(max_examples=200, deadline=None)
@given(cases())
@example(PADDED_PAST_THE_WINDOW)  # found by hypothesis: one token cost more than two
def test_core_and_twin_make_the_same_plans(case):
    assert_same(case)


@settings(max_examples=100, deadline=None)
@given(cases())
def test_plans_are_valid_and_last_as_long_as_promised(case):
    assert_valid(case)


@compiled
@settings(max_examples=100, deadline=None)
@given(cases(), st.sampled_from(WAYS), st.integers(0, 400), st.integers(0, 90))
def test_core_and_twin_place_rings_alike(case, way, percent, num_coarse):
    order = np.lexsort((-case.lengths, -case.smallest))
    order = order[case.smallest[order] > 1]
    rings = [case.lengths[order], case.smallest[order], case.widest[order]]
    rest = (num_coarse, case.bound * percent // 100, *way)
    core = _core.place_rings(*rings, case.num_ranks, core_arguments(case.cost), *rest)
    for one, other in zip(core, place_rings_python(*rings, case.num_ranks, case.cost, *rest), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("num_ranks", [8, 96, 512])
@pytest.mark.parametrize("mix", ["byted", "github", "lognormal:1024,8192,4096,1.1", "lognormal:128,8192,1024,1.5"])
def test_batches_like_real_ones(mix, num_ranks, monkeypatch):
    monkeypatch.setattr(fine, "BLOCK_TIMES", 50)  # times come in many blocks, as they do for larger batches
    case = batch(mix, num_ranks)
    assert_valid(case)
    if core_backend() == "c++":
        assert_same(case)


EXTREMES = {
    "one rank": ([5, 4096, 1, 1, 4095] * 50, 1, 4096),
    "capacity 2": ([2, 1, 3, 64, 1, 7] * 30, 32, 2),
    "equal lengths": ([3 * 512] * 700, 64, 512),
    "all as long as the pool": ([64 * 512] * 40, 64, 512),
    "fewer sequences than ranks": ([700, 20, 1], 500, 512),
    "more ranks than tokens of a node": ([1 << 21, 1 << 20, 1 << 19] * 8, 16_384, 8192),
}


@pytest.mark.parametrize("name", EXTREMES)
def test_extremes(name):
    lengths, num_ranks, capacity = EXTREMES[name]
    array, cost = np.array(lengths, dtype=np.int64), CostModel(BYTESCALE, layers_per_stage=32)
    widest = widest_rings(cost, array, -(-array // capacity), num_ranks)
    case = Case(array, widest, num_ranks, capacity, cost, lower_bound(array, num_ranks, capacity, cost).picoseconds)
    assert_valid(case)
    if core_backend() == "c++":
        assert_same(case)


@compiled
def test_core_and_twin_look_twice_alike():
    """Many rings that each need a good share of the pool: more coarse rings, other orders."""
    rng, num_ranks, capacity = np.random.default_rng(5), 32, 8192
    lengths = np.exp(rng.uniform(np.log(3 << 13), np.log(1 << 16), 80)).astype(np.int64)
    cost = CostModel(BYTESCALE, layers_per_stage=32)
    widest = widest_rings(cost, lengths, -(-lengths // capacity), num_ranks)
    bound = lower_bound(lengths, num_ranks, capacity, cost).picoseconds
    case = Case(lengths, widest, num_ranks, capacity, cost, bound)
    assert case.twin()[1] > bound + bound // FAR
    assert_same(case)


def test_a_second_look_gives_long_locals_rings_of_two():
    """Half of the sequences fill a rank, alone for longer than the mean of all work."""
    lengths, num_ranks, capacity = np.array([8192] * 20 + [1024] * 200, dtype=np.int64), 64, 8192
    cost = CostModel(BYTESCALE, layers_per_stage=32)
    bound = lower_bound(lengths, num_ranks, capacity, cost).picoseconds
    case = Case(lengths, np.ones_like(lengths), num_ranks, capacity, cost, bound)
    alone = int(cost.picoseconds(8192, 1, 0))
    assert alone > bound + bound // FAR
    assert_valid(case)
    columns, span = case.twin()
    assert span < alone
    assert set(columns[1][:20].tolist()) == {2}
    if core_backend() == "c++":
        assert_same(case)


@pytest.mark.parametrize("number", [33, 40, 70])
def test_more_equal_sequences_than_ranks_do_not_take_a_round_more(number):
    lengths, num_ranks, capacity = np.full(number, 8192, dtype=np.int64), 32, 8192
    cost = CostModel(BYTESCALE, layers_per_stage=32)
    bound = lower_bound(lengths, num_ranks, capacity, cost).picoseconds
    case = Case(lengths, np.ones_like(lengths), num_ranks, capacity, cost, bound)
    assert_valid(case)
    rounds = -(-number // num_ranks)
    assert case.twin()[1] < rounds * int(cost.picoseconds(8192, 1, 0)) - bound // 5
    if core_backend() == "c++":
        assert_same(case)


@compiled
@pytest.mark.parametrize("seed", range(4))
def test_rank_time_may_leave_int64(seed):
    """3,000 ranks for an hour are 10^19 picoseconds of rank-time."""
    cost, num_ranks, capacity = CostModel(BYTESCALE, layers_per_stage=32), 3000, 1 << 17
    lengths = np.random.default_rng(seed).integers(5 << 20, 12 << 20, 60)
    widest = widest_rings(cost, lengths, -(-lengths // capacity), num_ranks)
    bound = lower_bound(lengths, num_ranks, capacity, cost).picoseconds
    assert bound * num_ranks > 1 << 63
    assert_same(Case(lengths, widest, num_ranks, capacity, cost, bound))


BAD_DOORS = {
    "smallest 5": {"smallest": [5, 1]},
    "smallest 0": {"smallest": [0, 1]},
    "not above widest": {"widest": [1, 1]},
    "sequence 1 of 0 tokens": {"lengths": [100, 0]},
    "2 lengths, 1 smallest": {"smallest": [2]},
    "0 ranks": {"num_ranks": 0},
}


@pytest.mark.parametrize("wrong", BAD_DOORS.values(), ids=BAD_DOORS)
def test_rings_that_do_not_fit_the_pool_are_refused(wrong):
    """By the core and by its twin, in the same words; once inside they would never end."""
    cost = CostModel(BYTESCALE, layers_per_stage=1)
    arguments = {"lengths": [100, 50], "smallest": [2, 1], "widest": [4, 1], "num_ranks": 4} | wrong
    lengths, smallest, widest = (np.array(arguments[name]) for name in ("lengths", "smallest", "widest"))
    first = lengths, smallest, widest, arguments["num_ranks"]
    messages = []
    with pytest.raises(ValueError) as refusal:  # noqa: PT011 - the words are compared below
        plan_and_span(*first, 64, cost, 0)
    messages.append(str(refusal.value))
    with pytest.raises(ValueError) as refusal:  # noqa: PT011
        place_rings_python(*first, cost, 0, 0, 0, 0)
    messages.append(str(refusal.value))
    if core_backend() == "c++":
        with pytest.raises(ValueError) as refusal:  # noqa: PT011
            _core.plan_dp(*first, 64, core_arguments(cost), 0, 0, 0)
        messages.append(str(refusal.value))
        with pytest.raises(ValueError) as refusal:  # noqa: PT011
            _core.place_rings(*first, core_arguments(cost), 0, 0, 0, 0)
        messages.append(str(refusal.value))
    assert len(set(messages)) == 1
    assert "ranks" in messages[0]


def test_rings_in_another_order_are_refused():
    cost, sizes = CostModel(BYTESCALE, layers_per_stage=1), np.array([2, 3])
    with pytest.raises(ValueError, match="ring 1 needs 3 ranks, the one before it 2"):
        place_rings_python(sizes * 50, sizes, sizes, 4, cost, 0, 0, 0, 0)
    if core_backend() == "c++":
        with pytest.raises(ValueError, match="ring 1 needs 3 ranks, the one before it 2"):
            _core.place_rings(sizes * 50, sizes, sizes, 4, core_arguments(cost), 0, 0, 0, 0)


def test_a_step_of_days_is_refused():
    cost, one = CostModel(BYTESCALE, layers_per_stage=1), np.array([64])
    with pytest.raises(PlanError, match=r"at least 160 hours, more than 80: check the units of profile bytescale"):
        plan_dp(one, one // 64, one // 64, 1, 64, cost, 2 << 58)


@settings(max_examples=100, deadline=None)
@given(
    st.integers(1, 12).flatmap(
        lambda n: st.tuples(
            st.lists(st.integers(0, 60), min_size=n, max_size=n),
            st.lists(st.tuples(st.integers(1, 40), st.integers(0, n - 1)), max_size=80),
        )
    ),
    st.integers(0, 200),
)
def test_levelling_moves_only_tails_and_never_makes_a_step_longer(case, goal):
    """From any spread of local sequences after one ring a rank."""
    ends, locals_ = case
    locals_.sort(reverse=True)
    times, rank = [time for time, _ in locals_], [at for _, at in locals_]
    placed = Placement(list(range(len(ends))), [Place(at, 1, 0, end) for at, end in enumerate(ends)])
    turn = [item % 2 for item in range(len(times))]  # every second one runs before its ring and stays there
    before, old = rank.copy(), turn.copy()

    def last() -> int:
        loads = ends.copy()
        for time, at, own_turn in zip(times, rank, turn, strict=True):
            loads[at] += time if own_turn else 0
        return max(loads)

    longest = last()
    span = level_tails(placed, times, rank, turn, len(ends), goal)
    assert span == last() <= longest
    assert turn == old
    assert [at for at, own in zip(rank, old, strict=True) if not own] == before[::2]


def test_levelling_finds_what_longest_first_misses():
    """Times 5 5 4 4 3 3 3 on three ranks: longest first ends at 11, the best at 9 (Graham's example)."""
    times, num_ranks = [5, 5, 4, 4, 3, 3, 3], 3
    spread = spread_locals(Placement(), times, num_ranks)
    assert spread.span == 11
    assert level_locals(Placement(), times, num_ranks, 9, spread).span == 9


@given(st.integers(1, 300).flatmap(lambda most: st.tuples(st.just(most), st.lists(st.integers(1, most), max_size=150))))
def test_packing_of_falling_sizes_is_best_fit(case):
    capacity, sizes = case
    falling = sorted(sizes, reverse=True)
    expected = best_fit_python(np.array(falling, dtype=np.int64), capacity, np.zeros(0, dtype=np.int64))
    assert pack_falling(falling, capacity) == expected.tolist()


def test_a_batch_without_rings_is_levelled():
    case = batch("lognormal:100,4096,2048,1.1", 64)
    assert np.all(case.smallest == 1)
    ends = rank_ends(case.plan(case.twin()[0]), case.cost)
    longest = int(case.cost.picoseconds(case.lengths.max(), 1, 0))
    assert int(ends.max()) - int(ends.min()) <= longest  # longest processing time first ends within its last item
