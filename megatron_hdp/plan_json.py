"""A plan written out: for each rank its micro-batches, for each micro-batch its pieces. Format in docs/plan-schema.md.

`Plan.to_json` is the compact form, which `Plan.from_json` reads back; this one is for people, other languages and other
frameworks, who need not know how a ring walks or where padding goes.
"""

import json
from typing import Any

from megatron_hdp.types import EXCHANGES, Plan, Ring

PIECES_SCHEMA = 2
"""Version of what `expand` returns."""


def expand(plan: Plan) -> dict[str, Any]:
    """The plan as nested lists and objects of JSON, every piece with its ring's ranks in walking order.

    It grows with the sum of squares of ring sizes: for large pools the compact form is far smaller.
    """
    tokens = (2 * plan.chunk_tokens).tolist()
    offload, head_ranks = plan.offload.tolist(), plan.head_ranks.tolist()
    exchange = [EXCHANGES[index] for index in plan.exchange.tolist()]
    rings = [Ring(*place) for place in zip(plan.ring_start.tolist(), plan.ring_size.tolist(), strict=True)]
    ranks = [list(ring.ranks) for ring in rings]
    begins, sequences = plan.microbatch_offsets.tolist(), plan.piece_sequence.tolist()

    def piece(sequence: int, rank: int) -> dict[str, Any]:
        return {
            "sequence": sequence,
            "ring": ranks[sequence],
            "position": rings[sequence].position(rank),
            "tokens": tokens[sequence],
            "offload": offload[sequence],
            "exchange": exchange[sequence],
            "head_ranks": head_ranks[sequence],
        }

    cuts = plan.rank_offsets.tolist()
    return {
        "pieces_schema": PIECES_SCHEMA,
        "num_ranks": plan.num_ranks,
        "capacity": plan.capacity,
        "pad_multiple": plan.pad_multiple,
        "lengths": plan.lengths.tolist(),
        "ranks": [
            [
                [piece(sequence, rank) for sequence in sequences[begins[m] : begins[m + 1]]]
                for m in range(cuts[rank], cuts[rank + 1])
            ]
            for rank in range(plan.num_ranks)
        ],
    }


def to_pieces_json(plan: Plan) -> str:
    """`expand` as canonical JSON: sorted keys, no spaces."""
    return json.dumps(expand(plan), sort_keys=True, separators=(",", ":"))
