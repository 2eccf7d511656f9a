"""Times of a pipeline's candidates: the C++ sweep over slots against the evaluator of plans."""

import numpy as np
import pytest

from megatron_hdp.cost import CostModel, load_profile
from megatron_hdp.planner import core_backend
from megatron_hdp.planner.candidate_times import Ends, Task, candidate_times, candidate_times_python
from megatron_hdp.planner.columns import Layout
from megatron_hdp.planner.dp import widest_rings
from megatron_hdp.planner.halves import stack_rings, stack_rings_python
from megatron_hdp.planner.packs import spread, spread_python
from megatron_hdp.planner.pp import FLAT_WAYS, LEADS, RAMPS, WAYS, _pairs, _read
from megatron_hdp.planner.span import ends_of_columns_python

pytestmark = pytest.mark.skipif(core_backend() != "c++", reason="compares the C++ core with its twins")
LAYOUTS = [
    (1, 1, 1),
    (1, 1, 4),
    (2, 1, 1),
    (3, 1, 6),
    (4, 1, 1),
    (4, 2, 1),
    (2, 3, 3),
    (8, 1, 1),
    (8, 2, 12),
    (5, 1, 1),
]
COSTS = {
    stages: CostModel(load_profile("bytescale"), layers_per_stage=max(1, 32 // stages))
    for stages in {layout[0] for layout in LAYOUTS}
}


def random_batch(random: np.random.Generator, num_ranks: int, capacity: int) -> np.ndarray:
    """Lengths of very unlike kinds: many or few, short, long, alike."""
    longest = float(num_ranks * capacity)
    kinds = [
        np.exp(random.uniform(0, np.log(longest), int(random.integers(1, 90)))),
        random.uniform(1, capacity, int(random.choice([0, 60, 900]))),
        np.full(int(random.integers(0, 40)), float(random.integers(1, 3 * capacity))),
    ]
    lengths = np.concatenate([kinds[k] for k in np.flatnonzero(random.integers(0, 2, 3))] or kinds[:1])
    return np.clip(lengths.astype(np.int64), 1, int(longest))


def random_task(random: np.random.Generator, layout: Layout) -> tuple[Task, list]:
    num_ranks, capacity = int(random.choice([12, 24])), int(random.choice([64, 1024]))
    return task_of(random, random_batch(random, num_ranks, capacity), num_ranks, capacity, layout)


def task_of(
    random: np.random.Generator, lengths: np.ndarray, num_ranks: int, capacity: int, layout: Layout
) -> tuple[Task, list]:
    """The task, and its rings placed in two random ways."""
    cost = COSTS[layout.stages]
    smallest = -(-lengths // capacity)
    widest = widest_rings(cost, lengths, smallest, num_ranks)
    task, rings = _read(lengths, smallest, widest, num_ranks, capacity, cost, layout)
    ways = [(*WAYS, *FLAT_WAYS)[int(k)] for k in random.integers(0, len(WAYS) + len(FLAT_WAYS), 2)]
    return task, list(_pairs(task, rings, ways))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_sweep_gives_the_times_of_the_evaluator(layout):
    random = np.random.default_rng(layout)
    for _ in range(12):
        task, pairs = random_task(random, Layout(*layout))
        for pair in pairs:
            lost = random.integers(0, 1 + int(pair.back.height.max()), task.num_ranks)
            for losing in (np.zeros_like(lost), lost):
                choices = [Ends(int(random.choice(RAMPS)), int(random.choice((*LEADS, 512, 1024)))) for _ in range(3)]
                ours = candidate_times(task, pair, losing, choices)
                twins = candidate_times_python(task, pair, losing, choices)
                assert [span for span, _ in ours] == [span for span, _ in twins]
                assert all(np.array_equal(a, b) for (_, a), (_, b) in zip(ours, twins, strict=True))


def test_both_stop_at_the_first_that_is_enough():
    random = np.random.default_rng(5)
    lengths = np.concatenate([random.integers(1, 1024, 600), random.integers(1024, 5000, 20)])
    task, (pair, _) = task_of(random, lengths, 12, 1024, Layout(4, 1, 1))
    nothing = np.zeros(task.num_ranks, dtype=np.int64)
    choices = [Ends(ramp, 0) for ramp in (0, 4, 5, 6, 8)]
    spans = [span for span, _ in candidate_times(task, pair, nothing, choices)]
    assert len(set(spans)) > 1
    for enough in sorted(spans):
        tried = 1 + next(i for i, span in enumerate(spans) if span <= enough)
        for times in (candidate_times, candidate_times_python):
            assert [span for span, _ in times(task, pair, nothing, choices, enough)] == spans[:tried]


@pytest.mark.parametrize("layout", [(3, 1, 1), (2, 2, 4), (1, 1, 1)], ids=str)
def test_dull_evaluator_agrees_too(monkeypatch, layout):
    monkeypatch.setattr("megatron_hdp.planner.units.ends_of_columns", ends_of_columns_python)
    random = np.random.default_rng(layout)
    for _ in range(3):
        task, (pair, _) = random_task(random, Layout(*layout))
        nothing = np.zeros(task.num_ranks, dtype=np.int64)
        (ours,), (twin,) = (f(task, pair, nothing, [Ends(4, 512)]) for f in (candidate_times, candidate_times_python))
        assert ours[0] == twin[0]
        assert np.array_equal(ours[1], twin[1])


def test_twins_of_rows():
    random = np.random.default_rng(0)
    for _ in range(100):
        num_ranks, rings = int(random.integers(1, 20)), int(random.integers(0, 30))
        size = random.integers(1, num_ranks + 1, rings)
        start = random.integers(0, num_ranks - size + 1)
        end = random.integers(1, 1 << 40, rings)
        ours, twins = (f(start, size, end, num_ranks) for f in (stack_rings, stack_rings_python))
        assert all(np.array_equal(a, b) for a, b in zip(ours, twins, strict=True))


@pytest.mark.parametrize("shift", [0, 30, 52])
def test_spread_of_loads_that_leave_one_word(shift):
    random = np.random.default_rng(shift)
    for _ in range(30):
        ranks, items = int(random.integers(1, 40)), int(random.integers(0, 200))
        work, loads = random.integers(0, 9, items) << shift, random.integers(0, 99, ranks) << shift
        assert np.array_equal(spread(work, loads), spread_python(work, loads))


def test_rings_outside_their_depths_are_refused():
    task, (pair, _) = random_task(np.random.default_rng(1), Layout(2, 1, 1))
    assert pair.back.row.size
    pair.back.row[0] = pair.back.depth.max()
    with pytest.raises(ValueError, match="not inside the pool and its depths"):
        candidate_times(task, pair, np.zeros(task.num_ranks, dtype=np.int64), [Ends(4, 0)])
