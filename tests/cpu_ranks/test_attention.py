"""Ring attention over packs of pieces on gloo ranks, against float64 attention of the whole sequences."""

import os
import random
import signal
from dataclasses import replace

import numpy as np
import pytest
import torch
from attention_cases import Heads, How, errors, make_plan, on_pool, packed_tensors, random_pack, random_plans
from pool import RankContext, RankPool
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_hdp.attention.attend import hdp_attention
from megatron_hdp.attention.comm import RingComm
from megatron_hdp.attention.kernels import named_kernel, pick_kernel
from megatron_hdp.attention.traffic import exchange_bytes
from megatron_hdp.errors import ConfigError, PlanError, RankLostError
from megatron_hdp.types import MicroBatch, Piece, Plan, Ring


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 6, 8])
def test_random_packs_equal_float64_attention_and_send_what_was_foretold(rank_pool, num_ranks):
    heads = [Heads(), Heads(4, 1, 32), Heads(3, 3, 8)][num_ranks % 3]
    plans = random_plans(num_ranks, 4, num_ranks)
    for plan, by_rank in zip(plans, on_pool(rank_pool, plans, heads)):
        assert errors(plan, by_rank, heads).max() < 1e-5
        assert [sent for _, sent, _ in by_rank] == exchange_bytes(plan, heads.query, heads.kv, heads.dim, 4).tolist()
        assert max(len(peers) for _, _, peers in by_rank) <= 4


@pytest.mark.parametrize("kernel", ["reference", "torch_cpu_flash"])
def test_float64_is_exact_to_float64(rank_pool, kernel):
    heads = Heads(6, 2, 24, torch.float64)
    (plan,) = random_plans(8, 1, 77)
    (by_rank,) = on_pool(rank_pool, [plan], heads, How(kernel))
    assert errors(plan, by_rank, heads).max() < 1e-12
    assert [sent for _, sent, _ in by_rank] == exchange_bytes(plan, heads.query, heads.kv, heads.dim, 8).tolist()


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
    assert [sent for _, sent, _ in by_rank] == exchange_bytes(plan, heads.query, heads.kv, heads.dim, 4).tolist()


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
        forward = exchange_bytes(plan, heads.query, heads.kv, heads.dim, 4, backward=False)
        expected_bytes = exchange_bytes(plan, heads.query, heads.kv, heads.dim, 4) + bool(how.recompute) * forward
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
        pool.run(greet)  # imports take their time on a busy machine
        with pytest.raises(AssertionError, match=r"(?s)rank 1.*not done.*in hang"):
            pool.run(hang, timeout_s=1.0)
        assert pool.run(greet) == [0, 1]


def test_local_sequences_of_nearly_equal_length(rank_pool):
    """They share one padded batch on CPU; alone in a micro-batch they once came out with the padding."""
    plan = make_plan(1, [[(length, 0, 1) for length in (52, 50, 52, 52)]])
    (by_rank,) = on_pool(rank_pool, [plan], Heads())
    assert errors(plan, by_rank, Heads()).max() < 1e-5


class NoSync(TorchDispatchMode):
    """Fails on operations that make the host wait for the device, were the tensors on one."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = str(function)
        assert not any(word in name for word in ("_local_scalar_dense", "nonzero", "masked_select", "unique")), name
        if name.startswith("aten.index"):
            indices = args[1] if isinstance(args[1], list | tuple) else []
            assert not any(index is not None and index.dtype == torch.bool for index in indices), name
        return function(*args, **(kwargs or {}))


def without_sync(context: RankContext, plan_json: str, window: int | None) -> bool:
    """Case: forward and backward under `NoSync`."""
    heads = Heads(8, 2, 8)
    micro_batch = Plan.from_json(plan_json).micro_batch(context.rank, 0)
    comm = RingComm(context.group, context.ranks)
    q, k, v, dout = packed_tensors(micro_batch, heads, 0)
    kernel = pick_kernel(q.device, q.dtype, heads.dim)
    inputs = [tensor.requires_grad_() for tensor in (q, k, v)]
    with NoSync():
        settings = {"softmax_scale": 1.0, "kernel": kernel, "window": window}
        hdp_attention(*inputs, micro_batch, context.rank, comm, **settings).backward(dout)
    return all(bool((tensor.grad == tensor.grad).all()) for tensor in inputs)


@pytest.mark.parametrize("window", [None, 9])
def test_nothing_waits_for_the_device(rank_pool, window):
    how = [(), ("gather", 1), ("heads", 2), ("heads", 4)]
    pack = [(90, 0, 4, *each) for each in how] + [(length, 1, 1) for length in (9, 9, 30, 41)]
    plan = make_plan(4, [pack])
    assert rank_pool.run(without_sync, plan.to_json(), window, ranks=4) == [True] * 4
    with pytest.raises(AssertionError, match="_local_scalar_dense"), NoSync():
        torch.ones(1).item()


LOCAL = MicroBatch((Piece(0, 3, Ring(0, 1), 0, 2), Piece(1, 3, Ring(0, 1), 0, 2), Piece(2, 5, Ring(0, 1), 0, 3)))
REFERENCE = named_kernel("reference")


def attend_local(micro_batch: MicroBatch, rows: int, kernel=REFERENCE, kv_heads: int = 2) -> torch.Tensor:
    q, k = torch.randn(rows, 4, 8), torch.randn(rows, kv_heads, 8)
    return hdp_attention(q, k, k, micro_batch, 0, None, softmax_scale=1.0, kernel=kernel)


def test_local_sequences_run_as_one_kernel_call():
    calls = []

    class Counting(type(REFERENCE)):
        def forward(self, q, *args, **kwargs):
            calls.append((tuple(q.shape), args[2].queries))
            return super().forward(q, *args, **kwargs)

    attend_local(LOCAL, LOCAL.tokens, Counting())
    assert calls == [((11, 4, 8), (3, 3, 5))]


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
