"""A stage with offloading: the same bits, the promised memory, nothing left behind."""

import contextlib
import gc
import random

import pytest
import torch
from offload_cases import LateStreams, LiveBytes, Stack, batch, make_offload

from megatron_hdp.errors import ConfigError, SeamError
from megatron_hdp.offload.context import ActivationOffload
from megatron_hdp.offload.entry import Entry

RECOMPUTE = [None, "reentrant", "not reentrant", "inside"]
STREAMS = {
    "cpu": lambda: None,
    "late": LateStreams,
    "now and then": lambda: LateStreams(eager=0.3),
}


def gradients(stack: Stack) -> list[torch.Tensor]:
    found = [parameter.grad.clone() for parameter in stack.parameters()]
    stack.zero_grad()
    return found


def assert_equal(got: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    assert len(got) == len(wanted)
    for mine, theirs in zip(got, wanted):
        assert torch.equal(mine, theirs)


def run(stack: Stack, schedule: str, offload: ActivationOffload | None, ratio: list[float], recompute: str | None):
    """``schedule``: f0 forward, b0 backward of micro-batch 0, e evaluation. Losses, input and parameter gradients."""
    inputs, losses, results = {}, {}, []
    for word in schedule.split():
        if word == "e":
            with torch.no_grad():
                results.append(stack(batch(24, stack.hidden, 99), offload, 0.7).sum())
            continue
        number = int(word[1:])
        if word[0] == "f":
            inputs[number] = batch(32 + 16 * number, stack.hidden, number)
            inputs[number].retain_grad()
            losses[number] = stack(inputs[number], offload, ratio[number], recompute).square().mean()
        else:
            loss = losses.pop(number)
            loss.backward()
            results += [loss.detach(), inputs.pop(number).grad]
    return results + gradients(stack)


@pytest.mark.parametrize("streams", STREAMS)
@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("ratio", [0.0, 0.3, 0.5, 1.0])
def test_losses_and_gradients_are_the_same_bits(ratio, recompute, streams):
    stack = Stack(5)
    offload = make_offload(streams=STREAMS[streams]())
    plain, moved = (run(stack, "e f0 b0", mine, [ratio], recompute) for mine in (None, offload))
    assert_equal(moved, plain)
    metrics = offload.take_metrics()
    assert (metrics.bytes_out > 0) == (ratio > 0)
    assert metrics.bytes_in == metrics.bytes_out
    assert offload.arena.bytes_in_use == 0


@pytest.mark.parametrize("streams", STREAMS)
@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_micro_batches_in_flight_with_ratios_of_their_own(recompute, streams):
    # 1F1B with three in flight, evaluation between forward and backward
    schedule, ratios = "f0 f1 e f2 b0 f3 b1 f4 e b2 b3 f5 b4 b5", [0.5, 1.0, 0.0, 0.3, 1.0, 0.8]
    stack = Stack(4)
    offload = make_offload(streams=STREAMS[streams]())
    for _ in range(2):
        plain, moved = (run(stack, schedule, mine, ratios, recompute) for mine in (None, offload))
        assert_equal(moved, plain)
        assert offload.arena.bytes_in_use == 0
        ratios.reverse()


def test_stages_of_several_chunks_interleave():
    # each chunk its own block and context, the first keeps only its first layer, the last only its last
    chunks = [Stack(3, seed=seed) for seed in (1, 2)]
    offload = make_offload(streams=LateStreams())

    def forward(x, on):
        for chunk, keep in zip(chunks, ({"keep_last": False}, {"keep_first": False})):
            if on:
                with offload.micro_batch(0.6, 3, **keep):
                    x = chunk._run(x, angles, offload, None)
            else:
                x = chunk._run(x, angles, None, None)
        return x

    angles = torch.rand(32, 16)
    results = []
    for on in (False, True):
        losses = [forward(batch(32, 64, seed), on).square().mean() for seed in range(2)]
        for loss in losses:
            loss.backward()
        results.append([loss.detach() for loss in losses] + [g for chunk in chunks for g in gradients(chunk)])
    assert_equal(results[1], results[0])
    assert offload.take_metrics().bytes_out > 0
    assert offload.arena.bytes_in_use == 0


def resident(stack: Stack, offload: ActivationOffload | None, ratio: float, recompute: str | None) -> int:
    x = batch(96, stack.hidden, 1)
    with LiveBytes() as live:
        loss = stack(x, offload, ratio, recompute).sum()
        held = live.bytes() - loss.nbytes
        loss.backward()
        gradients(stack)
    return held


@pytest.mark.parametrize("recompute", [None, "reentrant", "not reentrant"])
@pytest.mark.parametrize("layers", [3, 4, 8])
@pytest.mark.parametrize("ratio", [0.25, 0.4, 0.5, 0.75, 1.0])
def test_resident_bytes_follow_the_formula(ratio, layers, recompute):
    stack = Stack(layers)
    offload = make_offload()
    everything, left = (resident(stack, *how, recompute) for how in ((None, 0.0), (offload, ratio)))
    if recompute:  # the input of the first layer counts, the table of angles that all layers share does not
        correction = 96 * stack.hidden * 4 - 96 * 16 * 4
        everything, left = everything + correction, left + correction
    formula = (2 + (1 - ratio) * (layers - 2)) / layers
    assert left / everything == pytest.approx(formula, rel=0.05)


def test_device_memory_goes_free_layer_by_layer():
    stack, seen = Stack(8), []
    offload = make_offload(streams=LateStreams())  # frees only what compute was made to wait for
    with LiveBytes() as live, offload.micro_batch(1.0, 8) as mine:
        x, angles = batch(96, 64, 1), torch.rand(96, 16)
        for index, layer in enumerate(stack.layers):
            mine.layer(index, x)
            seen.append(live.bytes())
            x = layer(x, angles)
    first = seen[1] - seen[0]
    # the first layer stays, and two layers at most are on their way out
    assert max(seen) < 3.3 * first + seen[0]
    x.sum().backward()


def test_backward_fetches_one_layer_ahead():
    stack = Stack(6)
    offload = make_offload()
    fetched = []
    with offload.micro_batch(1.0, 6) as mine:
        x, angles = batch(64, 64, 1), torch.rand(64, 16)
        for index, layer in enumerate(stack.layers):
            mine.layer(index, x)
            # runs in backward when layer `index` is done
            x.register_hook(lambda _, index=index: fetched.append((index, offload.take_metrics().bytes_in)))
            x = layer(x, angles)
    layer_bytes, rest = divmod(offload.take_metrics().bytes_out, 4)
    assert rest == 0
    x.sum().backward()
    # While layer i runs, what layer i - 1 needs is on its way. Layers 5 and 0 sent nothing.
    assert fetched == [(5, layer_bytes), (4, layer_bytes), (3, layer_bytes), (2, layer_bytes), (1, 0), (0, 0)]


@pytest.mark.parametrize("streams", STREAMS)
def test_nothing_is_left_over_200_steps_of_changing_shapes(streams):
    draw = random.Random(11)
    stack = Stack(4, hidden=32)
    offload = make_offload(2**22, streams=STREAMS[streams](), min_bytes=512)
    stack(batch(8, 32, 0)).sum().backward()  # gradients exist from here on
    for step in range(200):
        live = LiveBytes()
        with live if step % 10 == 0 else contextlib.nullcontext():
            losses = [
                stack(batch(draw.randrange(4, 64), 32, step), offload, draw.random(), draw.choice(RECOMPUTE)).sum()
                for _ in range(draw.randrange(1, 4))
            ]
            if step % 4 == 0:
                losses.pop()  # a graph that dies unused
            while losses:
                losses.pop(0).backward()
        assert offload.arena.bytes_in_use == 0
        assert live.bytes() == 0
    assert offload.arena.largest_free == offload.arena.bytes
    gc.collect()
    assert not [thing for thing in gc.get_objects() if type(thing) is Entry]


def test_a_full_arena_keeps_tensors_on_the_device():
    stack = Stack(5)
    plain = run(stack, "f0 b0", None, [1.0], None)
    offload = make_offload(2**16, streams=LateStreams())
    assert_equal(run(stack, "f0 b0", offload, [1.0], None), plain)
    metrics = offload.take_metrics()
    assert metrics.bytes_kept > 0
    assert 0 < metrics.bytes_out <= metrics.arena_high_water <= metrics.arena_bytes == 2**16
    assert offload.arena.bytes_in_use == 0


def test_a_full_arena_is_an_error_if_asked_for_and_leaves_nothing():
    stack = Stack(5)
    offload = make_offload(2**16, keep_when_full=False)
    with pytest.raises(
        ConfigError,
        match=r"layer 1 has \d+ bytes to move to the host, whose arena of 65536 bytes has \d+ bytes in use and "
        r"\d+ bytes as its largest free block: raise --hdp-offload-gib",
    ):
        stack(batch(64, 64, 0), offload, 1.0)
    assert offload.active is None
    gc.collect()
    assert offload.arena.bytes_in_use == 0
    plain, moved = (run(stack, "f0 b0", mine, [0.02], None) for mine in (None, offload))
    assert_equal(moved, plain)


def test_metrics_are_of_one_step():
    stack = Stack(4)
    offload = make_offload(streams=LateStreams())
    run(stack, "f0 b0", offload, [1.0], None)
    first = offload.take_metrics()
    assert first.bytes_out == first.bytes_in > 0
    assert 0 < first.bytes_out <= first.arena_high_water < 1.1 * first.bytes_out
    assert first.wait_seconds > 0
    assert first.wait_seconds % 0.25 == 0  # a quarter of a second for each time compute waited
    run(stack, "f0 b0", offload, [0.5], None)
    second = offload.take_metrics()
    assert second.bytes_out == pytest.approx(first.bytes_out / 2, rel=0.05)
    assert second.arena_high_water < 0.6 * first.arena_high_water
    idle = offload.take_metrics()
    assert (idle.bytes_out, idle.bytes_in, idle.wait_seconds, idle.arena_high_water) == (0, 0, 0.0, 0)


@pytest.mark.parametrize("ratio", [-0.1, 1.1, float("nan")])
def test_ratios_out_of_range_are_refused(ratio):
    with pytest.raises(ConfigError, match=f"the ratio is {ratio}, must be from 0 to 1"):
        make_offload().micro_batch(ratio, 4)


def test_wrong_counts_of_layers_are_refused():
    offload = make_offload()
    with pytest.raises(ConfigError, match="0 layers, must be at least 1"):
        offload.micro_batch(0.5, 0)
    with pytest.raises(ConfigError, match=r"layer 4 began in .* of 4 layers"), offload.micro_batch(0.5, 4) as mine:
        mine.layer(4)


def test_layers_that_do_not_tell_are_an_error():
    offload = make_offload()
    with (
        pytest.raises(SeamError, match=r"none of 4 layers told that it begins.* call layer\(\)"),
        offload.micro_batch(0.5, 4),
    ):
        batch(32, 64, 0).exp()
    assert offload.active is None
