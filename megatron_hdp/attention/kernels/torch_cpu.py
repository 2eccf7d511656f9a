"""torch's flash attention for CPU: blocked, no S x K memory.

The op and its backward take fewer key/value heads than query heads, S shorter or longer than K, single rows, masks
and every head size (all tested against float64). Segments run in the few batches of `batching`; a window is cut into
tiles of query rows, each against the keys that it can see.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from megatron_hdp.attention.kernels.batching import Batch, batches
from megatron_hdp.attention.kernels.interface import Segments, accumulate_dtype


@dataclass(frozen=True)
class _Tile:
    """Query rows of a batch's segments and the range of keys that any of them sees."""

    queries: slice
    keys: slice
    causal: bool = False
    mask: Tensor | None = None


class TorchCpuFlashKernel:
    """`_scaled_dot_product_flash_attention_for_cpu` over packed segments."""

    name = "torch_cpu_flash"

    def forward(
        self, q_THD: Tensor, k_KGD: Tensor, v_KGD: Tensor, segments: Segments, *, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See `BlockKernel.forward`."""
        q, k, v = (_dense(x) for x in (q_THD, k_KGD, v_KGD))
        made = batches(segments, q.device)
        if len(made) == 1 and isinstance(made[0].query_rows, slice):
            out_BSHD, lse_BSH = _batch_forward(q, k, v, made[0], segments, scale)
            return out_BSHD.flatten(0, 1), lse_BSH.flatten(0, 1)
        rows, heads, size = q.shape
        out_THD = q.new_empty(rows + 1, heads, size)
        lse_TH = q.new_empty(rows + 1, heads, dtype=accumulate_dtype(q.dtype))
        for batch in made:
            out_BSHD, lse_BSH = _batch_forward(q, k, v, batch, segments, scale)
            batch.put(out_THD, batch.query_rows, out_BSHD)
            batch.put(lse_TH, batch.query_rows, lse_BSH)
        return out_THD[:rows], lse_TH[:rows]

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
        dout, q, k, v, out = (_dense(x) for x in (dout_THD, q_THD, k_KGD, v_KGD, out_THD))
        made = batches(segments, q.device)
        if len(made) == 1 and isinstance(made[0].query_rows, slice):
            dq, dk, dv = _batch_backward(dout, q, k, v, out, lse_TH, made[0], segments, scale)
            return dq.flatten(0, 1), dk.flatten(0, 1), dv.flatten(0, 1)
        totals = tuple(x.new_empty(x.shape[0] + 1, *x.shape[1:]) for x in (q, k, v))
        for batch in made:
            gradients = _batch_backward(dout, q, k, v, out, lse_TH, batch, segments, scale)
            for total, gradient, rows in zip(totals, gradients, (batch.query_rows, batch.key_rows, batch.key_rows)):
                batch.put(total, rows, gradient)
        dq, dk, dv = (total[:-1] for total in totals)
        return dq, dk, dv


def _batch_forward(
    q: Tensor, k: Tensor, v: Tensor, batch: Batch, segments: Segments, scale: float
) -> tuple[Tensor, Tensor]:
    """Output [B, S, H, D] and log-sum-exp [B, S, H] of one batch."""
    q_BHSD = batch.take(q, batch.query_rows).transpose(1, 2)
    k_BGKD, v_BGKD = (batch.take(x, batch.key_rows).transpose(1, 2) for x in (k, v))
    parts = []
    for tile in _tiles(segments, batch, q.dtype):
        out_BHSD, lse_BHS = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q_BHSD[:, :, tile.queries],
            k_BGKD[:, :, tile.keys],
            v_BGKD[:, :, tile.keys],
            0.0,
            tile.causal,
            attn_mask=tile.mask,
            scale=scale,
        )
        parts.append((out_BHSD.transpose(1, 2), lse_BHS.transpose(1, 2)))
    if len(parts) == 1:
        return parts[0]
    outs, lses = zip(*parts)
    return torch.cat(outs, dim=1), torch.cat(lses, dim=1)


def _batch_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    batch: Batch,
    segments: Segments,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients [B, S, H, D] and [B, K, G, D] twice of one batch."""
    dout_ = batch.take(dout, batch.query_rows, zero_padding=True).transpose(1, 2)
    q_, out_, lse_ = (batch.take(x, batch.query_rows).transpose(1, 2) for x in (q, out, lse))
    k_, v_ = (batch.take(x, batch.key_rows).transpose(1, 2) for x in (k, v))
    parts, totals = [], None
    for tile in _tiles(segments, batch, q.dtype):
        rows, keys = tile.queries, tile.keys
        gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *(dout_[:, :, rows], q_[:, :, rows], k_[:, :, keys], v_[:, :, keys], out_[:, :, rows], lse_[:, :, rows]),
            0.0,
            tile.causal,
            attn_mask=tile.mask,
            scale=scale,
        )
        dq, dk, dv = (gradient.transpose(1, 2) for gradient in gradients)
        if rows == slice(0, batch.queries):
            return dq, dk, dv
        if totals is None:  # tiles overlap in keys: their sum must not be rounded at each tile
            shape = batch.count, batch.keys, *k.shape[1:]
            totals = tuple(k.new_zeros(shape, dtype=accumulate_dtype(k.dtype)) for _ in range(2))
        totals[0][:, keys] += dk
        totals[1][:, keys] += dv
        parts.append(dq)
    assert totals is not None
    return torch.cat(parts, dim=1), totals[0].to(k.dtype), totals[1].to(k.dtype)


def _tiles(segments: Segments, batch: Batch, dtype: torch.dtype) -> Iterator[_Tile]:
    """The batch's query rows in order; one tile if no window cuts anything off.

    Rows up to ``left`` see back to the first key, so they are one plain tile. Row i of a later one that begins at row
    a sees columns i .. i + left (causal) or from i (edge) of the keys from a - left, so all tiles share a mask.
    """
    left, causal = segments.left, segments.right == 0
    plain = batch.queries if left is None else min(left + 1, batch.queries)
    yield _Tile(slice(0, plain), slice(0, plain if causal else batch.keys), causal)
    if left is None:
        return
    rows = _tile_rows(left)
    for begin in range(plain, batch.queries, rows):
        end = min(begin + rows, batch.queries)
        low, high = begin - left, end if causal else batch.keys
        width = rows + left if causal else batch.keys
        mask = _band(rows, width, left if causal else width, dtype)
        yield _Tile(slice(begin, end), slice(low, high), mask=mask[: end - begin, : high - low])


def _tile_rows(left: int) -> int:
    """Rows of a tile of a window: small ones compute less beside the window, large ones add fewer gradients.

    The fastest of 32 to 512 for windows of 128, 512, 2048 and 4096 on 16K tokens. A window of 4096 then takes 1.11
    times its share of the area in time, one of 512 1.4 times: short ranges of keys are slower per score.
    """
    return 64 if left < 512 else 128 if left < 2048 else 256


@lru_cache(maxsize=16)
def _band(rows: int, columns: int, width: int, dtype: torch.dtype) -> Tensor:
    """Mask [rows, columns]: 0 where row <= column <= row + width, else minus infinity."""
    offset = torch.arange(columns) - torch.arange(rows)[:, None]
    hidden = (offset < 0) | (offset > width)
    return torch.zeros(rows, columns, dtype=dtype).masked_fill(hidden, float("-inf"))


def _dense(x: Tensor) -> Tensor:
    """The op wants rows that lie in memory; an expanded tensor, say of ones, does not."""
    size = x.shape[-1]
    lies = x.stride(-1) == 1 and x.stride(1) >= size and x.stride(0) >= size
    return x if lies else x.contiguous()
