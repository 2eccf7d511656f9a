"""One micro-batch through the model: the forward step that takes the place of the script's own."""

import functools
from typing import Any

import torch
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.training import get_args, get_timers
from torch import Tensor

from megatron_hdp.loader import MicroBatchTensors
from megatron_hdp.loss import token_loss
from megatron_hdp.seams.output import output_options
from megatron_hdp.seams.spec import HdpPackedSeqParams

_SPIKE = 10.0
"""A loss this many times the largest seen so far counts as spiky, as in Megatron's own script."""


def forward_step(data_iterator: Any, model: Any, return_schedule_plan: bool = False) -> tuple[Any, Any]:
    """Run one micro-batch of the plan. Returns the model's output and the loss function for it."""
    assert not return_schedule_plan, "--hdp has no combined expert-parallel schedule"
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    batch: MicroBatchTensors = next(data_iterator)
    tokens_1T = batch.tokens_1T.cuda(non_blocking=True)
    labels_1T = batch.labels_1T.cuda(non_blocking=True)
    loss_mask_1T = batch.loss_mask_1T.cuda(non_blocking=True)
    positions_1T = batch.positions_1T.cuda(non_blocking=True)
    # "sbhd" keeps Megatron from cutting anything by its own context-parallel group
    params = HdpPackedSeqParams(
        qkv_format="sbhd",
        micro_batch=batch.micro_batch,
        positions_T=positions_1T[0],
        most_tokens=batch.most_tokens,
        sequences=batch.sequences,
    )
    timers("batch-generator").stop()
    # only padding lies beyond the last position; a learned position embedding has no row for it
    position_ids_1T = positions_1T.clamp(max=get_args().max_position_embeddings - 1)
    options = output_options(get_args(), tokens_1T.shape[1])
    output = model(tokens_1T, position_ids_1T, None, labels=labels_1T, packed_seq_params=params, **options)
    return output, functools.partial(_checked_loss, loss_mask_1T)


def _checked_loss(loss_mask_1T: Tensor, losses_1T: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """The loss, shown to Megatron's rerun machine, which repeats a step whose result looks wrong."""
    total, count, report = token_loss(losses_1T, loss_mask_1T)
    args = get_args()
    machine = get_rerun_state_machine()
    if args.check_for_nan_in_loss_and_grad:
        for wrong, name in ((torch.isnan, "NaN"), (torch.isinf, "Inf")):
            machine.validate_result(
                result=total,
                rejection_func=wrong,
                message=f"found {name} in local forward loss calculation",
                tolerance=0.0,
                fatal=True,
            )
    if args.check_for_spiky_loss:
        machine.validate_result(
            # the mean, because sums of micro-batches of different sizes are no measure of a spike
            result=total.detach() / count.clamp(min=1),
            rejection_func=functools.partial(machine.is_unexpectedly_large, threshold=_SPIKE, context="loss"),
            message="Spiky loss",
            tolerance=0.0,
            fatal=False,
        )
    return total, count, report
