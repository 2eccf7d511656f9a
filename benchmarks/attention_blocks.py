"""Kernels alone, on one device: blocks of a ring by length, and attention of a whole sequence next to others'."""

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from attention_rivals import Attention, one_device_rivals
from torch import Tensor

from megatron_hdp.attention.attend import hdp_attention
from megatron_hdp.attention.kernels import available_kernels, chosen_kernel
from megatron_hdp.attention.kernels.interface import BlockKernel
from megatron_hdp.attention.segments import Segments
from megatron_hdp.types import MicroBatch, Piece, Ring

MATRIX_PRODUCTS = 2 + 5
"""Of queries and keys, in forward and in backward."""
MIN_SECONDS = 0.05
"""A measurement repeats its calls until it is at least so long."""


def block_tables(shape: Any, lengths: list[int], device_name: str, repeats: int) -> tuple[str, list[dict[str, Any]]]:
    """Markdown, and the same as data. ``shape`` is `attention_ranks.Shape`."""
    device = torch.device(device_name)
    kernels = _kernels(shape, device)
    blocks = [_block_row(shape, kernel, rows, device, repeats) for kernel in kernels for rows in lengths]
    best = {kernel.name: max(row["causal"] for row in blocks if row["kernel"] == kernel.name) for kernel in kernels}
    lines = [
        "\n## Blocks of a ring\n",
        "GFLOP/s of forward and backward of what a rank with so many rows computes in one step: its own block "
        "(causal), all its queries against half a slice, half its queries against a whole one; and as a share of the "
        "kernel's best causal block.\n",
        "| kernel | rows | causal | all x half | half x all | causal, share | all x half, share | half x all, share |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in blocks:
        kinds = ("causal", "all x half", "half x all")
        speeds = " | ".join(f"{row[kind] / 1e9:,.1f}" for kind in kinds)
        shares = " | ".join(f"{100 * row[kind] / best[row['kernel']]:.0f} %" for kind in kinds)
        lines.append(f"| {row['kernel']} | {row['rows']:,} | {speeds} | {shares} |")
    whole, notes = _whole_rows(shape, kernels, lengths, device, repeats)
    lines += [
        "\n## A whole sequence on one device\n",
        "Milliseconds of forward and backward.\n",
        "| tokens | with | ms | of the kernel alone |",
        "|---:|---|---:|---:|",
    ]
    lines += [
        f"| {row['tokens']:,} | {row['with']} | {1e3 * row['seconds']:.2f} | {row['ratio']:.3f} |" for row in whole
    ]
    return "\n".join([*lines, "", *notes]), [*blocks, *whole]


def _kernels(shape: Any, device: torch.device) -> list[BlockKernel]:
    """The one that was asked for, or all that can run but the plain one."""
    names = [shape.kernel]
    if shape.kernel == "auto":
        found = available_kernels(device, shape.torch_dtype, shape.head_dim)
        names = [name for name, usable, _ in found if usable and name != "reference"]
    return [chosen_kernel(name, device, shape.torch_dtype, shape.head_dim) for name in names]


def _block_row(shape: Any, kernel: BlockKernel, rows: int, device: torch.device, repeats: int) -> dict[str, Any]:
    """FLOP per second of the three kinds of block."""
    half = max(rows // 2, 1)
    sizes = {"causal": (rows, rows), "all x half": (rows, half), "half x all": (half, rows)}
    ways: dict[str, Callable[[], object]] = {}
    for kind, (queries, keys) in sizes.items():
        segments = Segments((queries,), (keys,), right=0 if kind == "causal" else None)
        q, dout = (_random(queries, shape.heads, shape, device) for _ in range(2))
        k, v = (_random(keys, shape.kv_heads, shape, device) for _ in range(2))
        ways[kind] = partial(_forward_backward, kernel, dout, q, k, v, segments)
    result: dict[str, Any] = {"kernel": kernel.name, "rows": rows}
    for kind, seconds in _medians(ways, device, repeats).items():
        queries, keys = sizes[kind]
        pairs = rows * (rows + 1) // 2 if kind == "causal" else queries * keys
        result[kind] = MATRIX_PRODUCTS * 2 * pairs * shape.heads * shape.head_dim / seconds
    return result


def _forward_backward(
    kernel: BlockKernel, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, segments: Segments
) -> tuple[Tensor, ...]:
    scale = q.shape[-1] ** -0.5
    out, lse = kernel.forward(q, k, v, segments, scale=scale)
    return kernel.backward(dout, q, k, v, out, lse, segments, scale=scale)


def _whole_rows(
    shape: Any, kernels: list[BlockKernel], lengths: list[int], device: torch.device, repeats: int
) -> tuple[list[dict[str, Any]], list[str]]:
    rivals = one_device_rivals(device, shape.heads, shape.kv_heads, shape.head_dim)
    notes = [f"- {name}: {why}" for name, why in rivals.items() if isinstance(why, str)]
    rows: list[dict[str, Any]] = []
    best = kernels[0]
    for tokens in lengths:
        q, dout = (_random(tokens, shape.heads, shape, device) for _ in range(2))
        k, v = (_random(tokens, shape.kv_heads, shape, device) for _ in range(2))
        piece = Piece(0, tokens, Ring(0, 1), 0, -(-tokens // 2))
        segments = Segments((tokens,), (tokens,), right=0)
        ways: dict[str, Callable[[], object]] = {
            f"{best.name} alone": partial(_forward_backward, best, dout, q, k, v, segments),
            "hdp_attention": _differentiated(_ours(best, MicroBatch((piece,))), q, k, v, dout),
        }
        for name, rival in rivals.items():
            if not isinstance(rival, str):
                ways[name] = _differentiated(rival, *(x.unsqueeze(0) for x in (q, k, v, dout)))
        seconds = _medians(ways, device, repeats)
        base = seconds[f"{best.name} alone"]
        rows += [{"tokens": tokens, "with": name, "seconds": s, "ratio": s / base} for name, s in seconds.items()]
    return rows, notes


def _ours(kernel: BlockKernel, micro_batch: MicroBatch) -> Attention:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return hdp_attention(q, k, v, micro_batch, 0, None, softmax_scale=q.shape[-1] ** -0.5, kernel=kernel)

    return attention


def _differentiated(attention: Attention, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> Callable[[], object]:
    def call() -> object:
        inputs = [x.detach().requires_grad_() for x in (q, k, v)]
        return torch.autograd.grad(attention(*inputs), inputs, dout)

    return call


def _random(rows: int, heads: int, shape: Any, device: torch.device) -> Tensor:
    return torch.randn(rows, heads, shape.head_dim, device=device, dtype=shape.torch_dtype)


def _medians(ways: dict[str, Callable[[], object]], device: torch.device, repeats: int) -> dict[str, float]:
    """Seconds of one call of each: medians of ``repeats`` measurements, in which they take turns."""
    calls = {}
    for name, way in ways.items():
        way()
        calls[name] = max(1, int(MIN_SECONDS / max(_elapsed(way, 1, device), 1e-6)))
    runs = [{name: _elapsed(way, calls[name], device) for name, way in ways.items()} for _ in range(repeats)]
    return {name: statistics.median(run[name] for run in runs) for name in ways}


def _elapsed(call: Callable[[], object], calls: int, device: torch.device) -> float:
    """Seconds of one of ``calls`` calls; on CUDA between events, so that launches may run ahead."""
    if device.type == "cuda":
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(calls):
            call()
        end.record()
        torch.cuda.synchronize()
        milliseconds: float = begin.elapsed_time(end)
        return milliseconds / 1e3 / calls
    started = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - started) / calls
