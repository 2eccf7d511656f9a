"""What HDP is compared with: static context parallelism, through the same data, attention and loss."""

import numpy as np

from megatron_hdp.errors import ConfigError, PlanError
from megatron_hdp.planner.layout import Batch, Cells, build_plan, ring_cells
from megatron_hdp.planner.load import piece_cost
from megatron_hdp.planner.packing import best_fit
from megatron_hdp.planner.rooms import spread
from megatron_hdp.types import IntArray, Plan, chunk_tokens


def plan_static(
    lengths: IntArray,
    num_ranks: int,
    capacity: int,
    pad_multiple: int,
    *,
    ring_size: int | None = None,
    count_multiple: int = 1,
) -> Plan:
    """Static context parallelism: the pool in aligned blocks of ``ring_size`` ranks, every sequence over a whole block.

    Sequences are packed by best fit decreasing into micro-batches of at most ring_size x capacity tokens, which go
    heaviest first to the block with the least work. All ranks have equal counts.

    Args:
        lengths: tokens of every sequence, shape [num_sequences].
        num_ranks: ranks of the pool.
        capacity: tokens that one rank holds in one micro-batch.
        pad_multiple: pieces are multiples of this.
        ring_size: ranks of a block, a divisor of num_ranks; the whole pool when None.
        count_multiple: micro-batch counts are a multiple of this.

    Raises:
        ConfigError: ring_size does not divide num_ranks.
        PlanError: a sequence does not fit in a block.
    """
    ring_size = num_ranks if ring_size is None else ring_size
    if ring_size < 1 or num_ranks % ring_size:
        raise ConfigError(f"static ring_size is {ring_size}: it must divide the pool of {num_ranks} ranks")
    longest = int(np.argmax(lengths))
    if int(lengths[longest]) > ring_size * capacity:
        raise PlanError(
            f"sequence {longest} has {int(lengths[longest])} tokens, a static ring of {ring_size} ranks holds "
            f"{ring_size * capacity}: use a larger ring_size or raise --hdp-tokens-per-rank"
        )
    sizes = np.full(lengths.size, ring_size, dtype=np.int64)
    tokens: IntArray = 2 * chunk_tokens(lengths, sizes, pad_multiple)
    batch = Batch(num_ranks, capacity, pad_multiple, lengths, sizes, tokens, piece_cost(lengths, tokens))

    pack = best_fit(tokens, capacity)
    work = np.zeros(int(pack.max()) + 1, dtype=np.int64)
    np.add.at(work, pack, batch.cost)
    block = spread(work, np.zeros(num_ranks // ring_size, dtype=np.int64))
    order = np.lexsort((np.arange(work.size), -work, block))  # per block from heavy to light
    first_of_block = np.searchsorted(block[order], block[order])
    slot = np.empty_like(block)
    slot[order] = np.arange(work.size) - first_of_block

    start = block[pack] * ring_size
    sequence, rank = ring_cells(np.arange(lengths.size), start, sizes)
    cells = Cells(sequence, rank, slot[pack[sequence]])
    count = -(-(int(slot.max()) + 1) // count_multiple) * count_multiple
    return build_plan(batch, start, cells, cells.time, np.full(num_ranks, count))
