"""Every kernel that this GPU and its packages offer, against the plain kernel in float64 on the same device."""

import os

import pytest
import torch
from torch import Tensor

from megatron_hdp.attention.kernels import Segments, available_kernels, named_kernel

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS refuses the deterministic switch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

LENGTHS = (1, 70, 2, 3, 300, 7, 31, 69, 3, 1030)


def causal(window: int | None = None) -> Segments:
    return Segments(LENGTHS, LENGTHS, None if window is None else window - 1, 0)


KINDS = {
    "causal": causal(),
    "single rows": Segments((1,) * 5, (1,) * 5, None, 0),
    **{f"window {w}": causal(w) for w in (1, 7, 64, 300, 1029, 1030)},
    "full": Segments((1, 1, 31, 70, 300, 3, 1030), (1, 7, 70, 31, 2, 300, 515)),
    "full, single rows": Segments((1,) * 4, (9, 300, 1, 70)),
    "edge": Segments((300, 31, 70, 31, 1), (303, 34, 73, 34, 4), 50, None),
}
HEADS = [(4, 4, 64), (8, 2, 128), (6, 1, 96), (2, 2, 20), (4, 2, 256)]
FAST = ["flash_attn_3", "flash_attn_4", "flash_attn_2", "transformer_engine", "torch_cuda_flash"]


def usable(name: str, dtype: torch.dtype, head_dim: int):
    """The kernel, or a skip with its reason."""
    found = {n: reason for n, _, reason in available_kernels(torch.device("cuda"), dtype, head_dim)}
    if found[name]:
        pytest.skip(found[name])
    return named_kernel(name)


def tensors(segments: Segments, heads: int, kv: int, dim: int, dtype: torch.dtype) -> list[Tensor]:
    """dout, q, k and v."""
    generator = torch.Generator("cuda").manual_seed(1)
    rows, keys = sum(segments.queries), sum(segments.keys)
    shapes = (rows, heads), (rows, heads), (keys, kv), (keys, kv)
    return [torch.randn(*shape, dim, generator=generator, device="cuda").to(dtype) for shape in shapes]


def results(kernel, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, segments: Segments) -> list[Tensor]:
    out, lse = kernel.forward(q, k, v, segments, scale=0.17)
    return [out, lse, *kernel.backward(dout, q, k, v, out, lse, segments, scale=0.17)]


def errors(got: list[Tensor], want: list[Tensor]) -> Tensor:
    """Largest error of each result, relative to its largest entry or to 4."""
    pairs = zip(got, want)
    return torch.stack([(g.double() - w).abs().max() / w.abs().max().clamp_min(4) for g, w in pairs]).cpu()


def one_call_errors(dim: int, dtype: torch.dtype) -> Tensor:
    """Errors of torch's dense flash attention on one sequence: what the type itself costs."""
    segments = Segments((1030,), (1030,), None, 0)
    inputs = tensors(segments, 4, 4, dim, dtype)
    want = results(named_kernel("reference"), *(x.double() for x in inputs), segments)
    dout, q, k, v = inputs
    leaves = [x.transpose(0, 1)[None].detach().requires_grad_() for x in (q, k, v)]
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
        out = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=True, scale=0.17)
    gradients = torch.autograd.grad(out, leaves, dout.transpose(0, 1)[None])
    dense = [x[0].transpose(0, 1) for x in (out, *gradients)]
    out_, *gradients_ = errors(dense, [want[0], *want[2:]])
    return torch.stack([out_, torch.tensor(1e-5).double(), *gradients_])


@pytest.mark.parametrize("name", FAST)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_against_the_plain_kernel(name, kind, heads):
    for dtype in (torch.bfloat16, torch.float16):
        kernel = usable(name, dtype, heads[2])
        inputs = tensors(KINDS[kind], *heads, dtype)
        want = results(named_kernel("reference"), *(x.double() for x in inputs), KINDS[kind])
        got = results(kernel, *inputs, KINDS[kind])
        assert [x.shape for x in got] == [x.shape for x in want]
        assert (errors(got, want) <= 2 * one_call_errors(heads[2], dtype) + 1e-6).all()


@pytest.mark.parametrize("kind", KINDS)
def test_the_plain_kernel_in_fp32(kind):
    inputs = tensors(KINDS[kind], 4, 2, 64, torch.float32)
    want = results(named_kernel("reference"), *(x.double() for x in inputs), KINDS[kind])
    assert errors(results(named_kernel("reference"), *inputs, KINDS[kind]), want).max() < 1e-5


@pytest.mark.parametrize("name", [*FAST, "reference"])
@pytest.mark.parametrize("kind", ["causal", "window 64", "full", "edge"])
def test_nothing_waits_and_repeats_are_bit_equal(name, kind):
    """With the deterministic switch on, in which flash backward adds in a fixed order."""
    kernel = usable(name, torch.bfloat16, 64)
    inputs = tensors(KINDS[kind], 4, 2, 64, torch.bfloat16)
    torch.use_deterministic_algorithms(True)
    torch.cuda.set_sync_debug_mode("error")
    try:
        kept = KINDS[kind]
        fresh = Segments(kept.queries, kept.keys, kept.left, kept.right)  # what is derived must not wait either
        runs = [results(kernel, *inputs, fresh) for _ in range(2)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
        torch.use_deterministic_algorithms(False)
    assert all(map(torch.equal, *runs))
