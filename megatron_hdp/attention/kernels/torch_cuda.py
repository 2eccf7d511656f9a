"""torch's own flash attention for CUDA in its packed form; fp16 and bf16, head sizes up to 256.

Written against the op's schema and checked for shapes on torch's meta device; NOT YET RUN on a GPU. Its backward
adds dq with atomics unless `torch.use_deterministic_algorithms` is on, so bit-equal repeats need that switch.
"""

import torch
from torch import Tensor

from megatron_hdp.attention.kernels.varlen import Packing, VarlenKernel


def _forward(q: Tensor, k: Tensor, v: Tensor, packing: Packing, scale: float) -> tuple[Tensor, Tensor]:
    out_THD, lse_HT, *_ = torch.ops.aten._flash_attention_forward(
        q,
        k,
        v,
        packing.cumulative_queries,
        packing.cumulative_keys,
        packing.max_queries,
        packing.max_keys,
        0.0,
        packing.causal,
        False,
        scale=scale,
        window_size_left=packing.left,
    )
    return out_THD, lse_HT


def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse_HT: Tensor, packing: Packing, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    # The op wants the forward's random state even without dropout, which is the only reader of it.
    state = torch.zeros(2, dtype=torch.uint64, device=q.device)
    unused = torch.empty(0, device=q.device)
    dq, dk, dv = torch.ops.aten._flash_attention_backward(
        dout,
        q,
        k,
        v,
        out,
        lse_HT,
        packing.cumulative_queries,
        packing.cumulative_keys,
        packing.max_queries,
        packing.max_keys,
        0.0,
        packing.causal,
        state,
        unused,
        scale=scale,
        window_size_left=packing.left,
    )
    return dq, dk, dv


TORCH_CUDA_FLASH = VarlenKernel("torch_cuda_flash", _forward, _backward)
