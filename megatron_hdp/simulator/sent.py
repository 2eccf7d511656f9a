"""Bytes that attention sends, as training counts them: padding never travels."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron_hdp.attention.traffic import exchange_bytes
from megatron_hdp.planner.peers import RING
from megatron_hdp.simulator.job import Job
from megatron_hdp.types import IntArray, Plan, Ring

type Floats = npt.NDArray[np.float64]
_BLOCK = 1 << 20
"""Pieces that are looked at together, which bounds the memory."""


@dataclass(frozen=True)
class Sent:
    """What is sent for each shared sequence on one layer, by one GPU of each rank of its ring; forward, backward.

    Backward has the forward pass that full recompute runs again. Where pipeline stages lie differently on their nodes,
    what crosses is the mean over stages.
    """

    sequence: IntArray
    """Ascending, [num_shared]."""
    all: Floats
    """Bytes of all ranks of the ring, [num_shared, 2]."""
    across: Floats
    """Those of them that leave their node, [num_shared, 2]."""
    senders: Floats
    """Ranks that send across nodes, [num_shared]."""

    @property
    def of_sender(self) -> Floats:
        """Bytes that one rank that sends across nodes sends there, mean over them, [num_shared, 2]."""
        return np.asarray(self.across / np.maximum(self.senders, 1e-9)[:, None], dtype=np.float64)


def sent_by_sequences(plan: Plan, job: Job) -> Sent:
    """Bytes of attention by sequence; those of a token's keys and values are the profile's.

    Of rings where all goes round, each hop is looked at. Of gathers, of swaps of rows for heads and of windows, what
    each rank sends is exact, and the part that leaves its node is the share of peers on other nodes.
    """
    shared = np.flatnonzero(plan.ring_size > 1)
    window = job.cost.window
    round_ = plan.exchange[shared] == RING
    if window is not None:
        round_ &= plan.lengths[shared] <= window
    every, across = np.zeros((shared.size, 2)), np.zeros((shared.size, 2))
    senders = np.zeros(shared.size)
    for rows, found in ((round_, _rounds), (~round_, _others)):
        if rows.any():
            every[rows], across[rows], senders[rows] = found(plan, job, shared[rows])
    for part in (every, across):
        if job.cost.recompute == "full":
            part[:, 1] += part[:, 0]
    return Sent(shared, every, across, senders)


def _rounds(plan: Plan, job: Job, sequences: IntArray) -> tuple[Floats, Floats, Floats]:
    """`Sent.all`, `Sent.across` and `Sent.senders` of rings on which all keys and values go round.

    A slice makes all hops but the one home, its gradients make all. So a hop carries the rows of all positions but the
    receiver's, and those are counted through prefix sums over the chunks: chunk j is all real if it ends at or before
    the sequence does.
    """
    length, size, chunk = plan.lengths[sequences], plan.ring_size[sequences], plan.chunk_tokens[sequences]
    ranks = job.cluster.ranks_per_node(job.tensor_parallel)
    cases, of_case = np.unique(np.stack([plan.ring_start[sequences] % ranks, size]), axis=1, return_inverse=True)
    whole, rest = length // chunk, length % chunk
    hops, missing = np.zeros(sequences.size, dtype=np.int64), np.zeros(sequences.size, dtype=np.int64)
    of_case = of_case.reshape(-1)
    order = np.argsort(of_case, kind="stable")
    cuts = np.searchsorted(of_case[order], np.arange(cases.shape[1] + 1))
    for case, (start, width) in enumerate(cases.T.tolist()):
        rows = order[cuts[case] : cuts[case + 1]]
        into = np.roll(_crossing(plan, job, start, width), 1)  # stages at which the hop into each position crosses
        of_chunk = np.concatenate([into, into[::-1], np.zeros(1, np.int64)])
        ahead = np.concatenate([np.zeros(1, np.int64), np.cumsum(of_chunk)])
        hops[rows] = into.sum()
        missing[rows] = chunk[rows] * ahead[whole[rows]] + rest[rows] * of_chunk[whole[rows]]
    layer = job.cost.layer_profile
    stages = job.stages

    def moved(round_: IntArray, home: IntArray) -> Floats:
        """Forward keys and values make a round; backward they do, and gradients go home."""
        once = round_ * layer.kv_per_token / stages
        return np.stack([once, once + home * layer.kv_gradient_per_token / stages], axis=1)

    every = moved(stages * (size - 1) * length, stages * size * length)
    return every, moved(hops * length - missing, hops * length), hops / stages


def _crossing(plan: Plan, job: Job, start: int, size: int) -> IntArray:
    """At how many of the pipeline's stages the hop from each position to the next leaves a node, int64 [size]."""
    ranks = job.cluster.ranks_per_node(job.tensor_parallel)
    offsets = np.arange(size) if job.one_slice else np.array(Ring(0, size).ranks)
    first = start + np.arange(job.stages)[:, None] * plan.num_ranks
    node = (first + offsets) // ranks
    return np.asarray((node != np.roll(node, -1, axis=1)).sum(axis=0), dtype=np.int64)


def _others(plan: Plan, job: Job, sequences: IntArray) -> tuple[Floats, Floats, Floats]:
    """As `_rounds` of gathers, swaps of rows for heads, and windows, piece by piece."""
    parts = [_block(plan, job, block) for block in _blocks(sequences, plan.ring_size[sequences])]
    every, across, senders = (np.concatenate(column) for column in zip(*parts, strict=True))
    return every, across, senders


def _blocks(sequences: IntArray, size: IntArray) -> Iterator[IntArray]:
    """Some sequences at a time, with about `_BLOCK` pieces."""
    block = (np.cumsum(size) - size) // _BLOCK
    cuts = np.flatnonzero(np.diff(block)) + 1
    yield from np.split(sequences, cuts)


def _block(plan: Plan, job: Job, sequences: IntArray) -> tuple[Floats, Floats, Floats]:
    size = plan.ring_size[sequences]
    begin = np.cumsum(size) - size
    once, both = _bytes_of_pieces(plan, job, sequences, begin)
    offset = np.arange(once.size) - np.repeat(begin, size)
    share = across_share(plan, job, np.repeat(sequences, size), offset)
    pieces = np.stack([once, both - once], axis=1)
    every, across = (np.add.reduceat(part, begin, axis=0) for part in (pieces, pieces * share[:, None]))
    return every, across, np.add.reduceat((share > 0).astype(np.float64), begin)


def _bytes_of_pieces(plan: Plan, job: Job, sequences: IntArray, begin: IntArray) -> tuple[Floats, Floats]:
    """What every piece sends in forward, and in forward and backward, one layer, one GPU; ring after ring."""
    size, cost = plan.ring_size[sequences], job.cost
    none = np.zeros(1, dtype=np.int64)
    apart = Plan(  # every ring has ranks of its own, so that what ranks send is what pieces send
        num_ranks=int(size.sum()),
        capacity=plan.capacity,
        pad_multiple=plan.pad_multiple,
        lengths=plan.lengths[sequences],
        ring_start=begin,
        ring_size=size,
        offload=np.zeros(sequences.size),
        rank_offsets=none,
        microbatch_offsets=none,
        piece_sequence=none[:0],
        exchange=plan.exchange[sequences],
        head_ranks=plan.head_ranks[sequences],
    )
    heads, kv_heads = cost.heads or 1, cost.kv_heads or 1
    unit = cost.layer_profile.kv_per_token / (4 * kv_heads)  # elements of a head

    def sent(backward: bool) -> Floats:
        found = exchange_bytes(apart, heads, kv_heads, 1, 2, window=cost.window, backward=backward)
        return np.asarray(found * unit, dtype=np.float64)

    return sent(False), sent(True)


def across_share(plan: Plan, job: Job, sequence: IntArray, offset: IntArray) -> Floats:
    """Share of a piece's peers that are on other nodes, mean over the pipeline's stages; [num_pieces].

    Peers are its neighbours on a ring (where windows are fetched hop by hop), else all others of the ring.
    """
    ranks = job.cluster.ranks_per_node(job.tensor_parallel)
    start, size = plan.ring_start[sequence], plan.ring_size[sequence]
    after, before = neighbours(offset, size, in_order=job.one_slice)
    on_ring = plan.exchange[sequence] == RING
    share = np.zeros(size.size)
    for stage in range(job.stages):
        first = start + stage * plan.num_ranks
        node = (first + offset) // ranks
        own_last, own_first = np.minimum((node + 1) * ranks, first + size), np.maximum(node * ranks, first)
        others = 1 - (own_last - own_first - 1) / np.maximum(size - 1, 1)
        hops = ((first + after) // ranks != node).astype(np.float64) + ((first + before) // ranks != node)
        share += np.where(on_ring, hops / 2, others)
    return share / job.stages


def neighbours(offset: IntArray, size: IntArray, *, in_order: bool) -> tuple[IntArray, IntArray]:
    """Offsets of the ranks after and before each one on its ring, as `Ring.ranks` walks it, or by their numbers."""
    if in_order:
        return (offset + 1) % size, (offset - 1) % size
    odd = offset % 2 == 1
    up = np.where(offset + 2 < size, offset + 2, size - 1 - size % 2)  # from the last even one to the last odd one
    down = np.where(offset >= 2, offset - 2, 1 - offset)  # 1 comes before 0
    down = np.minimum(down, size - 1)
    after = np.where(odd, np.where(offset == 1, 0, offset - 2), up)
    last_even = size - 1 - (size - 1) % 2
    before = np.where(odd, np.where(offset + 2 < size, offset + 2, last_even), down)
    return after, before
