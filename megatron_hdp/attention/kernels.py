"""Block kernels: attention of some queries against some keys, with log-sum-exp, forward and backward.

Shapes: B sequences of equal length, S queries, K keys, H query heads, G key/value heads (dividing H), D head size.
A kernel's backward takes the *final* output and log-sum-exp of the rows, not those of the block: that is what makes
the gradients of the blocks of a row add up (FlashAttention's backward, Dao et al. 2022, section 3.1; used blockwise
by ring attention, Liu et al. 2023).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from megatron_hdp.errors import ConfigError


class BlockKernel(Protocol):
    """One implementation of block attention."""

    @property
    def name(self) -> str:
        """Name for flags, logs and the doctor."""

    def forward(
        self, q_BSHD: Tensor, k_BKGD: Tensor, v_BKGD: Tensor, *, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Output [B, S, H, D] in the dtype of q and log-sum-exp [B, S, H] in `accumulate_dtype`.

        S and K are at least 1; ``causal`` is only asked for with S == K.
        """

    def backward(
        self,
        dout_BSHD: Tensor,
        q_BSHD: Tensor,
        k_BKGD: Tensor,
        v_BKGD: Tensor,
        out_BSHD: Tensor,
        lse_BSH: Tensor,
        *,
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Contribution of the block to the gradients of q, k and v, given the rows' final output and log-sum-exp."""


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """Type in which partial results are merged and gradients travel: fp32, or fp64 for fp64 inputs."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class ReferenceKernel:
    """Plain matmul and softmax with a hand-written backward; any device and dtype, S x K memory."""

    name = "reference"

    def forward(
        self, q_BSHD: Tensor, k_BKGD: Tensor, v_BKGD: Tensor, *, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See `BlockKernel.forward`."""
        scores = _scores(q_BSHD, k_BKGD, causal, scale)
        lse_BGRS = scores.logsumexp(dim=-1)
        weights = (scores - lse_BGRS[..., None]).exp()
        out = torch.einsum("bgrsk,bkgd->bsgrd", weights, v_BKGD.to(weights.dtype))
        return out.reshape(q_BSHD.shape).to(q_BSHD.dtype), lse_BGRS.flatten(1, 2).transpose(1, 2)

    def backward(
        self,
        dout_BSHD: Tensor,
        q_BSHD: Tensor,
        k_BKGD: Tensor,
        v_BKGD: Tensor,
        out_BSHD: Tensor,
        lse_BSH: Tensor,
        *,
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `BlockKernel.backward`."""
        scores = _scores(q_BSHD, k_BKGD, causal, scale)
        heads_kv = k_BKGD.shape[2]
        dtype = scores.dtype
        lse = lse_BSH.transpose(1, 2).unflatten(1, (heads_kv, -1))
        weights = (scores - lse[..., None]).exp()
        dout = dout_BSHD.to(dtype).unflatten(2, (heads_kv, -1))
        out = out_BSHD.to(dtype).unflatten(2, (heads_kv, -1))
        q = q_BSHD.to(dtype).unflatten(2, (heads_kv, -1))
        dv = torch.einsum("bgrsk,bsgrd->bkgd", weights, dout)
        dweights = torch.einsum("bsgrd,bkgd->bgrsk", dout, v_BKGD.to(dtype))
        row = (dout * out).sum(dim=-1).permute(0, 2, 3, 1)
        dscores = weights * (dweights - row[..., None]) * scale
        dq = torch.einsum("bgrsk,bkgd->bsgrd", dscores, k_BKGD.to(dtype)).reshape(q_BSHD.shape)
        dk = torch.einsum("bgrsk,bsgrd->bkgd", dscores, q)
        return dq.to(q_BSHD.dtype), dk.to(k_BKGD.dtype), dv.to(v_BKGD.dtype)


def _scores(q_BSHD: Tensor, k_BKGD: Tensor, causal: bool, scale: float) -> Tensor:
    """Scaled scores [B, G, H/G, S, K] with the future at minus infinity."""
    dtype = accumulate_dtype(q_BSHD.dtype)
    q_BSGRD = q_BSHD.to(dtype).unflatten(2, (k_BKGD.shape[2], -1))
    scores = torch.einsum("bsgrd,bkgd->bgrsk", q_BSGRD, k_BKGD.to(dtype)) * scale
    if causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(diagonal=1)
        scores = scores.masked_fill(future, float("-inf"))
    return scores


class TorchCpuFlashKernel:
    """torch's flash attention for CPU: blocked, no S x K memory.

    The op and its backward take fewer key/value heads than query heads, S shorter or longer than K, single rows and
    every head size from 8 to 256 (all tested against float64), so no shape needs a detour.
    """

    name = "torch_cpu_flash"

    def forward(
        self, q_BSHD: Tensor, k_BKGD: Tensor, v_BKGD: Tensor, *, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See `BlockKernel.forward`."""
        out_BHSD, lse_BHS = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q_BSHD.transpose(1, 2), k_BKGD.transpose(1, 2), v_BKGD.transpose(1, 2), 0.0, causal, scale=scale
        )
        return out_BHSD.transpose(1, 2), lse_BHS.transpose(1, 2)

    def backward(
        self,
        dout_BSHD: Tensor,
        q_BSHD: Tensor,
        k_BKGD: Tensor,
        v_BKGD: Tensor,
        out_BSHD: Tensor,
        lse_BSH: Tensor,
        *,
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `BlockKernel.backward`."""
        rows = (tensor.transpose(1, 2) for tensor in (dout_BSHD, q_BSHD, k_BKGD, v_BKGD, out_BSHD, lse_BSH))
        gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(*rows, 0.0, causal, scale=scale)
        dq, dk, dv = (gradient.transpose(1, 2) for gradient in gradients)
        return dq, dk, dv


class TorchCudaFlashKernel:
    """torch's own flash attention for CUDA, dense form; fp16 and bf16, head sizes up to 256.

    Written against the op's schema and checked for shapes on torch's meta device; NOT YET RUN on a GPU. Its backward
    adds dq with atomics unless `torch.use_deterministic_algorithms` is on, so bit-equal repeats need that switch.
    """

    name = "torch_cuda_flash"

    def forward(
        self, q_BSHD: Tensor, k_BKGD: Tensor, v_BKGD: Tensor, *, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See `BlockKernel.forward`."""
        head_dim = q_BSHD.shape[-1]
        q, k, v = (_pad_heads(tensor) for tensor in (q_BSHD, k_BKGD, v_BKGD))
        out, lse_BHS, *_ = torch.ops.aten._flash_attention_forward(
            q, k, v, None, None, q.shape[1], k.shape[1], 0.0, causal, False, scale=scale
        )
        return out[..., :head_dim], lse_BHS.transpose(1, 2)

    def backward(
        self,
        dout_BSHD: Tensor,
        q_BSHD: Tensor,
        k_BKGD: Tensor,
        v_BKGD: Tensor,
        out_BSHD: Tensor,
        lse_BSH: Tensor,
        *,
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `BlockKernel.backward`."""
        head_dim = q_BSHD.shape[-1]
        dout, q, k, v, out = (_pad_heads(tensor) for tensor in (dout_BSHD, q_BSHD, k_BKGD, v_BKGD, out_BSHD))
        # The op wants the forward's random state even without dropout, which is the only reader of it.
        state = torch.zeros(2, dtype=torch.uint64, device=q.device)
        unused = torch.zeros((), dtype=torch.uint64, device=q.device)
        lse_BHS = lse_BSH.transpose(1, 2).contiguous()
        gradients = torch.ops.aten._flash_attention_backward(
            dout, q, k, v, out, lse_BHS, None, None, q.shape[1], k.shape[1], 0.0, causal, state, unused, scale=scale
        )
        dq, dk, dv = (gradient[..., :head_dim] for gradient in gradients)
        return dq, dk, dv


def _pad_heads(tensor: Tensor) -> Tensor:
    """The CUDA op wants head sizes that are multiples of 8 and a dense last dimension; zeros change no product."""
    missing = -tensor.shape[-1] % 8
    return functional.pad(tensor, (0, missing)) if missing else tensor.contiguous()


@dataclass(frozen=True)
class _Candidate:
    """A kernel and the reason, if any, why it cannot serve a case; "" means that it can."""

    kernel: BlockKernel
    unusable: Callable[[torch.device, torch.dtype, int], str]


def _cuda_flash_unusable(device: torch.device, dtype: torch.dtype, head_dim: int) -> str:
    if not torch.cuda.is_available():
        return "no CUDA device"
    if device.type != "cuda":
        return f"runs on CUDA, not on {device.type}"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "needs compute capability 8.0 (Ampere) or newer"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"takes fp16 and bf16, not {dtype}"
    return f"takes head sizes up to 256, not {head_dim}" if head_dim > 256 else ""


def _cpu_flash_unusable(device: torch.device, dtype: torch.dtype, head_dim: int) -> str:
    if device.type != "cpu":
        return f"runs on CPU, not on {device.type}"
    if not hasattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu_backward"):
        return f"torch {torch.__version__} does not have the op"
    known = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    return "" if dtype in known else f"takes floating point types, not {dtype}"


_CANDIDATES = (
    _Candidate(TorchCudaFlashKernel(), _cuda_flash_unusable),
    _Candidate(TorchCpuFlashKernel(), _cpu_flash_unusable),
    _Candidate(ReferenceKernel(), lambda device, dtype, head_dim: ""),
)
"""In order of preference; the first usable one serves."""


def pick_kernel(device: torch.device, dtype: torch.dtype, head_dim: int) -> BlockKernel:
    """The fastest kernel that can serve tensors of this device, dtype and head size."""
    return next(c.kernel for c in _CANDIDATES if not c.unusable(device, dtype, head_dim))


def named_kernel(name: str) -> BlockKernel:
    """The kernel called ``name``. Raises ConfigError if there is none."""
    for candidate in _CANDIDATES:
        if candidate.kernel.name == name:
            return candidate.kernel
    known = ", ".join(c.kernel.name for c in _CANDIDATES)
    raise ConfigError(f"there is no attention kernel called {name!r}: choose one of {known}")


def chosen_kernel(name: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> BlockKernel:
    """The kernel that --hdp-kernel asks for, "auto" being the fastest that can serve such tensors.

    Raises ConfigError, with the kernels that can, for an unknown one and for one that cannot.
    """
    if name == "auto":
        return pick_kernel(device, dtype, head_dim)
    found = available_kernels(device, dtype, head_dim)
    can = ", ".join(["auto", *(known for known, usable, _ in found if usable)])
    reasons = {known: reason for known, _, reason in found}
    if name not in reasons:
        raise ConfigError(f"--hdp-kernel {name}: there is no such kernel; here can run: {can}")
    if reasons[name]:
        raise ConfigError(f"--hdp-kernel {name}: {reasons[name]}; here can run: {can}")
    return named_kernel(name)


def available_kernels(
    device: torch.device | None = None, dtype: torch.dtype = torch.bfloat16, head_dim: int = 128
) -> list[tuple[str, bool, str]]:
    """Every kernel as (name, usable, reason when not), in order of preference, for `megatron-hdp doctor`.

    ``device`` defaults to this machine's CUDA device if it has one, else the CPU.
    """
    if device is None:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    reasons = ((c.kernel.name, c.unusable(device, dtype, head_dim)) for c in _CANDIDATES)
    return [(name, not reason, reason) for name, reason in reasons]
