"""Parameters gathered ahead of the step's first micro-batch, where ZeRO-1 overlaps the gather with it.

Megatron starts the all-gather of one bucket of parameters when the forward pass reaches the bucket before, and waits
for it a little later. A rank inside a ring would then wait for a gather that another rank starts only after that very
ring, since a ring may have another place in the list of micro-batches of each rank: both stand still. So all gathers
of a step are started before its first micro-batch, in the order in which layers need them; each layer waits for its
own, so that they still hide behind compute.
"""

from collections.abc import Iterable
from typing import Any


def start_param_gathers(model_chunks: Iterable[Any]) -> None:
    """Start every gather of the coming step that is not under way.

    Nothing happens without --overlap-param-gather, in a run's first step and in evaluation, where Megatron has gathered
    everything beforehand; nor with --align-param-gather in an interleaved pipeline, whose schedule starts them itself.
    """
    for chunk in model_chunks:
        settings = getattr(chunk, "ddp_config", None)
        if settings is None or not settings.overlap_param_gather or not chunk.remove_forward_pre_hook_handles:
            continue
        if chunk.config.param_sync_func is not None:
            continue
        settings.align_param_gather = True  # a layer then waits for its gather and does not start the next one
        for groups in (chunk.bucket_groups, chunk.expert_parallel_bucket_groups):
            for group in reversed(groups):  # groups are in the order of backward
                if not group.param_gather_dispatched:
                    group.start_param_sync()
