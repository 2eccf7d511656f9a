"""Blocks of a row merged into its attention over all of them."""

import torch
from torch import Tensor

from megatron_hdp.attention.kernels.interface import accumulate_dtype


class Merged:
    """Output [rows, H, D] and log-sum-exp [rows, H] of the blocks so far, in `accumulate_dtype`."""

    def __init__(self, q_THD: Tensor) -> None:
        dtype = accumulate_dtype(q_THD.dtype)
        self.out = q_THD.new_empty(q_THD.shape, dtype=dtype)
        self.lse = q_THD.new_empty(q_THD.shape[:2], dtype=dtype)
        self._begun = False

    def add(self, rows: tuple[int, int], block_out: Tensor, block_lse: Tensor) -> None:
        """Fold in one block's result for some rows; the first block must be of all rows.

        With weights w = exp(lse) the merged output is (w out + w' out') / (w + w'), which is
        out + sigmoid(lse' - lse)(out' - out).
        """
        out, lse = self.out[rows[0] : rows[1]], self.lse[rows[0] : rows[1]]
        if not self._begun:
            assert out.shape[0] == self.out.shape[0]
            out.copy_(block_out)
            lse.copy_(block_lse)
            self._begun = True
            return
        weight = torch.sigmoid(block_lse - lse)
        out.add_(weight[..., None] * (block_out.to(out.dtype) - out))
        torch.logaddexp(lse, block_lse, out=lse)
