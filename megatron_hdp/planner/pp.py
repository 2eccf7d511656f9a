"""Balance with pipeline stages: equal counts, and a ring sits in the same slot on all its ranks.

Then a stage runs the same sequence of slots on every rank, so rings meet under 1F1B and interleaved schedules alike.
"""

import numpy as np

from megatron_hdp.planner.layout import Batch, Cells, build_plan, ring_cells
from megatron_hdp.planner.rooms import fill_rings, longest_rings, pack_groups, spread
from megatron_hdp.types import IntArray, Plan


def plan_pp(batch: Batch, count_multiple: int) -> Plan:
    """Plan with equal counts, a multiple of ``count_multiple``; pure function of the batch."""
    rings = longest_rings(batch)
    cell_of, fill = fill_rings(batch, rings)
    size = batch.ring_size[rings]
    start, row, loads = _place(size, batch.cost[rings] + fill, batch.num_ranks)
    ring_sequence, ring_rank = ring_cells(rings, start, size)
    ring_row = np.repeat(row, size)

    riding = np.flatnonzero(cell_of >= 0)
    local = np.flatnonzero((batch.ring_size == 1) & (cell_of < 0))
    rank = spread(batch.cost[local], loads)
    pack = pack_groups(batch.piece_tokens[local], rank, batch.capacity)
    slot = _free_slots(batch.cost[local], rank, pack, ring_rank, ring_row)
    cells = Cells.join(
        Cells(ring_sequence, ring_rank, ring_row),
        Cells(riding, ring_rank[cell_of[riding]], ring_row[cell_of[riding]]),
        Cells(local, rank, slot),
    )
    count = -(-(int(cells.time.max(initial=0)) + 1) // count_multiple) * count_multiple
    ring_start = np.zeros(batch.lengths.size, dtype=np.int64)
    ring_start[rings] = start
    ring_start[riding], ring_start[local] = ring_rank[cell_of[riding]], rank
    return build_plan(batch, ring_start, cells, cells.time, np.full(batch.num_ranks, count))


def _place(size: IntArray, work: IntArray, num_ranks: int) -> tuple[IntArray, IntArray, IntArray]:
    """First rank [num_rings] and slot [num_rings] of every ring, and the work of every rank [num_ranks].

    Rings go longest first into the first slot that has room, at the end of its free interval where the ranks have less
    work, so that a slot's free ranks always stay one interval. A slot is opened by its longest ring, so slots run from
    heavy to light.
    """
    loads = np.zeros(num_ranks, dtype=np.int64)
    low = np.zeros(size.size, dtype=np.int64)  # free interval of every slot; there are never more slots than rings
    high = np.full(size.size, num_ranks, dtype=np.int64)
    starts, rows = np.empty_like(size), np.empty_like(size)
    for ring, (ring_size, ring_work) in enumerate(zip(size.tolist(), work.tolist(), strict=True)):
        row = int(np.argmax(high - low >= ring_size))
        left, right = int(low[row]), int(high[row]) - ring_size
        start = left if loads[left : left + ring_size].max() <= loads[right : right + ring_size].max() else right
        if start == left:
            low[row] += ring_size
        else:
            high[row] -= ring_size
        loads[start : start + ring_size] += ring_work
        starts[ring], rows[ring] = start, row
    return starts, rows, loads


def _free_slots(cost: IntArray, rank: IntArray, pack: IntArray, ring_rank: IntArray, ring_row: IntArray) -> IntArray:
    """Slot of every local sequence [num_local]: a rank's heaviest pack in its first slot without a ring, and so on."""
    num_packs = int(pack.max(initial=0)) + 1
    key, member = np.unique(rank * num_packs + pack, return_inverse=True)
    work = np.zeros(key.size, dtype=np.int64)
    np.add.at(work, member, cost)
    order = np.lexsort((key, -work, key // num_packs))  # packs by rank, heaviest first
    taken: dict[int, set[int]] = {}
    for r, row in zip(ring_rank.tolist(), ring_row.tolist(), strict=True):
        taken.setdefault(r, set()).add(row)
    slots = np.empty(key.size, dtype=np.int64)
    previous, slot = -1, 0
    for index, r in zip(order.tolist(), (key[order] // num_packs).tolist(), strict=True):
        slot = 0 if r != previous else slot + 1
        while slot in taken.get(r, ()):
            slot += 1
        slots[index], previous = slot, r
    return slots[member]
