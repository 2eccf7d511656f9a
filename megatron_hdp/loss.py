"""Token-mean loss in the form Megatron's per-token path wants: local sum, local count, and both for the report."""

import torch
from torch import Tensor


def token_loss(losses_1T: Tensor, loss_mask_1T: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Sum of the masked token losses of one micro-batch, their count, and Megatron's report.

    Megatron sums gradients over all micro-batches and ranks and divides once by the number of tokens of the global
    batch, so any spread of sequences gives the exact token mean. A micro-batch without any token gives 0 and 0.

    Shapes: losses and mask [1, T]; sum fp32 scalar; count int32 scalar.
    """
    mask_T = loss_mask_1T.reshape(-1).float()
    total = torch.sum(losses_1T.reshape(-1).float() * mask_T)
    count = mask_T.sum().detach().to(torch.int)
    return total, count, {"lm loss": torch.cat([total.detach().view(1), count.view(1)])}
