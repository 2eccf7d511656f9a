"""The profiler's instruments on CPU ranks: clock, rounds, transfers, copies, activation bytes."""

import time

import pytest
import torch
from torch import nn

from megatron_hdp.attention.comm import RingComm
from megatron_hdp.profiler.activations import LayerBytes
from megatron_hdp.profiler.agree import Everyone
from megatron_hdp.profiler.cases import Case
from megatron_hdp.profiler.links import exchanger, ring_sizes, time_copies, time_ring
from megatron_hdp.profiler.machine import device_memory, hardware, machine_memory
from megatron_hdp.profiler.rounds import run_rounds
from megatron_hdp.profiler.timer import Timer
from megatron_hdp.types import Ring

CPU = torch.device("cpu")


def everyone_of(context):
    """All ranks of the case: the pool has eight processes and the profiler speaks to the default group."""
    assert context.size == 8
    return Everyone(CPU)


# Clock


def test_timer_counts_work_and_not_waiting():
    timer = Timer(CPU)
    if timer.name != "CPU time of the thread":
        pytest.skip("torch has several threads here")
    timer.mark()
    time.sleep(0.05)
    timer.mark()
    end = time.thread_time() + 0.02
    while time.thread_time() < end:
        pass
    timer.mark()
    waited, worked = timer.seconds()
    assert waited < 0.02
    assert 0.02 <= worked < 0.06
    assert timer.seconds() == ()


def test_timer_counts_waiting_where_asked():
    timer = Timer(CPU, waits=True)
    assert timer.name == "wall time"
    timer.mark()
    time.sleep(0.02)
    timer.mark()
    assert timer.seconds()[0] >= 0.02


# Rounds


def rounds_case(context, fails_at, lacks, seconds, lengths):
    """Runs fake cases that take as long as they are long (in 10 us); returns counts, and what was left out."""
    runs = []
    now = [0.0]  # a clock that only the runs move: on a busy machine nothing else is left out

    def prepare(case):
        if context.rank == 3 and case.tokens == fails_at:
            raise MemoryError("no room")

        def run():
            now[0] += case.tokens * 1e-5
            runs.append(case.tokens)
            return case.tokens * 1e-5, case.tokens * 2e-5

        return run

    def has(case):
        return not (context.rank == 5 and case.tokens == lacks)

    cases = [Case("layers", (length,)) for length in lengths]
    found = run_rounds(cases, has, prepare, seconds, everyone_of(context), lambda: now[0])
    counts = {case.tokens: len(samples) for case, samples in found.samples.items()}
    return counts, [case.tokens for case in found.left_out], len(runs)


def test_all_ranks_repeat_alike(rank_pool):
    results = rank_pool.run(rounds_case, None, None, 0.5, (64, 128, 256, 512))
    counts = [result[0] for result in results]
    assert all(count == counts[0] for count in counts)
    assert set(counts[0]) == {64, 128, 256, 512}
    assert min(counts[0].values()) >= 3
    assert counts[0][64] > counts[0][512]  # short ones more often
    assert all(result[1] == [] for result in results)
    assert results[0][2] == sum(counts[0].values()) + 4  # each once to warm up


def test_no_memory_on_one_rank_ends_the_grid_on_all(rank_pool):
    for counts, left_out, _ in rank_pool.run(rounds_case, 256, None, 0.3, (64, 128, 256, 512)):
        assert set(counts) == {64, 128}
        assert left_out == [256, 512]


def test_a_rank_without_a_case_skips_it(rank_pool):
    results = rank_pool.run(rounds_case, None, 128, 0.3, (64, 128, 256))
    assert set(results[5][0]) == {64, 256}
    assert set(results[0][0]) == {64, 128, 256}
    assert results[5][0][256] == results[0][0][256]


def test_no_time_leaves_the_longest_out(rank_pool):
    for counts, left_out, _ in rank_pool.run(rounds_case, None, None, 1.0, (100, 40000, 60000)):
        assert set(counts) == {100, 40000}
        assert left_out == [60000]


# Transfers and copies


def ring_case(context, place):
    """Exchanges on rings of three and five ranks at once, or one rank on none; then copies beside them."""
    everyone = everyone_of(context)
    comm = RingComm(None, context.ranks)
    comm.warm_up()
    rings = {"two rings": [Ring(0, 3), Ring(3, 5)], "one apart": [Ring(0, 7)], "none": []}[place]
    mine = next((r for r in rings if r.start <= context.rank < r.start + r.size), None)
    return time_ring(comm, mine, (1 << 10, 1 << 16, 1 << 22), everyone)


@pytest.mark.parametrize(("place", "ranks"), [("two rings", 5), ("one apart", 7)])
def test_transfers(rank_pool, place, ranks):
    results = rank_pool.run(ring_case, place)
    assert all(result == results[0] for result in results)  # the slowest rank's, on every rank
    seconds, found = results[0]
    assert found == ranks
    assert len(seconds) == 3
    assert 1e-6 < seconds[0] < seconds[2] < 5


def test_transfers_without_a_ring(rank_pool):
    assert rank_pool.run(ring_case, "none") == [None] * 8


def copies_case(context, is_beside):
    everyone = everyone_of(context)
    comm = RingComm(None, context.ranks)
    comm.warm_up()
    beside = exchanger(comm, Ring(0, context.size), CPU) if is_beside else None
    found = time_copies(everyone, beside, 1e8, size=1 << 20)
    return found.out, found.back, found.pinned, comm.bytes_sent


@pytest.mark.parametrize("is_beside", [False, True])
def test_copies(rank_pool, is_beside):
    for out, back, pinned, sent in rank_pool.run(copies_case, is_beside):
        assert 1e6 < out < 1e12
        assert 1e6 < back < 1e12
        assert not pinned
        assert (sent > 0) == is_beside


def test_sizes_of_transfers():
    assert ring_sizes(1 << 20) == (1 << 10, 1 << 13, 1 << 16, 1 << 19, 1 << 20)
    assert ring_sizes(100) == (1 << 10, 1 << 13)  # a line needs two


# Activation bytes


class Layer(nn.Module):
    """Saves its input, and gelu its own: with views of them and a parameter beside."""

    def __init__(self, size):
        super().__init__()
        self.linear = nn.Linear(size, size, bias=False)

    def forward(self, x):
        hidden = self.linear(x)  # saves x and the weight
        gate, value = hidden.chunk(2, dim=-1)  # views of one storage
        return torch.cat([torch.sigmoid(gate) * value, value], dim=-1)


def test_activation_bytes_by_hand():
    rows, size = 10, 8
    layers = nn.ModuleList([Layer(size), Layer(size)])
    outside = nn.Linear(size, size, bias=False)
    table = torch.rand(rows, size)
    x = torch.rand(rows, size, requires_grad=True)

    def forward():
        y = torch.tanh(x * table)  # saves table, and its own output, outside
        for layer in layers:
            y = layer(y)
        return torch.exp(outside(y))

    counter = LayerBytes(layers, layers.parameters())
    # each layer: its input, the storage of gate and value, and sigmoid's output of half the width
    by_hand = 2 * (rows * size + rows * size + rows * size // 2) * 4
    assert counter.of(forward) == by_hand
    assert counter.of(forward) == by_hand  # nothing is left over from the first time


def test_what_is_there_anyway_does_not_count():
    layer = Layer(8)
    x = torch.rand(10, 8, requires_grad=True)
    all_of_it = LayerBytes([layer], layer.parameters()).of(lambda: layer(x))
    assert LayerBytes([layer], [*layer.parameters(), x]).of(lambda: layer(x)) == all_of_it - x.nbytes
    assert LayerBytes([layer], []).of(lambda: layer(x)) == all_of_it + layer.linear.weight.nbytes


def test_machine_is_the_same_twice():
    assert hardware(CPU) == hardware(CPU)
    assert hardware(CPU).startswith("CPU rank: ")
    assert device_memory(CPU, 4) == machine_memory() / 4 > 2**28
