"""A trial of the chosen kernel before training: what another version of a package computes is not taken on trust."""

import torch
from torch import Tensor

from megatron_hdp.attention.kernels.interface import BlockKernel, Segments
from megatron_hdp.attention.kernels.plain import ReferenceKernel
from megatron_hdp.errors import ConfigError

_HALF, _FULL = 0.05, 1e-3
"""Errors allowed in 16 bits and above, of the largest value: far above rounding, far below any mistake in meaning."""
TRIALS = (
    ("causal", Segments((37, 1, 70), (37, 1, 70), right=0)),
    ("windowed", Segments((37, 1, 70), (37, 1, 70), left=8, right=0)),
    ("full", Segments((40, 9), (70, 3))),
    ("edge", Segments((20,), (33,), left=0)),
)
"""One for every kind of segments that `Segments` knows."""


def try_kernel(
    kernel: BlockKernel, device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int
) -> None:
    """Compare ``kernel`` with the plain one on a few small blocks, forward and backward; some milliseconds.

    ``heads`` and ``kv_heads`` are those of one process. The global random state is left as it was.

    Raises ConfigError, with the size of the error, if the results differ by more than rounding.
    """
    plain = ReferenceKernel()
    limit = _HALF if dtype in (torch.float16, torch.bfloat16) else _FULL
    random = torch.Generator().manual_seed(1)
    for kind, segments in TRIALS:
        rows, keys = sum(segments.queries), sum(segments.keys)
        shapes = [(rows, heads), (rows, heads), (keys, kv_heads), (keys, kv_heads)]
        dout, q, k, v = (torch.randn(*shape, head_dim, generator=random).to(dtype).to(device) for shape in shapes)
        scale = head_dim**-0.5
        fresh = Segments(segments.queries, segments.keys, segments.left, segments.right)
        out, lse = kernel.forward(q, k, v, fresh, scale=scale)
        got = (out, lse, *kernel.backward(dout, q, k, v, out, lse, fresh, scale=scale))
        dout, q, k, v = (x.float() if limit == _HALF else x for x in (dout, q, k, v))
        out, lse = plain.forward(q, k, v, fresh, scale=scale)
        expected = (out, lse, *plain.backward(dout, q, k, v, out, lse, fresh, scale=scale))
        names = ("output", "log-sum-exp", "gradient of q", "gradient of k", "gradient of v")
        for name, ours, theirs in zip(names, got, expected):
            error = _error(ours, theirs)
            if not error <= limit:  # also where it is NaN
                raise ConfigError(
                    f"attention kernel {kernel.name} is wrong on this machine: the {name} of {kind} blocks (head size "
                    f"{head_dim}, {heads} query and {kv_heads} key/value heads, {dtype}) is off by {error:.2g} of its "
                    f"largest value, allowed are {limit:g}. Choose another with --hdp-kernel (`megatron-hdp doctor` "
                    "lists them), and report this with the version of the package that the kernel comes from"
                )


def _error(ours: Tensor, theirs: Tensor) -> float:
    """Largest difference over the largest value (at least 1: gradients may be zero); infinite for other shapes."""
    if ours.shape != theirs.shape:
        return float("inf")
    return float((ours.double() - theirs.double()).abs().max() / theirs.double().abs().max().clamp(min=1.0))
