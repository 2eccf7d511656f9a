"""Balanced HDP: ByteScale's Algorithm 2 (SIGCOMM 2025, doi 10.1145/3718958.3754352), as published.

Sequences are sorted by length and cut into groups of about equal work ("buckets" in the paper). Then, until no group is
left: ranks that lag behind the slowest by more than delta are given more, from the first group (DP-Balance, so that
ranks run similar lengths at a time) or from all groups in turn (PP-Balance, so that a pipeline keeps to one length).

What the paper leaves open, and what is done here:

* delta and the number of groups: see `TUNED`.
* No rank lags, as at the start: all ranks are targets, and what comes next makes a new slowest one.
* Which ranks: those of the interval that is free soonest. A ring starts when its last rank is free.
* The longest sequence of the group does not fit in any interval of targets: the longest that fits goes first; if none
  does, all ranks are targets.
* Short sequences are packed by best fit inside their group, so that a pack keeps to one length.
* PP-Balance: a rank belongs to the group it got its first sequence from; targets of the same group go first. A rank
  runs its widest rings first.
"""

from collections import deque
from dataclasses import dataclass
from typing import Literal

import numpy as np

from megatron_hdp.cost import CostModel
from megatron_hdp.planner.offload import Limits, smallest_rings
from megatron_hdp.planner.packing import best_fit
from megatron_hdp.planner.units import Units, soonest, unit_picoseconds, units_plan
from megatron_hdp.types import IntArray, Plan, chunk_tokens

Strategy = Literal["dp", "pp"]
TUNED: dict[Strategy, tuple[int, int]] = {"dp": (400, 1), "pp": (70, 2)}
"""Strategy -> delta in percent of the time of one local sequence of ``capacity`` tokens, and number of groups.

The settings with the least geometric mean of spans over the mixes byted and github, two steps each of 32M tokens on 64,
256, 512 and 1024 ranks of 8192 tokens, bytescale profile (32 layers; for "pp" 4 stages of 8): of delta 0 to 1600 % and
1 to 16 groups. DP-Balance is best with one group, where it is list scheduling that passes over ranks within delta
of the slowest: from 1.27 (16 groups, delta 0) to 1.22 times the mean work; much of the rest is the longest sequence.
"""


@dataclass
class _Level:
    """Units of one group that wait, each from heavy to light."""

    rings: list[int]
    packs: deque[int]

    def take(self, widest: int, size: IntArray) -> int | None:
        """Remove and return the heaviest unit of at most ``widest`` ranks."""
        for index, unit in enumerate(self.rings):
            if size[unit] <= widest:
                return self.rings.pop(index)
        return self.packs.popleft() if self.packs and widest else None

    def __bool__(self) -> bool:
        return bool(self.rings or self.packs)


def plan_bytescale(
    lengths: IntArray,
    num_ranks: int,
    capacity: int,
    pad_multiple: int,
    *,
    cost: CostModel,
    count_multiple: int = 1,
    equal_counts: bool = False,
    offload: bool = False,
    strategy: Strategy = "dp",
    delta_percent: int | None = None,
    levels: int | None = None,
) -> Plan:
    """Balanced HDP by Algorithm 2.

    Args:
        lengths: tokens of every sequence, int64 [num_sequences].
        num_ranks: ranks of the pool.
        capacity: tokens that one rank holds in one micro-batch.
        pad_multiple: pieces are multiples of this.
        cost: what units cost.
        count_multiple: micro-batch counts are a multiple of this.
        equal_counts: equal counts and slots.
        offload: let activations of long sequences leave for host memory, for smaller rings.
        strategy: "dp" is DP-Balance; "pp" is PP-Balance, with the same slots on all ranks of a ring and, unless
            ``equal_counts``, free counts.
        delta_percent: see `TUNED`, the default.
        levels: number of groups; see `TUNED`, the default.

    Raises:
        PlanError: a sequence does not fit in the pool.
    """
    delta_percent = TUNED[strategy][0] if delta_percent is None else delta_percent
    levels = TUNED[strategy][1] if levels is None else levels
    size, fraction = smallest_rings(lengths, num_ranks, capacity, cost, Limits() if offload else None)
    of, sizes, level_of = _units(lengths, size, capacity, pad_multiple, cost, levels)
    work = unit_picoseconds(cost, lengths, of, sizes)
    heavy_first = np.argsort(-work, kind="stable")
    waiting = []
    for level in range(levels):
        units = heavy_first[level_of[heavy_first] == level]
        wide = sizes[units] > 1
        waiting.append(_Level(units[wide].tolist(), deque(units[~wide].tolist())))
    delta = int(cost.picoseconds(capacity)) * delta_percent // 100
    start, time = _assign(waiting, sizes, work, num_ranks, delta, strategy)
    if strategy == "pp":
        order = np.lexsort((time, -sizes))
        time = np.empty_like(order)
        time[order] = np.arange(order.size)
    return units_plan(
        lengths,
        num_ranks,
        capacity,
        pad_multiple,
        Units(of, start, sizes, time),
        offload=fraction,
        same_slots=strategy == "pp",
        equal_counts=equal_counts,
        count_multiple=count_multiple,
    )


def _units(
    lengths: IntArray, size: IntArray, capacity: int, pad_multiple: int, cost: CostModel, levels: int
) -> tuple[IntArray, IntArray, IntArray]:
    """Unit of every sequence [num_sequences]; ring size and group of every unit [num_units]."""
    order = np.argsort(-lengths, kind="stable")
    work = np.asarray(cost.picoseconds(lengths), dtype=np.int64)[order]
    before = np.cumsum(work) - work
    level_of = np.empty_like(order)
    level_of[order] = before // (int(work.sum()) // levels + 1)
    of = np.empty_like(order)
    sizes: list[IntArray] = []
    units_level: list[IntArray] = []
    num = 0
    for level in range(levels):
        long = np.flatnonzero((level_of == level) & (lengths > capacity))
        short = np.flatnonzero((level_of == level) & (lengths <= capacity))
        pack = best_fit(2 * chunk_tokens(lengths[short], np.int64(1), pad_multiple), capacity)
        num_packs = int(pack.max(initial=-1)) + 1
        of[long], of[short] = num + np.arange(long.size), num + long.size + pack
        sizes += [size[long], np.ones(num_packs, dtype=np.int64)]
        units_level.append(np.full(long.size + num_packs, level, dtype=np.int64))
        num += long.size + num_packs
    return of, np.concatenate(sizes), np.concatenate(units_level)


def _assign(
    waiting: list[_Level], size: IntArray, work: IntArray, num_ranks: int, delta: int, strategy: Strategy
) -> tuple[IntArray, IntArray]:
    """First rank and turn of every unit, both [num_units]: Algorithm 2's loop."""
    ends = np.zeros(num_ranks, dtype=np.int64)
    home = np.full(num_ranks, -1, dtype=np.int64)  # group that a rank belongs to, for PP-Balance
    start, time = np.empty_like(size), np.empty_like(size)
    everyone = np.ones(num_ranks, dtype=bool)
    cursor = 0
    for turn in range(size.size):
        while not waiting[cursor]:
            cursor = (cursor + 1) % len(waiting)
        targets = int(ends.max()) - ends > delta
        unit = waiting[cursor].take(_widest(targets), size)
        if unit is None:  # no rank lags, or nothing of this group fits on those that do
            targets = everyone
            unit = waiting[cursor].take(num_ranks, size)
        assert unit is not None
        ring, first = int(size[unit]), None
        if strategy == "pp":
            first = soonest(ends, ring, targets & ((home == cursor) | (home < 0)))
        first = soonest(ends, ring, targets) if first is None else first
        assert first is not None
        ranks = slice(first, first + ring)
        ends[ranks] = int(ends[ranks].max()) + int(work[unit])
        start[unit], time[unit] = first, turn
        if strategy == "pp":
            home[ranks] = np.where(home[ranks] < 0, cursor, home[ranks])
            cursor = (cursor + 1) % len(waiting)
    return start, time


def _widest(allowed: np.typing.NDArray[np.bool_]) -> int:
    """Length of the longest run of true entries."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], allowed, [False]])))
    return int(np.max(edges[1::2] - edges[::2], initial=0))
