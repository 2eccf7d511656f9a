"""A kernel that computes something else is found before training."""

import pytest
import torch

from megatron_hdp.attention.kernels import named_kernel, try_kernel
from megatron_hdp.attention.kernels.plain import ReferenceKernel
from megatron_hdp.errors import ConfigError

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(8, 2, 64), (1, 1, 128), (6, 3, 20)])
@pytest.mark.parametrize("name", ["torch_cpu_flash", "reference"])
def test_good_kernels_pass(name, shape, dtype):
    state = torch.get_rng_state()
    try_kernel(named_kernel(name), CPU, dtype, *shape)
    assert torch.equal(state, torch.get_rng_state())


class Wrong(ReferenceKernel):
    """The plain kernel with one thing wrong."""

    name = "wrong"

    def __init__(self, what):
        self.what = what

    def forward(self, q, k, v, segments, *, scale):
        if self.what == "scale":
            scale = 1.0
        if self.what == "window" and segments.left is not None:
            segments = type(segments)(segments.queries, segments.keys, segments.left + 1, segments.right)
        out, lse = super().forward(q, k, v, segments, scale=scale)
        return out, lse * 1.4427 if self.what == "base 2" else lse

    def backward(self, dout, q, k, v, out, lse, segments, *, scale):
        dq, dk, dv = super().backward(dout, q, k, v, out, lse, segments, scale=scale)
        if self.what == "nan":
            dk = dk * float("nan")
        return (dq, dv, dk) if self.what == "order" else (dq, dk, dv)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("scale", "output of causal"),
        ("window", "output of windowed"),
        ("base 2", "log-sum-exp of causal"),
        ("order", "gradient of k of causal"),
        ("nan", "gradient of k of causal .* off by nan"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_wrong_kernels_are_refused(what, words, dtype):
    with pytest.raises(ConfigError, match=f"kernel wrong is wrong on this machine: the {words}"):
        try_kernel(Wrong(what), CPU, dtype, 8, 2, 64)
