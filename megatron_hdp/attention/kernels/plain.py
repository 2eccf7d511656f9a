"""The plain kernel: matrix products and softmax, one segment after the other, on any device and in any float type.

The dull twin of the fast kernels, and what runs where none of them can. Letters are those of `interface`; S queries and
K keys of one tile, R = H/G query heads per key/value head.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_hdp.attention.kernels.interface import Segments, accumulate_dtype

_TILE_SCORES = 2**24
"""Scores held at a time: query rows are cut into tiles so that memory does not grow with S x K."""


@dataclass(frozen=True)
class _Tile:
    """Query rows of one segment and the keys that any of them sees, in the packed tensors."""

    queries: slice
    keys: slice
    segment_queries: int
    """First query row of the segment in the packed tensor."""
    segment_keys: int

    def hidden(self, segments: Segments, device: torch.device) -> Tensor:
        """Mask [S, K] of the keys that a query does not see."""
        row = torch.arange(self.queries.start, self.queries.stop, device=device)[:, None] - self.segment_queries
        column = torch.arange(self.keys.start, self.keys.stop, device=device) - self.segment_keys
        hidden = torch.zeros(row.shape[0], column.shape[0], dtype=torch.bool, device=device)
        if segments.left is not None:
            hidden |= column < row - segments.left
        if segments.right is not None:
            hidden |= column > row + segments.right
        return hidden


class ReferenceKernel:
    """Plain matmul and softmax with a hand-written backward; any device and float type."""

    name = "reference"

    def forward(
        self, q_THD: Tensor, k_KGD: Tensor, v_KGD: Tensor, segments: Segments, *, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See `BlockKernel.forward`."""
        out_THD = torch.empty_like(q_THD, memory_format=torch.contiguous_format)
        lse_TH = q_THD.new_empty(q_THD.shape[:2], dtype=accumulate_dtype(q_THD.dtype))
        for tile in _tiles(segments, q_THD.shape[1]):
            scores = _scores(q_THD[tile.queries], k_KGD[tile.keys], tile, segments, scale)
            lse_GRS = scores.logsumexp(dim=-1)
            weights = (scores - lse_GRS[..., None]).exp()
            out_THD[tile.queries] = torch.einsum("grsk,kgd->sgrd", weights, v_KGD[tile.keys].to(weights.dtype)).flatten(
                1, 2
            )
            lse_TH[tile.queries] = lse_GRS.flatten(0, 1).T
        return out_THD, lse_TH

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
        dtype = accumulate_dtype(q_THD.dtype)
        kv_heads = k_KGD.shape[1]
        dq, dk, dv = (x.new_zeros(x.shape, dtype=dtype) for x in (q_THD, k_KGD, v_KGD))
        for tile in _tiles(segments, q_THD.shape[1]):
            scores = _scores(q_THD[tile.queries], k_KGD[tile.keys], tile, segments, scale)
            weights = (scores - lse_TH[tile.queries].T.unflatten(0, (kv_heads, -1))[..., None]).exp()
            q, dout, out = (x[tile.queries].to(dtype).unflatten(1, (kv_heads, -1)) for x in (q_THD, dout_THD, out_THD))
            k, v = k_KGD[tile.keys].to(dtype), v_KGD[tile.keys].to(dtype)
            dweights = torch.einsum("sgrd,kgd->grsk", dout, v)
            row_SGR = (dout * out).sum(dim=-1)
            dscores = weights * (dweights - row_SGR.permute(1, 2, 0)[..., None]) * scale
            dq[tile.queries] = torch.einsum("grsk,kgd->sgrd", dscores, k).flatten(1, 2)
            dk[tile.keys] += torch.einsum("grsk,sgrd->kgd", dscores, q)
            dv[tile.keys] += torch.einsum("grsk,sgrd->kgd", weights, dout)
        return dq.to(q_THD.dtype), dk.to(k_KGD.dtype), dv.to(v_KGD.dtype)


def _tiles(segments: Segments, heads: int) -> Iterator[_Tile]:
    """All segments in order, their queries cut so that a tile has at most `_TILE_SCORES` scores."""
    first_query = first_key = 0
    for queries, keys in zip(segments.queries, segments.keys):
        rows = max(1, _TILE_SCORES // (heads * keys))
        for begin in range(0, queries, rows):
            end = min(begin + rows, queries)
            low = 0 if segments.left is None else max(0, begin - segments.left)
            high = keys if segments.right is None else min(keys, end + segments.right)
            yield _Tile(
                slice(first_query + begin, first_query + end),
                slice(first_key + low, first_key + high),
                first_query,
                first_key,
            )
        first_query += queries
        first_key += keys


def _scores(q_SHD: Tensor, k_KGD: Tensor, tile: _Tile, segments: Segments, scale: float) -> Tensor:
    """Scaled scores [G, R, S, K], minus infinity where a query does not see a key."""
    dtype = accumulate_dtype(q_SHD.dtype)
    q_SGRD = q_SHD.to(dtype).unflatten(1, (k_KGD.shape[1], -1))
    scores = torch.einsum("sgrd,kgd->grsk", q_SGRD, k_KGD.to(dtype)) * scale
    return scores.masked_fill(tile.hidden(segments, q_SHD.device), float("-inf"))
