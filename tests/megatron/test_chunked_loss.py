"""Output layer and loss in chunks: equal to the whole at once, one gradient per weight, no logits of all rows."""

import pytest
import torch
import torch.nn.functional as F
from forked import run_ranks
from live_bytes import LiveBytes

from megatron_hdp.loss import OutputLayer, chunk_rows, chunked_losses, token_loss

HERE = __file__.rpartition("/")[0]


def problem(tokens, hidden, vocabulary, dtype=torch.float32):
    """Leaves h [T, 1, D] and weight [V, D], labels [1, T], and a mask [1, T] with zeros."""
    generator = torch.Generator().manual_seed(0)
    h_T1D = torch.randn(tokens, 1, hidden, generator=generator).to(dtype).requires_grad_()
    weight = (torch.randn(vocabulary, hidden, generator=generator) / 8).to(dtype).requires_grad_()
    labels_1T = torch.randint(0, vocabulary, (1, tokens), generator=generator)
    mask_1T = (torch.rand(1, tokens, generator=generator) < 0.9).float()
    return h_T1D, weight, labels_1T, mask_1T


def output_layer(weight):
    def losses(h_R1D, labels_1R):
        logits_RV = h_R1D.squeeze(1) @ weight.t()
        logits_RV = logits_RV if logits_RV.dtype == torch.float64 else logits_RV.float()
        return F.cross_entropy(logits_RV, labels_1R[0], reduction="none")[None]

    return losses


def gradients(h_T1D, weight, labels_1T, mask_1T, rows):
    """Losses and both gradients; ``rows`` None: all at once."""
    h, w = (x.detach().clone().requires_grad_() for x in (h_T1D, weight))
    losses = output_layer(w)
    losses_1T = losses(h, labels_1T) if rows is None else chunked_losses(OutputLayer(losses, (w,)), h, labels_1T, rows)
    token_loss(losses_1T, mask_1T)[0].backward()
    return losses_1T.detach(), h.grad, w.grad


def relative(a, b):
    return float((a.double() - b.double()).norm() / b.double().norm())


@pytest.mark.parametrize("rows", [1, 7, 64, 199, 200, 1000])
def test_equal_to_the_whole_at_once(rows):
    inputs = problem(200, 16, 50)
    for ours, whole in zip(gradients(*inputs, rows), gradients(*inputs, None)):
        assert ours.dtype == whole.dtype
        assert relative(ours, whole) < 1e-6


def test_bf16_gradients_are_about_as_exact_as_of_the_whole():
    """Autograd's sum of bf16 gradients over chunks (torch.utils.checkpoint) is 5 times as far away."""
    inputs = problem(2048, 32, 256, torch.bfloat16)
    exact = gradients(*(x.detach().double() if x.is_floating_point() else x for x in inputs), None)
    whole, ours = gradients(*inputs, None), gradients(*inputs, 16)
    for a, b, c in zip(ours, whole, exact):
        assert relative(a, c) < 1.5 * relative(b, c)


def test_a_weight_gets_one_gradient():
    h, weight, labels, _ = problem(40, 8, 20)
    calls = []
    accumulate = weight.expand_as(weight).grad_fn.next_functions[0][0]  # where Megatron hooks its gradient reduction
    accumulate.register_hook(lambda *unused: calls.append(weight.grad.clone()))
    chunked_losses(OutputLayer(output_layer(weight), (weight,)), h, labels, 3).sum().backward()
    assert len(calls) == 1
    assert torch.equal(calls[0], weight.grad)


def test_only_wanted_gradients_are_computed():
    h, weight, labels, mask = problem(40, 8, 20)
    _, dh, dweight = gradients(h, weight, labels, mask, None)
    for frozen in (h, weight):
        frozen.requires_grad_(False)
        h.grad = weight.grad = None
        losses = chunked_losses(OutputLayer(output_layer(weight), (weight,)), h, labels, 16)
        token_loss(losses, mask)[0].backward()
        frozen.requires_grad_()
        found = [(h.grad, dh), (weight.grad, dweight)]
        assert frozen.grad is None
        assert all(relative(ours, whole) < 1e-6 for ours, whole in found if ours is not None)
        assert sum(ours is not None for ours, _ in found) == 1


def test_gradients_that_the_layer_adds_itself_are_not_added_again():
    """As with Megatron's fusion of gradient accumulation: autograd gets a token for the weight's gradient."""
    h, weight, labels, _ = problem(40, 8, 20)
    whole = gradients(h, weight, labels, torch.ones(1, 40), None)[2]
    main_gradient = torch.zeros_like(weight)

    class Fused(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            ctx.save_for_backward(x, w)
            return x @ w.t()

        @staticmethod
        def backward(ctx, dy):
            x, w = ctx.saved_tensors
            main_gradient.add_(dy.t() @ x)
            return dy @ w, torch.full_like(w, 7.0)

    def losses(h_R1D, labels_1R):
        return F.cross_entropy(Fused.apply(h_R1D.squeeze(1), weight), labels_1R[0], reduction="none")[None]

    chunked_losses(OutputLayer(losses, (weight,), added_elsewhere=(weight,)), h, labels, 16).sum().backward()
    assert relative(main_gradient, whole) < 1e-6
    assert torch.equal(weight.grad, torch.full_like(weight, 7.0))


def test_logits_of_all_rows_never_exist():
    """8K tokens x 32K entries: 1 GiB of fp32 logits. Chunks of 256 MiB need a few of them, forward and backward."""
    h, weight, labels, mask = problem(8192, 8, 32768)
    rows = chunk_rows(32768)
    assert rows * 32768 * 4 == 256 * 2**20
    with LiveBytes() as memory:
        losses = chunked_losses(OutputLayer(output_layer(weight), (weight,)), h, labels, rows)
        token_loss(losses, mask)[0].backward()
    assert memory.largest == 256 * 2**20
    assert 256 * 2**20 < memory.peak < 5 * 256 * 2**20
    # the meter sees what it is meant to see
    with LiveBytes() as memory:
        token_loss(output_layer(weight)(h[:4096], labels[:, :4096]), mask[:, :4096])[0].backward()
    assert memory.largest == 512 * 2**20


@pytest.mark.parametrize(
    ("vocabulary", "rows"), [(32768, 2048), (128256, 512), (16032, 4160), (2**18, 256), (2**30, 1)]
)
def test_default_chunks_fit_into_256_mib(vocabulary, rows):
    assert chunk_rows(vocabulary) == rows
    assert rows == 1 or rows * vocabulary * 4 <= 256 * 2**20


@pytest.mark.parametrize("ranks", [1, 2])
def test_megatrons_output_layer_in_chunks(ranks, tmp_path):
    """Its own vocab-parallel layer and loss, one process or two: tied and not, muP, fused loss, bf16, no gradients."""
    outcome = run_ranks(ranks, [f"{HERE}/chunked_loss.py"], tmp_path, launcher=False).check()
    assert outcome.output.count("all equal") == ranks
