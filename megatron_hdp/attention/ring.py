"""Causal attention over a micro-batch of local and ring pieces, exact for every layout.

T rows of the micro-batch's tensors, H query heads, G key/value heads (dividing H), D head size. Local pieces run
first, in groups of equal length; then the ring pieces in order. In both directions the next K/V slice is on its way
while the current one is computed on (ring attention, Liu et al. 2023; zigzag halves as in `layout`). Partial outputs
are merged by log-sum-exp in fp32, and gradients of K and V travel in fp32 together with their slice, so that they
are back at their owner after d steps.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_hdp.attention.comm import Exchange, RingComm
from megatron_hdp.attention.kernels import BlockKernel, accumulate_dtype
from megatron_hdp.attention.layout import AttentionLayout, Block, LocalGroup, RingPiece, attention_layout
from megatron_hdp.errors import ConfigError, PlanError
from megatron_hdp.types import MicroBatch


def hdp_attention(
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    micro_batch: MicroBatch,
    rank: int,
    comm: RingComm | None,
    *,
    softmax_scale: float,
    kernel: BlockKernel,
) -> Tensor:
    """Causal attention of every piece of ``micro_batch`` over its whole sequence; returns [T, H, D].

    Rows lie as `attention.layout` says; rows that are padding, or lie beyond the pieces, get output 0 and gradient
    0 whatever they hold. All ranks of a ring must call this, forward and backward, in the same order of rings.
    ``comm`` may be None if no piece is on a ring. Raises PlanError if the tensors do not fit the micro-batch,
    ConfigError for head counts that do not fit, RankLostError if another rank of a ring is gone.
    """
    layout, rows = _prepared(_ById(micro_batch), rank, q_THD.device)
    _check(q_THD, k_TGD, v_TGD, layout, rank, comm)
    job = _Job(layout, rows, comm, softmax_scale, kernel)
    return _HdpAttention.apply(q_THD, k_TGD, v_TGD, job)  # type: ignore[no-any-return, no-untyped-call]


type Rows = slice | Tensor
"""Rows of a packed tensor: a slice for one piece, an index for many."""


@dataclass(frozen=True)
class _Job:
    """What forward and backward share besides tensors."""

    layout: AttentionLayout
    rows: tuple[Rows, ...]
    """One per local group."""
    comm: RingComm | None
    scale: float
    kernel: BlockKernel


class _HdpAttention(torch.autograd.Function):  # type: ignore[misc]
    """Autograd over the whole micro-batch; saves q, k, v, out and log-sum-exp only."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, job: _Job) -> Tensor:
        out, lse = _forward(q, k, v, job)
        ctx.job = job
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        # Every rank of a ring takes part in the whole walk, whichever gradients it needs itself.
        gradients = _backward(dout, q, k, v, out, lse, ctx.job)
        wanted = zip(gradients, ctx.needs_input_grad)
        return (*(gradient if needed else None for gradient, needed in wanted), None)


def _forward(q: Tensor, k: Tensor, v: Tensor, job: _Job) -> tuple[Tensor, Tensor]:
    """Output [T, H, D] and log-sum-exp [T, H]."""
    out = q.new_zeros(q.shape)
    lse = q.new_zeros(q.shape[:2], dtype=accumulate_dtype(q.dtype))
    walk = _KeyValueWalk(k, v, job, "forward", across_rings=True)
    for group, rows in zip(job.layout.groups, job.rows):
        inputs = (_take(x, rows, group) for x in (q, k, v))
        out_BSHD, lse_BSH = job.kernel.forward(*inputs, causal=True, scale=job.scale)
        out[rows], lse[rows] = out_BSHD.flatten(0, 1), lse_BSH.flatten(0, 1)
    for piece, block, kv in walk:
        if block.step == 0:
            merged_out = lse.new_zeros((piece.real_tokens, *q.shape[1:]))
            merged_lse = lse.new_zeros((piece.real_tokens, q.shape[1]))
        if not block.empty:
            own = _own(q, piece, block)
            out_BSHD, lse_BSH = job.kernel.forward(own, *_keys(kv, block), causal=block.causal, scale=job.scale)
            rows = slice(*block.queries)
            _merge(merged_out[rows], merged_lse[rows], out_BSHD[0], lse_BSH[0], first=block.step == 0)
        if block.step == piece.size - 1:
            rows = _real_rows(piece)
            out[rows], lse[rows] = merged_out, merged_lse
    return out, lse


def _merge(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor, *, first: bool) -> None:
    """Fold one block's result into fp32 ``out`` [S, H, D] and ``lse`` [S, H], in place.

    With weights w = exp(lse) the merged output is (w out + w' out') / (w + w') = out + sigmoid(lse' - lse)(out' - out).
    """
    if first:
        out.copy_(block_out)
        lse.copy_(block_lse)
        return
    weight = torch.sigmoid(block_lse - lse)
    out += weight[..., None] * (block_out.to(out.dtype) - out)
    torch.logaddexp(lse, block_lse, out=lse)


def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, job: _Job
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v."""
    dq, dk, dv = (x.new_zeros(x.shape) for x in (q, k, v))
    # The walk must not run ahead into the next ring here: gradients of this ring are still to be posted, and ranks
    # that do not share the same rings would then post in different orders.
    walk = _KeyValueWalk(k, v, job, "backward", across_rings=False)
    for group, rows in zip(job.layout.groups, job.rows):
        inputs = (_take(x, rows, group) for x in (dout, q, k, v, out, lse))
        gradients = job.kernel.backward(*inputs, causal=True, scale=job.scale)
        for total, gradient in zip((dq, dk, dv), gradients):
            total[rows] = gradient.flatten(0, 1)
    landing: tuple[RingPiece, Exchange] | None = None
    travelling: Exchange | None = None
    for piece, block, kv in walk:
        if block.step == 0:
            dq_piece = lse.new_zeros((piece.real_tokens, *q.shape[1:]))
            dkv, travelling = lse.new_zeros(kv.shape), None
        contribution = None
        if not block.empty:
            dout_, q_, out_, lse_ = (_own(x, piece, block) for x in (dout, q, out, lse))
            contribution = job.kernel.backward(
                dout_, q_, *_keys(kv, block), out_, lse_, causal=block.causal, scale=job.scale
            )
        if travelling is not None:
            dkv = travelling.wait()
        if contribution is not None:
            dq_piece[slice(*block.queries)] += contribution[0][0]
            dkv[0, slice(*block.keys)] += contribution[1][0]
            dkv[1, slice(*block.keys)] += contribution[2][0]
        travelling = _pass_on(dkv, piece, block.step, job, "gradients of keys and values, backward")
        if block.step == piece.size - 1:
            dq[_real_rows(piece)] = dq_piece
            _land(dk, dv, landing)  # one ring late, so that the last hop overlaps with the next ring's first block
            landing = piece, travelling
    _land(dk, dv, landing)
    return dq, dk, dv


def _land(dk: Tensor, dv: Tensor, landing: tuple[RingPiece, Exchange] | None) -> None:
    """Wait for gradients that come home and put them into place."""
    if landing is not None:
        piece, travelling = landing
        dkv = travelling.wait()
        dk[_real_rows(piece)], dv[_real_rows(piece)] = dkv[0], dkv[1]


class _KeyValueWalk:
    """Every block of every ring piece in order, each with the K/V slice [2, rows, G, D] that it needs.

    The exchange for the next slice is under way when a block is handed out; the first one starts on construction,
    so that it overlaps with local work. ``across_rings`` also starts a ring's first exchange before the last block
    of the ring before it.
    """

    def __init__(self, k: Tensor, v: Tensor, job: _Job, direction: str, *, across_rings: bool) -> None:
        self._k, self._v, self._job = k, v, job
        self._task = f"keys and values, {direction}"
        self._across_rings = across_rings
        self._begun = self._begin(0)

    def __iter__(self) -> Iterator[tuple[RingPiece, Block, Tensor]]:
        for index, piece in enumerate(self._job.layout.rings):
            begun, self._begun = self._begun or self._begin(index), None
            assert begun is not None
            kv, coming = begun
            for block in piece.blocks:
                last = block.step == piece.size - 1
                if last and self._across_rings:
                    self._begun = self._begin(index + 1)
                yield piece, block, kv
                if not last:
                    kv = coming.wait()
                    if block.step + 1 < piece.size - 1:
                        coming = _pass_on(kv, piece, block.step + 1, self._job, self._task)

    def _begin(self, index: int) -> tuple[Tensor, Exchange] | None:
        """The own slice of a ring piece, already on its way to the next rank."""
        if index >= len(self._job.layout.rings):
            return None
        piece = self._job.layout.rings[index]
        rows = _real_rows(piece)
        own = torch.stack((self._k[rows], self._v[rows]))
        return own, _pass_on(own, piece, 0, self._job, self._task)


def _pass_on(slices: Tensor, piece: RingPiece, step: int, job: _Job, task: str) -> Exchange:
    """Send the slice of ``step`` to the next rank while that of the following step comes from the previous one."""
    assert job.comm is not None
    rows = piece.slice_tokens[piece.source(step + 1)]
    receive = slices.new_empty((2, rows, *slices.shape[2:]))
    task = f"{task} step {step + 1} of {piece.size},"
    return job.comm.start(slices, piece.next, receive, piece.previous, sequence=piece.sequence, task=task)


def _real_rows(piece: RingPiece) -> slice:
    return slice(piece.offset, piece.offset + piece.real_tokens)


def _own(x: Tensor, piece: RingPiece, block: Block) -> Tensor:
    """The block's query rows of a packed tensor, as a batch of one."""
    begin, end = block.queries
    return x[piece.offset + begin : piece.offset + end].unsqueeze(0)


def _keys(kv: Tensor, block: Block) -> tuple[Tensor, Tensor]:
    """The block's keys and values, each as a batch of one."""
    rows = slice(*block.keys)
    return kv[0, rows].unsqueeze(0), kv[1, rows].unsqueeze(0)


def _take(x: Tensor, rows: Rows, group: LocalGroup) -> Tensor:
    """The rows of a local group, [B, S, ...]."""
    return x[rows].unflatten(0, (len(group.offsets), group.real_tokens))


@dataclass(frozen=True, eq=False)
class _ById:
    """A micro-batch as cache key by identity: comparing ten thousand pieces in every layer would cost more."""

    micro_batch: MicroBatch

    def __hash__(self) -> int:
        return id(self.micro_batch)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ById) and other.micro_batch is self.micro_batch


@lru_cache(maxsize=64)  # micro-batches in flight: all layers, and all stages of an interleaved pipeline
def _prepared(key: _ById, rank: int, device: torch.device) -> tuple[AttentionLayout, tuple[Rows, ...]]:
    """The layout of a micro-batch and, per local group, its rows on the device."""
    layout = attention_layout(key.micro_batch, rank)
    return layout, tuple(_group_rows(group, device) for group in layout.groups)


def _group_rows(group: LocalGroup, device: torch.device) -> Rows:
    if len(group.offsets) == 1:
        return slice(group.offsets[0], group.offsets[0] + group.real_tokens)
    starts = torch.tensor(group.offsets, device=device)
    index: Tensor = (starts[:, None] + torch.arange(group.real_tokens, device=device)).flatten()
    return index


def _check(q: Tensor, k: Tensor, v: Tensor, layout: AttentionLayout, rank: int, comm: RingComm | None) -> None:
    if not (q.shape[0] == k.shape[0] == v.shape[0] >= layout.tokens):
        raise PlanError(
            f"the micro-batch of rank {rank} has {layout.tokens} rows, but q, k and v have {q.shape[0]}, "
            f"{k.shape[0]} and {v.shape[0]}: pass the tensors that belong to this micro-batch"
        )
    if k.shape != v.shape or q.shape[2] != k.shape[2] or q.shape[1] % k.shape[1]:
        raise ConfigError(
            f"q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)} [rows, heads, head size] do not fit: "
            "keys and values need equal shapes, one head size for all, and a head count that divides the queries'"
        )
    if layout.rings and (comm is None or comm.rank != rank):
        raise PlanError(
            f"the micro-batch of rank {rank} shares sequence {layout.rings[0].sequence} with other ranks, but the "
            f"communicator is {'missing' if comm is None else f'that of rank {comm.rank}'}: pass the pool's RingComm"
        )
