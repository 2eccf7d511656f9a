"""How little can overlap the longest sequence in a pipeline: against schedules, good plans, and the best orders."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from exact import to_plan
from test_bound import H100, NONE, random_batch, random_cost

from megatron_hdp import plan
from megatron_hdp.cost import CostModel, load_profile
from megatron_hdp.planner import check
from megatron_hdp.planner.bound import _Search, lower_bound, lower_bound_python
from megatron_hdp.planner.bound_window import room_of
from megatron_hdp.planner.schedule import BACKWARD, FORWARD, Op, schedule
from megatron_hdp.planner.span import ends_of_columns, rank_ends


@pytest.mark.parametrize(("stages", "parts"), [(2, 1), (4, 1), (7, 1), (2, 2), (3, 4), (4, 2), (8, 3)])
def test_schedules_let_no_more_into_a_window_than_its_room(stages, parts):
    """Ops between a micro-batch's first forward and last backward on the first stage, counted; the room is used."""
    room, most = room_of(stages, parts), 0
    turn = stages if parts > 1 else 1
    for count in (1, stages - 1, stages, 5 * stages):
        if count % turn:
            continue
        ops = schedule(count, 0, stages, parts)
        for slot in range(count):
            first, last = ops.index(Op(FORWARD, slot, 0)), ops.index(Op(BACKWARD, slot, 0))
            between, outside = ops[first + 1 : last], ops[:first] + ops[last + 1 :]
            assert not any(op.slot == slot for op in outside)
            mates = {op.slot for op in between if op.slot // turn == slot // turn} - {slot}
            assert len(mates) * parts <= room.mates
            apart = [op for op in between if op.slot // turn != slot // turn]
            forward, backward = (sum(op.phase == phase for op in apart) for phase in (FORWARD, BACKWARD))
            assert backward <= room.earlier - slot % turn
            assert forward <= room.later + slot % turn
            assert all(op.phase == (FORWARD if op.slot > slot else BACKWARD) for op in apart)  # so none both ways
            most = max(most, forward + backward)
    assert most == room.earlier + room.later


def skewed(rng, num_ranks, capacity):
    """A few long sequences, of which one is much the longest, and many short ones."""
    whole = num_ranks * capacity
    long = rng.integers(1, whole // 2, int(rng.integers(0, 5)))
    short = rng.integers(1, capacity, int(rng.integers(0, 60)))
    return np.concatenate([[whole - int(rng.integers(0, whole // 4))], long, short]).astype(np.int64)


@pytest.mark.parametrize("seed", range(24))
def test_good_plans_are_not_faster(seed):
    rng = np.random.default_rng(seed)
    stages, parts = [(2, 1), (3, 1), (4, 1), (2, 2), (4, 2), (8, 1)][seed % 6]
    num_ranks, capacity = int(rng.integers(1, 17)), 4096
    cost = random_cost(rng, window=None if seed % 4 else int(rng.integers(1, 3 * capacity)))
    for _ in range(4):
        lengths = skewed(rng, num_ranks, capacity)
        made = plan(
            lengths,
            num_ranks,
            capacity,
            balance="pp",
            stages=stages,
            virtual_stages=parts,
            cost=cost,
            pad_multiple=cost.pad_multiple,
        )
        check(made, stages=stages, virtual_stages=parts)
        bound = lower_bound(lengths, num_ranks, capacity, cost, stages=stages, virtual_stages=parts)
        assert rank_ends(made, cost, stages, parts).max() >= bound.picoseconds >= bound.window


def column_span(forward, backward, stages, parts):
    """Span of one column with these micro-batches."""
    count = len(forward)
    offsets = np.arange(count + 1)
    times = (np.asarray(forward, dtype=np.int64), np.asarray(backward, dtype=np.int64))
    return int(
        ends_of_columns(
            np.array([0, count]), offsets, np.arange(count), np.ones(count, np.int64), *times, stages, parts
        )[0]
    )


def best_order(lengths, capacity, cost, stages, parts, rng, steps=400):
    """Least span of one column that a local search over orders and packs of local sequences finds."""
    forward, backward = (np.asarray(cost.picoseconds(lengths, 1, 0, phase)) for phase in ("forward", "backward"))
    constants = [cost.microbatch_picoseconds(phase) for phase in ("forward", "backward")]
    tokens = cost.piece_tokens(lengths, 1)

    def span(groups):
        groups = groups + [[]] * (-len(groups) % stages if parts > 1 else 0)
        times = [[int(each[group].sum()) + c for group in groups] for each, c in zip((forward, backward), constants)]
        return column_span(*times, stages, parts)

    order = np.argsort(lengths, kind="stable")
    now = [[int(s)] for s in (*order[::2], *order[1::2][::-1])]  # a hill: the longest in the middle
    best = value = span(now)
    for _ in range(steps):
        a, b = (int(x) for x in rng.integers(0, len(now), 2))
        trial = [list(group) for group in now]
        move = int(rng.integers(4))
        if move == 0:
            trial[a], trial[b] = trial[b], trial[a]
        elif move == 1:
            trial.insert(b, trial.pop(a))
        elif move == 2 and a != b and tokens[trial[a]].sum() + tokens[trial[b]].sum() <= capacity:
            trial[b] += trial[a]
            del trial[a]
        elif move == 3 and len(trial[a]) > 1:
            trial.insert(b, [trial[a].pop()])
        tried = span(trial)
        if tried <= value:
            now, value = trial, tried
            best = min(best, value)
    return best


@pytest.mark.parametrize(("stages", "parts"), [(2, 1), (3, 1), (4, 1), (2, 2), (3, 2)])
def test_the_best_order_of_a_column_is_not_faster_but_little_slower(stages, parts):
    rng = np.random.default_rng(stages * 10 + parts)
    cost, capacity, ratios = CostModel(load_profile("bytescale"), 8), 1 << 17, []
    for _ in range(6):
        lengths = np.append(rng.integers(1000, 1 << 15, 12), 1 << 17).astype(np.int64)
        if rng.random() < 0.5:
            lengths = np.append(lengths, rng.integers(1 << 16, 1 << 17, 3))
        bound = lower_bound(lengths, 1, capacity, cost, stages=stages, virtual_stages=parts)
        best = best_order(lengths, capacity, cost, stages, parts, rng)
        assert best >= bound.picoseconds
        ratios.append(best / bound.picoseconds)
    assert min(ratios) < (1.03 if parts == 1 else 1.07), ratios


def test_a_long_sequence_that_two_others_hide_is_known():
    """Two stages, one rank: of equal short sequences, two come before the long one and two after, in one pack each."""
    cost, capacity = CostModel(load_profile("bytescale"), 16), 1 << 17
    lengths = np.array([1 << 17, *[1 << 16] * 6])
    (long, one), (_, backward), (_, forward) = (
        cost.picoseconds(np.array([1 << 17, 1 << 16]), 1, 0, phase).tolist()
        for phase in ("total", "backward", "forward")
    )
    assert cost.microbatch_picoseconds() == 0
    bound = lower_bound(lengths, 1, capacity, cost, stages=2)
    known = 2 * long + 6 * one - 2 * backward - 2 * forward
    assert known - 4 <= bound.window <= known
    assert bound.picoseconds == bound.window > max(bound.work, bound.longest, bound.pipeline, bound.crowded)
    groups = [[1], [2, 3], [0], [4, 5], [6]]
    made = to_plan(lengths, 1, capacity, 2, np.zeros(7, np.int64), np.ones(7, np.int64), [groups])
    check(made, stages=2)
    assert known <= rank_ends(made, cost, 2).max() <= known + one


def filled(search, ring):
    """Rank-time of a plan in which the longest sequence has a ring of ``ring`` and the next ones fill its windows."""
    room = room_of(search.stages, search.parts)
    length = int(search.lengths[-1])
    piece = int(search.piece(length, ring, "total")) - search.trim
    number, total = search.microbatches(), float(search.stages * ring * piece)
    total += (number - (2 * (search.stages - 1) * ring if search.parts > 1 else 0)) * search.constant
    free = [ring * search.capacity * share / room.parts for share in (room.mates, room.earlier, room.later)]
    for i in range(search.lengths.size - 1, -1, -1):
        n, d = int(search.lengths[i]), int(search.rings[i])
        kept = [0, search.rank_time(n, d, "forward"), search.rank_time(n, d, "backward")]
        for _ in range(int(search.counts[i]) - (i == search.lengths.size - 1)):
            left = 1.0
            for level, share in enumerate(kept):
                part = min(left, free[level] / n)
                free[level] -= part * n
                left -= part
                total += part * share
            total += left * search.rank_time(n, d)
    return total / search.ranks


@pytest.mark.parametrize("seed", range(20))
def test_prices_give_what_filled_windows_give(seed):
    """The dual bound against a primal filling, ring by ring: never above, and seldom much below."""
    rng = np.random.default_rng(seed)
    stages, parts = [(2, 1), (4, 1), (4, 2)][seed % 3]
    num_ranks, capacity = int(rng.integers(1, 13)), 4096
    cost = CostModel(replace(H100, gpus_per_node=4), 4)
    lengths = skewed(rng, num_ranks, capacity)
    search = _Search(lengths, NONE, cost, num_ranks, capacity, stages, parts)
    least = min(filled(search, ring) for ring in range(int(search.rings[-1]), num_ranks + 1))
    assert least * 0.97 - 1 <= search.window() <= least + 1


@pytest.mark.parametrize("seed", range(10))
def test_offload_leaves_more_room_in_windows(seed):
    rng = np.random.default_rng(seed)
    num_ranks, capacity, cost = 6, 4096, CostModel(H100, 4)
    lengths = random_batch(rng, num_ranks, capacity)
    found = [
        lower_bound_python(lengths, np.full(lengths.size, share, np.int64), cost, num_ranks, capacity, 4, 1).window
        for share in (0, 1 << 18, 1 << 19, 1 << 20)
    ]
    assert all(a >= b * (1 - 1e-2) for a, b in itertools.pairwise(found))
    longest = 4 * int(cost.picoseconds(int(lengths.max()), np.arange(1, num_ranks + 1)).min())
    assert found[-1] >= longest // num_ranks  # the longest on one rank, and all others in its window


def test_one_stage_and_no_sequences_have_no_windows():
    assert lower_bound(np.array([5000]), 2, 4096, CostModel(H100, 4)).window == 0
    assert lower_bound(NONE, 2, 4096, CostModel(H100, 4), stages=4).window == 0
