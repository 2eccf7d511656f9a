"""What gradients and parameters add to a step: against a loop over layers, and plans that know of it."""

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_hdp.cost import CostModel, load_profile
from megatron_hdp.errors import ConfigError
from megatron_hdp.mixes import mix_batches, parse_mix
from megatron_hdp.planner import plan
from megatron_hdp.planner.frame import framed_span, last_enough
from megatron_hdp.planner.span import microbatch_picoseconds, rank_ends
from megatron_hdp.simulator import simulate_step
from megatron_hdp.simulator.strategies import Setting, run_strategy
from megatron_hdp.types import Plan

SECOND = 10**12


def cost_of(gather: int = 0, reduce: int = 0, layers: int = 32) -> CostModel:
    return CostModel(load_profile("bytescale"), layers, gather_picoseconds=gather, reduce_picoseconds=reduce)


def local_plan(counts: list[int]) -> Plan:
    """Local sequences of 64 tokens, each alone, so many on each rank."""
    number = sum(counts)
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    return Plan(
        num_ranks=len(counts),
        capacity=64,
        pad_multiple=2,
        lengths=np.full(number, 64),
        offload=np.zeros(number),
        ring_start=np.repeat(np.arange(len(counts)), counts),
        ring_size=np.ones(number, dtype=np.int64),
        rank_offsets=offsets,
        microbatch_offsets=np.arange(number + 1),
        piece_sequence=np.arange(number),
    )


def layer_by_layer(ends, first, last, layers, gather, reduce):
    """The dull twin, in floats: parameters of layer i are there at (i + 1) / layers of the gathering, gradients leave
    when all ranks have them, one layer after the other."""
    done_at = []
    for end, forward in zip(ends, first, strict=True):
        waits = [gather * (i + 1) / layers - forward * i / layers for i in range(layers)]
        done_at.append(end + max(waits))
    free = 0.0
    for ahead in reversed(range(layers)):  # layers that still have to run backward
        there = max(end - backward * ahead / layers for end, backward in zip(done_at, last, strict=True))
        free = max(free, there) + reduce / layers
    return free


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=5),
    st.integers(1, 40),
    st.integers(0, 3 * SECOND),
    st.integers(0, 3 * SECOND),
    st.randoms(use_true_random=False),
)
def test_equal_to_a_loop_over_layers(counts, layers, gather, reduce, random):
    made = local_plan(counts)
    number = made.microbatch_offsets.size - 1
    forward, backward = (np.array([random.randint(1, SECOND) for _ in range(number)]) for _ in range(2))
    firsts, lasts = made.rank_offsets[:-1], made.rank_offsets[1:] - 1
    ends = np.add.reduceat(forward + backward, firsts)
    found = framed_span(made, ends, forward, backward, cost_of(gather, reduce, layers))
    twin = layer_by_layer(ends.tolist(), forward[firsts].tolist(), backward[lasts].tolist(), layers, gather, reduce)
    assert found == pytest.approx(twin, abs=10)


def test_enough_is_never_more_than_a_full_micro_batch():
    cost = cost_of(reduce=1)
    backward, total = (int(cost.picoseconds(8192, phase=phase)) for phase in ("backward", "total"))
    constant = cost.microbatch_picoseconds()
    assert last_enough(dataclasses.replace(cost, reduce_picoseconds=backward // 2), 8192).time == pytest.approx(
        (total + constant) / 2, rel=1e-3
    )
    assert last_enough(dataclasses.replace(cost, reduce_picoseconds=backward * 9), 8192).time == total + constant
    assert last_enough(cost_of(), 8192) == (0, 0)


def test_ranks_end_soon_enough_for_the_sums():
    """Where rings of small pieces run last on some ranks, these end ahead by what their backward lacks; never worse."""
    reduce = int(cost_of().picoseconds(8192, phase="backward"))
    gains = []
    for mix, seed in itertools.product(("github", "lognormal:6000,200000,8192,1.0"), range(3)):
        lengths = mix_batches(parse_mix(mix), 4 << 20, 200_000, seed)(0)
        spans = {}
        for known in (0, reduce):
            made = plan(lengths, 64, 8192, cost=cost_of(reduce=known))
            ends, times = rank_ends(made, cost_of()), microbatch_picoseconds(made, cost_of())
            spans[known] = framed_span(made, ends, *times, cost_of(reduce=reduce))
        gains.append(spans[0] / spans[reduce])
    assert min(gains) >= 1
    assert max(gains) > 1.01


def test_steps_are_simulated_as_planned():
    """Seconds of a step but for the optimizer are those that the planner's frame says, where rings wait for nothing."""
    setting = Setting(model="llama-7b", gpus=16, tensor_parallel=8, context=8192, hardware="h100")
    step = run_strategy("hdp", np.array([4000] * 7 + [300]), setting)
    assert np.all(step.plan.ring_size == 1)
    times = microbatch_picoseconds(step.plan, setting.cost)
    planned = framed_span(step.plan, rank_ends(step.plan, setting.cost), *times, setting.cost) / SECOND
    alone = simulate_step(step.plan, dataclasses.replace(setting.job(), model=None)).seconds
    assert planned > 1.01 * alone
    optimizer = step.result.seconds - planned
    assert 0 <= optimizer < 0.02 * planned


def test_times_below_zero_are_refused():
    with pytest.raises(ConfigError, match="gather_picoseconds is 0 and reduce_picoseconds is -1"):
        cost_of(reduce=-1)
