"""The cost model against the paper's figures, against a step-by-step walk of the ring, and against damaged profiles."""

import json
import math
import subprocess
import sys
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_hdp.cost import CostModel, Profile, Tier, load_profile, profile_names
from megatron_hdp.cost import calibrate as c
from megatron_hdp.cost.area import busiest_area, chunk_area, own_area, step_area
from megatron_hdp.cost.attention import (
    Pieces,
    gather_attention,
    heads_attention,
    hops,
    needed,
    ring_attention,
    transfers,
)
from megatron_hdp.cost.fixed import fixed, scaled
from megatron_hdp.errors import ConfigError, PlanError
from megatron_hdp.types import EXCHANGES, chunk_tokens

REPOSITORY = Path(__file__).parents[2]
BYTESCALE, H100 = load_profile("bytescale"), load_profile("h100")
INSIDE, ACROSS = Tier.INSIDE_NODE, Tier.ACROSS_NODES
K = 1024

ENDS = replace(H100, layers={"llama-7b": replace(H100.layer(), loss_per_token=3e-6, embedding_per_token=2e-7)})
CALLS = replace(H100, layers={"llama-7b": replace(H100.layer(), ring_step_forward=3e-4, ring_step_backward=7e-4)})
MODELS = [
    CostModel(BYTESCALE, 32),
    CostModel(BYTESCALE, 3, recompute="full", layer="figure-21"),
    CostModel(H100, 10, layer="llama-70b", pad_multiple=8),
    CostModel(H100, 1, window=4096),
    CostModel(H100, 8, window=50_000, recompute="full", layer="mixtral-8x7b"),
    CostModel(ENDS, 4, recompute="full"),
    CostModel(ENDS, 4, stages=2),
    CostModel(CALLS, 3),
    CostModel(CALLS, 1, window=4096),
]


# A dull walk of the ring


def seen(queries, keys, window):
    """Area of the mask between two spans of token positions: row by row, exact because rows are linear in between."""

    def row(x):
        low = keys[0] if window is None else max(keys[0], x - window)
        return max(0, min(x, keys[1]) - low)

    return sum(row(x) + row(x + 1) for x in range(*queries)) / 2


def busiest(size, chunk, window, step):
    """Twice the area that the busiest rank computes at a step, by looking at every rank and pair of chunks."""

    def spans(position):
        return [(p * chunk, (p + 1) * chunk) for p in (position, 2 * size - 1 - position)]

    return 2 * max(
        sum(seen(q, k, window) for q in spans(rank) for k in spans((rank - step) % size)) for rank in range(size)
    )


def link_of(model, tier):
    return (model.profile.inside_node, model.profile.across_nodes)[tier]


def chunks_of(size, position):
    return position, 2 * size - 1 - position


def hop_rows(size, chunk, window):
    """For each round in which anybody gets something: tokens that the rank gets that gets most."""
    found = []
    for hop in range(1, 2 * size):
        most = 0
        for position in range(size):
            low, high = chunks_of(size, position)
            came = [low - hop] if low >= hop else []
            came += [high - hop] if high - hop > low else []
            reach = max(0, min(chunk, window - 1 - (hop - 1) * chunk))
            most = max(most, len(came) * reach)
        found += [most] if most else []
    return found


def needed_rows(size, chunk, window):
    """Tokens of others that a rank's queries look back on, for the rank that needs most; by looking at every token."""

    def rows(position):
        own = {token for i in chunks_of(size, position) for token in range(i * chunk, (i + 1) * chunk)}
        starts = [i * chunk for i in chunks_of(size, position)]
        return {t for start in starts for t in range(max(0, start - (window - 1)), start)} - own

    return max(len(rows(position)) for position in range(size))


def own_and_total(size, chunk, window):
    """Areas (not twice): both diagonal blocks, and all blocks of the rank that has most."""

    def area(queries, keys):
        return seen((queries * chunk, (queries + 1) * chunk), (keys * chunk, (keys + 1) * chunk), window)

    totals = [sum(area(q, k) for q in chunks_of(size, position) for k in range(q + 1)) for position in range(size)]
    return 2 * area(0, 0), max(totals)


def fetched(model, tier, forward, own, total, rounds, scale):
    """Seconds of ``total`` compute, of which ``own`` runs beside rounds of so many rows, ``scale`` of the bytes."""
    link, layer = link_of(model, tier), model.layer_profile

    def moving(per_token):
        return sum(link.latency + scale * per_token * rows / link.bandwidth for rows in rounds)

    home = 0 if forward else moving(layer.kv_gradient_per_token)
    return total + max(0, moving(layer.kv_per_token) - own) + home + (called(layer, forward) if rounds else 0)


def called(layer, forward):
    return layer.ring_step_forward if forward else layer.ring_step_backward


def ring_pass(model, length, size, chunk, tier, forward, share=1.0, scale=1.0):
    """Seconds of attention on a ring, step by step; ``share`` of the heads, ``scale`` of the bytes."""
    layer, link = model.layer_profile, link_of(model, tier)
    a = share * layer.attention_forward * (1 if forward else layer.attention_backward_factor)
    if model.window is not None and model.window < (length if size > 1 else 2 * chunk):
        own, total = (2 * a * area for area in own_and_total(size, chunk, model.window))
        return fetched(model, tier, forward, own, total, hop_rows(size, chunk, model.window), scale)

    def transfer(bytes_per_token):
        return link.latency + scale * bytes_per_token * 2 * chunk / link.bandwidth

    time = 0.0
    for step in range(size):
        moving = layer.kv_per_token if step < size - 1 else 0.0
        moving += layer.kv_gradient_per_token if not forward and step > 0 else 0.0
        compute = a * busiest(size, chunk, None, step)
        time += max(compute, transfer(moving)) if moving else compute
        time += called(layer, forward) if step else 0
    return time + (transfer(layer.kv_gradient_per_token) if size > 1 and not forward else 0.0)


def gather_pass(model, length, size, chunk, tier, forward):
    layer = model.layer_profile
    a = layer.attention_forward * (1 if forward else layer.attention_backward_factor)
    window = model.window if model.window is not None and model.window < length else 2 * size * chunk
    rows = needed_rows(size, chunk, window)
    own, total = (2 * a * area for area in own_and_total(size, chunk, window))
    if window == 2 * size * chunk:  # then both own chunks, which see each other's keys, are one causal block
        own = a * (2 * chunk) ** 2
    return fetched(model, tier, forward, own, total, [rows] if rows else [], 1.0)


def heads_pass(model, length, size, chunk, tier, forward, ranks):
    """Swap rows for heads among so many ranks, message by message, then a ring of groups."""
    layer, link = model.layer_profile, link_of(model, tier)
    kv_heads = max(model.kv_heads // ranks, 1)
    unit = layer.kv_per_token / 2 / model.kv_heads  # bytes of one head of one token
    wide = layer.kv_gradient_per_token / 2 / model.kv_heads if ranks > model.kv_heads else unit
    query, keys = 2 * chunk * model.heads / ranks * unit, 2 * chunk * 2 * kv_heads
    there = query + (keys * unit if forward else 0)
    back = query + (0 if forward else keys * wide)
    time = sum(link.latency + (ranks - 1) * message / link.bandwidth for message in (there, back))
    inner = ring_pass(model, length, size // ranks, ranks * chunk, tier, forward, 1 / ranks, kv_heads / model.kv_heads)
    return time + inner + called(layer, forward)


def walk(model, length, size, tier, phase, exchange="ring", ranks=1):
    """Seconds of one piece in floats, straight from the profile's decimals."""
    layer = model.layer_profile
    chunk = chunk_tokens(length, size, model.pad_multiple)

    def one_pass(forward):
        arguments = (model, length, size, chunk, tier, forward)
        if exchange == "heads":
            time = heads_pass(*arguments, ranks)
        else:
            time = ring_pass(*arguments) if exchange == "ring" else gather_pass(*arguments)
        linear = layer.linear_forward * (1 if forward else layer.linear_backward_factor)
        return time + linear * 2 * chunk + layer.sequence_constant

    forward = model.layers_per_stage * one_pass(True)
    backward = model.layers_per_stage * one_pass(False) + (forward if model.recompute == "full" else 0)
    loss, embedding = layer.loss_per_token, layer.embedding_per_token
    backward += 2 * chunk * (loss + embedding if model.stages == 1 else max(loss, embedding))
    return {"forward": forward, "backward": backward, "total": forward + backward}[phase]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 9), st.integers(1, 30), st.none() | st.integers(1, 700))
def test_areas_are_those_of_the_busiest_rank(size, chunk, window):
    for step in range(size):
        area = own_area(chunk, window) if step == 0 else step_area(chunk, window, min(step, size - step))
        assert area == busiest(size, chunk, window, step)
    if window is not None:
        assert busiest_area(chunk, window, size) == 2 * own_and_total(size, chunk, window)[1]
        rounds = hop_rows(size, chunk, window)
        assert hops(window, chunk, size) == (len(rounds), sum(rounds))
        assert needed(window, chunk, size) == needed_rows(size, chunk, window)


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(MODELS),
    st.integers(1, 6000),
    st.integers(1, 12),
    st.sampled_from(Tier),
    st.sampled_from(["forward", "backward", "total"]),
    st.none() | st.integers(1, 3000),
)
def test_closed_form_equals_a_walk_of_the_ring(model, length, size, tier, phase, window):
    model = replace(model, window=window)
    exact = walk(model, length, size, tier, phase)
    assert model.seconds(length, size, tier, phase) == pytest.approx(exact, rel=1e-4, abs=1e-10)
    ring = model.exchange_picoseconds(length, size, tier, EXCHANGES.index("ring"), 1, phase)
    assert ring == model.picoseconds(length, size, tier, phase)


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(MODELS),
    st.integers(1, 3000),
    st.integers(2, 12),
    st.sampled_from(Tier),
    st.sampled_from(["forward", "backward", "total"]),
    st.none() | st.integers(1, 1500),
    st.sampled_from([(8, 8), (8, 2), (8, 1), (12, 4), (32, 8)]),
)
def test_gather_and_heads_cost_what_their_messages_say(model, length, size, tier, phase, window, heads):
    model = replace(model, window=window, heads=heads[0], kv_heads=heads[1])
    slowest = min(link_of(model, tier).bandwidth for tier in Tier)
    token = 4 * model.layers_per_stage * model.layer_profile.kv_gradient_per_token / slowest  # what is rounded up
    ways = [("gather", 1), *(("heads", a) for a in range(2, size + 1) if size % a == 0 and model.swaps_heads(a))]
    for name, ranks in ways:
        exact = walk(model, length, size, tier, phase, name, ranks)
        got = model.exchange_picoseconds(length, size, tier, EXCHANGES.index(name), ranks, phase) / 1e12
        assert got == pytest.approx(exact, rel=1e-4, abs=token), name
        free = model.with_free_links("all").picoseconds(length, size, tier, phase)
        assert got * 1e12 >= free - 2 * size - 4 or window is not None  # the bound stands on this


def test_heads_may_be_cut_over_ranks_that_divide_them_or_share_keys():
    def ranks(heads, kv_heads):
        model = CostModel(H100, 1, heads=heads, kv_heads=kv_heads)
        return [a for a in range(1, 40) if model.swaps_heads(a)]

    assert ranks(32, 8) == [1, 2, 4, 8, 16, 32]
    assert ranks(12, 4) == [1, 2, 4, 12]  # 3 and 6 ranks would share key/value heads unevenly
    assert ranks(6, 1) == [1, 2, 3, 6]
    assert not CostModel(H100, 1).swaps_heads(2)


def test_exchanges_that_cannot_be_are_refused():
    plain, model = CostModel(H100, 1), CostModel(H100, 1, heads=8, kv_heads=2)
    for exchange in (1, 2):
        with pytest.raises(ConfigError, match="give CostModel heads and kv_heads"):
            plain.exchange_picoseconds([5, 99], [1, 2], 0, [0, exchange], [1, exchange])
    for arguments, message in [
        ((3, 1), "exchange is 3, must be in 0 .. 2"),
        ((2, 0), "head_ranks is 0, but 8 heads and 2 key/value heads cannot be cut"),
        ((2, 3), "head_ranks is 3, but 8 heads"),
        ((2, 4), "head_ranks is 4, which does not divide rings of 6 ranks"),
    ]:
        with pytest.raises(PlanError, match=message):
            model.exchange_picoseconds(99, 6, 0, *arguments)


def test_exchanges_vectorise():
    model = CostModel(H100, 3, heads=8, kv_heads=2, recompute="full")
    lengths, rings = np.array([100, 5000, 777, 64_000]), np.array([1, 4, 6, 8])
    kind, ranks = np.array([0, 2, 1, 2]), np.array([1, 4, 1, 2])
    for phase in ("forward", "backward", "total"):
        got = model.exchange_picoseconds(lengths, rings, 0, kind, ranks, phase)
        assert got.dtype == np.int64
        one_by_one = zip(lengths.tolist(), rings.tolist(), kind.tolist(), ranks.tolist())
        assert got.tolist() == [int(model.exchange_picoseconds(n, d, 0, k, a, phase)) for n, d, k, a in one_by_one]


def test_closed_form_equals_the_packed_loop_for_one_sequence_on_wide_rings():
    for model in MODELS[:3]:  # with a window a pack still walks all steps, a ring does not
        for size in (1, 2, 3, 16, 97, 256):
            for phase in ("forward", "backward", "total"):
                packed = model.packed_attention_picoseconds([300_000], size, ACROSS, phase)
                assert packed == model.attention_picoseconds(300_000, size, ACROSS, phase)


def test_a_pack_moves_its_slices_together_and_adds_their_work():
    model = CostModel(BYTESCALE, 1)
    step = model.layer_profile.attention_forward * (1000**2 + 3000**2)
    link, layer = BYTESCALE.across_nodes, model.layer_profile
    transfer = link.latency + 4000 * layer.kv_per_token / link.bandwidth
    packed = model.packed_attention_picoseconds([8000, 24000], 8, phase="forward")
    assert packed == pytest.approx(1e12 * (7 * max(step, transfer) + step), rel=1e-5)


# The paper's figures


def test_figure_18_rings():
    model = CostModel(BYTESCALE, 1)
    static = model.packed_attention_picoseconds([256 * K] * 8, 256, phase="forward") / 1e9
    ring = model.attention_picoseconds(312 * K, 39, phase="forward") / 1e9
    assert static == pytest.approx(405, rel=0.001)
    assert ring == pytest.approx(109, rel=0.003)
    assert ring == pytest.approx(110, rel=0.01)
    assert model.hides(312 * K, 39)
    assert static / (static + c.FIGURE_18A_MLP_MS) == pytest.approx(0.976, abs=0.001)
    assert 1.4 <= c.FIGURE_18A_TRANSFER_MS <= 1.6


def test_the_large_run_computes_its_projections_too():
    """Figure 18a shows the MLP alone; in Figure 6a attention has a part that is linear in tokens."""
    (_, projections, _), (mlp, _) = c.fit_figure_6a()
    assert 0.5 < projections / mlp < 0.7
    linear = BYTESCALE.layer("llama-7b").linear_forward * c.FIGURE_18A_TOKENS * 1e3
    assert linear == pytest.approx(c.FIGURE_18A_MLP_MS * (1 + projections / mlp), rel=1e-5)


def test_a_static_ring_hides_its_transfers_only_for_about_a_million_tokens():
    """Sequences of L tokens that fill a 2M ring compute for t_block L / 2M per step, so L must be 2M t_x / t_block."""
    model = CostModel(BYTESCALE, 1)
    link, layer = BYTESCALE.across_nodes, model.layer_profile
    block = 1e3 * layer.attention_forward * 8192**2
    transfer = 1e3 * (link.latency + 8192 * layer.kv_per_token / link.bandwidth)
    assert 2048 * transfer / block == pytest.approx(1161, rel=0.01)
    whole = model.packed_attention_picoseconds([2048 * K], 256, phase="forward") / 1e9
    assert whole == pytest.approx(256 * block, rel=1e-5)
    halves = model.packed_attention_picoseconds([1024 * K] * 2, 256, phase="forward") / 1e9
    assert halves == pytest.approx(255 * transfer + block / 2, rel=1e-5)


def test_figure_6a_within_ten_percent():
    model = CostModel(BYTESCALE, 1, layer="figure-6a")
    tokens = K * np.array(list(c.FIGURE_6A))
    predicted = (model.picoseconds(tokens, phase="forward") + model.microbatch_picoseconds("forward")) / 1e9
    np.testing.assert_allclose(predicted, np.sum(list(c.FIGURE_6A.values()), axis=1), rtol=0.1)
    (quadratic, linear, constant), (mlp, mlp_constant) = c.fit_figure_6a()
    attention = 1e3 * (quadratic * tokens**2.0 + linear * tokens + constant)
    np.testing.assert_allclose(attention, [pair[0] for pair in c.FIGURE_6A.values()], rtol=0.1)
    np.testing.assert_allclose(
        1e3 * (mlp * tokens + mlp_constant), [pair[1] for pair in c.FIGURE_6A.values()], rtol=0.1
    )


def figure_21(offload, recompute="none"):
    model = CostModel(BYTESCALE, 32, layer="figure-21", recompute=recompute)
    rest, _ = c.fit_figure_21_memory()
    time = model.picoseconds(65536) + model.microbatch_picoseconds()
    time += model.offload_stall_picoseconds(65536, offload=offload)
    return time / 1e12, (rest + model.bytes(65536, 1, offload)) / 1e9


def test_figure_21_order_and_values():
    rows = {r: figure_21(r) for r in c.FIGURE_21_SECONDS}
    recompute = figure_21(0.0, "full")
    assert rows[0.0][0] == rows[0.5][0] < rows[0.6][0] < rows[0.8][0] < rows[1.0][0] < recompute[0]
    assert rows[0.0][1] > rows[0.5][1] > rows[0.6][1] > rows[0.8][1] > rows[1.0][1]
    for r, (seconds, gigabytes) in rows.items():
        assert seconds == pytest.approx(c.FIGURE_21_SECONDS[r], rel=0.02)
        assert gigabytes == pytest.approx(c.FIGURE_21_GB[r], rel=0.06)
    assert recompute[0] == pytest.approx(c.FIGURE_21_RECOMPUTE_SECONDS, rel=0.02)
    assert recompute[1] == pytest.approx(c.FIGURE_21_RECOMPUTE_GB, rel=0.06)


def test_free_offload_is_half_at_64k_and_all_at_256k():
    model = CostModel(BYTESCALE, 32, layer="figure-21")
    free = model.largest_free_offload([65536, 262144])
    assert 0.5 <= free[0] < 0.6
    assert free[1] == 1.0
    assert model.offload_stall_picoseconds(65536, offload=free[0]) == 0
    assert model.offload_stall_picoseconds(65536, offload=free[0] + 2 / 1024) > 0


def test_loss_and_embedding_come_once_and_their_stage_is_the_slowest():
    plain, one = CostModel(H100, 8), CostModel(ENDS, 8)
    for recompute in ("none", "full"):
        models = [replace(model, recompute=recompute) for model in (plain, one, one.with_stages(4))]
        without, alone, piped = (int(model.picoseconds(50_000)) for model in models)
        assert alone - without == pytest.approx(50_000 * 3.2e6, abs=2)
        assert piped - without == pytest.approx(50_000 * 3e6, abs=2)
        forwards = {int(model.picoseconds(50_000, phase="forward")) for model in models}
        assert len(forwards) == 1
        free = [model.largest_free_offload(50_000) for model in models]  # copies hide behind layers only
        assert free[0] == free[1] == free[2]
    assert plain.with_stages(4) is plain
    assert one.with_stages(1) is one
    assert one.with_stages(4) is one.with_stages(4)
    assert one.with_stages(4) == replace(one, stages=4)


def test_free_offload_waits_for_the_slower_direction():
    layer = replace(BYTESCALE.layer(), attention_forward=0.0, sequence_constant=0.0)
    for out, back in ((40e9, 10e9), (10e9, 40e9)):
        profile = replace(BYTESCALE, layers={"llama-7b": layer}, d2h_bandwidth=out, h2d_bandwidth=back)
        free = CostModel(profile, 32).largest_free_offload(8192)
        assert free == pytest.approx(layer.linear_forward * 10e9 / layer.activation_per_token, abs=1 / 1024)


def test_shipped_files_are_what_the_calibration_computes():
    done = subprocess.run(
        [sys.executable, "benchmarks/profiles.py", "--check"], cwd=REPOSITORY, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "405" in done.stdout


def test_nonnegative_least_squares_beats_every_other_point():
    rng = np.random.default_rng(0)
    for _ in range(20):
        matrix, target = rng.normal(size=(8, 3)), rng.normal(size=8)
        best = c.nonnegative_least_squares(matrix, target)
        assert np.all(best >= 0)
        error = np.sum((matrix @ best - target) ** 2)
        for other in np.abs(best + rng.normal(scale=0.3, size=(200, 3))):
            assert error <= np.sum((matrix @ other - target) ** 2)


def test_h100_is_what_its_data_sheet_says():
    """One H100 does 989 TFLOP/s at best; the profile's forward pass of 7B must do the stated share of that."""
    layer = H100.layer("llama-7b")
    tokens = 65536
    attention = 4 * tokens**2 / 2 * 4096 / (layer.attention_forward * tokens**2)
    assert attention / 989e12 == pytest.approx(0.5, rel=1e-4)
    weights = 4096 * 4096 * 2 + 2 * 4096 * 1024 + 3 * 4096 * 11008
    assert 2 * weights / layer.linear_forward / 989e12 == pytest.approx(0.6, rel=1e-4)
    assert H100.across_nodes.bandwidth < 400e9 / 8
    assert H100.inside_node.bandwidth < 900e9 / 2


# Properties


def test_local_cost_is_the_formula_in_seconds():
    """Units: 8192 tokens of llama-7b on ByteScale's cluster, by hand."""
    model = CostModel(BYTESCALE, 32)
    linear = 10e-3 * (1 + 1.0914947 / 1.8186554)  # MLP and projections
    by_hand = 32 * (2.8e-3 + linear + model.layer_profile.sequence_constant)
    assert model.seconds(8192, phase="forward") == pytest.approx(by_hand, rel=1e-5)
    assert model.picoseconds(8192, phase="forward") == pytest.approx(1e12 * by_hand, rel=1e-5)
    assert model.bytes(8192) == pytest.approx(8192 * 32 * model.layer_profile.activation_per_token, rel=1e-4)


@pytest.mark.parametrize("model", MODELS)
def test_vectorised_equals_scalar(model):
    lengths = np.array([1, 2, 777, 8192, 100_001, 2_000_000])
    rings = np.array([[1], [2], [3], [8], [39]])
    tiers = np.array([0, 1, 1, 0, 1, 1])
    for phase in ("forward", "backward", "total"):
        grid = model.picoseconds(lengths, rings, tiers, phase)
        hidden = model.hides(lengths, rings, tiers, phase)
        assert grid.dtype == np.int64
        assert grid.shape == hidden.shape == (5, 6)
        for i, ring in enumerate(rings[:, 0].tolist()):
            for j, (length, tier) in enumerate(zip(lengths.tolist(), tiers.tolist())):
                assert model.picoseconds(length, ring, tier, phase) == grid[i, j]
                assert model.hides(length, ring, tier, phase) == hidden[i, j]
    widest = model.widest_hiding_ring(lengths, tiers, max_ring=64)
    assert widest.tolist() == [
        int(model.widest_hiding_ring(s, t, max_ring=64)) for s, t in zip(lengths.tolist(), tiers.tolist())
    ]
    offloads = np.linspace(0, 1, 6)
    assert model.bytes(lengths, 3, offloads).tolist() == [
        int(model.bytes(s, 3, r)) for s, r in zip(lengths.tolist(), offloads.tolist())
    ]
    assert model.smallest_ring(lengths, 8192, offloads).tolist() == [
        int(model.smallest_ring(s, 8192, r)) for s, r in zip(lengths.tolist(), offloads.tolist())
    ]


@pytest.mark.parametrize("window", [1, 2, 3, 5, 8, 40, None])
@pytest.mark.parametrize("pad_multiple", [2, 4, 6])
def test_local_sequences_cost_no_less_than_shorter_ones(window, pad_multiple):
    model = CostModel(BYTESCALE, 1, window=window, pad_multiple=pad_multiple)
    lengths = np.arange(1, 100)
    for phase in ("forward", "backward", "total"):
        times = model.picoseconds(lengths, 1, INSIDE, phase)
        assert np.all(np.diff(times) >= 0)
        assert np.array_equal(times, model.picoseconds(model.piece_tokens(lengths, 1), 1, INSIDE, phase))


@pytest.mark.parametrize("model", MODELS)
def test_monotone(model):
    lengths = np.arange(1, 400_000, 997)
    # with a window longer pieces may save a hop; a sequence that outgrows it stops to walk the whole ring
    steady = model if model.window is None else model.with_free_links("all")
    for ring in (1, 2, 7, 64):
        behind = lengths[lengths > (model.window or 0)]
        assert np.all(np.diff(steady.picoseconds(behind, ring)) >= 0)
        assert np.all(np.diff(model.bytes(lengths, ring, 0.4)) >= 0)
        assert np.all(model.picoseconds(lengths, ring, INSIDE) <= model.picoseconds(lengths, ring, ACROSS))
    assert np.all(np.diff(model.bytes(400_000, 4, np.linspace(0, 1, 50))) <= 0)
    assert np.all(np.diff(model.smallest_ring(400_000, 8192, np.linspace(0, 1, 50))) <= 0)
    assert np.all(np.diff(model.smallest_ring(lengths, 8192, 0.3)) >= 0)
    windows = [replace(model, window=w) for w in (1, 100, 5_000, 50_000, 10**6, None)]
    times = [other.with_free_links("all").picoseconds(100_000, 5) for other in windows]
    assert times == sorted(times)
    assert times[-1] > times[0]
    assert windows[-2].picoseconds(100_000, 5) == windows[-1].picoseconds(100_000, 5)


def test_phases_add_up_and_recompute_runs_forward_again():
    plain, again = CostModel(H100, 4), CostModel(H100, 4, recompute="full")
    for ring in (1, 5):
        forward, backward = (plain.picoseconds(50_000, ring, phase=phase) for phase in ("forward", "backward"))
        assert plain.picoseconds(50_000, ring) == forward + backward
        assert again.picoseconds(50_000, ring, phase="forward") == forward
        assert again.picoseconds(50_000, ring, phase="backward") == forward + backward
    assert again.microbatch_picoseconds("backward") == 2 * plain.microbatch_picoseconds("backward")
    assert again.bytes(50_000) < plain.bytes(50_000)


def test_grouped_query_attention_moves_less():
    layer = H100.layer()
    wide = replace(layer, kv_per_token=4 * layer.kv_per_token, kv_gradient_per_token=4 * layer.kv_gradient_per_token)
    full = CostModel(replace(H100, layers={"llama-7b": wide}), 1)
    grouped = CostModel(H100, 1)
    assert grouped.widest_hiding_ring(10**6) > 3 * full.widest_hiding_ring(10**6)
    assert grouped.picoseconds(32_768, 8) < full.picoseconds(32_768, 8)
    assert grouped.picoseconds(32_768, 1) == full.picoseconds(32_768, 1)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("tier", Tier)
def test_hides_means_that_slower_links_would_not_and_free_ones_do_not_matter(model, tier):
    """Dull twin: with links that take no time the ring costs the same, but for the gradients' last hop."""
    free = replace(model.profile.across_nodes, latency=0.0, bandwidth=1e30)
    instant = replace(model, profile=replace(model.profile, inside_node=free, across_nodes=free))
    sizes = np.arange(2, 70)
    for length in (5_000, 40_000, 300_000, 2_000_000):
        for phase, direction in (("forward", 0), ("backward", 1)):
            if model.recompute == "full" and phase == "backward":
                continue  # holds for both passes together
            waits = model.attention_picoseconds(length, sizes, tier, phase)
            waits = waits - instant.attention_picoseconds(length, sizes, tier, phase)
            tokens = model.piece_tokens(length, sizes)
            home = transfers(model._stage, tokens, tier, direction)[2]
            if model.window is not None and model.window < length:
                rounds, rows = hops(model.window, tokens // 2, sizes)
                coming, back = transfers(model._stage, rows, tier, direction)[::2]
                latency = (rounds - 1) * int(model._stage.latency[tier] >> 12)
                own = scaled(2 * chunk_area(tokens // 2, model.window, 0 * tokens), model._stage.attention[direction])
                assert np.array_equal(model.hides(length, sizes, tier, phase), own >= coming + latency)
                home = back + latency if direction else 0
            assert np.array_equal(model.hides(length, sizes, tier, phase), waits == home)


@pytest.mark.parametrize("model", MODELS)
def test_widest_hiding_ring_is_where_hiding_ends(model):
    sizes = np.arange(1, 301)
    answers = set()
    for tier in Tier:
        for length in (1, 2, *range(300, 60_000, 701), 123_456, 500_000):
            limit = min(300, -(-length // model.pad_multiple))
            hidden = model.hides(length, sizes[:limit], tier)
            widest = int(np.argmin(hidden)) if not hidden.all() else limit
            assert model.widest_hiding_ring(length, tier, max_ring=300) == widest
            answers.add(widest)
    assert len(answers) > 1


def test_tiers_follow_nodes():
    model = CostModel(BYTESCALE, 32)
    assert model.ranks_per_node == 4
    assert CostModel(H100, 1, layer="llama-70b").ranks_per_node == 1
    assert model.tier([0, 0, 3, 4, 3], [4, 5, 1, 4, 2]).tolist() == [INSIDE, ACROSS, INSIDE, INSIDE, ACROSS]


# Memory


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(MODELS[:3]),
    st.integers(1, 3_000_000),
    st.integers(1, 4096),
    st.integers(0, OFFLOAD := 1024),
    st.integers(0, 10**8),
)
@example(MODELS[0], 312 * K, 1024, 0, 0)
def test_smallest_ring_is_the_first_that_fits(model, length, units, steps, constant):
    layer = replace(model.layer_profile, activation_constant=float(constant))
    name = model.layer or model.profile.default_layer
    model = replace(model, profile=replace(model.profile, layers={name: layer}), layer=name)
    capacity, offload = units * model.pad_multiple, steps / OFFLOAD
    size = int(model.smallest_ring(length, capacity, offload))
    assert model.bytes(length, size, offload) <= model.bytes(capacity)
    if size > 1:
        assert model.bytes(length, size - 1, offload) > model.bytes(capacity)
    if steps == 0:
        assert size == -(-length // capacity)


def test_smallest_ring_is_the_papers_d():
    """D(s, r) = ceil((2 + (1 - r)(l - 2)) Act(s) / (l Act(C))) in exact fractions; ours counts padding."""
    model = CostModel(BYTESCALE, 32)
    for length in range(8192, 2048 * K, 8192 * 13):
        for steps in (0, 100, 512, 900, 1024):
            r = Fraction(steps, 1024)
            paper = -(-(2 + (1 - r) * 30) * length // (32 * 8192))
            assert abs(model.smallest_ring(length, 8192, float(r)) - paper) <= paper // 2000  # pieces are even
    assert model.smallest_ring(2048 * K, 8192, 1.0) == 2 * 256 // 32
    for steps in range(0, 1025, 41):
        held = (2 + (1 - Fraction(steps, 1024)) * 30) * 1002 * math.ceil(model.layer_profile.activation_per_token)
        assert model.bytes(1001 * 2, 2, steps / 1024) == math.ceil(held)  # pieces are even: 1002 tokens
    assert model.held_fraction([0.0, 1.0]).tolist() == [1.0, 2 / 32]


def test_stages_of_two_layers_keep_everything():
    model = CostModel(BYTESCALE, 2)
    assert model.bytes(10_000, 1, 1.0) == model.bytes(10_000)
    assert model.offload_stall_picoseconds(10_000, offload=1.0) == 0


# Integers


@settings(max_examples=300)
@given(st.integers(0, 2**62), st.integers(0, 2**50 - 1))
def test_scaled_is_the_exact_floor_wherever_it_fits(count, coefficient):
    count = min(count, (2**62 << 12) // max(coefficient, 1), 2**62)
    assert scaled(np.int64(count), coefficient) == count * coefficient >> 12


def test_fixed_rounds_once_half_to_even():
    tick = Fraction(1, 4096 * 10**12)
    assert [fixed(tick * x / 2, "x") for x in (0, 1, 3, 5)] == [0, 0, 2, 2]
    with pytest.raises(ConfigError, match=r"attention_forward is 1000 s"):
        fixed(Fraction(1000), "attention_forward")


@pytest.mark.parametrize("model", MODELS)
def test_longest_lengths_do_not_wrap(model):
    longest = model.max_length
    assert longest > 4_000_000
    free = model.with_free_links("all")
    for ring in (1, 2, 1000, 1_000_000):
        assert model.picoseconds(longest, ring) > 0
        assert free.picoseconds(longest, ring) >= free.picoseconds(longest // 2, ring)
    exact = model.layers_per_stage * Fraction(model.layer_profile.attention_forward) * longest**2 * 10**12
    if model.window is None:
        assert model.attention_picoseconds(longest, 1, phase="forward") == pytest.approx(float(exact), rel=1e-4)
    assert model.smallest_ring(longest, 8192) == -(-longest // 8192)
    assert model.bytes(longest) > 0
    assert 0 <= model.largest_free_offload(longest) <= 1
    with pytest.raises(PlanError, match="for this profile and this many layers"):
        model.picoseconds(longest + 1)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("heads", [(1, 1), (64, 8), (64, 1), (4096, 16)])
@pytest.mark.parametrize("window", [None, 1, 4096, (1 << 31) - 1])
def test_exchanges_of_the_longest_do_not_wrap(model, heads, window):
    """The same formulas in Python's integers, which have no end."""
    model = replace(model, heads=heads[0], kv_heads=heads[1], window=window)
    rings, longest = np.array([2, 4, 64, 4096, 1 << 20]), model.max_length
    tokens = model.piece_tokens(longest, rings)
    arrays = [np.array(x.tolist(), dtype=object) for x in (0 * rings + longest, tokens, rings)]
    endless = Pieces(*arrays, 1)
    for direction in (0, 1):
        ways = [(0, 0 * rings + 1, ring_attention, ()), (1, 0 * rings + 1, gather_attention, ())]
        for ranks in (a for a in (2, 8, 64) if model.swaps_heads(a)):
            groups = np.where(rings % ranks == 0, ranks, 1)
            ways.append((2, groups, heads_attention, (groups.astype(object), heads)))
        for exchange, groups, formula, more in ways:
            stage = replace(model._stage, **{
                name: np.array(getattr(model._stage, name).tolist(), dtype=object)
                for name in ("latency", "kv_time", "both_time", "gradient_time")
            })  # fmt: skip
            exact = formula(stage, model.window, endless, direction, *more)
            exact = exact + scaled(arrays[1], int(stage.linear[direction])) + (int(stage.sequence[direction]) >> 12)
            pieces = (longest, rings, 1, np.where((groups > 1) | (exchange < 2), exchange, 0), groups)
            phase = ("forward", "backward")[direction]
            got = replace(model, recompute="none").exchange_picoseconds(*pieces, phase)
            keep = (groups > 1) | (exchange < 2)
            assert got[keep].tolist() == exact[keep].tolist()


def test_too_slow_a_profile_is_refused():
    slow = replace(BYTESCALE.layer(), attention_forward=0.01)
    with pytest.raises(ConfigError, match="check the units"):
        CostModel(replace(BYTESCALE, layers={"llama-7b": slow}), 1)


# Mistakes


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers_per_stage": 0}, "layers_per_stage is 0"),
        ({"window": 0}, "window is 0"),
        ({"stages": 0}, "stages is 0: a model has at least 1 pipeline stage"),
        ({"recompute": "some"}, "recompute is 'some'"),
        ({"pad_multiple": 3}, "pad_multiple is 3"),
        ({"layers_per_stage": 1.5}, "layers_per_stage is 1.5: it must be a whole number"),
        ({"layers_per_stage": True}, "layers_per_stage is True: it must be a whole number"),
        ({"layers_per_stage": 10**30}, f"layers_per_stage is {10**30:,}: too large, it can be at most 65,536"),
        ({"window": "3"}, "window is '3': it must be a whole number"),
        ({"window": 2**31}, "window is 2,147,483,648: too large, it can be at most 2,147,483,647"),
        ({"pad_multiple": 4.0}, "pad_multiple is 4.0: it must be a whole number"),
        ({"pad_multiple": None}, "pad_multiple is None: it must be a whole number"),
        ({"pad_multiple": 10**9}, "pad_multiple is 1,000,000,000: too large, it can be at most 65,536"),
        ({"heads": 8}, "heads is 8 and kv_heads is None: give both"),
        ({"kv_heads": 8}, "heads is None and kv_heads is 8: give both"),
        (
            {"heads": 8, "kv_heads": 3},
            "heads is 8 and kv_heads is 3: both must be at least 1, and kv_heads must divide",
        ),
        ({"heads": 8, "kv_heads": 0}, "heads is 8 and kv_heads is 0: both must be at least 1"),
        ({"heads": 2.0, "kv_heads": 1}, "heads is 2.0: it must be a whole number"),
        ({"heads": 1, "kv_heads": 10**9}, "kv_heads is 1,000,000,000: too large, it can be at most 65,536"),
        ({"layer": "gpt"}, "has no layer 'gpt'.*llama-7b"),
    ],
)
def test_wrong_settings(change, message):
    with pytest.raises(ConfigError, match=message):
        replace(MODELS[0], **change)


def test_numpys_whole_numbers_are_settings_like_others():
    model = CostModel(H100, np.int64(10), window=np.int32(4096), pad_multiple=np.uint8(8))
    assert model == CostModel(H100, 10, window=4096, pad_multiple=8)
    assert type(model.layers_per_stage) is type(model.window) is type(model.pad_multiple) is int


def test_the_largest_settings_work():
    for largest in ({"window": 2**31 - 1}, {"pad_multiple": 2**16}):
        model = CostModel(H100, 1, **largest)
        assert model.max_length >= 1 << 20
        assert model.picoseconds(model.max_length, 7) > 0


FIRST_FOUR = ("attention_forward", "linear_forward", "sequence_constant", "microbatch_constant")


@pytest.mark.parametrize("field", [*FIRST_FOUR, "kv_per_token", "activation_per_token"])
def test_coefficients_at_the_end_of_floats_are_refused(field):
    layer = replace(BYTESCALE.layer(), **{field: 1e308})
    with pytest.raises(ConfigError, match=rf"{field} is .*e\+(3\d\d|298) s for all layers|check the units") as error:
        CostModel(replace(BYTESCALE, layers={"llama-7b": layer}), 32)
    assert (field in str(error.value)) == (field != "activation_per_token")


def test_wrong_arguments():
    model = MODELS[0]
    for call, message in [
        (lambda: model.picoseconds([5, 0]), "length is 0"),
        (lambda: model.picoseconds(5, -1), "ring is -1"),
        (lambda: model.picoseconds(5, 1, 2), r"tier is 2, must be in 0 .. 1"),
        (lambda: model.picoseconds(5.0), "length must be whole numbers, got float64"),
        (lambda: model.bytes(5, 1, 1.5), "offload is 1.5"),
        (lambda: model.bytes(5, 1, float("nan")), "offload is nan"),
        (lambda: model.smallest_ring(5, 1), "does not hold the smallest piece, 2 tokens"),
    ]:
        with pytest.raises(PlanError, match=message):
            call()
    with pytest.raises(ConfigError, match="phase is 'both'"):
        model.picoseconds(5, phase="both")


def test_round_trip(tmp_path):
    assert profile_names() == ("bytescale", "h100")
    for profile in (BYTESCALE, H100):
        again = Profile.from_json(profile.to_json())
        assert again == profile
        assert again.digest() == profile.digest()
        assert {CostModel(again, 2), CostModel(profile, 2)} == {CostModel(profile, 2)}
        profile.save(tmp_path / "mine.json")
        assert load_profile(tmp_path / "mine.json") == profile
        assert profile.sources
        assert profile.calibrated
        assert profile.assumed
    assert BYTESCALE.digest() != replace(BYTESCALE, date="2026-01-01").digest()


MEASURED = replace(
    BYTESCALE,
    d2h_bandwidth_shared=5e9,
    h2d_bandwidth_shared=6e9,
    device_memory=80e9,
    host_memory=1e12,
    software="torch 2.14.1",
    layers={"llama-7b": replace(BYTESCALE.layer(), loss_per_token=3e-6, embedding_per_token=1e-7)},
)


def test_what_may_be_left_out_is_not_known_and_files_of_schema_1_can_be_read():
    assert Profile.from_json(MEASURED.to_json()) == MEASURED
    old = json.loads(MEASURED.to_json()) | {"schema": 1}
    new = {"d2h_bandwidth_shared", "h2d_bandwidth_shared", "device_memory", "host_memory", "software"}
    for name in new:
        del old[name]
    for name in ("loss_per_token", "embedding_per_token"):
        del old["layers"]["llama-7b"][name]
    again = Profile.from_json(json.dumps(old))
    assert again == replace(BYTESCALE, layers={"llama-7b": BYTESCALE.layer()})
    assert not new & set(json.loads(again.to_json()))
    assert again.layer().loss_per_token == again.layer().embedding_per_token == 0


def damage(path, value="remove"):
    data = json.loads(BYTESCALE.to_json())
    parent = data
    for key in path[:-1]:
        parent = parent[key]
    if value == "remove":
        del parent[path[-1]]
    else:
        parent[path[-1]] = value
    return json.dumps(data)


ATTENTION = ["layers", "llama-7b", "attention_forward"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "mine.json: not JSON"),
        ("[]", "mine.json: field schema must be 1 or 2"),
        ('{"schema": 1, "schema": 1}', "mine.json: field schema appears twice"),
        (damage(["schema"], 3), "field schema must be 1 or 2"),
        (damage(["date"]), "mine.json: field date is missing"),
        (damage(["date"], 3), "field date must be a text"),
        (damage(["speed"], 3), "field speed is unknown"),
        (damage(["sources"], []), "field sources must be a list"),
        (damage(["calibrated"], "all"), "field calibrated must be an object of texts"),
        (damage(["gpus_per_node"], 0), "field gpus_per_node must be a whole number of at least 1"),
        (damage(["gpus_per_node"], True), "field gpus_per_node must be a whole number"),
        (damage(["layers"], {}), "field layers must be an object with at least one layer"),
        (damage(["default_layer"], "gpt"), "field default_layer is 'gpt'"),
        (damage(["inside_node"], 7), "field inside_node must be an object"),
        (damage(["inside_node", "latency"]), "field inside_node.latency is missing"),
        (damage(ATTENTION), "field layers.llama-7b.attention_forward is missing"),
        (damage(ATTENTION, 1e-11), r"field layers.llama-7b.attention_forward must be .*s/token\^2"),
        (
            damage([*ATTENTION, "unit"], "ms/token^2"),
            "attention_forward has unit 'ms/token\\^2', must be 's/token\\^2'",
        ),
        (damage([*ATTENTION, "value"], -1e-11), "attention_forward is -1e-11, must be finite and not negative"),
        (damage([*ATTENTION, "value"], float("inf")), "attention_forward is inf, must be finite"),
        (damage([*ATTENTION, "value"], "1"), "attention_forward must be a number"),
        (damage([*ATTENTION, "value"], True), "attention_forward must be a number"),
        (damage([*ATTENTION, "value"], 10**400), "attention_forward is 10+[.]+0+, must be finite"),
        (damage([*ATTENTION, "value"], 7).replace(": 7,", f": {'7' * 5000},"), "mine.json: not JSON: .*4300 digits"),
        (damage(["gpus_per_node"], 2**31 + 1), "field gpus_per_node .* at most 2.31, got 2147483649"),
        (damage(["gpus_per_node"], 10**30), "field gpus_per_node must be .* at most 2.31"),
        (damage(["layers", "llama-7b", "tensor_parallel"], 10**30), "llama-7b.tensor_parallel must be .* at most 2.31"),
        ("[" * 100_000, "mine.json: not JSON"),
        ("\ufeff" + BYTESCALE.to_json(), "mine.json: not JSON: .*BOM"),
        (damage(["schema"], True), "field schema must be 1"),
        (damage(["schema"], 1.0), "field schema must be 1"),
        (damage(["d2h_bandwidth", "value"], 0), "field d2h_bandwidth is 0, must be finite and positive"),
        (damage(["d2h_bandwidth_shared"], {"value": 0, "unit": "byte/s"}), "d2h_bandwidth_shared is 0, must be finite"),
        (damage(["host_memory"], {"value": 1, "unit": "GiB"}), "field host_memory has unit 'GiB', must be 'byte'"),
        (
            damage(["host_memory"], {"value": 1e300, "unit": "byte"}),
            "host_memory is 1e.300 bytes, can be at most 2.52",
        ),
        (damage(["name"], "a\nb"), r"field name must be printable text, got 'a\\nb'"),
        (damage(["name"], "\udcff"), r"field name must be printable text, got '\\udcff'"),
        (damage(["hardware"], "\x1b[31m"), r"field hardware must be printable text, got '\\x1b"),
        (damage(["sources"], ["a", "\x00"]), "field sources has an entry that must be printable text"),
        (damage(["calibrated"], {"\x07": "b"}), "field calibrated has a name that must be printable text"),
        (damage(["assumed"], {"a": "\x07"}), "field assumed.a must be printable text"),
        (damage(["layers", "\x07"], {}), r"field layers has a layer whose name must be printable text, got '\\x07'"),
        (damage(["\x07"], {}), r"mine.json: field '\\x07' is unknown"),
        (damage(["device_memory"], None), r"field device_memory must be {\"value\": NUMBER"),
        (damage(["software"], ""), "field software must be a text"),
        (
            damage(["layers", "llama-7b", "loss_per_token", "value"], -1),
            "field layers.llama-7b.loss_per_token is -1, must be finite and not negative",
        ),
    ],
)
def test_damaged_profiles_name_field_and_file(text, message, tmp_path):
    (tmp_path / "mine.json").write_text(text)
    with pytest.raises(ConfigError, match=message) as error:
        load_profile(tmp_path / "mine.json")
    assert "mine.json" in str(error.value)
    assert str(error.value).isprintable()


def test_unknown_profile():
    with pytest.raises(ConfigError, match=r"'a100' is neither a shipped one \(bytescale, h100\) nor a readable file"):
        load_profile("a100")


def test_what_is_no_name_of_a_file():
    with pytest.raises(ConfigError, match=r"is neither a shipped one .* null"):
        load_profile("a\x00b")


def test_needs_neither_torch_nor_megatron():
    code = (
        "import sys\n"
        "for name in ('torch', 'megatron'): sys.modules[name] = None\n"
        "from megatron_hdp.cost import CostModel, load_profile\n"
        "import megatron_hdp.cost.calibrate\n"
        "print(CostModel(load_profile('h100'), 2).picoseconds(4096))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=REPOSITORY)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == CostModel(H100, 2).picoseconds(4096)


def test_the_documented_profile_can_be_read():
    text = (Path(__file__).parents[2] / "docs" / "cost-model.md").read_text(encoding="utf-8")
    profile = Profile.from_json(text.split("```json")[1].split("```")[0])
    assert CostModel(profile, layers_per_stage=32).picoseconds(8192) > 0
