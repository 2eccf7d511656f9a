"""Random plans run as attention on gloo ranks, and their errors against float64 attention of the whole sequences."""

import math
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from pool import RankContext, RankPool
from torch.utils.checkpoint import checkpoint

from megatron_hdp.attention.attend import hdp_attention
from megatron_hdp.attention.comm import RingComm
from megatron_hdp.attention.kernels import named_kernel, pick_kernel
from megatron_hdp.attention.reference import reference_gradients
from megatron_hdp.types import EXCHANGES, MicroBatch, Piece, Plan

Shared = tuple[Any, ...]
"""Length, first rank and size of the ring of one sequence; then, if it is not the ring, exchange and head ranks."""


@dataclass(frozen=True)
class Heads:
    """Query heads, key/value heads, head size, and type of the tensors."""

    query: int = 4
    kv: int = 2
    dim: int = 16
    dtype: torch.dtype = torch.float32

    @property
    def scale(self) -> float:
        return 1.3 / math.sqrt(self.dim)  # not the usual scale, so that ignoring the argument would show

    def swap(self, ranks: int) -> bool:
        """Can so many ranks swap rows for heads?"""
        return self.query % ranks == 0 and (self.kv % ranks == 0 or ranks % self.kv == 0)


@dataclass(frozen=True)
class How:
    """Ways to call the attention that must not change what comes out."""

    kernel: str = ""
    recompute: str = ""
    """Activation checkpointing: "", "reentrant" (as Megatron's own) or "hooks"."""
    extra_rows: int = 0
    window: int | None = None
    overlap: bool = True


def make_plan(num_ranks: int, micro_batches: list[list[Shared]], pad_multiple: int = 2) -> Plan:
    """Every rank runs slot m with those sequences of ``micro_batches[m]`` whose ring holds it, in the given order."""
    flat = [shared for batch in micro_batches for shared in batch]
    first = np.cumsum([0, *(len(batch) for batch in micro_batches)])
    rank_offsets, offsets, pieces = [0], [0], []
    for rank in range(num_ranks):
        for slot, batch in enumerate(micro_batches):
            pieces += [int(first[slot]) + i for i, (_, start, d, *_) in enumerate(batch) if start <= rank < start + d]
            offsets.append(len(pieces))
        rank_offsets.append(len(offsets) - 1)
    lengths, starts, sizes = (np.array(column) for column in zip(*(shared[:3] for shared in flat)))
    how = [shared[3:] or ("ring", 1) for shared in flat]
    return Plan(
        num_ranks=num_ranks,
        capacity=10**6,
        pad_multiple=pad_multiple,
        lengths=lengths,
        ring_start=starts,
        ring_size=sizes,
        offload=np.zeros(len(flat)),
        rank_offsets=rank_offsets,
        microbatch_offsets=offsets,
        piece_sequence=pieces,
        exchange=[EXCHANGES.index(exchange) for exchange, _ in how],
        head_ranks=[ranks for _, ranks in how],
    )


def exchanges(size: int, heads: "Heads") -> list[tuple[str, int]]:
    """Every way to share a sequence among so many ranks."""
    fits = [a for a in range(2, size + 1) if size % a == 0 and heads.swap(a)]
    return [("ring", 1), ("gather", 1), *(("heads", a) for a in fits)]


def random_pack(rng: random.Random, num_ranks: int, max_length: int = 70, heads: Heads | None = None) -> list[Shared]:
    """Local and ring sequences with rings of any size starting anywhere; lengths near the rings' edges among them.

    All exchanges that ``heads`` allow; rings only if it is None.
    """
    pack = []
    for _ in range(rng.randint(1, 9)):
        size = rng.choice([1, rng.randint(1, num_ranks)])
        start = rng.randint(0, num_ranks - size)
        length = rng.choice([1, 2 * size - 1, 2 * size, 2 * size + 1, 7, rng.randint(1, max_length)])
        how = rng.choice(exchanges(size, heads)) if heads and size > 1 else ("ring", 1)
        pack += [(max(1, length), start, size, *how)] * rng.choice([1, 1, 3])
    rng.shuffle(pack)
    return pack


def sequence_tensors(sequence: int, length: int, heads: Heads) -> list[torch.Tensor]:
    """q, k, v and output gradient of one sequence; the same on every process."""
    generator = torch.Generator().manual_seed(1000 + sequence)
    shapes = [(length, count, heads.dim) for count in (heads.query, heads.kv, heads.kv, heads.query)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(heads.dtype) for shape in shapes]


def real_rows(piece: Piece) -> tuple[np.ndarray, np.ndarray]:
    """Token positions that the piece really holds, and their rows in the piece."""
    positions = np.concatenate([np.arange(*span) for span in piece.spans])
    rows = np.flatnonzero(positions < piece.length)
    return positions[rows], rows


def packed_tensors(micro_batch: MicroBatch, heads: Heads, extra_rows: int) -> list[torch.Tensor]:
    """The rank's q, k, v and output gradient; every row that is padding holds NaN, which would spread if read."""
    packed = [
        torch.full((micro_batch.tokens + extra_rows, count, heads.dim), math.nan, dtype=heads.dtype)
        for count in (heads.query, heads.kv, heads.kv, heads.query)
    ]
    offset = 0
    for piece in micro_batch.pieces:
        positions, rows = real_rows(piece)
        for whole, part in zip(sequence_tensors(piece.sequence, piece.length, heads), packed):
            part[offset + rows] = whole[positions]
        offset += piece.tokens
    return packed


def run_plan(context: RankContext, plan_json: str, heads: Heads, how: How) -> tuple[list, int, set[int]]:
    """Case: run all micro-batches of a plan forward and backward; (out, dq, dk, dv) each, bytes sent, peers."""
    plan = Plan.from_json(plan_json)
    comm = RingComm(context.group, context.ranks, overlap=how.overlap)
    kernel = named_kernel(how.kernel) if how.kernel else pick_kernel(torch.device("cpu"), heads.dtype, heads.dim)
    settings = {"softmax_scale": heads.scale, "kernel": kernel, "window": how.window}
    results = []
    for micro_batch in plan.micro_batches(context.rank):
        q, k, v, dout = packed_tensors(micro_batch, heads, how.extra_rows)
        inputs = [tensor.requires_grad_() for tensor in (q, k, v)]

        def attend(q, k, v, micro_batch=micro_batch):
            return hdp_attention(q, k, v, micro_batch, context.rank, comm, **settings)

        recompute = {"use_reentrant": how.recompute == "reentrant"}
        out = checkpoint(attend, *inputs, **recompute) if how.recompute else attend(*inputs)
        out.backward(dout)
        gradients = [tensor.grad for tensor in inputs]
        results.append([tensor.detach().view(torch.uint8).numpy() for tensor in (out, *gradients)])
    return results, comm.bytes_sent, comm.peers


def run_plans(context: RankContext, plans: list[str], heads: Heads, how: How) -> list:
    """Case: several plans in a row."""
    return [run_plan(context, plan, heads, how) for plan in plans]


def on_pool(pool: RankPool, plans: list[Plan], heads: Heads, how: How | None = None) -> list[list]:
    """Results of every plan by rank."""
    ranks = plans[0].num_ranks
    by_rank = pool.run(run_plans, [plan.to_json() for plan in plans], heads, how or How(), ranks=ranks)
    return [[by_rank[rank][index] for rank in range(ranks)] for index in range(len(plans))]


def errors(plan: Plan, by_rank: list, heads: Heads, window: int | None = None) -> np.ndarray:
    """Largest error of out, dq, dk, dv against float64, relative to the largest entry; checks that padding is 0."""
    whole = [sequence_tensors(s, int(n), heads) for s, n in enumerate(plan.lengths)]
    expected = [reference_gradients(*tensors, heads.scale, window) for tensors in whole]
    largest = np.array([max(float(e[i].abs().max()) for e in expected) for i in range(4)])
    worst = np.zeros(4)
    seen = np.zeros(plan.num_sequences, dtype=np.int64)
    for rank in range(plan.num_ranks):
        for micro_batch, result in zip(plan.micro_batches(rank), by_rank[rank][0]):
            got = [torch.from_numpy(array).view(heads.dtype).double() for array in result]
            is_padding = torch.ones(got[0].shape[0], dtype=torch.bool)
            offset = 0
            for piece in micro_batch.pieces:
                positions, rows = real_rows(piece)
                seen[piece.sequence] += rows.size
                is_padding[offset + rows] = False
                if rows.size:
                    for i in range(4):
                        difference = got[i][offset + rows] - expected[piece.sequence][i][positions]
                        worst[i] = np.maximum(worst[i], float(difference.abs().max()))  # keeps NaN
                offset += piece.tokens
            assert all(bool((tensor[is_padding] == 0).all()) for tensor in got), "padding must come out as exact zeros"
    assert (seen == plan.lengths).all(), "every token of every sequence must be on exactly one rank"
    return worst / np.maximum(
        largest, 1.0
    )  # gradients may be zero, and what is left then is rounding of terms of size 1


def random_plans(num_ranks: int, count: int, seed: int, heads: Heads | None = None) -> list[Plan]:
    rng = random.Random(seed)
    packs = ([random_pack(rng, num_ranks, heads=heads) for _ in range(rng.randint(1, 3))] for _ in range(count))
    return [make_plan(num_ranks, pack, rng.choice([2, 2, 4, 6])) for pack in packs]
