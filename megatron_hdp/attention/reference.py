"""Attention of one whole sequence on one process in float64: the dull twin of the ring.

Shares no code with the kernels or the ring; gradients come from autograd.
"""

import torch
from torch import Tensor


def reference_attention(
    q_SHD: Tensor, k_SGD: Tensor, v_SGD: Tensor, softmax_scale: float, window: int | None = None
) -> Tensor:
    """Causal attention of one sequence in float64, differentiable.

    S tokens, H query heads, G key/value heads (dividing H), D head size; returns float64 [S, H, D]. With ``window``
    a token sees itself and the window - 1 tokens before it.
    """
    tokens, heads, _ = q_SHD.shape
    group = heads // k_SGD.shape[1]
    k_SHD = k_SGD.double().repeat_interleave(group, dim=1)
    v_SHD = v_SGD.double().repeat_interleave(group, dim=1)
    scores_HSK = torch.einsum("shd,khd->hsk", q_SHD.double(), k_SHD) * softmax_scale
    back = torch.arange(tokens, device=q_SHD.device)[:, None] - torch.arange(tokens, device=q_SHD.device)
    hidden = (back < 0) | (back >= (tokens if window is None else window))
    weights_HSK = scores_HSK.masked_fill(hidden, float("-inf")).softmax(dim=-1)
    return torch.einsum("hsk,khd->shd", weights_HSK, v_SHD)


def reference_gradients(
    q_SHD: Tensor, k_SGD: Tensor, v_SGD: Tensor, dout_SHD: Tensor, softmax_scale: float, window: int | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Output and the gradients of q, k and v for the output gradient ``dout_SHD``, all float64."""
    q, k, v = (tensor.detach().double().requires_grad_() for tensor in (q_SHD, k_SGD, v_SGD))
    out = reference_attention(q, k, v, softmax_scale, window)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), dout_SHD.double())
    return out.detach(), dq, dk, dv
