"""Ring attention: keys and values walk round the ring (Liu et al. 2023; zigzag halves as in `walk_layout`).

T real rows of the own piece, H query heads, G key/value heads, D head size. In both directions the next slice is on its
way while the current one is computed on. Gradients of K and V travel in fp32 one step behind their slice, so that they
are back at their owner after d steps.
"""

import torch
from torch import Tensor

from megatron_hdp.attention.comm import Exchange
from megatron_hdp.attention.kernels.interface import accumulate_dtype
from megatron_hdp.attention.merge import Merged
from megatron_hdp.attention.steps import Event, Job, Work
from megatron_hdp.attention.walk_layout import Block, Walk

_FORWARD = "keys and values, forward"
_BACKWARD = "keys and values, backward"
_GRADIENTS = "gradients of keys and values, backward"


def walk_forward(job: Job, walk: Walk, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor) -> Work[tuple[Tensor, Tensor]]:
    """Output [T, H, D] and log-sum-exp [T, H] of the own piece, in `accumulate_dtype`."""
    merged = Merged(q_THD)
    last = walk.view.size - 1
    kv = torch.stack((k_TGD, v_TGD))
    coming = _pass_on(job, walk, kv, 0, _FORWARD)
    yield Event.STARTED
    if last == 1:
        yield Event.POSTED
    for block in walk.blocks:
        if block.segments is not None:
            keys = kv[:, block.keys[0] : block.keys[1]]
            q = q_THD[block.queries[0] : block.queries[1]]
            merged.add(block.queries, *job.forward(q, *keys, segments=block.segments, what=_name(walk, block)))
        if block.step < last:
            yield Event.WAIT
            (kv,) = coming.wait()
            if block.step + 1 < last:
                coming = _pass_on(job, walk, kv, block.step + 1, _FORWARD)
                if block.step + 2 == last:
                    yield Event.POSTED
    return merged.out, merged.lse


def walk_backward(
    job: Job, walk: Walk, dout_THD: Tensor, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, out_THD: Tensor, lse_TH: Tensor
) -> Work[tuple[Tensor, Tensor, Tensor]]:
    """Gradients of the own piece's q, k and v, in `accumulate_dtype`."""
    dtype = accumulate_dtype(q_THD.dtype)
    last = walk.view.size - 1
    dq = q_THD.new_zeros(q_THD.shape, dtype=dtype)
    kv = torch.stack((k_TGD, v_TGD))
    dkv = kv.new_zeros(kv.shape, dtype=dtype)
    coming = _pass_on(job, walk, kv, 0, _BACKWARD)
    travelling: Exchange | None = None
    yield Event.STARTED
    for block in walk.blocks:
        contribution = None
        if block.segments is not None:
            rows = slice(*block.queries)
            k, v = kv[:, block.keys[0] : block.keys[1]]
            tensors = (dout_THD[rows], q_THD[rows], k, v, out_THD[rows], lse_TH[rows])
            contribution = job.backward(tensors, segments=block.segments, what=_name(walk, block))
        if travelling is not None:
            yield Event.WAIT
            (dkv,) = travelling.wait()
        if contribution is not None:
            dq[block.queries[0] : block.queries[1]] += contribution[0]
            dkv[0, block.keys[0] : block.keys[1]] += contribution[1]
            dkv[1, block.keys[0] : block.keys[1]] += contribution[2]
        travelling = _pass_on(job, walk, dkv, block.step, _GRADIENTS)
        if block.step < last:
            yield Event.WAIT
            (kv,) = coming.wait()
            if block.step + 1 < last:
                coming = _pass_on(job, walk, kv, block.step + 1, _BACKWARD)
    yield Event.POSTED
    assert travelling is not None
    (dkv,) = travelling.wait()
    return dq, dkv[0], dkv[1]


def _pass_on(job: Job, walk: Walk, slices: Tensor, step: int, task: str) -> Exchange:
    """Send the slice [2, rows, G, D] of ``step`` to the next rank while the next one comes from the previous rank."""
    rows = walk.slice_tokens[walk.source(step + 1)]
    receive = slices.new_empty((2, rows, *slices.shape[2:]))
    task = f"{task} step {step + 1} of {walk.view.size},"
    return job.exchange([(slices, walk.next)], [(receive, walk.previous)], walk.view.sequence, task)


def _name(walk: Walk, block: Block) -> str:
    return f"block {block.step + 1} of {walk.view.size}, sequence {walk.view.sequence}"
