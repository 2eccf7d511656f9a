"""Which kernel serves: candidates in order of preference, each with the reason, if any, why it cannot."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from megatron_hdp.attention.kernels import flash_attn, transformer_engine
from megatron_hdp.attention.kernels.interface import BlockKernel
from megatron_hdp.attention.kernels.plain import ReferenceKernel
from megatron_hdp.attention.kernels.torch_cpu import TorchCpuFlashKernel
from megatron_hdp.attention.kernels.torch_cuda import TORCH_CUDA_FLASH
from megatron_hdp.errors import ConfigError


@dataclass(frozen=True)
class _Candidate:
    """A kernel and the reason, if any, why it cannot serve a case; "" means that it can."""

    kernel: BlockKernel
    unusable: Callable[[torch.device, torch.dtype, int], str]


def _cuda_unusable(device: torch.device, dtype: torch.dtype, head_dim: int) -> str:
    """What all flash kernels for CUDA need."""
    if not torch.cuda.is_available():
        return "no CUDA device"
    if device.type != "cuda":
        return f"runs on CUDA, not on {device.type}"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "needs compute capability 8.0 (Ampere) or newer"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"takes fp16 and bf16, not {dtype}"
    return f"takes head sizes up to 256, not {head_dim}" if head_dim > 256 else ""


def _flash_attn_2_unusable(device: torch.device, dtype: torch.dtype, head_dim: int) -> str:
    return _cuda_unusable(device, dtype, head_dim) or flash_attn.unbound(flash_attn.FLASH_ATTN_2)


def _flash_attn_3_unusable(device: torch.device, dtype: torch.dtype, head_dim: int) -> str:
    return (
        _cuda_unusable(device, dtype, head_dim)
        or _generation_unusable(device, (9,), "Hopper (9.0)")
        or flash_attn.unbound(flash_attn.FLASH_ATTN_3)
    )


def _flash_attn_4_unusable(device: torch.device, dtype: torch.dtype, head_dim: int) -> str:
    reason = _cuda_unusable(device, dtype, head_dim) or _generation_unusable(device, (9, 10, 11), "9.0 to 11.x")
    if not reason and head_dim > 128 and torch.cuda.get_device_capability(device)[0] > 9:
        return f"takes head sizes up to 128 on this GPU, not {head_dim}"
    return reason or flash_attn.unbound(flash_attn.FLASH_ATTN_4)


def _transformer_engine_unusable(device: torch.device, dtype: torch.dtype, head_dim: int) -> str:
    reason = _cuda_unusable(device, dtype, head_dim) or _generation_unusable(device, (9, 10), "9.0 to 10.x")
    if reason:
        return reason
    if head_dim > 128:
        return f"takes head sizes up to 128, not {head_dim}"
    if (torch.backends.cudnn.version() or 0) < 90600:
        return "needs cuDNN 9.6 or newer, which packs the log-sum-exp"
    return transformer_engine.unbound()


def _generation_unusable(device: torch.device, majors: tuple[int, ...], words: str) -> str:
    if torch.version.hip is not None:
        return "runs on NVIDIA GPUs"
    major, minor = torch.cuda.get_device_capability(device)
    return "" if major in majors else f"needs compute capability {words}, not {major}.{minor}"


def _cpu_flash_unusable(device: torch.device, dtype: torch.dtype, head_dim: int) -> str:
    if device.type != "cpu":
        return f"runs on CPU, not on {device.type}"
    if not hasattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu_backward"):
        return f"torch {torch.__version__} does not have the op"
    known = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    return "" if dtype in known else f"takes fp16, bf16, fp32 and fp64, not {dtype}"


def _reference_unusable(device: torch.device, dtype: torch.dtype, head_dim: int) -> str:
    return "" if dtype.is_floating_point else f"takes floating point types, not {dtype}"


_CANDIDATES = (
    _Candidate(flash_attn.FLASH_ATTN_3, _flash_attn_3_unusable),
    _Candidate(flash_attn.FLASH_ATTN_4, _flash_attn_4_unusable),
    _Candidate(flash_attn.FLASH_ATTN_2, _flash_attn_2_unusable),
    _Candidate(transformer_engine.TRANSFORMER_ENGINE, _transformer_engine_unusable),
    _Candidate(TORCH_CUDA_FLASH, _cuda_unusable),
    _Candidate(TorchCpuFlashKernel(), _cpu_flash_unusable),
    _Candidate(ReferenceKernel(), _reference_unusable),
)
"""In order of preference; the first usable one serves."""


def pick_kernel(device: torch.device, dtype: torch.dtype, head_dim: int) -> BlockKernel:
    """The fastest kernel that can serve tensors of this device, dtype and head size.

    Raises ConfigError, with every kernel's reason, if none can.
    """
    reasons = []
    for candidate in _CANDIDATES:
        reason = candidate.unusable(device, dtype, head_dim)
        if not reason:
            return candidate.kernel
        reasons.append(f"{candidate.kernel.name} {reason}")
    raise ConfigError(
        f"no attention kernel takes tensors of type {dtype} and head size {head_dim} on {device.type}: "
        f"{'; '.join(reasons)}. Train in bf16, fp16 or fp32"
    )


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
