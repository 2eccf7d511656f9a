"""Rows for heads: some ranks of a ring swap, so that each holds all their rows of some heads. No torch.

Method: DeepSpeed-Ulysses (Jacobs et al. 2023) where all ranks of the ring swap, and Ulysses with a ring around it
(USP, Fang and Zhao 2024) where ``head_ranks`` of them do. Those are consecutive positions of the ring, P a .. P a + a
- 1: their low chunks are consecutive, and so are their high chunks. So together they hold exactly what position P of a
ring of d / a would hold if chunks were a times as long, and the rest of attention sees nothing else (`HeadSwap.view`).
"""

from dataclasses import dataclass
from functools import lru_cache

from megatron_hdp.attention.view import Rows, View
from megatron_hdp.errors import ConfigError


@dataclass(frozen=True, slots=True)
class HeadSwap:
    """The swap of one piece."""

    members: tuple[int, ...]
    """Pool ranks that swap, in order of their positions; member m gets the m-th part of the heads."""
    own: int
    """Index of this rank in ``members``."""
    halves: tuple[tuple[int, int], ...]
    """Real rows of the low and of the high chunk of every member."""
    view: View
    """What the members hold together, and the ranks that hold the same heads of the other parts of the sequence."""

    def places(self, member: int) -> tuple[Rows, Rows]:
        """Rows of a member's low and high chunk in the common piece: low ones ascend, then high ones descend."""
        low = sum(each[0] for each in self.halves[:member])
        high = sum(each[0] for each in self.halves) + sum(each[1] for each in self.halves[member + 1 :])
        rows = self.halves[member]
        return (low, low + rows[0]), (high, high + rows[1])

    def rows(self, member: int) -> int:
        """Real rows of a member."""
        return sum(self.halves[member])


def head_swap(view: View, head_ranks: int) -> HeadSwap:
    """The swap among ``head_ranks`` ranks, a divisor of the ring's size, as ``view.position`` sees it."""
    group, own = divmod(view.position, head_ranks)
    first = group * head_ranks
    positions = range(first, first + head_ranks)
    return HeadSwap(
        members=tuple(view.ranks[position] for position in positions),
        own=own,
        halves=tuple(view.halves(position) for position in positions),
        view=View(view.sequence, view.length, head_ranks * view.chunk, group, view.ranks[own::head_ranks]),
    )


@dataclass(frozen=True, slots=True)
class HeadParts:
    """Which heads each member of a swap works on."""

    query: tuple[Rows, ...]
    kv: tuple[Rows, ...]
    replicated: bool
    """Several members work on the same K/V head."""


@lru_cache(maxsize=64)
def head_parts(heads: int, kv_heads: int, head_ranks: int) -> HeadParts:
    """Equal parts of the query heads, and the K/V heads that each needs.

    Raises ConfigError unless ``head_ranks`` divides the query heads and divides, or is a multiple of, the K/V heads.
    """
    if heads % head_ranks or (kv_heads % head_ranks and head_ranks % kv_heads):
        raise ConfigError(
            f"{heads} query and {kv_heads} key/value heads cannot be swapped among {head_ranks} ranks: the number must "
            "divide the query heads, and divide the key/value heads or be a multiple of them; use --hdp-exchange ring"
        )
    each, kv_each = heads // head_ranks, max(1, kv_heads // head_ranks)
    query = tuple((m * each, (m + 1) * each) for m in range(head_ranks))
    first = [m * kv_heads // head_ranks for m in range(head_ranks)]
    return HeadParts(query, tuple((begin, begin + kv_each) for begin in first), head_ranks > kv_heads)
