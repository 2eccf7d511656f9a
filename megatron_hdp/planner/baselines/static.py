"""Static context parallelism, the ordinary way: the pool in equal blocks, every sequence over a whole block.

A real run packs many sequences into one micro-batch of a block, cuts each over the whole ring, and sends the keys and
values of all of them in one slice per ring step. `megatron_hdp.planner.span` sums over pieces: each sequence of a pack
walks the ring by itself, so its latency, and what its own short blocks cannot hide, count once per sequence. For packs
of many short sequences that overstates the cost; `megatron_hdp.planner.baselines.packed` evaluates such a plan with
one slice per step (`CostModel.packed_attention_picoseconds`). Quote both.
"""

import numpy as np

from megatron_hdp.cost import CostModel
from megatron_hdp.errors import ConfigError, PlanError
from megatron_hdp.planner.packing import best_fit
from megatron_hdp.planner.packs import spread
from megatron_hdp.planner.units import Units, unit_picoseconds, units_plan
from megatron_hdp.types import IntArray, Plan, chunk_tokens


def plan_static(
    lengths: IntArray,
    num_ranks: int,
    capacity: int,
    pad_multiple: int,
    *,
    cost: CostModel,
    ring_size: int | None = None,
    count_multiple: int = 1,
    equal_counts: bool = True,
    offload: bool = False,
) -> Plan:
    """Static context parallelism: the pool in aligned blocks of ``ring_size`` ranks, every sequence over a whole block.

    Sequences are packed by best fit decreasing into micro-batches of at most ring_size x capacity tokens, which go
    heaviest first to the block with the least work. All ranks have equal counts. A usual run deals out packs without
    looking at their work, so this is in static's favour.

    Args:
        lengths: tokens of every sequence, shape [num_sequences].
        num_ranks: ranks of the pool.
        capacity: tokens that one rank holds in one micro-batch.
        pad_multiple: pieces are multiples of this.
        cost: what a pack costs.
        ring_size: ranks of a block, a divisor of num_ranks; the whole pool when None.
        count_multiple: micro-batch counts are a multiple of this.
        equal_counts: no choice here, counts are equal; in the signature of all baselines.
        offload: no choice here, nothing is offloaded.

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
    tokens: IntArray = 2 * chunk_tokens(lengths, np.int64(ring_size), pad_multiple)
    pack = best_fit(tokens, capacity)
    sizes = np.full(int(pack.max()) + 1, ring_size, dtype=np.int64)
    work = unit_picoseconds(cost, lengths, pack, sizes)
    heavy_first = np.argsort(-work, kind="stable")
    block = np.empty(sizes.size, dtype=np.int64)
    block[heavy_first] = spread(work[heavy_first], np.zeros(num_ranks // ring_size, dtype=np.int64))
    time = np.empty(sizes.size, dtype=np.int64)
    time[heavy_first] = np.arange(sizes.size)  # every block from heavy to light
    units = Units(pack, block * ring_size, sizes, time)
    return units_plan(
        lengths, num_ranks, capacity, pad_multiple, units, equal_counts=True, count_multiple=count_multiple
    )


def smallest_static_ring(num_ranks: int, capacity: int, longest: int) -> int:
    """Fewest ranks of a static block that hold ``longest`` tokens: a divisor of ``num_ranks``.

    Raises:
        PlanError: the whole pool does not hold them.
    """
    if longest > num_ranks * capacity:
        raise PlanError(
            f"a sequence of {longest} tokens does not fit in a pool of {num_ranks} ranks with {capacity} tokens each: "
            "raise --hdp-tokens-per-rank or use more ranks"
        )
    return next(d for d in range(1, num_ranks + 1) if num_ranks % d == 0 and d * capacity >= longest)


def plan_static_smallest(
    lengths: IntArray,
    num_ranks: int,
    capacity: int,
    pad_multiple: int,
    *,
    cost: CostModel,
    count_multiple: int = 1,
    equal_counts: bool = True,
    offload: bool = False,
    longest: int | None = None,
) -> Plan:
    """`plan_static` with the smallest blocks that hold the longest sequence of the run.

    A run's mesh of ranks is fixed before its first step, so ``longest`` should be its context. None takes the longest
    sequence of this batch, as if every step could have a mesh of its own: better than a real static run can be.
    """
    ring_size = smallest_static_ring(num_ranks, capacity, int(lengths.max()) if longest is None else longest)
    return plan_static(
        lengths, num_ranks, capacity, pad_multiple, ring_size=ring_size, count_multiple=count_multiple, cost=cost
    )
