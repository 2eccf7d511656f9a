"""A simulated step: time that adds up, the planner's spans, bytes, frames, errors."""

import dataclasses
import itertools
import json
import subprocess
import sys

import numpy as np
import pytest

from megatron_hdp.cost import CostModel, load_profile
from megatron_hdp.errors import ConfigError, PlanError
from megatron_hdp.memory import ModelShape, Parallel, parameters
from megatron_hdp.metrics import RingTraffic
from megatron_hdp.planner import plan
from megatron_hdp.planner.baselines import packed_picoseconds, packed_rank_ends, plan_static
from megatron_hdp.planner.exchange import choose_exchanges
from megatron_hdp.planner.span import microbatch_picoseconds, rank_ends
from megatron_hdp.simulator import (
    CAUSES,
    KINDS,
    Control,
    Job,
    StepResult,
    Sync,
    chrome_trace,
    cluster_of_profile,
    load_cluster,
    simulate_step,
)
from megatron_hdp.simulator.copies import copy_waits
from megatron_hdp.simulator.durations import durations
from megatron_hdp.simulator.flops import batch_flops
from megatron_hdp.simulator.links import ring_links
from megatron_hdp.simulator.messages import message_picoseconds
from megatron_hdp.simulator.sent import across_share, neighbours, sent_by_sequences
from megatron_hdp.simulator.sync import collective, optimizer_picoseconds, over_pool, weights_of
from megatron_hdp.simulator.traffic import (
    attention_bytes,
    moved_between_stages,
    nic_peak,
    sync_bytes,
)
from megatron_hdp.types import EXCHANGES, Plan, Ring

H100 = load_profile("h100")
MODEL = ModelShape(layers=8, hidden=4096, ffn=11008, heads=32, kv_heads=8, head_dim=128, vocabulary=32000)
LAYOUTS = [(1, 1, 1), (2, 1, 1), (4, 1, 1), (2, 2, 1), (1, 1, 4), (2, 1, 4), (2, 2, 4)]


def batch(seed: int = 0, long: int = 3, short: int = 30) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.concatenate([rng.integers(20, 4000, short), rng.integers(9000, 60_000, long)])


def job_of(layout=(1, 1, 1), cluster: str = "h100", layer: str = "llama-13b", model=MODEL, **changes) -> Job:
    stages, parts, experts = layout
    own = {key: changes.pop(key) for key in ("window", "recompute") if key in changes}
    tp = H100.layer(layer).tensor_parallel
    cost = CostModel(H100, 8 // stages, layer=layer, heads=32 // tp, kv_heads=8 // tp, stages=stages, **own)
    return Job(
        cost=cost,
        cluster=load_cluster(cluster),
        model=model,
        stages=stages,
        virtual_stages=parts,
        expert_group=experts,
        **changes,
    )


def planned(job: Job, lengths=None, ranks: int = 8, **options) -> Plan:
    lengths = batch() if lengths is None else lengths
    layout = {"stages": job.stages, "virtual_stages": job.virtual_stages, "expert_group": job.expert_group}
    return plan(lengths, ranks, 8192, cost=job.cost, **layout, **options)


def adds_up(result: StepResult) -> None:
    """For every lane, and for every bar."""
    assert tuple(result.idle) == CAUSES
    total = result.compute + sum(result.idle.values()) + result.optimizer_seconds
    np.testing.assert_allclose(total, result.seconds, rtol=1e-9)
    assert all((seconds >= 0).all() for seconds in result.idle.values())
    assert (result.compute > 0).all()
    bars = result.timeline
    assert bars is not None
    order = np.lexsort((bars.start, bars.lane))
    assert np.array_equal(order, np.arange(bars.lane.size))
    assert (bars.end > bars.start).all()
    assert bars.start.min() >= 0
    assert bars.end.max() == pytest.approx(result.seconds)
    same = bars.lane[1:] == bars.lane[:-1]
    assert (bars.start[1:] >= bars.end[:-1] - 1e-9)[same].all()  # none overlap
    op = np.isin(bars.kind, [KINDS.index("forward"), KINDS.index("backward")])
    inside = bars.compute + bars.ring + bars.partner + bars.expert + bars.copy
    np.testing.assert_allclose(inside[op], (bars.end - bars.start)[op], rtol=1e-9)
    assert not inside[~op].any()
    assert (bars.slot[op] >= 0).all()
    assert (bars.slot[~op] == -1).all()
    lanes = result.compute.size
    for cause in ("ring", "partner", "expert", "copy"):
        found = np.bincount(bars.lane, weights=getattr(bars, cause), minlength=lanes)
        np.testing.assert_allclose(found, result.idle[cause], rtol=1e-9, atol=1e-12)
    for kind in ("load", "gather", "reduce"):
        chosen = bars.kind == KINDS.index(kind)
        found = np.bincount(bars.lane[chosen], weights=(bars.end - bars.start)[chosen], minlength=lanes)
        np.testing.assert_allclose(found, result.idle[kind], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("cluster", ["h100", "h100-4-nics"])
def test_every_second_has_a_cause(layout, cluster):
    for sync, control in itertools.product(
        (Sync(), Sync(overlap_grad_reduce=False, overlap_param_gather=False)),
        (Control(), Control(plan_seconds=0.1, ahead=False, broadcast=True, load_seconds_per_token=1e-6)),
    ):
        job = job_of(layout, cluster, sync=sync, control=control)
        result = simulate_step(planned(job), job)
        adds_up(result)
        assert result.ranks * job.stages * job.tensor_parallel == result.gpus
        assert result.compute.size == result.ranks * result.stages
        assert 0 < result.computing < 1
        assert result.tokens_per_second == result.tokens / result.seconds


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("layer", ["llama-7b", "llama-13b", "llama-70b"])  # 8, 4 and 1 ranks a node
def test_spans_are_the_planners_where_links_are_the_cost_models(layout, layer):
    """Without a model nothing but micro-batches takes time, and each GPU has a NIC of its own."""
    for window in (None, 3000):
        job = job_of(layout, layer=layer, model=None, window=window)
        step = planned(job)
        result = simulate_step(step, job, timeline=False)
        assert result.span_seconds == rank_ends(step, job.cost, *layout).max() / 1e12
        assert result.seconds == result.span_seconds
        assert result.mfu is None


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_durations_are_the_cost_models_where_links_are(exchange):
    """Of rings of any links, of gathers and swaps inside one node or between nodes of one rank each."""
    for layer, window in itertools.product(("llama-7b", "llama-70b"), (None, 2000)):
        job = job_of(layer=layer, window=window)
        lengths = np.random.default_rng(1).integers(1, 60_000, 40)
        step = choose_exchanges(planned(job, lengths), job.cost, exchange)
        found = durations(step, job).total
        np.testing.assert_array_equal(found, np.stack(microbatch_picoseconds(step, job.cost), axis=1))


def static(job: Job, lengths, ring: int, exchange: str = "ring") -> Plan:
    made = plan_static(lengths, 16, 8192, 2, cost=job.cost, ring_size=ring, count_multiple=job.stages)
    return choose_exchanges(made, job.cost, exchange)


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_packs_travel_in_one_slice(exchange):
    """Compute as the cost model has it; with uniform links all is."""
    for layer, window, ring in itertools.product(("llama-7b", "llama-70b"), (None, 2000), (4, 8)):
        job = job_of(layer=layer, window=window, model=None, one_slice=True)
        step = static(job, np.minimum(batch(2, 2, 60), ring * 8000), ring, exchange)
        if exchange == "heads" and layer == "llama-70b":
            continue  # the cost model's packs swap heads inside nodes only
        found = durations(step, job)
        np.testing.assert_array_equal(found.total, np.stack(packed_picoseconds(step, job.cost), axis=1))
        assert (found.ring >= 0).all()
        result = simulate_step(step, job)
        assert result.seconds == packed_rank_ends(step, job.cost).max() / 1e12
        adds_up(result)


def test_one_slice_is_faster_than_many():
    lengths = batch(3, 1, 200)
    alone, together = (job_of(layer="llama-70b", model=None, one_slice=one) for one in (False, True))
    step = static(alone, lengths, 16)
    assert simulate_step(step, together).seconds < 0.7 * simulate_step(step, alone).seconds


def test_fewer_nics_and_slow_uplinks_make_rings_wait():
    seconds = []
    for nics, uplinks in ((8, 1.0), (4, 1.0), (1, 1.0), (1, 64.0)):
        job = job_of(model=None)
        cluster = dataclasses.replace(job.cluster, nics_per_node=nics, nodes_per_leaf=1, oversubscription=uplinks)
        job = dataclasses.replace(job, cluster=cluster)
        result = simulate_step(planned(job, np.array([60_000, 200_000]), ranks=32), job)
        seconds.append(float(result.idle["ring"].mean()))
    assert seconds == sorted(seconds)
    assert seconds[0] < seconds[1] < seconds[2] < seconds[3]


def test_two_results_are_equal():
    job = job_of((2, 2, 1))
    one, other = (simulate_step(planned(job), job) for _ in range(2))
    assert one.seconds == other.seconds
    for name in ("lane", "kind", "start", "end", "compute", "partner"):
        assert np.array_equal(getattr(one.timeline, name), getattr(other.timeline, name))


def test_a_trace_for_people():
    job = job_of((2, 1, 1), control=Control(plan_seconds=0.1, ahead=False))
    result = simulate_step(planned(job), job)
    whole, some = chrome_trace(result), chrome_trace(result, ranks=[2, 5])
    bars = [event for event in json.loads(json.dumps(whole))["traceEvents"] if event["ph"] == "X"]
    assert len(bars) == result.timeline.lane.size
    assert sum(bar["dur"] for bar in bars) / 1e6 == pytest.approx((result.timeline.end - result.timeline.start).sum())
    assert {bar["cat"] for bar in bars} == set(KINDS) - {"gather"}  # which loading hides
    assert {event["tid"] for event in some["traceEvents"] if "tid" in event} == {4, 5, 10, 11}
    names = [event["args"]["name"] for event in some["traceEvents"] if event["name"] == "thread_name"]
    assert names == ["rank 2, stage 0", "rank 2, stage 1", "rank 5, stage 0", "rank 5, stage 1"]
    assert [bar for bar in bars if bar["tid"] in (4, 5, 10, 11)] == [e for e in some["traceEvents"] if e["ph"] == "X"]
    with pytest.raises(ConfigError, match="no timeline"):
        chrome_trace(simulate_step(planned(job), job, timeline=False))


# Bytes


@pytest.mark.parametrize("window", [None, 3000])
@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_bytes_of_attention_are_those_that_training_counts(window, exchange, recompute):
    for layout in ((1, 1, 1), (2, 1, 1)):
        job = job_of(layout, window=window, recompute=recompute)
        step = choose_exchanges(planned(job), job.cost, exchange)
        tp = job.tensor_parallel
        traffic = RingTraffic(
            layer_windows=(window,) * 8,
            recomputed=(recompute == "full",) * 8,
            heads=32 // tp,
            kv_heads=8 // tp,
            head_dim=128,
            bytes_per_element=2,
        )
        found = attention_bytes(sent_by_sequences(step, job), job)
        assert sum(found.values()) == int(traffic.bytes_by_rank(step).sum()) * tp
        assert found["inside_node"] > 0
        assert found["across_nodes"] > 0


def test_bytes_of_a_ring_hop_by_hop():
    """16 GPUs, 2 to a rank, so 4 ranks a node: by hand."""
    job = job_of()
    step = planned(job, np.array([64_000]), ranks=8)
    ring = step.ring(0)
    layer = job.cost.layer_profile
    across = total = 0
    for position, rank in enumerate(ring.ranks):
        after = ring.ranks[(position + 1) % ring.size]
        moved = (64_000 - step.piece(0, after).real_tokens) * 2 * layer.kv_per_token  # forward and backward
        moved += 64_000 * layer.kv_gradient_per_token
        total += moved
        across += moved * (rank // 4 != after // 4)
    assert ring.size == 8
    assert attention_bytes(sent_by_sequences(step, job), job) == {
        "across_nodes": int(across) * 8 * 2,
        "inside_node": int(total - across) * 8 * 2,
    }


@pytest.mark.parametrize("one_slice", [False, True])
def test_bytes_of_many_rings_hop_by_hop(one_slice):
    """Pieces with padding, and of padding only; stages that begin in the middle of a node."""
    rng = np.random.default_rng(5)
    size = rng.integers(2, 12, 60)
    start = rng.integers(0, 14 - size)
    lengths = np.concatenate([rng.integers(1, 60, 30), rng.integers(1000, 9000, 30)])
    none = np.zeros(1, dtype=np.int64)
    step = Plan(14, 8192, 2, lengths, start, size, np.zeros(60), none, none, none[:0])
    job = job_of((2, 1, 1), one_slice=one_slice)
    found, layer = sent_by_sequences(step, job), job.cost.layer_profile
    assert found.sequence.tolist() == list(range(60))
    for s in range(60):
        ring = step.ring(s)
        every, across, senders = np.zeros(2), np.zeros(2), 0
        for stage, (at, rank) in itertools.product((0, 1), enumerate(ring.ranks)):
            after = ring.ranks[(at + 1) % ring.size]
            kv = (lengths[s] - step.piece(s, after).real_tokens) * layer.kv_per_token
            moved = np.array([kv, kv + lengths[s] * layer.kv_gradient_per_token])
            places = (at, (at + 1) % ring.size) if one_slice else (rank - ring.start, after - ring.start)
            nodes = [(stage * 14 + ring.start + place) // 4 for place in places]
            every += moved / 2
            across += moved / 2 * (nodes[0] != nodes[1])
            senders += (nodes[0] != nodes[1]) / 2
        assert found.all[s] == pytest.approx(every)
        assert found.across[s] == pytest.approx(across)
        assert found.senders[s] == senders


def test_neighbours_are_those_of_the_ring():
    for size in range(2, 12):
        offset, of = np.arange(size), np.full(size, size)
        after, before = neighbours(offset, of, in_order=False)
        found = [Ring(0, size).neighbours(rank) for rank in range(size)]
        assert list(zip(before.tolist(), after.tolist(), strict=True)) == found
        after, before = neighbours(offset, of, in_order=True)
        assert np.array_equal(after, np.roll(offset, -1))
        assert np.array_equal(before, np.roll(offset, 1))


def test_shares_of_bytes_across_nodes_are_shares_of_peers():
    job = job_of()
    step = choose_exchanges(planned(job, np.array([64_000]), ranks=8), job.cost, "gather")
    assert across_share(step, job, np.zeros(8, dtype=np.int64), np.arange(8)).tolist() == pytest.approx([4 / 7] * 8)


def test_a_nic_sends_no_faster_than_it_can():
    for cluster in ("h100", "h100-4-nics"):
        job = job_of(cluster=cluster)
        step = planned(job, np.array([300_000, 9000]), ranks=40)
        result = simulate_step(step, job)
        assert 0 < result.nic_mean < result.nic_peak <= job.cluster.nic_bandwidth


def test_the_peak_of_a_nic_by_hand():
    """One ring of 16 that waits for its links, in which the first and last ranks of nodes send."""
    job = job_of(model=None)
    job = dataclasses.replace(job, cluster=dataclasses.replace(job.cluster, nic_bandwidth=1e9))
    step = planned(job, np.array([128_000]), ranks=16)
    assert step.ring_size.tolist() == [16]
    times = durations(step, job)
    layers, own = 8, job.cost.layer_profile
    found = nic_peak(step, job, sent_by_sequences(step, job), ring_links(step, job), times)
    once = 15 * 8000 * own.kv_per_token
    moved = (once, once + 16 * 8000 * own.kv_gradient_per_token)
    rates = [moved[phase] / (times.attention[0, phase] / layers / 1e12) for phase in (0, 1)]
    assert times.attention.min() / layers > 1e10  # of a layer, so 10 ms say nothing
    assert found == pytest.approx(max(rates))
    assert 0.9e9 < found <= 1e9


# Copies


def test_copies_wait_as_the_cost_model_says_where_they_have_lanes_of_their_own():
    profile = dataclasses.replace(H100, d2h_bandwidth=2e9, h2d_bandwidth=2e9)
    cost = CostModel(profile, 8, layer="llama-13b")
    job = Job(cost=cost, cluster=cluster_of_profile(profile), model=None)
    step = dataclasses.replace(planned(job, np.array([90_000]), ranks=12), offload=np.array([0.5]))
    result = simulate_step(step, job)
    adds_up(result)
    size = int(step.ring_size[0])
    fraction = 0.5 * 8 / 6
    stall = cost.offload_stall_picoseconds(90_000, size, cost.tier(step.ring_start[0], size), fraction) / 1e12
    assert stall > 0.1
    constant = cost.microbatch_picoseconds() * 6 / 8 / 1e12  # has time for copies too
    assert result.idle["copy"].max() == pytest.approx(stall - constant, rel=2e-3)  # r is a multiple of 1/1024
    assert result.bytes_by_link["to_host"] == result.bytes_by_link["from_host"]
    kept = cost.host_bytes(90_000, size, 0.5)
    assert result.bytes_by_link["to_host"] == kept * size * 2


def test_copies_share_lanes_with_the_nic():
    """By hand: bytes of both over the lanes' bandwidth, less the time of the layers beside which copies run."""
    job = job_of(model=None)
    waits = {}
    for shared in (False, True):
        cluster = dataclasses.replace(job.cluster, pcie_bandwidth=6e9, pcie_shared_with_nic=shared)
        own = dataclasses.replace(job, cluster=cluster)
        step = dataclasses.replace(planned(own, np.array([120_000]), ranks=16), offload=np.array([0.5]))
        times = durations(step, own)
        waits[shared] = copy_waits(step, own, times.compute + times.ring)[0]
        size, layer = int(step.ring_size[0]), own.cost.layer_profile
        once = 120_000 * (size - 1) / size * layer.kv_per_token
        for phase, moved in enumerate((once, once + 120_000 * layer.kv_gradient_per_token)):
            host = own.cost.host_bytes(120_000, int(step.ring_size[0]), 0.5)
            lanes = (host + shared * int(moved) * 6) / 6e9 * 1e12
            left = lanes - (times.compute + times.ring)[0, phase] * 6 / 8
            assert waits[shared][phase] == pytest.approx(max(left, 0), rel=1e-6)
    assert (waits[True] > waits[False]).all()


# Frame


def test_parameters_of_stages():
    whole = weights_of(job_of((1, 1, 1)), 8)
    assert whole.dense == (parameters(MODEL, Parallel(ranks=8, tensor_parallel=2), "only"),)
    assert whole.expert == (0,)
    job = job_of((4, 1, 1))
    parts = weights_of(job, 8).dense
    assert parts[1] == parts[2] < parts[0] < parts[3]  # layers; the table; the output layer and the last norm
    assert sum(parts) == whole.dense[0]
    tied = job_of((4, 1, 1), model=dataclasses.replace(MODEL, tied=True))
    assert weights_of(tied, 8).dense[1:3] == parts[1:3]


def test_parameters_of_experts():
    dense = weights_of(job_of(), 8)
    job = job_of((1, 1, 4), experts=8, experts_per_token=2)
    found = weights_of(job, 8)
    mlp = 8 * MODEL.hidden * 3 * MODEL.ffn // 2
    assert found.expert == (mlp * 2,)  # two of eight experts on each rank
    assert found.dense == (dense.dense[0] - mlp + 8 * MODEL.hidden * 8,)


def test_collectives_by_hand():
    job = job_of(cluster="h100-4-nics")  # 4 ranks a node, 8 GPUs share 4 NICs of 45 GB/s, uplinks for half
    assert collective(job, 10**9, 4, 4) == pytest.approx((1e9 * 3 / 4 / 360e9 + 2 * 5e-6) * 1e12, abs=1)
    per_group = 45e9 * 4 / 8 * 4  # 4 GPUs of the group have half a NIC each; uplinks are crossed by one hop of many
    assert collective(job, 10**9, 16, 4) == pytest.approx((1e9 * 15 / 16 / per_group + 4 * 15e-6) * 1e12, abs=1)
    assert collective(job, 10**9, 1, 4) == 0
    assert collective(job, 0, 16, 4) == 0


def test_sync_without_overlap_is_the_sum_of_its_parts():
    sync = Sync(overlap_grad_reduce=False, overlap_param_gather=False)
    job = job_of(sync=sync)
    step = planned(job)
    weights = weights_of(job, 8)
    gather, reduce = (int(over_pool(job, 8, weights, each)[0]) for each in (2, 4))
    optimizer = optimizer_picoseconds(job, 8, weights)
    result = simulate_step(step, job)
    span = int(rank_ends(step, job.cost).max())
    assert optimizer == pytest.approx(weights.dense[0] / 8 * 28 / 3.35e12 * 1e12, rel=1e-6)
    assert result.seconds == pytest.approx((gather + span + reduce + optimizer) / 1e12)
    assert result.idle["gather"].tolist() == pytest.approx([gather / 1e12] * 8)
    assert result.idle["reduce"].tolist() == pytest.approx([reduce / 1e12] * 8)
    assert result.optimizer_seconds == optimizer / 1e12


def test_overlap_leaves_one_layer_of_the_sums_and_one_of_the_parameters():
    """Where a layer's transfers are shorter than its passes, as here, only the first and the last are seen."""
    job = job_of()
    result = simulate_step(planned(job, np.full(64, 8000)), job)
    weights = weights_of(job, 8)
    gather, reduce = (int(over_pool(job, 8, weights, each)[0]) for each in (2, 4))
    assert result.idle["gather"].tolist() == pytest.approx([gather / 8 / 1e12] * 8)
    assert result.idle["reduce"].tolist() == pytest.approx([reduce / 8 / 1e12] * 8)


def test_sync_bytes_by_hand():
    job = job_of()  # 4 ranks a node
    weights = weights_of(job, 16)
    found = sync_bytes(planned(job, ranks=16), job, weights)
    total = weights.dense[0] * 6 * 15 * 2  # 15 / 16 of all, for each of 16 ranks of 2 GPUs
    assert sum(found.values()) == total
    assert found["across_nodes"] == total // 4  # one hop of four crosses


def test_messages_between_stages():
    job = job_of((2, 1, 1))
    step = planned(job, ranks=16)  # 2 GPUs x 16 ranks: each stage fills 4 nodes
    tokens = np.array([mb.tokens for mbs in step for mb in mbs])
    found = message_picoseconds(step, job)
    np.testing.assert_allclose(found, (15e-6 + tokens * 4096 * 2 / 2 / 45e9) * 1e12, rtol=1e-6)
    small = planned(job, np.full(8, 4000), ranks=2)  # all in one node
    tokens = np.array([mb.tokens for mbs in small for mb in mbs])
    found = message_picoseconds(small, job)
    np.testing.assert_allclose(found, (5e-6 + tokens * 4096 * 2 / 2 / 360e9) * 1e12, rtol=1e-6)
    assert not message_picoseconds(step, dataclasses.replace(job, model=None)).any()


def test_bytes_between_stages_by_hand():
    """4 stages in 2 parts each: 7 moves forward and 7 back. Stages of 8 ranks of 2 GPUs have 2 nodes each."""
    job = job_of((4, 2, 1))
    step = planned(job)
    tokens = sum(mb.tokens for mbs in step for mb in mbs)
    assert moved_between_stages(step, job) == {"inside_node": 0, "across_nodes": tokens * 4096 * 2 * 14}
    pair = planned(job, np.full(8, 4000), ranks=2)  # two stages in a node: every other move crosses, and the wrap
    tokens = sum(mb.tokens for mbs in pair for mb in mbs)
    found = moved_between_stages(pair, job)
    assert found == {"inside_node": tokens * 4096 * 2 * 2 * 4, "across_nodes": tokens * 4096 * 2 * 2 * 3}


def test_one_rank_alone():
    """No rings, no pool, nothing to send."""
    job = job_of()
    step = planned(job, np.array([4000, 100, 7]), ranks=1)
    result = simulate_step(step, job)
    adds_up(result)
    assert result.nic_peak == 0
    assert result.bytes_by_link == dict.fromkeys(result.bytes_by_link, 0)
    assert result.idle["reduce"].sum() == result.idle["gather"].sum() == 0


def test_messages_make_a_pipeline_slower():
    job = job_of((4, 1, 1))
    step = planned(job)
    slow = dataclasses.replace(job, cluster=dataclasses.replace(job.cluster, nic_latency=0.05, inside_latency=0.05))
    quick = dataclasses.replace(slow, model=None)
    assert simulate_step(step, slow).span_seconds > simulate_step(step, quick).span_seconds + 6 * 0.05


def test_flops_by_hand():
    job = job_of()
    layer = 4096 * 128 * (2 * 32 + 2 * 8) + 3 * 4096 * 11008
    linear = 6 * 1000 * (8 * layer + 4096 * 32000)
    pairs = 600 * 600 / 2 + 400 * 400 / 2
    assert batch_flops(np.array([600, 400]), job) == pytest.approx(linear + 12 * 8 * 4096 * pairs)
    pairs = 100 * (600 - 50) + 100 * (400 - 50)
    windowed = job_of(window=100)
    assert batch_flops(np.array([600, 400]), windowed) == pytest.approx(linear + 12 * 8 * 4096 * pairs)
    experts = job_of(experts=8, experts_per_token=2)
    more = 6 * 1000 * 8 * (3 * 4096 * 11008 + 4096 * 8)
    assert batch_flops(np.array([600, 400]), experts) == pytest.approx(linear + more + 12 * 8 * 4096 * 260_000)


def test_mfu_counts_neither_padding_nor_recompute():
    job = job_of()
    step = planned(job)
    result = simulate_step(step, job)
    assert result.mfu == pytest.approx(batch_flops(step.lengths, job) / (result.seconds * 16 * 989e12))
    assert 0.2 < result.mfu < 0.6
    again = job_of(recompute="full")
    slower = simulate_step(step, again)
    assert slower.mfu == pytest.approx(result.mfu * result.seconds / slower.seconds)


# Control


def test_planning_ahead_is_hidden_unless_it_takes_longer_than_a_step():
    job = job_of(control=Control(plan_seconds=0.01, load_seconds_per_token=1e-9))
    step = planned(job)
    calm = simulate_step(step, job)
    assert calm.control.exposed_seconds == 0
    assert calm.control.plan_bytes == 0
    tokens = max(sum(mb.tokens for mb in mbs) for mbs in step)
    assert calm.control.load_seconds == pytest.approx(tokens * 1e-9)
    late = simulate_step(step, dataclasses.replace(job, control=Control(plan_seconds=calm.seconds + 1)))
    assert late.seconds == pytest.approx(calm.seconds + 1)
    assert late.control.exposed_seconds == pytest.approx(1)
    assert late.idle["load"].tolist() == pytest.approx([1.0] * 8)
    adds_up(late)


def test_a_plan_that_is_sent():
    job = job_of(control=Control(broadcast=True))
    step = planned(job, ranks=16)
    found = simulate_step(step, job).control
    columns = 6 * step.num_sequences + 17 + int(step.microbatch_counts.sum()) + 1 + step.piece_sequence.size
    assert found.plan_bytes == 8 * columns
    assert found.broadcast_seconds == pytest.approx(2 * 15e-6 + found.plan_bytes / 45e9, rel=1e-6)  # 4 nodes


# Errors


def test_clusters_that_are_too_small_or_too_coarse():
    job = job_of((4, 1, 1))
    small = dataclasses.replace(job, cluster=dataclasses.replace(job.cluster, nodes=7))
    with pytest.raises(ConfigError, match=r"64 GPUs are asked for, .* has 7 nodes of 8 GPUs, 56 in all.* nodes to 8"):
        simulate_step(planned(job), small)
    with pytest.raises(ConfigError, match="tensor_parallel is 2 on nodes of 1 GPUs"):
        dataclasses.replace(job, cluster=dataclasses.replace(job.cluster, gpus_per_node=1, nics_per_node=1))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"stages": 2}, "8 layers per stage, the model 8 layers on 2 stages"),
        ({"virtual_stages": 2}, "virtual_stages is 2 with one stage"),
        ({"stages": 0}, "stages is 0"),
        ({"experts": 6, "expert_group": 4}, "6 experts do not divide over expert groups of 4 ranks"),
        ({"experts_per_token": 2}, "experts_per_token is 2 of 1 experts"),
    ],
)
def test_jobs_that_cannot_be(changes, words):
    with pytest.raises(ConfigError, match=words):
        dataclasses.replace(job_of(), **changes)


def test_plans_that_do_not_fit_the_job():
    step = planned(job_of(), np.full(9, 3000), ranks=6)
    with pytest.raises(ConfigError, match="a pool of 6 ranks does not divide into expert groups of 4"):
        simulate_step(step, job_of((1, 1, 4)))
    lengths = np.full(5, 8000)
    with pytest.raises(PlanError, match="counts: the interleaved schedule"):
        simulate_step(planned(job_of(), lengths, ranks=1), job_of((2, 2, 1)))
    counts = np.array([2, 1, 1, 1])
    unequal = dataclasses.replace(
        planned(job_of(), np.full(5, 8000), ranks=4),
        ring_start=np.array([0, 0, 1, 2, 3]),
        ring_size=np.ones(5, dtype=np.int64),
        rank_offsets=np.cumsum([0, *counts]),
        microbatch_offsets=np.arange(6),
        piece_sequence=np.arange(5),
    )
    with pytest.raises(PlanError, match="counts: ranks that share experts"):
        simulate_step(unequal, job_of((1, 1, 4)))


@pytest.mark.parametrize("bandwidth", [1e-3, 1.0, 300.0])
def test_links_too_slow_for_integers(bandwidth):
    job = job_of(model=None)
    step = planned(job, np.array([120_000]), ranks=16)
    slow = dataclasses.replace(job, cluster=dataclasses.replace(job.cluster, nic_bandwidth=bandwidth))
    with pytest.raises(ConfigError, match=r"check the units|no integer cost can hold"):
        simulate_step(step, slow)
    good = dataclasses.replace(job, cluster=dataclasses.replace(job.cluster, nic_bandwidth=1e6))
    assert simulate_step(step, good).seconds > 1000


def test_ranks_that_would_wait_forever():
    """Two rings, in one order on the first rank and in the other on the second."""
    step = Plan(
        num_ranks=2,
        capacity=8192,
        pad_multiple=2,
        lengths=np.array([100, 100]),
        ring_start=np.array([0, 0]),
        ring_size=np.array([2, 2]),
        offload=np.zeros(2),
        rank_offsets=np.array([0, 2, 4]),
        microbatch_offsets=np.arange(5),
        piece_sequence=np.array([0, 1, 1, 0]),
    )
    with pytest.raises(PlanError, match="wait for each other forever"):
        simulate_step(step, job_of())


def test_the_package_needs_no_torch():
    code = "import sys, megatron_hdp.simulator; sys.exit(any(m in sys.modules for m in ('torch', 'megatron')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
