"""Replaying measured compute: against a dull executor, against the planner's evaluator, against the simulator."""

import numpy as np
import pytest
from column_executor import linked, random_plan
from plan_twins import schedule

from megatron_hdp.cost import CostModel, load_profile
from megatron_hdp.errors import PlanError
from megatron_hdp.planner import check, plan
from megatron_hdp.planner.span import ends_of_columns, microbatch_picoseconds
from megatron_hdp.simulator import Job, Sync, cluster_of_profile, simulate_step
from megatron_hdp.simulator.replay import replay
from megatron_hdp.simulator.result import KINDS
from megatron_hdp.types import Plan

COST = CostModel(load_profile("h100"), layers_per_stage=4)
SHAPES = [(1, 1, 1), (2, 1, 1), (3, 1, 1), (2, 2, 1), (1, 1, 2), (2, 1, 2)]
"""Stages, virtual stages, expert group."""


def planned(stages, parts, experts, seed=0, ranks=4):
    lengths = np.random.RandomState(seed).randint(1, 5000, size=24)
    layout = {"stages": stages, "virtual_stages": parts, "expert_group": experts}
    made = plan(lengths, ranks, 2048, cost=COST, exchange="ring", **layout)
    check(made)
    return made


def times(made, places, seed=0):
    random = np.random.RandomState(seed)
    shape = (int(made.rank_offsets[-1]), places)
    return random.uniform(1e-3, 2.0, shape), random.uniform(1e-3, 4.0, shape)


def job_of(stages=1, parts=1, experts=1, cost=COST):
    return Job(
        cost=cost,
        cluster=cluster_of_profile(cost.profile),
        stages=stages,
        virtual_stages=parts,
        expert_group=experts,
        sync=Sync(),
    )


def executed(made, forward, backward, stages, parts):
    """Ends of (rank, stage, phase, slot, part) by trying again and again what could go on; or None if nothing can."""
    of_ring = linked(made)
    lists = {
        (rank, stage): list(schedule(int(count), stage, stages, parts))
        for rank, count in enumerate(made.microbatch_counts)
        for stage in range(stages)
    }
    ends, at = {}, dict.fromkeys(lists, 0)

    def input_of(rank, direction, slot, place):
        """When the place before is done: 0 where there is none, None if it is not."""
        if direction == "F":
            return 0.0 if place == 0 else ends.get((rank, "F", slot, place - 1))
        if place == stages * parts - 1:
            return ends.get((rank, "F", slot, place))
        return ends.get((rank, "B", slot, place + 1))

    moved = True
    while moved:
        moved = False
        for (rank, stage), ops in lists.items():
            if at[rank, stage] == len(ops):
                continue
            direction, part, slot = ops[at[rank, stage]]
            place, members = part * stages + stage, of_ring[rank, slot]
            if any((direction, part, own) not in lists[r, stage][at[r, stage] :][:1] for r, own in members):
                continue
            ready = [input_of(r, direction, own, place) for r, own in members]
            if None in ready:
                continue
            table = forward if direction == "F" else backward
            start = max(ready + [ends.get(("lane", r, stage), 0.0) for r, _ in members])
            end = start + max(table[made.rank_offsets[r] + own, place] for r, own in members)
            for r, own in members:
                ends[r, direction, own, place] = ends["lane", r, stage] = end
                at[r, stage] += 1
            moved = True
    return ends if all(at[key] == len(ops) for key, ops in lists.items()) else None


@pytest.mark.parametrize(("stages", "parts"), [(1, 1), (2, 1), (3, 1), (2, 2)])
def test_as_the_dull_executor(stages, parts):
    stuck = 0
    for seed in range(25):
        made = random_plan(np.random.default_rng(seed), stages, parts, shuffle=0.1)
        forward, backward = times(made, stages * parts, seed)
        expected = executed(made, forward, backward, stages, parts)
        if expected is None:
            stuck += 1
            with pytest.raises(PlanError, match="order:"):
                replay(made, job_of(stages, parts), forward, backward)
            continue
        found = replay(made, job_of(stages, parts), forward, backward)
        bars = found.timeline
        for lane, kind, slot, part, end in zip(bars.lane, bars.kind, bars.slot, bars.part, bars.end):
            rank, stage = divmod(int(lane), stages)
            key = (rank, "F" if KINDS[kind] == "forward" else "B", int(slot), int(part) * stages + stage)
            assert end == pytest.approx(expected[key], abs=1e-9)
        assert bars.end.size == sum(key[0] != "lane" for key in expected)
        lanes = [expected.get(("lane", *divmod(lane, stages)), 0.0) for lane in range(made.num_ranks * stages)]
        assert found.lane_ends == pytest.approx(lanes, abs=1e-9)
    assert stuck < 20


@pytest.mark.parametrize(("stages", "parts", "experts"), SHAPES)
def test_modelled_times_give_the_modelled_step(stages, parts, experts):
    """As the planner's evaluator and the simulator have it, where links take no time."""
    made = planned(stages, parts, experts)
    free = COST.with_free_links("all").with_stages(stages)
    both = [np.repeat(each[:, None] // parts, stages * parts, axis=1) for each in microbatch_picoseconds(made, free)]
    job = job_of(stages, parts, experts, free)
    found = replay(made, job, *(each / 1e12 for each in both))
    simulated = simulate_step(made, job)
    assert found.span_seconds == pytest.approx(simulated.span_seconds, rel=1e-9)
    assert simulated.timeline is not None
    passes = np.isin(simulated.timeline.kind, [KINDS.index("forward"), KINDS.index("backward")])
    for name in ("lane", "kind", "slot", "part"):
        assert np.array_equal(getattr(found.timeline, name), getattr(simulated.timeline, name)[passes])
    first = simulated.timeline.start[passes].min()
    for name in ("compute", "partner", "expert"):
        assert getattr(found.timeline, name) == pytest.approx(getattr(simulated.timeline, name)[passes], abs=1e-11)
    for name in ("start", "end"):
        shifted = getattr(simulated.timeline, name)[passes] - first
        assert getattr(found.timeline, name) == pytest.approx(shifted, abs=1e-11)
    if experts == 1:
        columns = (made.rank_offsets, made.microbatch_offsets, made.piece_sequence, made.ring_size)
        ends = ends_of_columns(*columns, *microbatch_picoseconds(made, free), stages, parts)
        assert found.lane_ends.reshape(-1, stages).max(axis=1) == pytest.approx(ends / 1e12, rel=1e-9)


@pytest.mark.parametrize(("stages", "parts", "experts"), SHAPES)
def test_bars_are_whole(stages, parts, experts):
    made = planned(stages, parts, experts, seed=3)
    forward, backward = times(made, stages * parts)
    bars = replay(made, job_of(stages, parts, experts), forward, backward).timeline
    spent = bars.compute + bars.ring + bars.partner + bars.expert + bars.copy
    assert spent == pytest.approx(bars.end - bars.start, abs=1e-11)
    assert bars.compute.sum() == pytest.approx(forward.sum() + backward.sum())
    assert np.all(np.diff(bars.lane) >= 0)
    same = np.diff(bars.lane) == 0
    assert np.all(bars.start[1:][same] >= bars.end[:-1][same] - 1e-11)
    assert np.all(bars.partner >= 0)
    assert np.all(bars.expert >= 0)
    assert (bars.expert.sum() > 0) == (experts > 1)
    assert not bars.ring.any()
    assert not bars.copy.any()


def test_ranks_wait_in_rings():
    """Rank 0: local, shared; rank 1: shared, local. The shared one starts when rank 0 is done with its own."""
    made = Plan(2, 100, 2, [50, 200, 60], [0, 0, 1], [1, 2, 1], [0, 0, 0], [0, 2, 4], [0, 1, 2, 3, 4], [0, 1, 1, 2])
    check(made)
    forward, backward = np.array([[1.0], [2.0], [3.0], [5.0]]), np.array([[2.0], [4.0], [1.0], [6.0]])
    found = replay(made, job_of(), forward, backward)
    assert found.lane_ends.tolist() == [10.0, 21.0]
    assert found.span_seconds == 21.0
    assert found.timeline.start.tolist() == [0, 1, 3, 6, 0, 6, 10, 15]
    assert found.timeline.partner.tolist() == [0, 0, 1, 0, 3, 3, 0, 0]


def test_wrong_times_are_refused():
    made = planned(1, 1, 1)
    forward, backward = times(made, 1)
    with pytest.raises(PlanError, match=r"forward has the shape \[\d+, 2\], must be \[\d+, 1\]"):
        replay(made, job_of(), np.repeat(forward, 2, axis=1), backward)
    for bad in (-1e-9, np.nan, np.inf):
        wrong = backward.copy()
        wrong[0] = bad
        with pytest.raises(PlanError, match="backward has times that are negative"):
            replay(made, job_of(), forward, wrong)
