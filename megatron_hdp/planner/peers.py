"""With how many other ranks a rank exchanges attention data: each costs buffers and connections for the whole run."""

import numpy as np
import numpy.typing as npt

from megatron_hdp.types import EXCHANGES, IntArray, Plan, Ring

RING, GATHER, HEADS = (EXCHANGES.index(name) for name in ("ring", "gather", "heads"))


def peers(plan: Plan) -> IntArray:
    """Number of ranks that each rank exchanges data with over the plan, by the exchanges in use, int64 [num_ranks].

    On a ring that is at most the two neighbours; with gather all others of the ring; with heads the others of the
    group that swaps rows for heads, and the same members of the two neighbouring groups.
    """
    return _count(plan, plan.ring_size > 1)


def ring_peers(plan: Plan) -> IntArray:
    """`peers` of the sequences whose exchange is "ring" alone."""
    return _count(plan, (plan.ring_size > 1) & (plan.exchange == RING))


def _count(plan: Plan, chosen: npt.NDArray[np.bool_]) -> IntArray:
    """`peers` of the chosen sequences. All columns are those of a plan whose rings and exchanges are sound."""
    columns = (plan.ring_start, plan.ring_size, plan.exchange, plan.head_ranks)
    found = np.unique(np.stack([column[chosen] for column in columns]), axis=1)
    low, high = _gathered(plan.num_ranks, found[:, found[2] == GATHER])
    links = [np.zeros((2, 0), dtype=np.int64)]
    paired = found[:, found[2] != GATHER]
    for size, exchange, head_ranks in np.unique(paired[1:], axis=1).T.tolist():
        alike = (paired[1] == size) & (paired[2] == exchange) & (paired[3] == head_ranks)
        offsets = _links(size, head_ranks)
        links.append((paired[0, alike][:, None, None] + offsets).transpose(1, 0, 2).reshape(2, -1))
    one_way = np.concatenate(links, axis=1)
    rank, other = np.concatenate([one_way, one_way[::-1]], axis=1)
    outside = (other < low[rank]) | (other >= high[rank])
    pairs = np.unique(rank[outside] * plan.num_ranks + other[outside])
    return np.bincount(pairs // plan.num_ranks, minlength=plan.num_ranks) + (high - low - 1)


def _gathered(num_ranks: int, rings: IntArray) -> tuple[IntArray, IntArray]:
    """Whom each rank gathers from: the pool ranks low .. high - 1 with itself, int64 [num_ranks] each.

    That is the union of all its gathering rings, which is an interval, because all of them hold the rank.
    ``rings``: starts and sizes, [2 or more, num_rings].
    """
    low, high = np.arange(num_ranks), np.arange(num_ranks) + 1
    for start, size in rings[:2].T.tolist():
        held = slice(start, start + size)
        low[held], high[held] = np.minimum(low[held], start), np.maximum(high[held], start + size)
    return low, high


def _links(size: int, head_ranks: int) -> IntArray:
    """Pairs of offsets into a ring that exchange data, each in one or both orders, int64 [2, num_links].

    ``head_ranks``: as `Plan.head_ranks`; 1 for a ring, whose groups are single ranks.
    """
    walk, place = np.array(Ring(0, size).ranks), np.arange(size)
    to = [place // head_ranks * head_ranks + (place + step) % head_ranks for step in range(1, head_ranks)]
    to += [(place + head_ranks) % size] if head_ranks < size else []
    return np.stack([np.tile(walk, len(to)), walk[np.concatenate(to)]])
