"""Which exchange the cost model gives rings inside a node, by the tokens of a piece: the table of docs/planner.md.

python benchmarks/exchanges.py

Milliseconds of core attention of one layer, forward and backward, transfers and swaps included. Needs numpy only, and
gives the same numbers on every machine.
"""

import numpy as np

from megatron_hdp.cost import CostModel, Tier, load_profile
from megatron_hdp.planner.exchange import choose_exchanges
from megatron_hdp.types import EXCHANGES, Plan

CASES = (("bytescale", 16, 4, 4), ("h100", 32, 8, 2), ("h100", 32, 8, 4), ("h100", 32, 8, 8))
"""(profile, query heads and key/value heads of LLaMA-7B on one tensor-parallel rank, ring)"""
PIECES = (128, 256, 512, 1024, 2048, 4096, 8192)


def ring_plan(length: int, size: int) -> Plan:
    """One sequence on a ring from rank 0, a micro-batch on each rank."""
    ranks = np.arange(size + 1)
    zeros = np.zeros(size, dtype=np.int64)
    return Plan(size, length, 2, [length], [0], [size], [0.0], ranks, ranks, zeros)  # type: ignore[arg-type]


def attention(cost: CostModel, length: int, size: int, exchange: str, ranks: int = 1) -> float:
    """Milliseconds; the rest of a piece is what is left without attention."""
    tier = Tier.INSIDE_NODE
    rest = int(cost.picoseconds(length, size, tier)) - int(cost.attention_picoseconds(length, size, tier))
    time = int(cost.exchange_picoseconds(length, size, tier, EXCHANGES.index(exchange), ranks))
    return (time - rest) * 1e-9


def row(profile: str, heads: int, kv_heads: int, size: int, piece: int) -> list[str]:
    cost = CostModel(load_profile(profile), 1, heads=heads, kv_heads=kv_heads)
    length = size * piece
    ways = [a for a in range(2, size + 1) if size % a == 0 and cost.swaps_heads(a)]
    swapped = {a: attention(cost, length, size, "heads", a) for a in ways}
    best = min(swapped, key=swapped.__getitem__)
    chosen = choose_exchanges(ring_plan(length, size), cost)
    name, ranks = EXCHANGES[int(chosen.exchange[0])], int(chosen.head_ranks[0])
    took = attention(cost, length, size, name, ranks)
    ring = attention(cost, length, size, "ring")
    saved = f"{name}{f' x {ranks}' if ranks > 1 else ''}, {100 * (1 - took / ring):.0f} %" if name != "ring" else "ring"
    numbers = [ring, attention(cost, length, size, "gather"), swapped[best]]
    shown = [f"{number:.3f}" for number in numbers]
    return [f"{profile}, {size} ranks", f"{piece:,}", *shown[:2], f"{shown[2]} ({best})", saved]


def main() -> None:
    print("| profile, ring | tokens of a piece | ring | gather | heads (of ranks) | chosen, shorter by |")
    print("|---|---:|---:|---:|---:|---|")
    for case in CASES:
        for piece in PIECES:
            print("| " + " | ".join(row(*case, piece)) + " |")


if __name__ == "__main__":
    main()
