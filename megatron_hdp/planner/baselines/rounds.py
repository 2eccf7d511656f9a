"""Another system's answer as a plan: rounds, and in each round the sequences of every rank."""

from collections.abc import Sequence
from itertools import groupby

import numpy as np

from megatron_hdp.errors import PlanError
from megatron_hdp.planner.packing import best_fit
from megatron_hdp.planner.units import Units, units_plan
from megatron_hdp.types import IntArray, Plan, chunk_tokens

Round = Sequence[Sequence[int]]
"""Sequences of every rank in the order in which it runs them; ranks that share a sequence have the same ones."""


def plan_rounds(
    lengths: IntArray,
    num_ranks: int,
    capacity: int,
    pad_multiple: int,
    rounds: Sequence[Round],
    *,
    system: str,
    packed: bool,
    any_ring: bool = False,
    equal_counts: bool = False,
    count_multiple: int = 1,
) -> Plan:
    """The plan that runs the rounds one after the other. A plan has no barriers, so rounds may overlap.

    A pack that is full with the other system's padding may exceed the capacity by a few tokens of this package's own
    (pieces of whole ``pad_multiple``). Its shortest sequences then run in packs of their own at the end, on the ranks
    with the least work.

    Args:
        lengths: tokens of every sequence, int64 [num_sequences].
        num_ranks: ranks of the pool.
        capacity: tokens that one rank holds in one micro-batch.
        pad_multiple: pieces are multiples of this.
        rounds: what the system answered.
        system: its name, for errors.
        packed: a rank runs the sequences of a round in one micro-batch; else each in its own.
        any_ring: take any interval of ranks; else only those that Megatron has communicators for: aligned powers of
            two, and the pool.
        equal_counts: equal counts and slots.
        count_multiple: micro-batch counts are a multiple of this.

    Raises:
        PlanError: the answer misses a sequence, has one twice, or has a ring without a communicator.
    """
    of = np.full(lengths.size, -1, dtype=np.int64)
    start: list[int] = []
    size: list[int] = []
    time: list[int] = []
    evicted: list[int] = []
    now = 0
    for number, round_ in enumerate(rounds):
        if len(round_) != num_ranks:
            raise PlanError(f"{system}: round {number} of its plan has {len(round_)} ranks, the pool has {num_ranks}")
        first = 0
        for members, run in groupby(tuple(sequences) for sequences in round_):
            ranks = len(list(run)) if members else 1
            if members and not any_ring:
                _refuse_ring(system, number, first, ranks, num_ranks)
            _refuse_twice(system, members, of)
            kept = _fitting(members, lengths, ranks, capacity, pad_multiple) if packed else members
            evicted += sorted(set(members) - set(kept))
            of[list(members)] = len(start)  # evicted ones too, so that no other ring may have them
            for place, pack in enumerate([kept] if packed else [(sequence,) for sequence in kept]):
                of[list(pack)] = len(start)
                start.append(first)
                size.append(ranks)
                time.append(now + place)
            first += ranks
        now += 1 if packed else max(len(sequences) for sequences in round_)
    units = Units(of, np.array(start, dtype=np.int64), np.array(size, dtype=np.int64), np.array(time, dtype=np.int64))
    missing = np.flatnonzero(of < 0)
    if missing.size:
        raise PlanError(f"{system}: its plan lacks sequence {missing[0]} ({missing.size} in all)")
    if evicted:
        units = _append(units, np.array(evicted), lengths, num_ranks, capacity, pad_multiple)
    return units_plan(
        lengths,
        num_ranks,
        capacity,
        pad_multiple,
        units,
        equal_counts=equal_counts,
        count_multiple=count_multiple,
    )


def _refuse_ring(system: str, number: int, first: int, ranks: int, num_ranks: int) -> None:
    """Megatron makes blocks of 2, 4, ... ranks, half the largest power of two in the pool at most, and the pool."""
    largest = (1 << num_ranks.bit_length() - 1) // 2
    if ranks != num_ranks and ranks > 1 and (ranks & (ranks - 1) or ranks > largest or first % ranks):
        raise PlanError(
            f"{system}: round {number} of its plan has a ring of ranks {first} to {first + ranks - 1}, for which it "
            f"has no communicator (aligned powers of two up to {largest}, and all {num_ranks}): its run would hang or "
            "fail on this batch"
        )


def _refuse_twice(system: str, sequences: Sequence[int], of: IntArray) -> None:
    """A sequence on ranks that are no interval shows up here too: as a second ring."""
    for index, sequence in enumerate(sequences):
        if not 0 <= sequence < of.size or of[sequence] >= 0 or sequence in sequences[:index]:
            raise PlanError(f"{system}: its plan has sequence {sequence} on two rings, or there is no such sequence")


def _fitting(
    members: tuple[int, ...], lengths: IntArray, ranks: int, capacity: int, pad_multiple: int
) -> tuple[int, ...]:
    """The longest of the members that fit in one micro-batch, in order."""
    by_length = sorted(members, key=lambda sequence: (-int(lengths[sequence]), sequence))
    tokens = 2 * chunk_tokens(lengths[np.array(by_length, dtype=np.int64)], np.int64(ranks), pad_multiple)
    fits = set(by_length[: int(np.searchsorted(np.cumsum(tokens), capacity, side="right"))])
    return tuple(sequence for sequence in members if sequence in fits)


def _append(
    units: Units, sequences: IntArray, lengths: IntArray, num_ranks: int, capacity: int, pad_multiple: int
) -> Units:
    """The units and, after them, packs of ``sequences`` on the ranks with the least sum of s^2 / d; long ones alone."""
    loads = np.zeros(num_ranks, dtype=np.int64)
    for unit, length in zip(units.of.tolist(), lengths.tolist(), strict=True):
        ring = int(units.size[unit])
        loads[units.start[unit] : units.start[unit] + ring] += length * length // ring
    long = sequences[lengths[sequences] > capacity]
    short = sequences[lengths[sequences] <= capacity]
    pack = best_fit(2 * chunk_tokens(lengths[short], np.int64(1), pad_multiple), capacity)
    num_packs = int(pack.max(initial=-1)) + 1
    of = units.of.copy()
    of[short] = units.size.size + pack
    of[long] = units.size.size + num_packs + np.arange(long.size)
    needed = -(-lengths[long] // capacity)
    ring = np.minimum(1 << np.array([int(d - 1).bit_length() for d in needed], dtype=np.int64), num_ranks)
    size = np.concatenate([np.ones(num_packs, dtype=np.int64), ring])
    start = np.concatenate([np.argsort(loads, kind="stable")[np.arange(num_packs) % num_ranks], 0 * ring])
    time = int(units.time.max(initial=-1)) + 1 + np.arange(size.size)
    return Units(
        of,
        np.concatenate([units.start, start]),
        np.concatenate([units.size, size]),
        np.concatenate([units.time, time]),
    )
