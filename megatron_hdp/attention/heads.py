"""Rows for heads and back, around the attention of what the ranks then hold; see `heads_layout`.

T real rows of the own piece, U of the common piece; H query heads, G key/value heads, D head size; h and g those of one
rank after the swap. q, k and v travel in one message, their gradients in one more for q and one for k and v.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_hdp.attention.comm import Exchange
from megatron_hdp.attention.heads_layout import HeadParts, HeadSwap, head_parts
from megatron_hdp.attention.kernels.interface import accumulate_dtype
from megatron_hdp.attention.steps import Event, Job, Work


@dataclass(frozen=True)
class Swapper:
    """The swaps of one piece's tensors."""

    job: Job
    swap: HeadSwap
    parts: HeadParts

    @classmethod
    def of(cls, job: Job, swap: HeadSwap, heads: int, kv_heads: int) -> "Swapper":
        """Raises ConfigError if the heads cannot be swapped among so many ranks."""
        return cls(job, swap, head_parts(heads, kv_heads, len(swap.members)))

    def rows_to_heads(self, pieces: Sequence[tuple[Tensor, tuple[tuple[int, int], ...]]], task: str) -> "Swap":
        """Post the swap of [T, heads, D] tensors, each with the heads of every member."""
        mine = [torch.cat([x[:, slice(*heads[m])] for x, heads in pieces], dim=1) for m in self._members]
        width = mine[0].shape[1]
        into = [mine[self.swap.own].new_empty((self.swap.rows(m), width, mine[0].shape[2])) for m in self._members]
        return self._post(mine, into, task)

    def heads_to_rows(self, common: Tensor, task: str) -> "Swap":
        """Post the swap back of a tensor [U, heads, D] of the common piece."""
        mine = [torch.cat([common[slice(*rows)] for rows in self.swap.places(m)]) for m in self._members]
        own = self.swap.rows(self.swap.own)
        return self._post(mine, [common.new_empty((own, *common.shape[1:])) for _ in self._members], task)

    def common(self, received: Sequence[Tensor]) -> Tensor:
        """The rows of all members in the order of the common piece, [U, heads, D]."""
        result = received[0].new_empty((sum(x.shape[0] for x in received), *received[0].shape[1:]))
        for m, rows in enumerate(received):
            low, high = self.swap.places(m)
            result[slice(*low)] = rows[: low[1] - low[0]]
            result[slice(*high)] = rows[low[1] - low[0] :]
        return result

    def kv_gradient(self, received: Sequence[Tensor], kv_heads: int) -> Tensor:
        """Sum of what the members have for the own rows' keys and values, [T, 2 G, D] from [T, 2 g, D] of each."""
        first = received[0]
        total = first.new_zeros((first.shape[0], 2, kv_heads, first.shape[2]))
        for part, (begin, end) in zip(received, self.parts.kv):
            total[:, :, begin:end] += part.unflatten(1, (2, -1))
        return total

    @property
    def _members(self) -> range:
        return range(len(self.swap.members))

    def _post(self, mine: list[Tensor], into: list[Tensor], task: str) -> "Swap":
        own = self.swap.own
        others = [m for m in self._members if m != own]
        sends = [(mine[m], self.swap.members[m]) for m in others]
        receives = [(into[m], self.swap.members[m]) for m in others]
        return Swap(self.job.exchange(sends, receives, self.swap.view.sequence, f"{task},"), mine[own], own)


@dataclass(frozen=True)
class Swap:
    """A swap under way."""

    exchange: Exchange
    kept: Tensor
    """The part that this rank keeps."""
    own: int

    def wait(self) -> list[Tensor]:
        """What every member sent, in order."""
        received = list(self.exchange.wait())
        return [*received[: self.own], self.kept, *received[self.own :]]


def swap_in(swapper: Swapper, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor) -> Swap:
    """Post the way in of the forward pass."""
    parts = swapper.parts
    return swapper.rows_to_heads(
        [(q_THD, parts.query), (k_TGD, parts.kv), (v_TGD, parts.kv)], "queries, keys and values for heads, forward"
    )


def taken_in(swapper: Swapper, swap: Swap) -> tuple[Tensor, Tensor, Tensor]:
    """q [U, h, D], k [U, g, D] and v [U, g, D] of the common piece, each dense."""
    common = swapper.common(swap.wait())
    begin, end = swapper.parts.query[0]
    kv = (common.shape[1] - (end - begin)) // 2
    q, k, v = common.split([end - begin, kv, kv], dim=1)
    return q.contiguous(), k.contiguous(), v.contiguous()


def swap_out(swapper: Swapper, out_UhD: Tensor, task: str) -> Work[Tensor]:
    """The way out of the forward pass: output of the own rows, [T, H, D]."""
    swap = swapper.heads_to_rows(out_UhD, task)
    yield Event.POSTED
    return torch.cat(swap.wait(), dim=1)


def swap_gradients_out(
    swapper: Swapper, dq_UhD: Tensor, dk_UgD: Tensor, dv_UgD: Tensor, dtype: torch.dtype, kv_heads: int
) -> Work[tuple[Tensor, Tensor, Tensor]]:
    """The way out of the backward pass: gradients of the own rows' q, k and v.

    Where members share a K/V head, their parts travel and are added in `accumulate_dtype`; else nothing is left to add
    and they travel in ``dtype``, that of q.
    """
    dq = swapper.heads_to_rows(dq_UhD.to(dtype), "gradients of queries for rows, backward")
    travel = accumulate_dtype(dtype) if swapper.parts.replicated else dtype
    dkv_U2gD = torch.cat((dk_UgD, dv_UgD), dim=1).to(travel)
    dkv = swapper.heads_to_rows(dkv_U2gD, "gradients of keys and values for rows, backward")
    yield Event.POSTED
    dq_THD = torch.cat(dq.wait(), dim=1)
    total = swapper.kv_gradient(dkv.wait(), kv_heads)
    return dq_THD, total[:, 0], total[:, 1]
