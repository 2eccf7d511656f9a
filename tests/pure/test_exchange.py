"""Which exchange each ring gets: what is fastest inside a node, by looking at all; forced ones; reports of them."""

import dataclasses
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_hdp import cli
from megatron_hdp.cost import CostModel, load_profile
from megatron_hdp.errors import ConfigError
from megatron_hdp.planner import check, plan, summarize
from megatron_hdp.planner.baselines import packed_rank_ends
from megatron_hdp.planner.check import peers
from megatron_hdp.planner.entry import default_cost
from megatron_hdp.planner.exchange import choose_exchanges
from megatron_hdp.planner.span import microbatch_picoseconds, rank_ends
from megatron_hdp.types import EXCHANGES, Plan

BYTESCALE, H100 = load_profile("bytescale"), load_profile("h100")
RING, GATHER, HEADS = range(3)
COST = CostModel(H100, 32, heads=32, kv_heads=8)


def with_links(profile, latency, bandwidth):
    link = dataclasses.replace(profile.inside_node, latency=latency, bandwidth=bandwidth)
    return dataclasses.replace(profile, inside_node=link)


def best_of_all(made: Plan, cost: CostModel, sequence: int) -> set[tuple[int, int]]:
    """Exchanges of least total time that lengthen no pass; the ring alone if it is one of them."""
    length, size = int(made.lengths[sequence]), int(made.ring_size[sequence])
    tier = int(cost.tier(made.ring_start[sequence], size))
    if size == 1 or tier == 1:
        return {(RING, 1)}
    ways = [(RING, 1), (GATHER, 1), *((HEADS, a) for a in range(2, size + 1) if size % a == 0 and cost.swaps_heads(a))]
    times = {
        way: [int(cost.exchange_picoseconds(length, size, tier, *way, phase)) for phase in ("forward", "backward")]
        for way in ways
    }
    allowed = {way: sum(t) for way, t in times.items() if all(x <= y for x, y in zip(t, times[RING, 1]))}
    least = min(allowed.values())
    return {(RING, 1)} if allowed[RING, 1] == least else {way for way, time in allowed.items() if time == least}


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from([BYTESCALE, H100]),
    st.sampled_from([0.0, 1e-6, 5e-6, 1e-4]),
    st.sampled_from([1e9, 1e10, 1e11, 4e11]),
    st.sampled_from([(32, 8), (8, 8), (12, 4), (4, 1), (7, 7)]),
    st.sampled_from(["none", "full"]),
    st.lists(st.integers(1, 8000), min_size=1, max_size=12),
    st.integers(1, 12),
    st.sampled_from([64, 256, 1024]),
)
def test_the_choice_is_the_best_of_all(profile, latency, bandwidth, heads, recompute, lengths, num_ranks, capacity):
    cost = CostModel(with_links(profile, latency, bandwidth), 2, recompute=recompute, heads=heads[0], kv_heads=heads[1])
    lengths = [min(length, num_ranks * capacity) for length in lengths]
    made = plan(lengths, num_ranks, capacity, cost=cost)
    for s in range(made.num_sequences):
        assert (int(made.exchange[s]), int(made.head_ranks[s])) in best_of_all(made, cost, s)


def test_short_pieces_inside_a_node_take_gather_and_heads_and_long_ones_the_ring():
    lengths = [1000, 2000, 3000, 4000] * 4
    made = plan(lengths, 8, 512, cost=COST)
    assert {GATHER, HEADS} <= set(made.exchange.tolist())
    rings = plan(lengths, 8, 512, cost=COST, exchange="ring")
    assert not rings.exchange.any()
    assert np.all(made.ring_size == rings.ring_size)
    assert rank_ends(made, COST).max() < rank_ends(rings, COST).max()
    long = plan([8 * n for n in lengths], 8, 4096, cost=COST)
    assert (long.ring_size > 1).any()
    assert not long.exchange.any()


def test_rings_across_nodes_and_windows_and_unknown_heads_keep_the_ring():
    lengths = [1000, 2000, 3000, 4000] * 4
    for cost in (
        CostModel(H100, 32),
        dataclasses.replace(COST, window=500),
        dataclasses.replace(COST, profile=dataclasses.replace(H100, gpus_per_node=1)),
    ):
        made = plan(lengths, 8, 512, cost=cost)
        assert (made.ring_size > 1).any()
        assert not made.exchange.any()
    apart = dataclasses.replace(COST, profile=dataclasses.replace(H100, gpus_per_node=4))
    made = plan(lengths, 8, 512, cost=apart)
    inside = apart.tier(made.ring_start, made.ring_size) == 0
    assert made.exchange[inside & (made.ring_size > 1)].any()
    assert (~inside).any()
    assert not made.exchange[~inside].any()


def test_the_choice_changes_only_its_columns_and_is_made_once():
    made = plan([1000, 2000, 3000, 4000] * 4, 8, 512, cost=COST)
    rings = choose_exchanges(made, COST, "ring")
    for name in Plan._columns()[:-2]:
        assert np.array_equal(getattr(made, name), getattr(rings, name))
    assert choose_exchanges(rings, COST) == made
    assert choose_exchanges(made, COST) is made
    for chosen, ring in zip(microbatch_picoseconds(made, COST), microbatch_picoseconds(rings, COST)):
        assert np.all(chosen <= ring)
        assert np.any(chosen < ring)


def test_forced_exchanges_are_for_all_rings():
    lengths = [500, 9000, 700, 4000, 2500]
    gather = plan(lengths, 12, 1024, cost=COST, exchange="gather")
    assert np.array_equal(gather.exchange, np.where(gather.ring_size > 1, GATHER, RING))
    heads = plan(lengths, 12, 1024, cost=COST, exchange="heads", algorithm="static")
    assert heads.ring_size.tolist() == [12] * 5
    assert heads.head_ranks.tolist() == [4] * 5  # of 32 and 8 heads: 2 and 4 divide 12, 8 and 16 do not
    assert set(heads.exchange.tolist()) == {HEADS}
    assert peers(heads).tolist() == [5] * 12  # three of the group, and a neighbour in each of two others
    odd = plan(lengths, 9, 1024, cost=COST, exchange="heads", algorithm="static")
    assert not odd.exchange.any()  # no number of ranks that cuts the heads divides 9


@pytest.mark.parametrize("algorithm", ["static", "naive", "bytescale", "pow2"])
def test_baselines_keep_the_ring_unless_forced(algorithm):
    lengths = [1000, 2000, 3000, 4000] * 4
    made = plan(lengths, 8, 512, cost=COST, algorithm=algorithm)
    assert not made.exchange.any()
    forced = plan(lengths, 8, 512, cost=COST, algorithm=algorithm, exchange="gather")
    assert np.all(forced.exchange == (forced.ring_size > 1))
    assert np.all(packed_rank_ends(forced, COST) <= rank_ends(forced, COST))  # one gather for a pack


def test_wrong_choices_are_refused():
    with pytest.raises(ConfigError, match="--hdp-exchange is 'usp': choose one of auto, ring, gather, heads"):
        plan([9], 2, 8, exchange="usp")
    for exchange in ("gather", "heads"):
        with pytest.raises(ConfigError, match=f"--hdp-exchange is '{exchange}', .* give CostModel heads and kv_heads"):
            plan([9], 2, 8, exchange=exchange)


def test_a_summary_says_what_exchanges_do():
    made = plan([1000, 2000, 3000, 4000] * 4, 8, 512, cost=COST)
    rings = choose_exchanges(made, COST, "ring")
    summary, of_rings = summarize(made, COST), summarize(rings, COST)
    shared = made.exchange[made.ring_size > 1]
    assert summary.exchanges == {name: int((shared == index).sum()) for index, name in enumerate(EXCHANGES)}
    assert of_rings.exchanges == {"ring": shared.size, "gather": 0, "heads": 0}
    assert (of_rings.exchange_saving, of_rings.exchanges_leave_nodes, of_rings.peers_max <= 4) == (0, False, True)
    assert not summary.exchanges_leave_nodes
    assert summary.peers_max == peers(made).max() == 7
    tier = COST.tier(made.ring_start, made.ring_size)
    chosen = made.exchange > 0
    before, after = (
        float((times * made.ring_size)[chosen].sum())
        for times in (
            COST.picoseconds(made.lengths, made.ring_size, tier),
            COST.exchange_picoseconds(made.lengths, made.ring_size, tier, made.exchange, made.head_ranks),
        )
    )
    assert 0 < summary.exchange_saving == pytest.approx(1 - after / before)
    across = plan([1000, 2000, 3000, 4000] * 4, 16, 512, cost=COST, exchange="gather", algorithm="static")
    assert summarize(across, COST).exchanges_leave_nodes
    assert summarize(across, COST).efficiency <= 1
    check(across)
    assert summarize(across).exchange_saving == summarize(across, cost_of_default()).exchange_saving
    with pytest.raises(ConfigError, match="give CostModel heads and kv_heads"):
        summarize(across, CostModel(H100, 32))


def cost_of_default():
    return dataclasses.replace(default_cost(), heads=16, kv_heads=4)


# The command line

BYTED = "plan --ranks 8 --tokens-per-rank 512 --context 4K --batch-tokens 32K --lengths byted --profile h100".split()


def run(capsys, *words):
    code = cli.main([*BYTED, *words])
    out, err = capsys.readouterr()
    return code, out, err


def test_the_report_names_exchanges_peers_and_why(capsys, tmp_path):
    out_file = tmp_path / "plan.json"
    code, out, err = run(capsys, "--heads", "32", "--kv-heads", "8", "--json", str(out_file))
    assert (code, err) == (0, "")
    made = Plan.from_json(out_file.read_text())
    summary = summarize(made, COST)
    counts = ", ".join(f"{name} {count}" for name, count in summary.exchanges.items())
    assert f"exchanges of sequences on rings: {counts}\n" in out
    saving = f"{100 * summary.exchange_saving:.2f} % shorter than the ring"
    assert f"gather and heads: {saving}; a rank has up to 7 peers, more than the 4 of rings, inside nodes\n" in out
    assert "32 heads, 8 of keys and values" in out
    _, plain, _ = run(capsys)
    assert "exchange" not in plain
    _, static, _ = run(capsys, "--heads", "32", "--kv-heads", "8", "--exchange", "gather", "--ranks", "16",
                       "--algorithm", "static-smallest")  # fmt: skip
    assert re.search(r"gather and heads: [\d.]+ % (shorter|longer) than the ring", static)
    assert "exchange gather" in static


@pytest.mark.parametrize("exchange", ["ring", "gather", "heads"])
def test_every_algorithm_takes_a_forced_exchange(capsys, exchange):
    for algorithm in ("hdp", "static", "static-smallest", "naive", "bytescale", "pow2"):
        code, out, err = run(capsys, *f"--heads 8 --kv-heads 8 --exchange {exchange} --algorithm {algorithm}".split())
        assert (code, err) == (0, "")
        if exchange != "ring":
            assert re.search(rf"exchanges of sequences on rings: .*{exchange} [1-9]", out)


def test_several_steps_report_exchanges_together(capsys):
    _, out, _ = run(capsys, *"--heads 32 --kv-heads 8 --steps 3".split())
    total = [int(n) for n in re.search(r"ring (\d+), gather (\d+), heads (\d+)", out).groups()]
    assert sum(total[1:]) > 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--heads 8", "--heads without --kv-heads: give both"),
        ("--kv-heads 8", "--kv-heads without --heads: give both"),
        ("--heads 8 --kv-heads 3", "--heads is 8 and --kv-heads is 3: both must be at least 1"),
        ("--heads 99999999 --kv-heads 3", "--heads is 99,999,999: too large"),
        ("--exchange usp", "--exchange is 'usp': choose one of auto, ring, gather, heads"),
        ("--exchange gather", "--exchange gather: what it costs depends on --heads and --kv-heads"),
        ("--exchange heads", "--exchange heads: what it costs depends on --heads and --kv-heads"),
    ],
)
def test_wrong_flags_are_named(capsys, words, message):
    code, out, err = run(capsys, *words.split())
    assert (code, out) == (2, "")
    assert message in err
