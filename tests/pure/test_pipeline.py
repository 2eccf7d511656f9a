"""Plans for pipelines and experts: rings in equal slots, counts as the model demands, time where it is lost."""

import numpy as np
import pytest

from megatron_hdp.cost import CostModel, load_profile
from megatron_hdp.errors import ConfigError, PlanError
from megatron_hdp.mixes import mix_batches, parse_mix
from megatron_hdp.planner import plan
from megatron_hdp.planner.baselines import BASELINES
from megatron_hdp.planner.bound import lower_bound
from megatron_hdp.planner.candidate_times import candidate_times
from megatron_hdp.planner.check import check
from megatron_hdp.planner.columns import Layout
from megatron_hdp.planner.dp import widest_rings
from megatron_hdp.planner.packs import pack_ranks, pack_ranks_python, ramp_rooms, spread, spread_python
from megatron_hdp.planner.pp import plan_pp
from megatron_hdp.planner.span import rank_ends
from megatron_hdp.types import Plan


def batch(name: str, ranks: int, tokens: int = 8 << 20, capacity: int = 8192) -> np.ndarray:
    return mix_batches(parse_mix(name), tokens, min(2 << 20, ranks * capacity), 7)(0)


def cost(stages: int) -> CostModel:
    return CostModel(load_profile("bytescale"), layers_per_stage=32 // stages)


def slots(result: Plan) -> dict[int, set[int]]:
    """Slots in which each sequence with a ring runs."""
    found: dict[int, set[int]] = {}
    for rank, micro_batches in enumerate(result):
        for slot, micro_batch in enumerate(micro_batches):
            for piece in micro_batch.pieces:
                assert rank in piece.ring.ranks
                if piece.ring.size > 1:
                    found.setdefault(piece.sequence, set()).add(slot)
    return found


@pytest.mark.parametrize(("stages", "virtual_stages"), [(2, 1), (4, 1), (4, 2), (8, 1)])
def test_rings_have_one_slot_and_counts_differ(stages, virtual_stages):
    result = plan(batch("github", 12), 12, 8192, balance="pp", stages=stages, virtual_stages=virtual_stages)
    assert all(len(where) == 1 for where in slots(result).values())
    assert len(slots(result)) > 10
    if virtual_stages == 1:
        assert len(set(result.microbatch_counts.tolist())) > 1
    else:
        assert not (result.microbatch_counts % stages).any()


def test_time_that_was_promised_is_the_evaluators(monkeypatch):
    lengths, layout = batch("github", 16), Layout(4, 1, 1)
    smallest = -(-lengths // 8192)
    promised = []

    def note(*arguments):
        found = candidate_times(*arguments)
        promised.extend(span for span, _ in found)
        return found

    monkeypatch.setattr("megatron_hdp.planner.pp.candidate_times", note)
    widest = widest_rings(cost(4), lengths, smallest, 16)
    columns = plan_pp(lengths, smallest, widest, 16, 8192, cost(4), 1, layout)
    result = Plan(
        num_ranks=16,
        capacity=8192,
        pad_multiple=2,
        lengths=lengths,
        offload=np.zeros(lengths.size),
        **columns._asdict(),
    )
    assert int(rank_ends(result, cost(4), 4).max()) == min(promised)


@pytest.mark.parametrize("layout", [(4, 1, 1), (4, 2, 1), (1, 1, 8), (1, 1, 32), (2, 1, 4)])
@pytest.mark.parametrize("name", ["github", "byted"])
def test_not_longer_than_any_baseline(name, layout):
    lengths, (stages, virtual_stages, expert_group) = batch(name, 32), layout
    settings = {"stages": stages, "virtual_stages": virtual_stages, "expert_group": expert_group}
    spans = {}
    for algorithm in ["hdp", *sorted(set(BASELINES) - {"static"})]:
        result = plan(lengths, 32, 8192, balance="pp", cost=cost(stages), algorithm=algorithm, **settings)
        spans[algorithm] = int(rank_ends(result, cost(stages), **settings).max())
    assert spans["hdp"] == min(spans.values()), spans


def test_near_the_bound_where_lengths_are_alike():
    lengths = batch("lognormal:100,4096,2048,1.1", 32)  # 32 full micro-batches a rank
    for stages, most in ((4, 1.06), (8, 1.11)):
        span = int(
            rank_ends(
                plan(lengths, 32, 8192, balance="pp", stages=stages, cost=cost(stages)), cost(stages), stages
            ).max()
        )
        assert span <= most * lower_bound(lengths, 32, 8192, cost(stages), stages=stages).picoseconds


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("expert_group", [2, 3, 12])
def test_experts_have_equal_counts_in_their_groups(stages, expert_group):
    result = plan(batch("github", 12), 12, 8192, balance="pp", stages=stages, expert_group=expert_group)
    assert not np.ptp(result.microbatch_counts.reshape(-1, expert_group), axis=1).any()
    alone = rank_ends(result, cost(stages), stages).max()
    assert rank_ends(result, cost(stages), stages, 1, expert_group).max() >= alone


def hand_made(ring_slots: dict[int, tuple[int, int]]) -> Plan:
    """4 ranks with 2 micro-batches each; sequence s is a ring of ranks start, start + 1 in the slots of the dict."""
    cells: list[list[list[int]]] = [[[], []] for _ in range(4)]
    starts = {0: 0, 1: 2}
    for sequence, (low, high) in ring_slots.items():
        cells[starts[sequence]][low].append(sequence)
        cells[starts[sequence] + 1][high].append(sequence)
    flat = [micro_batch for rank in cells for micro_batch in rank]
    return Plan(
        num_ranks=4,
        capacity=8,
        pad_multiple=2,
        lengths=np.array([16, 16]),
        ring_start=np.array([0, 2]),
        ring_size=np.array([2, 2]),
        offload=np.zeros(2),
        rank_offsets=np.arange(0, 9, 2),
        microbatch_offsets=np.concatenate([[0], np.cumsum([len(m) for m in flat])]),
        piece_sequence=np.array([s for m in flat for s in m]),
    )


def test_a_ring_across_slots_is_refused_where_ranks_share_experts():
    crooked = hand_made({0: (0, 1), 1: (1, 1)})
    check(crooked)  # without experts rank 0 just waits
    with pytest.raises(PlanError, match="groups of 2 ranks run every slot together"):
        check(crooked, expert_group=2)
    check(hand_made({0: (0, 0), 1: (1, 1)}), expert_group=2)
    check(hand_made({0: (0, 0), 1: (1, 1)}), expert_group=4)


def test_experts_wait_for_the_slowest_of_their_group():
    aligned, model = hand_made({0: (0, 0), 1: (1, 1)}), cost(1)
    ring = int(model.picoseconds(16, 2, 0))
    empty = model.microbatch_picoseconds()
    assert rank_ends(aligned, model).tolist() == [ring + empty] * 4
    assert rank_ends(aligned, model, 1, 1, 4).tolist() == [2 * ring + 2 * empty] * 4 if empty else [2 * ring] * 4


def test_expert_groups_that_cannot_be_are_refused():
    with pytest.raises(ConfigError, match="expert groups of 5 ranks do not divide the pool of 12"):
        plan([8], 12, 8, balance="pp", expert_group=5)
    with pytest.raises(ConfigError, match="expert groups of 3: counts would differ; use pp"):
        plan([8], 12, 8, balance="dp", expert_group=3)


@pytest.mark.parametrize("seed", range(5))
def test_twins_of_spread_and_packs(seed):
    random = np.random.default_rng(seed)
    for _ in range(60):
        ranks, items = int(random.integers(1, 9)), int(random.integers(0, 60))
        size = -np.sort(-random.integers(1, 24, items))
        rank = random.integers(0, ranks, items)
        rooms = random.integers(1, 20, int(random.integers(0, 5)))
        assert np.array_equal(pack_ranks(rank, size, ranks, 20, rooms), pack_ranks_python(rank, size, ranks, 20, rooms))
        loads = random.integers(0, 30, ranks)
        assert np.array_equal(spread(size, loads), spread_python(size, loads))


def test_ramp_rooms_rise_evenly_in_whole_multiples():
    assert ramp_rooms(4, 10, 50, 4).tolist() == [8, 8, 20, 20, 28, 28, 40, 40]
    assert ramp_rooms(0, 10, 50, 4).size == 0
    assert ramp_rooms(2, 1, 50, 4).tolist() == [4, 4, 24, 24]
