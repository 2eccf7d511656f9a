"""Times of ranks and the deadlock check of pipelines: C++, Python and a brute-force executor agree."""

import dataclasses
import time
from collections import Counter

import numpy as np
import pytest
from column_executor import execute, random_plan
from plan_twins import deadlocks

from megatron_hdp.cost import CostModel, load_profile
from megatron_hdp.errors import PlanError
from megatron_hdp.planner import check, core_backend, plan
from megatron_hdp.planner.check import check_python
from megatron_hdp.planner.graph import groups, pipeline_graph, run, run_python
from megatron_hdp.planner.span import ends_of_columns, ends_of_columns_python, microbatch_picoseconds, rank_ends
from megatron_hdp.types import Plan

NONE, ONES = np.zeros(0, dtype=np.int64), np.ones(40_000, dtype=np.int64)
SCHEDULES = [(1, 1), (2, 1), (3, 1), (4, 1), (2, 2), (2, 3), (3, 2), (4, 2)]  # stages, virtual stages


def refusal(work) -> str:
    """What `work` says against a plan that can only be wrong in its order; empty if nothing."""
    try:
        work()
    except PlanError as error:
        return str(error)
    return ""


def accepted(case: Plan, stages: int, parts: int, how=check) -> bool:
    words = refusal(lambda: how(case, stages=stages, virtual_stages=parts))
    assert words == "" or words.startswith("order:"), words
    return not words


def ends(case: Plan, stages: int, parts: int, forward, backward, how) -> list[int] | None:
    columns = (case.rank_offsets, case.microbatch_offsets, case.piece_sequence, case.ring_size)
    found: list[int] = []
    words = refusal(lambda: found.extend(how(*columns, forward, backward, stages, parts).tolist()))
    assert words == "" or words.startswith("order:"), words
    return None if words else found


def costs(case: Plan, rng: np.random.Generator):
    forward, backward = rng.integers(0, 100, (2, case.microbatch_offsets.size - 1))
    by_slot = {
        (direction, rank, slot): int(times[case.rank_offsets[rank] + slot])
        for direction, times in (("F", forward), ("B", backward))
        for rank in range(case.num_ranks)
        for slot in range(int(case.microbatch_counts[rank]))
    }
    return forward, backward, by_slot


@pytest.mark.parametrize(("stages", "parts"), SCHEDULES)
def test_check_and_times_are_those_of_the_executor(stages, parts):
    rng = np.random.default_rng(stages * 10 + parts)
    verdicts: Counter[tuple[bool, bool]] = Counter()
    for _ in range(250):
        case = random_plan(rng, stages, parts, shuffle=0.6)
        forward, backward, by_slot = costs(case, rng)
        truth = execute(case, stages, parts, cost=by_slot)
        assert ends(case, stages, parts, forward, backward, ends_of_columns_python) == truth
        assert ends(case, stages, parts, forward, backward, ends_of_columns) == truth
        ways = ["together", "apart"] if parts > 1 else ["together"]
        safe = all(execute(case, stages, parts, messages) is not None for messages in ways)
        assert accepted(case, stages, parts) == safe
        assert accepted(case, stages, parts, check_python) == safe
        if safe:
            assert not deadlocks(case, stages, parts)  # ring by ring and layer by layer
        verdicts[truth is not None, safe] += 1
    assert not verdicts[False, True]  # a sender that waits makes nothing safe
    assert verdicts[True, True] > 50
    assert verdicts[False, False] > 20


@pytest.mark.parametrize(("stages", "parts"), SCHEDULES[1:])
def test_equal_slots_are_safe_whatever_the_counts(stages, parts):
    rng = np.random.default_rng(100 + stages * 10 + parts)
    for _ in range(150):
        case = random_plan(rng, stages, parts, shuffle=0)
        assert all(execute(case, stages, parts, messages) is not None for messages in ("free", "together", "apart"))
        check(case, stages=stages, virtual_stages=parts)


def test_a_sender_that_waits_to_be_asked_can_be_what_blocks():
    # nobody waits forever if stage 0 may send and go on at once; with overlapped messages it may not
    flat = [[], [0], [], [1], [], [0], [1], []]
    case = dataclasses.replace(
        plan([8, 8], 2, 4, balance="pp", stages=2, virtual_stages=2),
        rank_offsets=np.array([0, 4, 8]),
        microbatch_offsets=np.cumsum([0, *map(len, flat)]),
        piece_sequence=np.array([s for mb in flat for s in mb]),
    )
    assert [execute(case, 2, 2, way) is not None for way in ("free", "together", "apart")] == [True, True, False]
    with pytest.raises(PlanError, match=r"order: deadlock: .*to pass on "):
        check(case, stages=2, virtual_stages=2)


@pytest.mark.skipif(core_backend() == "python", reason="megatron_hdp._core is not built")
@pytest.mark.parametrize("messages", ["free", "together", "apart"])
def test_graphs_run_alike_in_both_languages(messages):
    rng = np.random.default_rng(7)
    for _ in range(100):
        case = random_plan(rng, 3, 2, shuffle=0.6)
        forward, backward, _ = costs(case, rng)
        group = groups(case.rank_offsets, case.microbatch_offsets, case.piece_sequence, case.ring_size)
        graph = pipeline_graph(case.rank_offsets, group, forward, backward, 3, 2, messages)
        assert np.array_equal(run(graph), run_python(graph))


def test_times_by_hand():
    # rank 0: local, then the ring; rank 1: the ring, then local; rank 2: local
    offsets, pieces = np.array([0, 2, 4, 5]), np.array([0, 2, 2, 1, 3])
    forward, backward = np.array([1, 2, 3, 3, 1]), np.array([3, 4, 4, 7, 0])
    columns = (offsets, np.arange(6), pieces, np.array([1, 1, 2, 1]))
    for how in (ends_of_columns, ends_of_columns_python):
        assert how(*columns, forward, backward).tolist() == [11, 21, 1]
    # one column, two stages, two micro-batches: F0 F1 B0 B1 on stage 0, F0 B0 F1 B1 on stage 1
    columns = (np.array([0, 2]), np.array([0, 0, 0]), NONE, NONE)
    for how in (ends_of_columns, ends_of_columns_python):
        assert how(*columns, np.array([1, 1]), np.array([2, 2]), 2).tolist() == [9]


def test_microbatch_times_are_those_of_their_pieces():
    cost = CostModel(load_profile("bytescale"), 8)
    case = plan([50_000, 9_000, 700, 300, 300, 4_000], 6, 16_384)
    for phase, got in zip(("forward", "backward"), microbatch_picoseconds(case, cost), strict=True):
        slow = [
            cost.microbatch_picoseconds(phase)
            + sum(
                int(cost.picoseconds(p.length, p.ring.size, cost.tier(p.ring.start, p.ring.size), phase))
                for p in mb.pieces
            )
            for mbs in case
            for mb in mbs
        ]
        assert got.dtype == np.int64
        assert got.tolist() == slow
    assert rank_ends(case, cost).shape == (6,)


def test_what_waits_forever_is_refused_with_its_reason():
    offsets, rings = np.array([0, 2, 4]), np.array([2, 2])
    for pieces, words in (([0, 1, 1, 0], "wait for each other"), ([0, 1, 0, 1], "")):
        columns = (offsets, np.arange(5), np.array(pieces), rings, ONES[:4], ONES[:4])
        for how in (ends_of_columns, ends_of_columns_python):
            if words:
                with pytest.raises(PlanError, match=words):
                    how(*columns)
            else:
                assert how(*columns).tolist() == [4, 4]
    columns = (offsets, np.array([0, 1, 2, 4, 4]), np.array([0, 1, 0, 1]), rings)
    with pytest.raises(PlanError, match="tie slot 0 of rank 0 to its slot 1"):
        ends_of_columns(*columns, ONES[:4], ONES[:4])
    with pytest.raises(PlanError, match="multiple of the 2 pipeline stages"):
        ends_of_columns(
            np.array([0, 3]), np.zeros(4, np.int64), *[np.zeros(0, np.int64)] * 2, *[np.ones(3, np.int64)] * 2, 2, 2
        )


@pytest.mark.skipif(core_backend() == "python", reason="megatron_hdp._core is not built")
def test_big_pools_take_milliseconds():
    rng = np.random.default_rng(0)
    lengths = np.minimum(rng.lognormal(7.8, 1.6, 9_000).astype(np.int64) + 1, 2**20)
    case = plan(lengths, 512, 8192)
    times = np.ones(case.microbatch_offsets.size - 1, dtype=np.int64)
    columns = (case.rank_offsets, case.microbatch_offsets, case.piece_sequence, case.ring_size, times, times)

    def fastest(work) -> float:
        best = float("inf")
        for _ in range(5):
            begin = time.perf_counter()
            work()
            best = min(best, time.perf_counter() - begin)
        return best

    assert fastest(lambda: check(case)) < 0.01  # about 0.3 ms on one idle core
    assert fastest(lambda: ends_of_columns(*columns)) < 0.01  # about 0.2 ms
    forty = (
        np.arange(1001) * 40,
        np.zeros(40_001, np.int64),
        *[np.zeros(0, np.int64)] * 2,
        *[np.ones(40_000, np.int64)] * 2,
    )
    assert fastest(lambda: ends_of_columns(*forty, 8, 1)) < 0.3  # about 14 ms
