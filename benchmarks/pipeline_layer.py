"""A tiny transformer layer on one CPU thread, run micro-batch by micro-batch as a plan says; clock: CPU time."""

import functools
import time
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from megatron_hdp.cost import LayerProfile, LinkProfile, Profile
from megatron_hdp.types import MicroBatch, Piece, Plan, Ring

FloatArray = npt.NDArray[np.float64]

HEADS, DIM = 2, 32
HIDDEN = HEADS * DIM

# Shapes: R rows, H hidden size, N heads, D head size.


@dataclass(frozen=True)
class Layer:
    """Weights of one layer: attention and a gated MLP."""

    qkv_H3H: Tensor
    out_HH: Tensor
    up_H8H: Tensor
    down_4HH: Tensor

    @classmethod
    @functools.cache
    def make(cls) -> "Layer":
        shapes = ((HIDDEN, 3 * HIDDEN), (HIDDEN, HIDDEN), (HIDDEN, 8 * HIDDEN), (4 * HIDDEN, HIDDEN))
        return cls(*((torch.randn(shape) / HIDDEN**0.5).requires_grad_() for shape in shapes))


@functools.cache
def _others(tokens: int) -> tuple[Tensor, Tensor]:
    """Keys and values of other ranks [1, N, tokens, D]; what they hold does not matter to the clock."""
    return torch.randn(1, HEADS, tokens, DIM, requires_grad=True), torch.randn(
        1, HEADS, tokens, DIM, requires_grad=True
    )


def _attend(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    return functional.scaled_dot_product_attention(q, k, v, is_causal=causal)


def _piece(q: Tensor, k: Tensor, v: Tensor, piece: Piece) -> Tensor:
    """Attention of a piece's rows [1, N, R, D]: each chunk on itself, and on all that lies before it in the sequence.

    The parts are added up and not merged by log-sum-exp: the work is that of a ring, the values are not.
    """
    if piece.ring.size == 1:
        return _attend(q, k, v, True)
    chunk, chunks = piece.chunk_tokens, []
    for place, (begin, _) in enumerate(piece.spans):
        rows = slice(place * chunk, (place + 1) * chunk)
        out = _attend(q[:, :, rows], k[:, :, rows], v[:, :, rows], True)
        for first in range(0, begin, 2 * chunk):  # as the ring brings them, two chunks at a time
            keys, values = _others(min(2 * chunk, begin - first))
            out = out + _attend(q[:, :, rows], keys, values, False)
        chunks.append(out)
    return torch.cat(chunks, dim=2)


def _forward(x_RH: Tensor, micro_batch: MicroBatch) -> Tensor:
    layer = Layer.make()
    q, k, v = (part.view(1, -1, HEADS, DIM).transpose(1, 2) for part in (x_RH @ layer.qkv_H3H).chunk(3, dim=1))
    found, begin = [], 0
    for piece in micro_batch.pieces:
        rows = slice(begin, begin + piece.tokens)
        found.append(_piece(q[:, :, rows], k[:, :, rows], v[:, :, rows], piece))
        begin += piece.tokens
    out = torch.cat(found, dim=2) if found else v
    x_RH = x_RH + out.transpose(1, 2).reshape(-1, HIDDEN) @ layer.out_HH
    gate, up = (x_RH @ layer.up_H8H).chunk(2, dim=1)
    return x_RH + (functional.silu(gate) * up) @ layer.down_4HH


def _once(micro_batch: MicroBatch) -> tuple[float, float]:
    """CPU seconds of forward and backward."""
    x_RH = torch.randn(micro_batch.tokens or 2, HIDDEN, requires_grad=True)
    begin = time.thread_time()
    out_RH = _forward(x_RH, micro_batch)
    middle = time.thread_time()
    out_RH.backward(torch.ones_like(out_RH))
    return middle - begin, time.thread_time() - middle


def microbatch_seconds(plan: Plan, repeats: int = 2) -> tuple[FloatArray, FloatArray]:
    """CPU seconds of every micro-batch, forward and backward, [num_microbatches] each; the least of some runs."""
    torch.set_num_threads(1)
    micro_batches = [micro_batch for rank in plan for micro_batch in rank]
    runs = np.array([[_once(each) for each in micro_batches] for _ in range(repeats)])
    least = runs.min(axis=0)
    return least[:, 0], least[:, 1]


def _samples() -> list[tuple[MicroBatch, tuple[float, float, float, float]]]:
    """Micro-batches, and their (token^2, tokens, pieces, 1)."""
    found = []
    for length, number in [(16, 1), (16, 32), (64, 1), (64, 8), (128, 2), (128, 4), (256, 1), (256, 2), (512, 1)]:
        piece = Piece(0, length, Ring(0, 1), 0, length // 2)
        found.append((MicroBatch((piece,) * number), (length**2 * number, length * number, number, 1)))
    for held, size in [(512, 2), (512, 4), (384, 8), (512, 8), (256, 16), (512, 16)]:
        piece = Piece(0, held * size, Ring(0, size), 0, held // 2)
        found.append((MicroBatch((piece,)), (held**2 * size, held, 1, 1)))
    return found


def measured_profile(repeats: int = 15) -> Profile:
    """Costs of the layer on this machine, fitted to `_samples`; links take no time, as in the replay."""
    torch.set_num_threads(1)
    samples = _samples()
    seconds = np.array([np.median([_once(each) for _ in range(repeats)], axis=0) for each, _ in samples])
    terms = np.array([each for _, each in samples], dtype=np.float64)
    fitted = []
    for phase in range(2):  # relative errors count
        weight = 1 / seconds[:, phase]
        solution = np.linalg.lstsq(terms * weight[:, None], np.ones(len(samples)), rcond=None)[0]
        fitted.append(np.maximum(solution, [1e-12, 1e-9, 0, 0]))
    forward, backward = fitted
    link = LinkProfile(0.0, 1e15)
    layer = LayerProfile(
        tensor_parallel=1,
        attention_forward=float(forward[0]),
        attention_backward_factor=float(backward[0] / forward[0]),
        linear_forward=float(forward[1]),
        linear_backward_factor=float(backward[1] / forward[1]),
        sequence_constant=float((forward[2] + backward[2]) / 2),
        microbatch_constant=float((forward[3] + backward[3]) / 2),
        activation_per_token=1.0,
        activation_constant=0.0,
        checkpoint_per_token=1.0,
        kv_per_token=1.0,
        kv_gradient_per_token=1.0,
    )
    return Profile(
        name="tiny-layer",
        hardware="this machine, one thread",
        date="now",
        sources=("benchmarks/pipeline_layer.py",),
        calibrated={},
        assumed={},
        gpus_per_node=1024,
        inside_node=link,
        across_nodes=link,
        d2h_bandwidth=1e12,
        h2d_bandwidth=1e12,
        default_layer="tiny",
        layers={"tiny": layer},
    )
