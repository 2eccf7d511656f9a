"""What the flash kernels for CUDA have in common: segments as cumulative lengths, one call for all of them.

They align a window with the *last* row and key of a segment where `Segments` counts from the first, want head sizes in
multiples of 8, and keep the log-sum-exp as [H, T] in fp32.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from megatron_hdp.attention.kernels.interface import Segments
from megatron_hdp.attention.placing import placed


@dataclass(frozen=True, eq=False)
class Packing:
    """Segments in the words of the flash kernels."""

    cumulative_queries: Tensor
    """First query row of every segment, and the end: int32 [segments + 1]."""
    cumulative_keys: Tensor
    max_queries: int
    """Upper bound of the query rows of a segment."""
    max_keys: int
    causal: bool
    left: int | None
    """Keys before the diagonal that ends at the last row and key; None is no limit."""


@dataclass(frozen=True)
class VarlenKernel:
    """A block kernel made of a flash forward and backward.

    Attributes:
        name: see `BlockKernel`.
        run_forward: (q, k, v, packing, scale) -> output [T, H, D], log-sum-exp [H, T].
        run_backward: (dout, q, k, v, out, log-sum-exp [H, T], packing, scale) -> gradients of q, k and v.
    """

    name: str
    run_forward: Callable[[Tensor, Tensor, Tensor, Packing, float], tuple[Tensor, Tensor]]
    run_backward: Callable[
        [Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Packing, float], tuple[Tensor, Tensor, Tensor]
    ]

    def forward(
        self, q_THD: Tensor, k_KGD: Tensor, v_KGD: Tensor, segments: Segments, *, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See `BlockKernel.forward`."""
        if not segments.queries:  # the kernels refuse a batch of none
            return torch.empty_like(q_THD), q_THD.new_empty(q_THD.shape[:2], dtype=torch.float32)
        size = q_THD.shape[-1]
        q, k, v = (_pad_heads(x) for x in (q_THD, k_KGD, v_KGD))
        out_THD, lse_HT = self.run_forward(q, k, v, packing(segments, q.device), scale)
        return out_THD[..., :size], lse_HT.T

    def backward(
        self,
        dout_THD: Tensor,
        q_THD: Tensor,
        k_KGD: Tensor,
        v_KGD: Tensor,
        out_THD: Tensor,
        lse_TH: Tensor,
        segments: Segments,
        *,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `BlockKernel.backward`."""
        if not segments.queries:
            return torch.empty_like(q_THD), torch.empty_like(k_KGD), torch.empty_like(v_KGD)
        size = q_THD.shape[-1]
        dout, q, k, v, out = (_pad_heads(x) for x in (dout_THD, q_THD, k_KGD, v_KGD, out_THD))
        lse_HT = lse_TH.T.contiguous()
        gradients = self.run_backward(dout, q, k, v, out, lse_HT, packing(segments, q.device), scale)
        dq, dk, dv = (gradient[..., :size] for gradient in gradients)
        return dq, dk, dv


def packing(segments: Segments, device: torch.device) -> Packing:
    """The segments as a flash kernel takes them; made once per object and device."""
    return segments.derive(("packing", device), lambda: _packing(segments, device))


def _packing(segments: Segments, device: torch.device) -> Packing:
    causal = segments.right == 0
    left = segments.left
    if left is not None:
        # A kernel reads a negative number as no limit at all, so none may get through.
        left += segments.keys[0] - segments.queries[0]
        assert left >= 0, f"a window of {segments.left} with {segments.queries[0]} queries, {segments.keys[0]} keys"
    return Packing(
        _cumulative(segments.queries, device),
        _cumulative(segments.keys, device),
        # With at most one row per segment flash-attn folds heads into rows, in a way of its own: not worth a path.
        max(2, *segments.queries),
        max(2, *segments.keys),
        causal,
        left,
    )


def _cumulative(rows: tuple[int, ...], device: torch.device) -> Tensor:
    ends = np.zeros(len(rows) + 1, dtype=np.int32)
    np.cumsum(rows, out=ends[1:])
    return placed(torch.from_numpy(ends), device)


def _pad_heads(x: Tensor) -> Tensor:
    """Head size up to a multiple of 8 and a dense last dimension; zeros change no product."""
    missing = -x.shape[-1] % 8
    if missing:
        return functional.pad(x, (0, missing))
    return x if x.stride(-1) == 1 else x.contiguous()
