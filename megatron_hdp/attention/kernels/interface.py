"""What a block kernel is: attention of packed segments, with log-sum-exp, forward and backward.

Shapes: T query rows and K key rows of all segments together, H query heads, G key/value heads (dividing H), D head
size.
A kernel's backward takes the *final* output and log-sum-exp of the rows, not those of the block: that is what makes
the gradients of the blocks of a row add up (FlashAttention's backward, Dao et al. 2022, section 3.1; used blockwise
by ring attention, Liu et al. 2023).
"""

from typing import Protocol

import torch
from torch import Tensor

from megatron_hdp.attention.segments import Segments

__all__ = ["BlockKernel", "Segments", "accumulate_dtype"]


class BlockKernel(Protocol):
    """One implementation of block attention. Results must not depend on earlier calls, nor on chance."""

    @property
    def name(self) -> str:
        """Name for flags, logs and the doctor."""

    def forward(
        self, q_THD: Tensor, k_KGD: Tensor, v_KGD: Tensor, segments: Segments, *, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Output [T, H, D] in the dtype of q and log-sum-exp [T, H] in `accumulate_dtype`."""

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
        """Contribution of the block to the gradients of q, k and v, given the rows' final output and log-sum-exp."""


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """Type in which partial results are merged and gradients travel: fp32, or fp64 for fp64 inputs."""
    return torch.float64 if dtype == torch.float64 else torch.float32
