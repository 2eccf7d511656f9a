"""Ring attention over packs of pieces on gloo ranks, against float64 attention of the whole sequences."""

import math
import os
import random
import signal
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from pool import RankContext, RankPool
from torch.utils.checkpoint import checkpoint

from megatron_hdp.attention.comm import RingComm
from megatron_hdp.attention.kernels import (
    TorchCudaFlashKernel,
    accumulate_dtype,
    available_kernels,
    chosen_kernel,
    named_kernel,
    pick_kernel,
)
from megatron_hdp.attention.reference import reference_gradients
from megatron_hdp.attention.ring import hdp_attention
from megatron_hdp.attention.traffic import ring_bytes
from megatron_hdp.errors import ConfigError, PlanError, RankLostError
from megatron_hdp.types import MicroBatch, Piece, Plan, Ring

Shared = tuple[int, int, int]
"""Length, first rank and size of the ring of one sequence."""


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


@dataclass(frozen=True)
class How:
    """Ways to call the attention that must not change what comes out."""

    kernel: str = ""
    recompute: str = ""
    """Activation checkpointing: "", "reentrant" (as Megatron's own) or "hooks"."""
    extra_rows: int = 0


def make_plan(num_ranks: int, micro_batches: list[list[Shared]], pad_multiple: int = 2) -> Plan:
    """Every rank runs slot m with those sequences of ``micro_batches[m]`` whose ring holds it, in the given order."""
    flat = [shared for batch in micro_batches for shared in batch]
    first = np.cumsum([0, *(len(batch) for batch in micro_batches)])
    rank_offsets, offsets, pieces = [0], [0], []
    for rank in range(num_ranks):
        for slot, batch in enumerate(micro_batches):
            pieces += [int(first[slot]) + i for i, (_, start, d) in enumerate(batch) if start <= rank < start + d]
            offsets.append(len(pieces))
        rank_offsets.append(len(offsets) - 1)
    lengths, starts, sizes = (np.array(column) for column in zip(*flat))
    return Plan(
        num_ranks, 10**6, pad_multiple, lengths, starts, sizes, np.zeros(len(flat)), rank_offsets, offsets, pieces
    )


def random_pack(rng: random.Random, num_ranks: int, max_length: int = 70) -> list[Shared]:
    """Local and ring sequences with rings of any size starting anywhere; lengths near the rings' edges among them."""
    pack = []
    for _ in range(rng.randint(1, 9)):
        size = rng.choice([1, rng.randint(1, num_ranks)])
        start = rng.randint(0, num_ranks - size)
        length = rng.choice([1, 2 * size - 1, 2 * size, 2 * size + 1, 7, rng.randint(1, max_length)])
        pack += [(max(1, length), start, size)] * rng.choice([1, 1, 3])
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
    comm = RingComm(context.group, context.ranks)
    kernel = named_kernel(how.kernel) if how.kernel else pick_kernel(torch.device("cpu"), heads.dtype, heads.dim)
    results = []
    for micro_batch in plan.micro_batches(context.rank):
        q, k, v, dout = packed_tensors(micro_batch, heads, how.extra_rows)
        inputs = [tensor.requires_grad_() for tensor in (q, k, v)]

        def attend(q, k, v, micro_batch=micro_batch):
            return hdp_attention(q, k, v, micro_batch, context.rank, comm, softmax_scale=heads.scale, kernel=kernel)

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


def errors(plan: Plan, by_rank: list, heads: Heads) -> np.ndarray:
    """Largest error of out, dq, dk, dv against float64, relative to the largest entry; checks that padding is 0."""
    whole = [sequence_tensors(s, int(n), heads) for s, n in enumerate(plan.lengths)]
    expected = [reference_gradients(*tensors, heads.scale) for tensors in whole]
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
    return worst / np.maximum(largest, 1e-30)


def random_plans(num_ranks: int, count: int, seed: int) -> list[Plan]:
    rng = random.Random(seed)
    return [
        make_plan(num_ranks, [random_pack(rng, num_ranks) for _ in range(rng.randint(1, 3))], rng.choice([2, 2, 4, 6]))
        for _ in range(count)
    ]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 6, 8])
def test_random_packs_equal_float64_attention_and_send_what_was_foretold(rank_pool, num_ranks):
    heads = [Heads(), Heads(4, 1, 32), Heads(3, 3, 8)][num_ranks % 3]
    plans = random_plans(num_ranks, 8, num_ranks)
    for plan, by_rank in zip(plans, on_pool(rank_pool, plans, heads)):
        assert errors(plan, by_rank, heads).max() < 1e-5
        assert [sent for _, sent, _ in by_rank] == ring_bytes(plan, heads.kv, heads.dim, 4).tolist()
        assert max(len(peers) for _, _, peers in by_rank) <= 4


@pytest.mark.parametrize("kernel", ["reference", "torch_cpu_flash"])
def test_float64_is_exact_to_float64(rank_pool, kernel):
    heads = Heads(6, 2, 24, torch.float64)
    (plan,) = random_plans(8, 1, 77)
    (by_rank,) = on_pool(rank_pool, [plan], heads, How(kernel))
    assert errors(plan, by_rank, heads).max() < 1e-12
    assert [sent for _, sent, _ in by_rank] == ring_bytes(plan, heads.kv, heads.dim, 8).tolist()


@pytest.mark.parametrize("kernel", ["reference", "torch_cpu_flash"])
def test_every_ring_with_lengths_at_its_edges(rank_pool, kernel):
    """Rings of 1..8 ranks at every start, with 1, 2d-1, 2d, 2d+1 and 5d+3 tokens; many pieces are all padding."""
    pack = [
        (length, start, size)
        for size in range(1, 9)
        for start in range(9 - size)
        for length in (1, 2 * size - 1, 2 * size, 2 * size + 1, 5 * size + 3)
    ]
    plan = make_plan(8, [pack])
    heads = Heads(2, 1, 8)
    (by_rank,) = on_pool(rank_pool, [plan], heads, How(kernel))
    assert errors(plan, by_rank, heads).max() < 1e-5
    assert [sent for _, sent, _ in by_rank] == ring_bytes(plan, heads.kv, heads.dim, 4).tolist()


def test_published_packs_of_odd_lengths(rank_pool):
    """Lengths that other systems dropped or misplaced tokens of: 7 on 2 ranks, 4, 8, 6, 10 on 2, 698 on 4."""
    packs = [[(7, 0, 2)], [(4, 0, 2), (8, 0, 2), (6, 0, 2), (10, 0, 2)], [(698, 0, 4)], [(15, 0, 8), (3, 2, 5)]]
    plan = make_plan(8, packs)
    (by_rank,) = on_pool(rank_pool, [plan], Heads())
    assert errors(plan, by_rank, Heads()).max() < 1e-5


def test_recompute_extra_rows_and_repeats_are_bit_equal(rank_pool):
    """Rows beyond the pieces, a second run, and recomputing the forward in the backward change no bit."""
    heads = Heads()
    (plan,) = random_plans(4, 1, 5)
    ways = [How(), How(), How(recompute="hooks"), How(recompute="reentrant"), How(extra_rows=3)]
    first, *others = ([on_pool(rank_pool, [plan], heads, how)[0]] for how in ways)
    assert errors(plan, first[0], heads).max() < 1e-5
    for other, how in zip(others, ways[1:]):
        for rank in range(4):
            for expected, got in zip(first[0][rank][0], other[0][rank][0]):
                for a, b in zip(expected, got):
                    np.testing.assert_array_equal(b[: len(a)], a)
                    assert not b[len(a) :].any()
        forward = ring_bytes(plan, heads.kv, heads.dim, 4, backward=False)
        expected_bytes = ring_bytes(plan, heads.kv, heads.dim, 4) + bool(how.recompute) * forward
        assert [sent for _, sent, _ in other[0]] == expected_bytes.tolist()


@pytest.mark.parametrize("heads", [Heads(4, 2, 64, torch.bfloat16), Heads(4, 4, 32, torch.float16)], ids=str)
def test_half_precision_is_as_good_as_one_rank(rank_pool, heads):
    lengths = [400, 333, 90]
    rings = make_plan(8, [[(length, start, 8 - start) for start, length in enumerate(lengths)]])
    alone = make_plan(1, [[(length, 0, 1) for length in lengths]])
    on_rings = errors(rings, on_pool(rank_pool, [rings], heads)[0], heads)
    on_one = errors(alone, on_pool(rank_pool, [alone], heads)[0], heads)
    assert (on_rings <= 2 * on_one).all(), f"rings {on_rings}, one rank {on_one}"


def test_all_rings_together_meet_at_most_four_peers(rank_pool):
    """Every interval of 8 ranks and random packs, on one communicator: what counts is whom a rank ever meets."""
    rng = random.Random(9)
    packs = [[(1 + rng.randrange(5), start, size)] for size in range(2, 9) for start in range(9 - size)]
    packs += [random_pack(rng, 8, 20) for _ in range(40)]
    plan = make_plan(8, packs)
    (by_rank,) = on_pool(rank_pool, [plan], Heads(1, 1, 8))
    met = [peers for _, _, peers in by_rank]
    assert all(0 < abs(peer - rank) <= 2 for rank in range(8) for peer in met[rank])
    assert max(len(peers) for peers in met) == 4
    assert errors(plan, by_rank, Heads(1, 1, 8)).max() < 1e-5


def warm_up(context: RankContext, max_distance: int) -> tuple[set[int], int]:
    comm = RingComm(context.group, context.ranks)
    comm.warm_up(max_distance)
    return comm.peers, comm.bytes_sent


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
def test_warm_up_meets_every_rank_within_two(rank_pool, num_ranks):
    for rank, (peers, sent) in enumerate(rank_pool.run(warm_up, 2, ranks=num_ranks, timeout_s=20)):
        assert peers == {r for r in range(num_ranks) if 0 < abs(r - rank) <= 2}
        assert sent == 0  # no traffic of rings


def partial_gradients(context: RankContext, plan_json: str, heads: Heads) -> list:
    """Case: gradients when only some inputs want one, the plain forward, and what is kept for backward."""
    micro_batch = Plan.from_json(plan_json).micro_batch(context.rank, 0)
    comm = RingComm(context.group, context.ranks)
    q, k, v, dout = packed_tensors(micro_batch, heads, 0)
    kernel = pick_kernel(q.device, q.dtype, heads.dim)
    kept: list[int] = []

    def run(*needed: int):
        inputs = [tensor.detach().clone().requires_grad_(i in needed) for i, tensor in enumerate((q, k, v))]
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
            out = hdp_attention(*inputs, micro_batch, context.rank, comm, softmax_scale=heads.scale, kernel=kernel)
        wanted = [inputs[i] for i in needed]
        return out, torch.autograd.grad(out, wanted, dout) if needed else ()

    out, (dq, dk, dv) = run(0, 1, 2)
    assert kept == [q.numel(), k.numel(), v.numel(), q.numel(), q.shape[0] * heads.query]
    same = [torch.equal(run(0)[1][0], dq), torch.equal(run(2)[1][0], dv), torch.equal(run(1, 2)[1][0], dk)]
    with torch.no_grad():
        plain, _ = run()
    assert not plain.requires_grad
    return [*same, torch.equal(plain, out)]


def test_gradients_of_some_inputs_only_and_no_grad(rank_pool):
    plan = make_plan(3, [[(20, 0, 3), (9, 1, 1), (9, 1, 1), (5, 1, 2), (8, 0, 2)]])
    assert rank_pool.run(partial_gradients, plan.to_json(), Heads(), ranks=3) == [[True] * 4] * 3


def lose_a_peer(context: RankContext, plan_json: str) -> str:
    """Case: rank 1 is killed after the forward pass; what the others are told in the backward pass."""
    micro_batch = Plan.from_json(plan_json).micro_batch(context.rank, 0)
    comm = RingComm(context.group, context.ranks)
    comm.warm_up()
    q, k, v, dout = packed_tensors(micro_batch, Heads(), 0)
    kernel = pick_kernel(q.device, q.dtype, 16)
    out = hdp_attention(q.requires_grad_(), k, v, micro_batch, context.rank, comm, softmax_scale=1.0, kernel=kernel)
    if context.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        out.backward(dout)
    except RankLostError as error:
        return str(error)
    return "no error"


def test_a_killed_peer_is_named():
    plan = make_plan(2, [[(30, 0, 1), (31, 0, 2)]])
    with RankPool(2) as pool:
        survivor, killed = pool.outcomes(lose_a_peer, plan.to_json(), timeout_s=30)
    assert killed.died
    message = str(survivor.value)
    assert "pool rank 0 was" in message
    assert "pool rank 1 (" in message
    assert "backward step 1 of 2, of sequence 1" in message


def hang(context: RankContext) -> None:
    if context.rank == 1:
        torch.distributed.barrier(context.group)


def greet(context: RankContext) -> int:
    return context.rank


def test_the_pool_reports_stacks_of_a_hang_and_recovers():
    with RankPool(2) as pool:
        with pytest.raises(AssertionError, match=r"(?s)rank 1.*not done.*in hang"):
            pool.run(hang, timeout_s=1.0)
        assert pool.run(greet) == [0, 1]


LOCAL = MicroBatch((Piece(0, 3, Ring(0, 1), 0, 2), Piece(1, 3, Ring(0, 1), 0, 2), Piece(2, 5, Ring(0, 1), 0, 3)))
REFERENCE = named_kernel("reference")


def attend_local(micro_batch: MicroBatch, rows: int, kernel=REFERENCE, kv_heads: int = 2) -> torch.Tensor:
    q, k = torch.randn(rows, 4, 8), torch.randn(rows, kv_heads, 8)
    return hdp_attention(q, k, k, micro_batch, 0, None, softmax_scale=1.0, kernel=kernel)


def test_equal_lengths_run_as_one_kernel_call():
    calls = []

    class Counting(type(REFERENCE)):
        def forward(self, q, *args, **kwargs):
            calls.append(tuple(q.shape))
            return super().forward(q, *args, **kwargs)

    attend_local(LOCAL, LOCAL.tokens, Counting())
    assert calls == [(2, 3, 4, 8), (1, 5, 4, 8)]


def test_an_empty_micro_batch_gives_zeros():
    q = torch.randn(6, 4, 8, requires_grad=True)
    k = torch.randn(6, 2, 8, requires_grad=True)
    out = hdp_attention(q, k, k, MicroBatch(()), 0, None, softmax_scale=1.0, kernel=REFERENCE)
    dq, dk = torch.autograd.grad(out.sum(), (q, k))
    assert not out.any()
    assert not dq.any()
    assert not dk.any()


def test_misuse_is_explained():
    with pytest.raises(PlanError, match="has 14 rows, but q, k and v have 13"):
        attend_local(LOCAL, 13)
    with pytest.raises(ConfigError, match="head count that divides"):
        attend_local(LOCAL, 14, kv_heads=3)
    shared = MicroBatch((Piece(3, 9, Ring(0, 2), 0, 3),))
    with pytest.raises(PlanError, match=r"shares sequence 3 .* is missing"):
        attend_local(shared, 6)
    with pytest.raises(PlanError, match="position 1 of the ring"):
        attend_local(MicroBatch((replace(shared.pieces[0], position=1),)), 6)


SHAPES = [(1, 1, False), (1, 9, False), (9, 1, False), (31, 70, False), (70, 31, False), (1, 1, True), (67, 67, True)]


@pytest.mark.parametrize("name", ["torch_cpu_flash", "reference"])
@pytest.mark.parametrize(("queries", "keys", "causal"), SHAPES)
def test_block_kernels_of_every_shape(name, queries, keys, causal):
    """A block's results for any head size and group, against autograd in float64."""
    kernel = named_kernel(name)
    for dim in (8, 20, 64, 96, 256):
        for heads, kv in ((4, 4), (4, 2), (4, 1)):
            q, k, v, dout = (
                torch.randn(2, n, h, dim) for n, h in [(queries, heads), (keys, kv), (keys, kv), (queries, heads)]
            )
            out, lse = kernel.forward(q, k, v, causal=causal, scale=0.2)
            gradients = kernel.backward(dout, q, k, v, out, lse, causal=causal, scale=0.2)
            wide = [tensor.double().requires_grad_() for tensor in (q, k, v)]
            scores = torch.einsum("bshd,bkhd->bhsk", wide[0], wide[1].repeat_interleave(heads // kv, 2)) * 0.2
            if causal:
                scores = scores + torch.full((queries, keys), -math.inf).triu(1)
            expected = torch.einsum("bhsk,bkhd->bshd", scores.softmax(-1), wide[2].repeat_interleave(heads // kv, 2))
            expected_gradients = torch.autograd.grad(expected, wide, dout.double())
            assert lse.dtype == torch.float32
            torch.testing.assert_close(lse.double(), scores.logsumexp(-1).transpose(1, 2), rtol=1e-5, atol=1e-5)
            for got, want in zip((out, *gradients), (expected, *expected_gradients)):
                # The gradient of a lone key's score is 0: what is left is rounding of terms as large as dout.
                assert (got.double() - want).abs().max() < 1e-5 * max(float(want.detach().abs().max()), 10.0)


@pytest.mark.parametrize("dim", [64, 20])
def test_the_cuda_kernel_fits_the_schema_of_its_op(dim):
    """No GPU here: the meta device checks arguments and shapes, not numbers."""
    q = torch.empty(2, 5, 4, dim, dtype=torch.bfloat16, device="meta")
    k = torch.empty(2, 7, 2, dim, dtype=torch.bfloat16, device="meta")
    kernel = TorchCudaFlashKernel()
    out, lse = kernel.forward(q, k, k, causal=False, scale=0.1)
    dq, dk, dv = kernel.backward(q, q, k, k, out, lse, causal=False, scale=0.1)
    assert (out.shape, lse.shape, lse.dtype) == (q.shape, (2, 5, 4), accumulate_dtype(q.dtype))
    assert (dq.shape, dk.shape, dv.shape) == (q.shape, k.shape, k.shape)


def test_kernels_are_picked_by_capability_and_reported_with_reasons():
    cpu = torch.device("cpu")
    assert pick_kernel(cpu, torch.bfloat16, 64).name == "torch_cpu_flash"
    assert pick_kernel(torch.device("meta"), torch.float32, 64).name == "reference"
    report = {name: (usable, reason) for name, usable, reason in available_kernels(cpu)}
    assert report["torch_cpu_flash"] == (True, "")
    assert report["reference"] == (True, "")
    assert not report["torch_cuda_flash"][0]
    assert "CUDA" in report["torch_cuda_flash"][1]
    with pytest.raises(ConfigError, match="choose one of torch_cuda_flash, torch_cpu_flash, reference"):
        named_kernel("tiny")


def test_a_kernel_that_cannot_run_is_refused_with_those_that_can():
    cpu = torch.device("cpu")
    assert chosen_kernel("auto", cpu, torch.float32, 64).name == "torch_cpu_flash"
    assert chosen_kernel("reference", cpu, torch.float32, 64).name == "reference"
    with pytest.raises(ConfigError, match=r"torch_cuda_flash: .*CUDA.*can run: auto, torch_cpu_flash, reference"):
        chosen_kernel("torch_cuda_flash", cpu, torch.bfloat16, 64)
    with pytest.raises(ConfigError, match="tiny: there is no such kernel; here can run: auto, torch_cpu_flash, ref"):
        chosen_kernel("tiny", cpu, torch.float32, 64)
