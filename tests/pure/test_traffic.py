"""Bytes of every exchange against a dull twin that counts messages one by one."""

import subprocess
import sys
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_hdp.attention.traffic import exchange_bytes
from megatron_hdp.errors import ConfigError, PlanError
from megatron_hdp.metrics import RingTraffic, record_step
from megatron_hdp.types import EXCHANGES, Plan

Message = tuple[int, int, int]
"""Position that sends, position that receives, rows."""


def plan_of(num_ranks: int, lengths, starts, sizes, exchange=None, head_ranks=None, pad_multiple: int = 2) -> Plan:
    """A plan in which every rank runs all that it holds as one micro-batch."""
    spans = list(zip(starts, sizes))
    held = [[s for s, (start, size) in enumerate(spans) if start <= rank < start + size] for rank in range(num_ranks)]
    return Plan(
        num_ranks=num_ranks,
        capacity=1 << 20,
        pad_multiple=pad_multiple,
        lengths=np.array(lengths),
        ring_start=np.array(starts),
        ring_size=np.array(sizes),
        offload=np.zeros(len(spans)),
        rank_offsets=np.arange(num_ranks + 1),
        microbatch_offsets=np.cumsum([0, *map(len, held)]),
        piece_sequence=np.array([s for sequences in held for s in sequences], dtype=np.int64),
        exchange=exchange,
        head_ranks=head_ranks,
    )


def real(length: int, chunk: int, index: int) -> set[int]:
    """Real tokens of a chunk."""
    return set(range(index * chunk, min((index + 1) * chunk, length)))


def needed(length: int, chunk: int, index: int, window: int | None) -> set[int]:
    """Tokens before a chunk that it needs."""
    if not real(length, chunk, index):
        return set()
    first = 0 if window is None else max(0, index * chunk - (window - 1))
    return set(range(first, index * chunk))


def owned(length: int, chunk: int, size: int, position: int) -> set[int]:
    return real(length, chunk, position) | real(length, chunk, 2 * size - 1 - position)


def ring_messages(length: int, chunk: int, size: int, window: int | None) -> tuple[list[Message], list[Message]]:
    """Messages with keys and values, once, and messages with their gradients."""
    if window is None or window >= length:
        rows = [len(owned(length, chunk, size, position)) for position in range(size)]
        hops = [(p, (p + 1) % size, rows[(p - step) % size]) for step in range(size) for p in range(size)]
        return [hop for step in range(size - 1) for hop in hops[step * size : (step + 1) * size]], hops
    forward = []
    for p in range(size):
        high = 2 * size - 1 - p
        for j in range(1, 2 * size):
            if p - j >= 0:
                rows = real(length, chunk, p - j) & needed(length, chunk, p, window)
                forward.append((p - 1, p, len(rows)))
            if high - j > p:
                rows = real(length, chunk, high - j) & needed(length, chunk, high, window)
                forward.append((p + 1, p, len(rows)))
        got = sum(rows for _, to, rows in forward if to == p)
        assert got == len(needs(length, chunk, size, p, window))  # every needed row exactly once
    return forward, [(to, sender, rows) for sender, to, rows in forward]


def needs(length: int, chunk: int, size: int, p: int, window: int | None) -> set[int]:
    both = needed(length, chunk, p, window) | needed(length, chunk, 2 * size - 1 - p, window)
    return both - owned(length, chunk, size, p)


def gather_messages(length: int, chunk: int, size: int, window: int | None) -> tuple[list[Message], list[Message]]:
    forward = []
    for p in range(size):
        for owner in range(size):
            rows = needs(length, chunk, size, p, window) & owned(length, chunk, size, owner)
            forward.append((owner, p, len(rows)))
    return forward, [(to, sender, rows) for sender, to, rows in forward]


def dull_bytes(plan, heads, kv_heads, head_dim, element, window, backward) -> list[int]:
    sent = [0] * plan.num_ranks
    full = max(4, element)

    def count(ring, messages, bytes_per_row):
        for position, _, rows in messages:
            sent[ring.ranks[position]] += rows * bytes_per_row

    def count_kv(ring, messages, kv_heads, place):
        row = 2 * kv_heads * head_dim
        forward, gradients = [[(place(p), q, rows) for p, q, rows in some] for some in messages]
        for _ in range(2 if backward else 1):
            count(ring, forward, row * element)
        if backward:
            count(ring, gradients, row * full)

    for sequence in range(plan.num_sequences):
        ring, length, chunk = plan.ring(sequence), int(plan.lengths[sequence]), int(plan.chunk_tokens[sequence])
        size, exchange = ring.size, EXCHANGES[plan.exchange[sequence]]
        if size == 1:
            continue
        if exchange == "ring":
            count_kv(ring, ring_messages(length, chunk, size, window), kv_heads, lambda p: p)
        elif exchange == "gather":
            count_kv(ring, gather_messages(length, chunk, size, window), kv_heads, lambda p: p)
        else:
            a = int(plan.head_ranks[sequence])
            kept = max(kv_heads // a, 1)
            for p in range(size):
                own = len(owned(length, chunk, size, p))
                for other in range(p // a * a, p // a * a + a):
                    if other == p:
                        continue
                    theirs = len(owned(length, chunk, size, other))
                    q_k_v = heads // a * element + 2 * kept * element
                    out_back = heads // a * element
                    total = own * q_k_v + theirs * out_back
                    if backward:
                        dout, dq = heads // a * element, heads // a * element
                        total += own * dout + theirs * (dq + 2 * kept * (full if a > kv_heads else element))
                    sent[ring.ranks[p]] += total * head_dim
            if size > a:
                messages = ring_messages(length, a * chunk, size // a, window)
                for member in range(a):
                    count_kv(ring, messages, kept, lambda p, member=member, a=a: p * a + member)
    return sent


@st.composite
def cases(draw):
    """A plan with every exchange, and heads that suit it: (plan, heads, kv_heads)."""
    kv_heads = draw(st.sampled_from([1, 2, 3, 4, 8]))
    heads = kv_heads * draw(st.integers(1, 4))
    num_ranks, count = draw(st.integers(2, 12)), draw(st.integers(1, 6))
    sizes = [draw(st.integers(1, num_ranks)) for _ in range(count)]
    starts = [draw(st.integers(0, num_ranks - size)) for size in sizes]
    lengths = [draw(st.integers(1, 120)) for _ in range(count)]
    exchange, head_ranks = [], []
    for size in sizes:
        fitting = [a for a in range(1, size + 1) if size % a == heads % a == 0 and not (kv_heads % a and a % kv_heads)]
        exchange.append(draw(st.integers(0, 2)) if size > 1 else 0)
        head_ranks.append(draw(st.sampled_from(fitting)) if exchange[-1] == 2 else 1)
    pad_multiple = draw(st.sampled_from([2, 4, 6]))
    return plan_of(num_ranks, lengths, starts, sizes, exchange, head_ranks, pad_multiple), heads, kv_heads


WINDOWS = st.one_of(st.none(), st.integers(1, 130))


@settings(max_examples=400, deadline=None)
@given(cases(), WINDOWS, st.sampled_from([2, 4, 8]), st.booleans())
def test_bytes_equal_the_messages_counted_one_by_one(case, window, element, backward):
    plan, heads, kv_heads = case
    got = exchange_bytes(plan, heads, kv_heads, 16, element, window=window, backward=backward)
    assert got.dtype == np.int64
    assert got.tolist() == dull_bytes(plan, heads, kv_heads, 16, element, window, backward)


def test_windows_send_less_and_only_from_near_ranks():
    plan = plan_of(8, [4096], [0], [8])
    full = exchange_bytes(plan, 8, 8, 64, 4)
    near = exchange_bytes(plan, 8, 8, 64, 4, window=100)
    chunk, row = 256, 2 * 8 * 64
    # 15 chunk borders, of which the one in the middle lies inside the last rank; 99 rows cross each of the others
    assert near.sum() == 14 * 99 * row * (4 + 4 + 4)
    assert full.sum() == 8 * (7 + 7 + 8) * (2 * chunk) * row * 4
    assert exchange_bytes(plan, 8, 8, 64, 4, window=1).tolist() == [0] * 8


@pytest.mark.parametrize("exchange", [0, 1, 2])
def test_a_window_that_holds_the_whole_sequence_is_none(exchange):
    plan = plan_of(4, [1000], [0], [4], [exchange], [2 if exchange == 2 else 1])
    without = exchange_bytes(plan, 4, 2, 16, 2)
    assert exchange_bytes(plan, 4, 2, 16, 2, window=1000).tolist() == without.tolist()
    assert exchange_bytes(plan, 4, 2, 16, 2, window=500).sum() < without.sum()


def test_what_does_not_fit_is_refused():
    plan = plan_of(4, [100], [0], [4], [2], [4])
    with pytest.raises(ConfigError, match="6 query heads with 4 key/value heads"):
        exchange_bytes(plan, 6, 4, 16, 2)
    with pytest.raises(ConfigError, match="window of 0 tokens"):
        exchange_bytes(plan, 4, 4, 16, 2, window=0)
    with pytest.raises(PlanError, match="among 4 ranks, but each has 6 query heads"):
        exchange_bytes(plan, 6, 2, 16, 2)
    with pytest.raises(PlanError, match="among 4 ranks, but each has 12 query heads and 6 key/value"):
        exchange_bytes(plan, 12, 6, 16, 2)
    with pytest.raises(PlanError, match="among 3 ranks on a ring of 4"):
        exchange_bytes(plan_of(4, [100], [0], [4], [2], [3]), 3, 3, 16, 2)


def large_plan() -> Plan:
    """3,000 rings on 1,024 ranks, most of them small, some very wide."""
    random = np.random.default_rng(0)
    sizes = np.minimum(2 + random.geometric(0.2, 3000), 512)
    sizes[:8] = 512
    starts = random.integers(0, 1024 - sizes + 1)
    exchange = np.where(random.random(3000) < 0.3, 1, 0)
    return plan_of(1024, sizes * 8000, starts, sizes, exchange)


def test_large_plans_take_milliseconds():
    plan = large_plan()
    seconds = []
    for _ in range(5):
        began = time.perf_counter()
        sent = exchange_bytes(plan, 32, 8, 128, 2, window=4096)
        seconds.append(time.perf_counter() - began)
    assert sent.min() > 0
    assert min(seconds) < 0.02  # 1.3 ms with nothing else running


def traffic_of(**changes) -> RingTraffic:
    given = {"layer_windows": (None,), "recomputed": (False,), "heads": 4, "kv_heads": 2, "head_dim": 16}
    return RingTraffic(**{**given, "bytes_per_element": 2, **changes})


def test_layers_of_a_model_add_up_one_by_one():
    plan = plan_of(4, [100, 60, 40], [0, 1, 0], [4, 2, 2], [0, 1, 2], [1, 1, 2])
    windows, recomputed = (None, 16, None, 16, 8), (False, True, True, False, True)
    traffic = traffic_of(layer_windows=windows, recomputed=recomputed)
    expected = np.zeros(4, dtype=np.int64)
    for window, twice in zip(windows, recomputed):
        expected += exchange_bytes(plan, 4, 2, 16, 2, window=window)
        if twice:
            expected += exchange_bytes(plan, 4, 2, 16, 2, window=window, backward=False)
    assert traffic.bytes_by_rank(plan).tolist() == expected.tolist()
    with pytest.raises(ConfigError, match="1 windows for 2 layers"):
        traffic_of(recomputed=(True, True))


def test_scalars_name_the_exchanges_only_if_there_is_more_than_the_ring():
    rings = plan_of(4, [100, 60, 9], [0, 2, 0], [4, 2, 1])
    mixed = plan_of(4, [100, 60, 9], [0, 2, 0], [4, 2, 1], [0, 2, 0], [1, 2, 1])
    plain, named = (record_step(0, traffic_of(), 0, plan, (0.0, 0.0)).scalars() for plan in (rings, mixed))
    assert not [name for name in plain if name.endswith("-sequences")]
    added = {name: value for name, value in named.items() if name not in plain}
    assert added == {"hdp/ring-sequences": 1.0, "hdp/gather-sequences": 0.0, "hdp/heads-sequences": 1.0}


def test_needs_no_torch():
    code = "import sys, megatron_hdp.attention.traffic, megatron_hdp.attention.trace; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
