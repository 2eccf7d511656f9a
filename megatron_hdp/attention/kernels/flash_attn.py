"""flash-attn 2, 3 (the Hopper package) and 4 (CuTe): their packed low-level entries.

Those take and give the log-sum-exp, which the public functions do not. Bound by argument name against the signatures of
flash-attn 2.7.0 to 2.8.4, the Hopper interface of 2.7.4 to 2.8.4 and flash-attn 4.0.0 beta 0 to 27; NOT YET RUN on a
GPU. Backward is deterministic when `torch.use_deterministic_algorithms` is on.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from megatron_hdp.attention.kernels.binding import Bound, Needs, UnusableError, bind, module, own_names, unusable
from megatron_hdp.attention.kernels.varlen import Packing, VarlenKernel

_PACKED = own_names(*("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "softmax_scale"))
_WINDOW = own_names("window_size_left", "window_size_right")
_ROWS = own_names("dout", "out", "deterministic")
_BUFFERS = own_names("dq", "dk", "dv")
_LSE: Needs = {"lse": ("softmax_lse",)}


@dataclass(frozen=True)
class _Package:
    """One version: how to find its entries, and how it writes that a window has no limit."""

    functions: Callable[[], tuple[Bound, Bound]]
    """Forward and backward. Raises UnusableError."""
    no_limit: int | None
    distributions: tuple[str, ...]
    """Names that it may be installed by."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, packing: Packing, scale: float) -> tuple[Tensor, Tensor]:
        """See `VarlenKernel.run_forward`."""
        values = self._values(q, k, v, packing, scale)
        out_THD, lse_HT, *_ = self.functions()[0](**values, return_softmax=False, return_lse=True)
        return out_THD, lse_HT

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse_HT: Tensor,
        packing: Packing,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `VarlenKernel.run_backward`."""
        function = self.functions()[1]
        values = self._values(q, k, v, packing, scale)
        values |= {"dout": dout, "out": out, "lse": lse_HT}
        values["deterministic"] = torch.are_deterministic_algorithms_enabled()
        if not function.takes("dq"):
            dq, dk, dv, *_ = function(**values)
            return dq, dk, dv
        # dense memory for the gradients, whatever the strides of the inputs
        dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
        function(**values, dq=dq, dk=dk, dv=dv)
        return dq, dk, dv

    def _values(self, q: Tensor, k: Tensor, v: Tensor, packing: Packing, scale: float) -> dict[str, Any]:
        """What forward and backward of all versions take together; each gets what it has an argument for."""
        left = self.no_limit if packing.left is None else packing.left
        right = 0 if packing.causal else self.no_limit
        return {
            "q": q,
            "k": k,
            "v": v,
            "cu_seqlens_q": packing.cumulative_queries,
            "cu_seqlens_k": packing.cumulative_keys,
            "max_seqlen_q": packing.max_queries,
            "max_seqlen_k": packing.max_keys,
            "softmax_scale": scale,
            "causal": packing.causal and packing.left is None,
            "window_size": (left, right),
            "window_size_left": left,
            "window_size_right": right,
            "dropout_p": 0.0,
            "softcap": 0.0,
        }


@lru_cache
def _bound_2(source: ModuleType) -> tuple[Bound, Bound]:
    plain = own_names("dropout_p", "causal")
    blanks = ("alibi_slopes", "rng_state", "block_table")
    extras = ("softcap", "return_softmax")
    forward = bind(source, "_flash_attn_varlen_forward", _PACKED | _WINDOW | plain, extras, blanks)
    needs = _PACKED | _WINDOW | plain | _ROWS | _BUFFERS | _LSE
    return forward, bind(source, "_flash_attn_varlen_backward", needs, extras, blanks)


_ABSENT_3 = (
    *("k_new", "v_new", "qv", "out", "cu_seqlens_k_new", "seqused_q", "seqused_k", "sequed_q", "sequed_k"),
    *("page_table", "kv_batch_idx", "leftpad_k", "rotary_cos", "rotary_sin", "seqlens_rotary"),
    *("q_descale", "k_descale", "v_descale"),
)
"""Inputs of the Hopper entries for serving; older ones give them no default."""


@lru_cache
def _bound_3(source: ModuleType) -> tuple[Bound, Bound]:
    causal: Needs = {"causal": ("causal", "is_causal")}
    backward_needs = _PACKED | causal | _ROWS | _BUFFERS | _LSE
    functions = (
        bind(source, "_flash_attn_forward", _PACKED | causal, ("window_size", *_WINDOW), _ABSENT_3),
        bind(source, "_flash_attn_backward", backward_needs, ("window_size", *_WINDOW), _ABSENT_3),
    )
    for function in functions:  # a pair in older versions
        if not function.takes("window_size") and not all(map(function.takes, _WINDOW)):
            raise UnusableError("the Hopper flash_attn_interface takes no window_size")
    return functions


@lru_cache
def _bound_4(source: ModuleType) -> tuple[Bound, Bound]:
    needs = _PACKED | _WINDOW | own_names("causal")
    forward = bind(source, "_flash_attn_fwd", needs | own_names("return_lse"))
    return forward, bind(source, "_flash_attn_bwd", needs | _ROWS | own_names("lse"))


_PACKAGES = {
    "flash_attn_2": _Package(
        lambda: _bound_2(module("flash_attn.flash_attn_interface", "flash-attn")), -1, ("flash-attn",)
    ),
    "flash_attn_3": _Package(
        lambda: _bound_3(module("flash_attn_interface", "flash-attn 3 (flash_attn_interface)")),
        -1,
        ("flash-attn-3", "flash_attn_3"),
    ),
    "flash_attn_4": _Package(
        lambda: _bound_4(module("flash_attn.cute.interface", "flash-attn-4 (flash_attn.cute)")),
        None,
        ("flash-attn-4", "fa4", "flash-attn"),
    ),
}
FLASH_ATTN_2, FLASH_ATTN_3, FLASH_ATTN_4 = (
    VarlenKernel(name, package.forward, package.backward) for name, package in _PACKAGES.items()
)


def unbound(kernel: VarlenKernel) -> str:
    """Why the installed package, if any, cannot be called; "" if it can."""
    package = _PACKAGES[kernel.name]
    return unusable(package.functions, *package.distributions)
