"""Data of the what-if panel. What it computes is in templates/report.js, with the formulas of docs/cost-model.md."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from megatron_hdp.types import IntArray

_MOST_LENGTHS = 1500
"""Different lengths that the panel computes with."""


def what_if_data(
    layer: Mapping[str, float], lengths: IntArray, *, capacity: int, context: int, ranks: int, source: str
) -> dict[str, Any]:
    """What the panel starts with.

    Args:
        layer: as `simulator.files.Simulation.layer`; seconds and bytes of one layer on one rank.
        lengths: sequences of a step, int64 [num_sequences].
        capacity: tokens that one rank holds.
        context: longest sequence allowed.
        ranks: ranks of the pool.
        source: where the numbers come from, for people.
    """
    bandwidth = layer["link_bandwidth"]
    values, counts = grouped(lengths, _MOST_LENGTHS)
    return {
        "attention": layer["attention_forward"],
        "backward": layer["attention_backward_factor"],
        "latency": layer["link_latency"],
        "kv": layer["kv_per_token"] / bandwidth,
        "gradient": layer["kv_gradient_per_token"] / bandwidth,
        "capacity": int(capacity),
        "context": int(context),
        "ranks": int(ranks),
        "lengths": values,
        "counts": counts,
        "source": source,
    }


def grouped(lengths: IntArray, most: int) -> tuple[list[int], list[int]]:
    """Different lengths, ascending, and how many sequences have each; neighbours together where there are too many.

    A group has the root of its lengths' mean square, so that attention work stays the same.
    """
    values, counts = np.unique(lengths, return_counts=True)
    if values.size > most:
        cuts = np.linspace(0, values.size, most + 1).astype(np.int64)[:-1]
        squares = np.add.reduceat(counts * np.square(values, dtype=np.float64), cuts)
        counts = np.add.reduceat(counts, cuts)
        values = np.rint(np.sqrt(squares / counts)).astype(np.int64)
    return values.tolist(), counts.tolist()
