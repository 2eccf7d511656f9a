"""Odd tensors: each is handled once and comes back as autograd would have kept it."""

import gc

import pytest
import torch
from offload_cases import CPU, LateStreams, LiveBytes, make_offload
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron_hdp.offload.context import ActivationOffload
from megatron_hdp.offload.entry import Gone, Kept
from megatron_hdp.offload.micro_batch import MicroBatch

KIB = 1024
LATE = pytest.mark.parametrize("make_streams", [lambda: None, LateStreams], ids=["cpu", "late"])


def middle(offload: ActivationOffload, ratio: float = 1.0) -> MicroBatch:
    """Context in which all that is saved is of the second of three layers."""

    class Middle(MicroBatch):
        def __enter__(self) -> MicroBatch:
            super().__enter__()
            self.layer(1)
            return self

    return Middle(offload, ratio, 3, frozenset((0, 2)))


class Save(torch.autograd.Function):
    """Saves what it is given; the gradient is 2 x, and ``seen`` gets what came back."""

    @staticmethod
    def forward(ctx, x, seen, *saved):
        ctx.save_for_backward(*saved)
        ctx.seen, ctx.count = seen, len(saved)
        return x * 1.0

    @staticmethod
    def backward(ctx, gradient):
        ctx.seen.append(ctx.saved_tensors)
        return 2 * gradient, None, *[None] * ctx.count


class Multiply(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.save_for_backward(factor)
        return x * factor

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[0], None


def carried(offload: ActivationOffload, *saved: Tensor, ratio: float = 1.0) -> tuple[Tensor, ...]:
    """The tensors as they come back."""
    x, seen = torch.ones(2, requires_grad=True), []
    with middle(offload, ratio):
        y = Save.apply(x, seen, *saved)
    y.sum().backward()
    return seen[0]


def assert_same(got: Tensor, wanted: Tensor) -> None:
    assert torch.equal(got, wanted)
    assert (got.dtype, got.size(), got.stride()) == (wanted.dtype, wanted.size(), wanted.stride())
    assert got.data_ptr() % 64 == wanted.data_ptr() % 64


def numbers(*size: int) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(sum(size)))


def test_parameters_and_their_views_never_leave():
    weight = nn.Parameter(numbers(64, 64))
    offload = make_offload()
    offload.protect([weight])
    weight_t, part, flat = weight.t(), weight[3:60], weight.detach().flatten()
    got = carried(offload, weight, weight_t, part, flat, weight.data)
    assert offload.take_metrics().bytes_out == 0
    for mine, theirs in zip(got, (weight, weight_t, part, flat, weight.data)):
        assert mine.data_ptr() == theirs.data_ptr()


def test_leaves_that_need_a_gradient_stay():
    leaf = numbers(64, 64).requires_grad_()
    offload = make_offload()
    with middle(offload):
        y = (leaf * leaf).sum() + leaf.view(-1).exp().sum()
    assert offload.take_metrics().bytes_out == 64 * 64 * 4  # the exponentials, not the leaf
    y.backward()
    assert torch.allclose(leaf.grad, 2 * leaf + leaf.exp())


def test_tiny_tensors_stay_and_do_not_count():
    offload = make_offload(min_bytes=4 * KIB)
    tiny, large = numbers(1023), numbers(1024)
    got = carried(offload, tiny, large)
    assert offload.take_metrics().bytes_out == large.nbytes
    assert got[0].data_ptr() == tiny.data_ptr()
    assert_same(got[1], large)


def test_a_tiny_view_does_not_hold_a_large_storage():
    offload = make_offload(min_bytes=4 * KIB)
    x, seen = torch.ones(2, requires_grad=True), []
    with LiveBytes() as live:
        large = torch.randn(256, 256)
        row = large[5, 7:20]
        wanted = row.clone()
        with middle(offload):
            y = Save.apply(x, seen, row)
        del large, row
        assert live.bytes() < 4 * KIB
    y.sum().backward()
    assert torch.equal(seen[0][0], wanted)
    assert offload.take_metrics().bytes_out == 0


@LATE
def test_views_of_one_storage_are_copied_once_and_share_one_again(make_streams):
    offload = make_offload(streams=make_streams())
    base = numbers(32, 3 * 64)
    query, key, value = base.chunk(3, dim=-1)
    got = carried(offload, query, key, value, base, base.t(), base.view(torch.int32))
    assert offload.take_metrics().bytes_out == base.nbytes
    for mine, theirs in zip(got, (query, key, value, base, base.t(), base.view(torch.int32))):
        assert_same(mine, theirs)
    assert len({mine.untyped_storage().data_ptr() for mine in got}) == 1


@LATE
def test_a_small_view_of_a_storage_goes_alone(make_streams):
    offload = make_offload(streams=make_streams())
    base = numbers(4, 1000)
    rows = [base[i] for i in (1, 3)]
    got = carried(offload, *rows, base[1, 100:900])
    metrics = offload.take_metrics()
    assert sum(row.nbytes for row in rows) <= metrics.bytes_out < sum(row.nbytes for row in rows) + 2 * 512
    for mine, theirs in zip(got, (*rows, base[1, 100:900])):
        assert_same(mine, theirs)
    assert got[0].untyped_storage().data_ptr() == got[2].untyped_storage().data_ptr()


@LATE
@pytest.mark.parametrize("ratio", [0.4, 1.0])
def test_layouts_and_types(ratio, make_streams):
    tensors = [
        numbers(64, 48).t(),
        numbers(64, 48)[::3, 5:40:2],
        numbers(1, 512).expand(300, 512),
        numbers(7, 1, 600).transpose(0, 2),
        numbers(64, 64).to(torch.bfloat16),
        numbers(64, 64) > 0,
        torch.arange(1000),
        torch.complex(numbers(400), numbers(400)),
        numbers(1025).double()[1:],
        numbers(40, 64).unfold(0, 8, 2),
    ]
    offload = make_offload(streams=make_streams())
    for mine, theirs in zip(carried(offload, *tensors, ratio=ratio), tensors):
        assert_same(mine, theirs)
    assert offload.take_metrics().bytes_out > 0
    assert offload.arena.bytes_in_use == 0


def test_expanded_tensors_leave_at_their_true_size():
    offload = make_offload()
    wide = numbers(1, 512).expand(300, 512)
    carried(offload, wide)
    assert offload.take_metrics().bytes_out == 512 * 4


def test_what_is_not_plain_memory_of_the_device_stays():
    class Marked(Tensor):
        pass

    conjugate = torch.complex(numbers(600), numbers(600)).conj()
    offload = make_offload()
    odd = [
        numbers(64, 64).to_sparse(),
        torch.empty(64, 64, device="meta"),
        numbers(64, 64).as_subclass(Marked),
        conjugate,
        conjugate.imag,  # lazily negated
        torch.empty(0, 5),
    ]
    got = carried(offload, *odd)
    assert offload.take_metrics().bytes_out == 0
    assert got[0].is_sparse
    assert got[1].is_meta
    assert torch.equal(got[3], conjugate)
    assert torch.equal(got[4], conjugate.imag)
    assert got[5].shape == (0, 5)


@LATE
def test_a_split_tensor_is_put_together_again(make_streams):
    offload = make_offload(streams=make_streams())
    base = numbers(100, 333)
    with LiveBytes() as live:
        x, seen = torch.ones(2, requires_grad=True), []
        moved = base * 1.0
        wanted = moved.clone().numpy()
        del base
        with middle(offload, 0.37):
            y = Save.apply(x, seen, moved, moved.t())
        before = live.bytes()
        del moved
        left = live.bytes()
    assert before - left == 100 * 333 * 4  # its storage is gone; the rest lives on its own
    bytes_out = offload.take_metrics().bytes_out
    assert bytes_out == pytest.approx(0.37 * 100 * 333 * 4, abs=256)
    y.sum().backward()
    assert (seen[0][0].numpy() == wanted).all()
    assert (seen[0][1].numpy() == wanted.T).all()


@LATE
def test_tensors_saved_in_several_layers_leave_once_and_are_back_for_the_last(make_streams):
    offload = make_offload(streams=make_streams())
    x = numbers(64, 64).requires_grad_()
    results = []
    for on in (False, True):
        mine = offload.micro_batch(1.0 if on else 0.0, 5)
        with mine:
            hidden = x * 2.0
            for index in range(5):
                mine.layer(index, hidden)
                if index == 0:
                    hidden = hidden * 1.5
                elif index == 1:
                    shared = hidden.sin()  # saved by two operations of this layer, and by one of each that follows
                    hidden = hidden + shared * shared.exp()
                else:
                    hidden = hidden + shared * hidden.tanh()
        hidden.sum().backward()
        results.append((hidden.detach(), x.grad))
        x.grad = None
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    # Of layer 1: its input (saved by sin), sin, exp. Of 2 and 3: the tanh (as its result, and by the product).
    assert offload.take_metrics().bytes_out == (3 + 2) * x.nbytes
    assert offload.arena.bytes_in_use == 0


def test_tensors_saved_in_several_layers_are_fetched_ahead_of_the_first_that_needs_them():
    offload = make_offload()
    x, fetched = numbers(64, 64).requires_grad_(), []
    with offload.micro_batch(1.0, 5) as mine:
        hidden = x * 2.0
        for index in range(5):
            mine.layer(index, hidden)
            if index == 1:
                shared = torch.full((64, 64), 1.5)
            hidden = Multiply.apply(hidden, shared) if index in (1, 3) else hidden * 1.5
            hidden = hidden.tanh() if index in (1, 2, 3, 4) else hidden
            hidden.register_hook(lambda _, index=index: fetched.append((index, offload.take_metrics().bytes_in)))
    assert offload.take_metrics().bytes_out == 4 * x.nbytes
    hidden.sum().backward()
    # Runs when the layer above is done. Layer 4 asks for the tanh of 3 and for what 1 and 3 share.
    assert fetched == [(4, 0), (3, 2 * x.nbytes), (2, x.nbytes), (1, x.nbytes), (0, 0)]


def test_once_a_part_of_a_storage_left_the_rest_leaves_too():
    offload = make_offload(min_bytes=3000)  # no part of a row may leave
    x, seen = torch.ones(2, requires_grad=True), []
    with LiveBytes() as live:
        base = torch.randn(5, 1024)
        wanted = base.clone().numpy()
        rows = [base[1], base[3]]
        before = live.bytes()
        with middle(offload, 0.6):
            y = Save.apply(x, seen, *rows)
        del base, rows
        assert before - live.bytes() > 5 * 4096 - 64
    assert offload.take_metrics().bytes_out == 2 * 4096  # the second row alone would have stayed
    y.sum().backward()
    for mine, row in zip(seen[0], (1, 3)):
        assert (mine.numpy() == wanted[row]).all()


def test_what_a_full_arena_kept_is_made_up_for():
    offload = make_offload(2**16, min_bytes=4096)
    large, small = numbers(2**16), [numbers(1024 + i)[i:] for i in range(8)]
    carried(offload, large, *small, ratio=0.5)
    metrics = offload.take_metrics()
    assert metrics.bytes_kept == large.nbytes / 2
    assert metrics.bytes_out >= 8 * 4096


@pytest.mark.parametrize("keep_last", [True, False])
def test_the_input_of_several_layers_that_are_recomputed_together_is_the_first_ones(keep_last):
    def pair(x: Tensor, first: int) -> Tensor:
        for index in (first, first + 1):
            offload.layer(index, x)
            x = x.exp().tanh()
        return x

    offload = make_offload()
    x, results = numbers(64, 64).requires_grad_(), []
    for ratio in (0.0, 1.0):
        with offload.micro_batch(ratio, 6, keep_last=keep_last):
            hidden = x * 2.0
            for first in (0, 2, 4):
                hidden = checkpoint(pair, hidden, first, use_reentrant=True)
        hidden.sum().backward()
        results.append(x.grad)
        x.grad = None
    assert torch.equal(*results)
    assert offload.take_metrics().bytes_out == 2 * x.nbytes  # those of layers 2 and 4


def test_a_last_layer_that_sends_is_fetched_with_the_one_before_it():
    offload = make_offload()
    x, fetched = numbers(64, 64).requires_grad_(), []
    with offload.micro_batch(1.0, 4, keep_last=False) as mine:
        hidden = x * 2.0
        for index in range(4):
            mine.layer(index)
            hidden.register_hook(lambda _: fetched.append(offload.take_metrics().bytes_in // x.nbytes))
            hidden = hidden.tanh()
    hidden.sum().backward()
    assert fetched == [2, 1, 0, 0]


def test_tensors_held_elsewhere_stay_usable():
    offload = make_offload()
    x = numbers(64, 64).requires_grad_()
    with middle(offload):
        hidden = x * 2.0
        y = hidden.exp().sum()
    assert torch.equal(hidden, x.detach() * 2.0)
    y.backward()
    assert torch.equal(x.grad, hidden.detach().exp() * 2.0)


def test_memory_that_is_used_again_is_not_taken_for_what_lay_there():
    # The allocator gives the same address to the next tensor of the same size.
    offload = make_offload()
    x = torch.ones(2, requires_grad=True)
    seen: list[tuple[Tensor, ...]] = []
    addresses, wanted = set(), []
    with middle(offload):
        for value in range(20):
            saved = torch.full((64, 64), float(value))
            addresses.add(saved.data_ptr())
            wanted.append(float(value))
            x = Save.apply(x, seen, saved)
            del saved
    x.sum().backward()
    assert len(addresses) < 20
    assert [float(saved[0, 0]) for (saved,) in reversed(seen)] == wanted


def changed_in_place(offload: ActivationOffload | None, ratio: float) -> tuple[Tensor, Tensor]:
    """Gradient with a factor that is changed after it was saved, and what is right."""
    x, factor = torch.ones(64, 64, requires_grad=True), numbers(64, 64)
    wanted = factor.clone()
    with middle(offload, ratio):
        y = Multiply.apply(x, factor)
        factor.add_(1.0)
        z = Multiply.apply(y, factor)  # the same storage at another version
    z.sum().backward()
    return x.grad, wanted * factor


def test_a_change_in_place_after_the_copy_does_no_harm():
    got, wanted = changed_in_place(make_offload(), 1.0)
    assert torch.equal(got, wanted)


def test_a_change_in_place_before_the_copy_is_over_is_the_error_of_autograd():
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation: \[torch.float32 \[64, 64\]\] was saved"):
        changed_in_place(make_offload(streams=LateStreams()), 1.0)


@LATE
@pytest.mark.parametrize("ratio", [0.01, 1.0])
def test_results_of_operations_in_place(ratio, make_streams):
    x, offload = numbers(64, 64).requires_grad_(), make_offload(streams=make_streams())
    with middle(offload, ratio):
        y = (x * 2.0).exp_().mul(3.0)
    y.sum().backward()
    assert torch.equal(x.grad, 3.0 * (x.detach() * 2.0).exp() * 2.0)


@pytest.mark.parametrize("ratio", [0.01, 1.0])
def test_a_change_in_place_of_what_stays_is_the_error_of_autograd(ratio):
    # with ratio 1 it stays as nothing is free
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        changed_in_place(make_offload(256), ratio)


@LATE
def test_a_second_backward_pass_over_the_same_graph(make_streams):
    offload = make_offload(streams=make_streams())
    x = numbers(64, 64).requires_grad_()
    with middle(offload):
        y = (x * 2.0).exp().tanh().sum()
    (first,) = torch.autograd.grad(y, x, retain_graph=True)
    (again,) = torch.autograd.grad(y, x, retain_graph=True)
    assert offload.take_metrics().bytes_in == 2 * x.nbytes  # fetched once
    (last,) = torch.autograd.grad(y, x)
    assert torch.equal(first, again)
    assert torch.equal(first, last)
    assert torch.equal(first, torch.autograd.grad((x * 2.0).exp().tanh().sum(), x)[0])


@LATE
def test_gradients_of_gradients(make_streams):
    offload = make_offload(streams=make_streams())
    x = numbers(64, 64).requires_grad_()
    results = []
    for ratio in (0.0, 1.0):
        with middle(offload, ratio):
            y = (x * x).tanh().sum()
        (gradient,) = torch.autograd.grad(y, x, create_graph=True)
        results.append(torch.autograd.grad(gradient.square().sum(), x)[0])
    assert torch.equal(*results)
    assert offload.take_metrics().bytes_in > 0


@LATE
def test_a_graph_that_dies_unused_gives_its_room_back(make_streams):
    offload = make_offload(streams=make_streams())
    x = numbers(64, 64).requires_grad_()
    with middle(offload):
        y = (x * 2.0).exp().tanh()
        part = (x * 3.0).exp()
        del part  # while the context is open
    assert offload.arena.bytes_in_use > 0
    del y
    assert offload.arena.bytes_in_use == 0
    assert offload.take_metrics().bytes_in == 0


def test_a_graph_that_dies_in_the_middle_of_backward_waits_for_what_it_fetched():
    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1.0

        @staticmethod
        def backward(ctx, gradient):
            raise ValueError("broken")

    streams = LateStreams()
    offload = make_offload(streams=streams)
    x = numbers(64, 64).requires_grad_()
    mine = offload.micro_batch(1.0, 4)
    with mine:
        hidden = x * 2.0
        for index in range(4):
            mine.layer(index, hidden)
            hidden = hidden.exp().tanh()
            if index == 2:
                hidden = Broken.apply(hidden)
    with pytest.raises(ValueError, match="broken"):
        hidden.sum().backward()
    del hidden
    gc.collect()
    assert offload.arena.bytes_in_use == 0
    assert offload.take_metrics().bytes_in > 0
    offload.close()  # LateStreams looks whether the targets lived until their copies were over


def broken_forward(offload: ActivationOffload, x: Tensor) -> None:
    with middle(offload):
        (x * 2.0).exp()
        raise ValueError("stop")


@LATE
def test_an_error_in_the_middle_of_forward_leaves_nothing(make_streams):
    offload = make_offload(streams=make_streams())
    x = numbers(64, 64).requires_grad_()
    with LiveBytes() as live:
        with pytest.raises(ValueError, match="stop"):
            broken_forward(offload, x)
        gc.collect()
        assert live.bytes() == 0
    assert offload.arena.bytes_in_use == 0
    assert offload.active is None
    y = (x * 2.0).exp()  # no hooks are left
    y.sum().backward()
    assert offload.take_metrics().bytes_in == 0


@LATE
def test_outputs_that_are_emptied_and_made_again(make_streams):
    # Selective recompute: the output's memory is given up after its user ran, and filled again during backward.
    offload = make_offload(streams=make_streams())
    x = numbers(64, 64).requires_grad_()
    results = []
    for ratio in (0.0, 1.0):
        with middle(offload, ratio):
            hidden = (x * 2.0).detach().requires_grad_() * 1.0
            out = Multiply.apply(x, hidden)
            size, content = hidden.untyped_storage().nbytes(), hidden.detach().clone()
            hidden.untyped_storage().resize_(0)
            out = out.exp()

        def fill(_: Tensor, hidden: Tensor = hidden, size: int = size, content: Tensor = content) -> None:
            hidden.untyped_storage().resize_(size)
            hidden.untyped_storage().copy_(content.untyped_storage())

        out.register_hook(fill)
        out.sum().backward()
        results.append(x.grad)
        x.grad = None
    assert torch.equal(*results)
    assert offload.arena.bytes_in_use == 0


def test_backward_inside_of_the_context():
    offload = make_offload(streams=LateStreams())
    x = numbers(64, 64).requires_grad_()
    with middle(offload):
        y = (x * 2.0).exp().tanh().sum()
        y.backward()
    got, x.grad = x.grad, None
    (x * 2.0).exp().tanh().sum().backward()
    assert torch.equal(got, x.grad)
    del y
    gc.collect()
    assert offload.arena.bytes_in_use == 0


def test_contexts_inside_of_each_other():
    offload = make_offload()
    with middle(offload) as outer:
        with offload.micro_batch(0.5, 3) as inner:
            assert offload.active is inner
            offload.layer(0)
        assert offload.active is outer
    assert offload.active is None
    offload.layer(7)  # no context: nothing to tell


def test_without_grad_and_with_ratio_0_there_are_no_hooks():
    offload = make_offload()
    x = numbers(64, 64).requires_grad_()
    with middle(offload, 0.0):
        y = x.exp()
        assert y.grad_fn._saved_result is not None
        assert not hasattr(y.grad_fn._raw_saved_result, "data") or not isinstance(
            y.grad_fn._raw_saved_result.data, Gone | Kept
        )
    with torch.no_grad(), middle(offload, 1.0) as mine:
        x.exp()
        assert mine._hooks is None
    with offload.micro_batch(1.0, 2) as mine:  # the first and the last are all there are
        assert mine._hooks is None


def test_the_first_and_the_last_layer_keep_what_they_saved_unless_told_otherwise():
    x = numbers(64, 64).requires_grad_()
    for keep, bytes_out in (
        ({}, 2),
        ({"keep_first": False}, 3),
        ({"keep_last": False}, 3),
        ({"keep_first": False, "keep_last": False}, 4),
    ):
        offload = make_offload()
        with offload.micro_batch(1.0, 4, **keep) as mine:
            hidden = (x * 2.0).exp()  # before the layers
            for index in range(4):
                mine.layer(index)
                hidden = hidden.tanh()
        assert offload.take_metrics().bytes_out == bytes_out * x.nbytes
        hidden.sum().backward()
        assert offload.arena.bytes_in_use == 0


def test_tensors_of_another_device_stay():
    offload = make_offload()
    offload.arena.device = torch.device("meta")  # what is on the CPU is elsewhere now
    hidden = numbers(64, 64)
    assert carried(offload, hidden)[0].data_ptr() == hidden.data_ptr()
    assert offload.arena.device != CPU
    assert offload.take_metrics().bytes_out == 0
