"""Transformer Engine's fused attention (cuDNN) in its packed form, for segments without a window.

Bound by argument name against Transformer Engine 2.0 to 2.18; NOT YET RUN on a GPU. Windows go to torch's flash
attention: which of them cuDNN takes depends on its version and the GPU, in ways that only a run can tell.
"""

from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from megatron_hdp.attention.kernels.binding import Bound, bind, module, own_names, unusable
from megatron_hdp.attention.kernels.interface import Segments
from megatron_hdp.attention.kernels.torch_cuda import TORCH_CUDA_FLASH
from megatron_hdp.attention.kernels.varlen import Packing, VarlenKernel

_BOTH = (
    *("max_seqlen_q", "max_seqlen_kv", "cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded"),
    *("q", "k", "v", "fake_dtype", "fused_attention_backend", "attn_scale", "dropout", "qkv_layout"),
    *("attn_bias_type", "attn_mask_type", "window_size"),
)


@lru_cache
def _bound(source: ModuleType) -> tuple[Bound, Bound]:
    forward = own_names(*_BOTH, "is_training")
    backward = own_names(*_BOTH, "o", "d_o", "aux_ctx_tensors", "deterministic")
    extras = "o_format", "do_format", "dqkv_layout", "dqkv_dtype"
    return bind(source, "fused_attn_fwd", forward, extras), bind(source, "fused_attn_bwd", backward, extras)


def _source() -> ModuleType:
    return module("transformer_engine.pytorch.cpp_extensions.fused_attn", "transformer-engine")


def _values(q: Tensor, k: Tensor, v: Tensor, packing: Packing, scale: float) -> dict[str, Any]:
    """What forward and backward take."""
    return {
        # cuDNN builds a plan for each longest length that it meets, and takes any that is not too short.
        "max_seqlen_q": _power_of_two(packing.max_queries),
        "max_seqlen_kv": _power_of_two(packing.max_keys),
        "cu_seqlens_q": packing.cumulative_queries,
        "cu_seqlens_kv": packing.cumulative_keys,
        "cu_seqlens_q_padded": packing.cumulative_queries,
        "cu_seqlens_kv_padded": packing.cumulative_keys,
        "q": q,
        "k": k,
        "v": v,
        "fake_dtype": q.dtype,
        "fused_attention_backend": _source().FusedAttnBackend["F16_arbitrary_seqlen"],
        "attn_scale": scale,
        "dropout": 0.0,
        "qkv_layout": "thd_thd_thd",
        "o_format": "thd",
        "attn_bias_type": "no_bias",
        "attn_mask_type": "padding_causal" if packing.causal else "padding",
        "window_size": (-1, 0) if packing.causal else (-1, -1),
    }


def _power_of_two(rows: int) -> int:
    return 1 << (rows - 1).bit_length()


def _forward(q: Tensor, k: Tensor, v: Tensor, packing: Packing, scale: float) -> tuple[Tensor, Tensor]:
    q, k, v = (x.contiguous() for x in (q, k, v))
    out_THD, auxiliary, *_ = _bound(_source())[0](**_values(q, k, v, packing, scale), is_training=True)
    return out_THD, auxiliary[0].squeeze(-1).T  # [T, H, 1]


def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse_HT: Tensor, packing: Packing, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    dout, q, k, v, out = (x.contiguous() for x in (dout, q, k, v, out))
    function = _bound(_source())[1]
    # The random state of the forward is read by dropout only.
    state = torch.zeros(2, dtype=torch.int64, device=q.device)
    old = {"dqkv_dtype": _engine_dtype(q.dtype)} if function.takes("dqkv_dtype") else {}
    dq, dk, dv, *_ = function(
        **_values(q, k, v, packing, scale),
        **old,
        o=out,
        d_o=dout,
        aux_ctx_tensors=[lse_HT.T.contiguous()[..., None], state],
        do_format="thd",
        dqkv_layout="thd_thd_thd",
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    return dq, dk, dv


def _engine_dtype(dtype: torch.dtype) -> Any:
    return module("transformer_engine.pytorch.constants", "transformer-engine").TE_DType[dtype]


_FUSED = VarlenKernel("transformer_engine", _forward, _backward)


@dataclass(frozen=True)
class TransformerEngineKernel:
    """Fused attention, and torch's flash attention where there is a window."""

    name: str = "transformer_engine"

    def forward(
        self, q_THD: Tensor, k_KGD: Tensor, v_KGD: Tensor, segments: Segments, *, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See `BlockKernel.forward`."""
        return _serving(segments).forward(q_THD, k_KGD, v_KGD, segments, scale=scale)

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
        kernel = _serving(segments)
        return kernel.backward(dout_THD, q_THD, k_KGD, v_KGD, out_THD, lse_TH, segments, scale=scale)


def _serving(segments: Segments) -> VarlenKernel:
    return _FUSED if segments.left is None else TORCH_CUDA_FLASH


TRANSFORMER_ENGINE = TransformerEngineKernel()


def unbound() -> str:
    """Why the installed package, if any, cannot be called; "" if it can."""
    return unusable(lambda: _bound(_source()), "transformer-engine")
