"""The cost model as the flat array that csrc/cost.hpp is built from."""

import numpy as np

from megatron_hdp.cost.fixed import FRACTION_BITS
from megatron_hdp.cost.model import CostModel
from megatron_hdp.types import IntArray


def core_arguments(cost: CostModel) -> IntArray:
    """The integers of a cost model in the order of the fields of ``hdp::Cost``, int64 [24]."""
    stage = cost._stage
    numbers = [
        FRACTION_BITS,
        cost.window or 0,
        int(cost.recompute == "full"),
        cost.pad_multiple,
        cost.ranks_per_node,
        cost.max_length,
        *stage.attention,
        *stage.linear,
        *stage.sequence,
        *stage.microbatch,
        *stage.ring_step,
        *stage.latency,
        *stage.kv_time,
        *stage.both_time,
        *stage.gradient_time,
    ]
    return np.array(numbers, dtype=np.int64)
