"""Causal attention over a micro-batch of local and shared pieces, exact for every layout and exchange.

T rows of the micro-batch's tensors, H query heads, G key/value heads (dividing H), D head size. Partial outputs are
merged by log-sum-exp in fp32, gradients of keys and values travel in fp32. Local pieces run in a few batched kernel
calls, which fill the waiting times of the shared ones (`steps`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_hdp.attention.comm import RingComm
from megatron_hdp.attention.fetch import fetch_backward, fetch_forward
from megatron_hdp.attention.heads import Swapper, swap_gradients_out, swap_in, swap_out, taken_in
from megatron_hdp.attention.heads_layout import head_parts
from megatron_hdp.attention.kernels.interface import BlockKernel, accumulate_dtype
from megatron_hdp.attention.layout import Alone, AttentionLayout, Inner, Share, SharedPiece, attention_layout
from megatron_hdp.attention.placing import placed
from megatron_hdp.attention.segments import Segments
from megatron_hdp.attention.steps import Event, Filler, Job, Work, drive, inside
from megatron_hdp.attention.walk import walk_backward, walk_forward
from megatron_hdp.attention.walk_layout import Walk
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
    window: int | None = None,
) -> Tensor:
    """Causal attention of every piece of ``micro_batch`` over its whole sequence; returns [T, H, D].

    Rows lie as `attention.layout` says; rows that are padding, or lie beyond the pieces, get output 0 and gradient
    0 whatever they hold. With ``window`` a token sees itself and the window - 1 tokens before it. All ranks of a ring
    must call this, forward and backward, in the same order of rings. ``comm`` may be None if no piece is shared.

    Raises PlanError if the tensors do not fit the micro-batch, ConfigError for head counts that do not fit (each other
    or the exchange), RankLostError if another rank of a ring is gone.
    """
    prepared = _prepared(_ById(micro_batch), rank, window, q_THD.device)
    _check(q_THD, k_TGD, v_TGD, prepared.layout, rank, comm)
    job = Job(comm, softmax_scale, kernel)
    return _HdpAttention.apply(q_THD, k_TGD, v_TGD, prepared, job)  # type: ignore[no-any-return, no-untyped-call]


type Index = slice | Tensor
"""Rows of a packed tensor: a slice where they lie together, else an index."""
type LocalShare = tuple[Index, Segments]
"""A share of the local pieces, and its rows."""


@dataclass(frozen=True)
class _Prepared:
    """What all layers share of a micro-batch."""

    layout: AttentionLayout
    shares: tuple[LocalShare, ...]


class _HdpAttention(torch.autograd.Function):  # type: ignore[misc]
    """Autograd over the whole micro-batch.

    Saves q, k, v, out and log-sum-exp, and once more those of pieces that swap heads, as they are after the swap.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, prepared: _Prepared, job: Job) -> Tensor:
        out = q.new_zeros(q.shape)
        lse = q.new_zeros(q.shape[:2], dtype=accumulate_dtype(q.dtype))
        swapped: dict[int, tuple[Tensor, ...]] = {}
        tensors = (q, k, v, out, lse)
        works = (_piece_forward(job, piece, i, tensors, swapped) for i, piece in enumerate(prepared.layout.pieces))
        shares: list[Callable[[], None]] = [partial(_share_forward, job, share, tensors) for share in prepared.shares]
        drive(works, Filler(shares, _waits(prepared)))
        ctx.job, ctx.prepared, ctx.swapped = job, prepared, tuple(swapped)
        ctx.save_for_backward(q, k, v, out, lse, *(x for saved in swapped.values() for x in saved))
        return out

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, *rest = ctx.saved_tensors
        swapped = {index: tuple(rest[5 * i : 5 * i + 5]) for i, index in enumerate(ctx.swapped)}
        gradients = tuple(x.new_zeros(x.shape) for x in (q, k, v))
        tensors = (dout, q, k, v, out, lse)
        job, prepared = ctx.job, ctx.prepared
        # Every rank of a ring takes part in the whole walk, whichever gradients it needs itself.
        works = (
            _piece_backward(job, piece, tensors, gradients, swapped.get(i))
            for i, piece in enumerate(prepared.layout.pieces)
        )
        shares: list[Callable[[], None]] = [
            partial(_share_backward, job, share, tensors, gradients) for share in prepared.shares
        ]
        drive(works, Filler(shares, _waits(prepared)))
        wanted = zip(gradients, ctx.needs_input_grad)
        return (*(gradient if needed else None for gradient, needed in wanted), None, None)


def _waits(prepared: _Prepared) -> int:
    return sum(piece.waits for piece in prepared.layout.pieces)


def _share_forward(job: Job, share: LocalShare, tensors: tuple[Tensor, ...]) -> None:
    rows, segments = share
    *inputs, out, lse = tensors
    out[rows], lse[rows] = job.forward(*(x[rows] for x in inputs), segments=segments, what="local sequences")


def _share_backward(job: Job, share: LocalShare, tensors: tuple[Tensor, ...], gradients: tuple[Tensor, ...]) -> None:
    rows, segments = share
    found = job.backward(tuple(x[rows] for x in tensors), segments=segments, what="local sequences")
    for total, gradient in zip(gradients, found):
        total[rows] = gradient


def _piece_forward(
    job: Job, piece: SharedPiece, index: int, tensors: tuple[Tensor, ...], swapped: dict[int, tuple[Tensor, ...]]
) -> Work[None]:
    """Attention of one shared piece, put into its rows of out and lse.

    What backward needs of a swap goes into ``swapped`` under ``index``.
    """
    q, k, v, out, lse = (x[slice(*piece.rows)] for x in tensors)
    if piece.swap is None:
        merged_out, merged_lse = yield from _inner_forward(job, piece.inner, q, k, v)
        out.copy_(merged_out)
        lse.copy_(merged_lse)
        return
    swapper = Swapper.of(job, piece.swap, q.shape[1], k.shape[1])
    coming = swap_in(swapper, q, k, v)
    yield Event.STARTED
    yield Event.WAIT
    q, k, v = taken_in(swapper, coming)
    common_out, common_lse = yield from inside(_inner_forward(job, piece.inner, q, k, v))
    common_out = common_out.to(out.dtype)
    swapped[index] = (q, k, v, common_out, common_lse)
    out.copy_((yield from swap_out(swapper, common_out, "output for rows, forward")))


def _piece_backward(
    job: Job,
    piece: SharedPiece,
    tensors: tuple[Tensor, ...],
    gradients: tuple[Tensor, ...],
    swapped: tuple[Tensor, ...] | None,
) -> Work[None]:
    """Gradients of one shared piece, put into its rows of ``gradients``."""
    rows = slice(*piece.rows)
    if piece.swap is None:
        found = yield from _inner_backward(job, piece.inner, *(x[rows] for x in tensors))
    else:
        assert swapped is not None
        dout, q, k = (x[rows] for x in tensors[:3])
        swapper = Swapper.of(job, piece.swap, q.shape[1], k.shape[1])
        coming = swapper.rows_to_heads([(dout, swapper.parts.query)], "gradients of output for heads, backward")
        yield Event.STARTED
        yield Event.WAIT
        common = swapper.common(coming.wait())
        inner = yield from inside(_inner_backward(job, piece.inner, common, *swapped))
        found = yield from swap_gradients_out(swapper, *inner, q.dtype, k.shape[1])
    for total, gradient in zip(gradients, found):
        total[rows] = gradient


def _inner_forward(job: Job, inner: Inner, q: Tensor, k: Tensor, v: Tensor) -> Work[tuple[Tensor, Tensor]]:
    if isinstance(inner, Alone):
        yield from ()
        return job.forward(q, k, v, segments=inner.segments, what=f"all rows, sequence {inner.view.sequence}")
    if isinstance(inner, Walk):
        return (yield from walk_forward(job, inner, q, k, v))
    return (yield from fetch_forward(job, inner, q, k, v))


def _inner_backward(job: Job, inner: Inner, *tensors: Tensor) -> Work[tuple[Tensor, Tensor, Tensor]]:
    """``tensors``: dout, q, k, v, out, lse."""
    if isinstance(inner, Alone):
        yield from ()
        return job.backward(tensors, segments=inner.segments, what=f"all rows, sequence {inner.view.sequence}")
    if isinstance(inner, Walk):
        return (yield from walk_backward(job, inner, *tensors))
    return (yield from fetch_backward(job, inner, *tensors))


@dataclass(frozen=True, eq=False)
class _ById:
    """A micro-batch as cache key by identity: comparing ten thousand pieces in every layer would cost more."""

    micro_batch: MicroBatch

    def __hash__(self) -> int:
        return id(self.micro_batch)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ById) and other.micro_batch is self.micro_batch


@lru_cache(maxsize=128)  # micro-batches in flight: all layers, two windows, and all stages of an interleaved pipeline
def _prepared(key: _ById, rank: int, window: int | None, device: torch.device) -> _Prepared:
    """The layout of a micro-batch and, per share of local pieces, its rows on the device."""
    layout = attention_layout(key.micro_batch, rank, window)
    return _Prepared(layout, tuple((_index(share, device), _segments(share, window)) for share in layout.shares))


def _segments(share: Share, window: int | None) -> Segments:
    cut = window is not None and window < max(share.real_tokens)
    return Segments(share.real_tokens, share.real_tokens, left=window - 1 if cut and window else None, right=0)


def _index(share: Share, device: torch.device) -> Index:
    begin, end = share.offsets[0], share.offsets[-1] + share.real_tokens[-1]
    if end - begin == sum(share.real_tokens):
        return slice(begin, end)
    rows = [torch.arange(first, first + real) for first, real in zip(share.offsets, share.real_tokens)]
    return placed(torch.cat(rows), device)


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
    for piece in layout.pieces:  # before anything is sent: ranks that wait for messages would not hear of an error
        if piece.swap is not None:
            head_parts(q.shape[1], k.shape[1], len(piece.swap.members))
    if layout.pieces and (comm is None or comm.rank != rank):
        raise PlanError(
            f"the micro-batch of rank {rank} shares sequence {layout.pieces[0].sequence} with other ranks, but the "
            f"communicator is {'missing' if comm is None else f'that of rank {comm.rank}'}: pass the pool's RingComm"
        )
