"""What others offer for attention over several ranks, for benchmarks/attention.py."""

import importlib
import importlib.metadata
import importlib.util
import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

ROTATIONS = ("allgather", "alltoall")
"""How torch's context_parallel moves keys and values in forward; its gradients always go by all-to-all."""


_TORCH_RING = "torch.distributed.tensor.experimental._context_parallel._attention"
_TORCH_RING_NAMES = ("_templated_ring_attention", "_templated_ring_attention_backward", "set_rotate_method")


def torch_ring_missing() -> str:
    """What the installed torch lacks for `TorchRing`; "" if nothing."""
    try:
        module = importlib.import_module(_TORCH_RING)
    except ImportError as error:
        return str(error)
    lacking = [name for name in _TORCH_RING_NAMES if not hasattr(module, name)]
    return f"{_TORCH_RING} has no {' and no '.join(lacking)}" if lacking else ""


def torch_ring_name(rotation: str) -> str:
    return f"torch ring, {rotation}"


class TorchRing:
    """The ring attention inside torch's context_parallel, forward and backward of one sequence.

    context_parallel itself has no rule for the CPU's flash op (`context_parallel_error`), but its two templates take
    any op: they are given the op that our CPU kernel uses. Zigzag, as by default. The length must divide into 2d
    chunks.
    """

    def __init__(self, group: dist.ProcessGroup, inputs: tuple[Tensor, ...], name: str) -> None:
        self._group = group
        self._rotation = next(rotation for rotation in ROTATIONS if torch_ring_name(rotation) == name)
        self._inputs = [x.transpose(0, 1).unsqueeze(0) for x in inputs]
        self._scale = inputs[0].shape[-1] ** -0.5

    def run(self) -> tuple[Tensor, ...]:
        """Output and gradients of q, k and v, each [rows, heads, head size]."""
        module = importlib.import_module(_TORCH_RING)
        module.set_rotate_method(self._rotation)
        q, k, v, dout = self._inputs
        out, lse = module._templated_ring_attention(self._group, 2, self._forward, q, k, v, is_causal=True)
        gradients = module._templated_ring_attention_backward(
            self._group, 2, self._backward, dout, "grad_out", q, k, v, out, lse, is_causal=True
        )
        return tuple(x.squeeze(0).transpose(0, 1) for x in (out, *gradients[:3]))

    def _forward(self, query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool) -> tuple[Tensor, Tensor]:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, is_causal, scale=self._scale
        )
        return out, lse

    def _backward(
        self,
        *,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        logsumexp: Tensor,
        grad_out: Tensor,
        is_causal: bool,
    ) -> tuple[Tensor, ...]:
        lse = logsumexp.squeeze(-1) if logsumexp.dim() == 4 else logsumexp
        gradients: tuple[Tensor, ...] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad_out, query, key, value, out.to(query.dtype), lse, 0.0, is_causal, scale=self._scale
        )
        return gradients


def context_parallel_error(group: dist.ProcessGroup) -> str | None:
    """The error of torch's context_parallel on CPU ranks, if it does not run. All ranks of the group call this."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.experimental import context_parallel

    mesh = DeviceMesh.from_group(group, "cpu")
    q, k, v = (torch.randn(1, 2, 64, 16) for _ in range(3))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with context_parallel(mesh, buffers=[q, k, v], buffer_seq_dims=[2, 2, 2]):
                q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
                functional.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def installed(module: str, package: str) -> str | None:
    """Version of a package if its module can be found."""
    if importlib.util.find_spec(module) is None:
        return None
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "?"


type Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Causal attention of q [1, S, H, D] and k, v [1, S, G, D], differentiable."""


def torch_sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """torch's scaled_dot_product_attention with its flash backend."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
    return out.transpose(1, 2)


def one_device_rivals(device: torch.device, heads: int, kv_heads: int, head_dim: int) -> dict[str, Attention | str]:
    """By name, what computes attention of one sequence on one device; or why it cannot here."""
    found: dict[str, Attention | str] = {"torch sdpa, flash": torch_sdpa}
    for name, module, package, make in (
        ("flash-attn", "flash_attn", "flash-attn", _flash_attn),
        ("ring-flash-attn, ring of one", "ring_flash_attn", "ring-flash-attn", _ring_flash_attn),
        ("Transformer Engine", "transformer_engine", "transformer-engine", _transformer_engine),
    ):
        version = installed(module, package)
        if version is None:
            found[name] = "not installed"
        elif device.type != "cuda":
            found[name] = "needs CUDA"
        else:
            found[f"{name} {version}"] = make(heads, kv_heads, head_dim)
    return found


def _flash_attn(heads: int, kv_heads: int, head_dim: int) -> Attention:
    function = importlib.import_module("flash_attn").flash_attn_func
    return lambda q, k, v: function(q, k, v, causal=True)  # type: ignore[no-any-return]


def _ring_flash_attn(heads: int, kv_heads: int, head_dim: int) -> Attention:
    function = importlib.import_module("ring_flash_attn").zigzag_ring_flash_attn_func
    if not dist.is_initialized():
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    return lambda q, k, v: function(q, k, v, causal=True)  # type: ignore[no-any-return]


def _transformer_engine(heads: int, kv_heads: int, head_dim: int) -> Attention:
    layer = importlib.import_module("transformer_engine.pytorch").DotProductAttention(
        heads,
        head_dim,
        num_gqa_groups=kv_heads,
        attention_dropout=0.0,
        qkv_format="bshd",
        attn_mask_type="causal",
    )
    return lambda q, k, v: layer(q, k, v).view(q.shape)  # type: ignore[no-any-return]
