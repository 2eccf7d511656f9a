"""Output layer and loss of long micro-batches, a few rows at a time, through GPTModel's `output_processor`.

Inside a chunk everything is Megatron's own: its output layer, muP's scale, its vocab-parallel cross entropy, fused or
not. What is left out is only that the logits of all rows exist at once.

Liger's fused kernels are no replacement: `LigerFusedLinearCrossEntropyLoss` knows one gradient for all tokens (with
reduction="none" and a mask on the losses its gradients are wrong, linkedin/Liger-Kernel#968) and no vocabulary cut over
ranks. Its newer tensor-parallel variant, which has both, was not tried here for want of a GPU.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor

from megatron_hdp.config import HdpConfig
from megatron_hdp.errors import ConfigError
from megatron_hdp.loss import OutputLayer, chunk_rows, chunked_losses

_INSIDE_A_CHUNK = ("native", "te")
"""Megatron's fused cross entropies that take logits. One that takes the output layer too keeps no logits anyway."""


def check_loss_chunk(args: Any, config: HdpConfig) -> None:
    """Raise `ConfigError` where chunks were asked for and cannot be."""
    if config.loss_chunk and _is_deferred(args):
        raise ConfigError(
            f"--hdp-loss-chunk {config.loss_chunk} with --defer-embedding-wgrad-compute, which keeps the gradients of "
            "all logits for the end of the step: drop one of the two"
        )


def loss_chunk_from_args(args: Any) -> int:
    """Tokens beyond which a micro-batch's loss is computed in chunks of as many; 0 for Megatron's own path always."""
    fusion = getattr(args, "cross_entropy_fusion_impl", "native") if args.cross_entropy_loss_fusion else "native"
    if _is_deferred(args) or fusion not in _INSIDE_A_CHUNK:
        return 0
    if args.hdp_loss_chunk is not None:
        return int(args.hdp_loss_chunk)
    return chunk_rows(args.padded_vocab_size // args.tensor_model_parallel_size)


def output_options(args: Any, tokens: int) -> dict[str, Any]:
    """Arguments of GPTModel's forward that make it chunk a micro-batch of ``tokens``; none for its own path."""
    rows = loss_chunk_from_args(args)
    if rows == 0 or tokens <= rows:
        return {}
    return {"output_processor": _chunked_output, "output_processor_context": rows}


def _chunked_output(
    *,
    hidden_states: Tensor,
    output_layer: Any,
    output_weight: Tensor | None,
    labels: Tensor,
    context: int,
    compute_language_model_loss: Callable[[Tensor, Tensor], Tensor],
    scale_logits: Callable[[Tensor], Tensor],
    **unused: Any,
) -> Tensor:
    """Token losses [1, T] of the last stage's hidden states [T, 1, D], ``context`` rows at a time.

    With sequence parallelism a process has T / TP rows of hidden states: they are gathered once, not by every chunk.
    """
    split = bool(output_layer.sequence_parallel)
    if split:
        hidden_states = gather_from_sequence_parallel_region(hidden_states, group=output_layer.tp_group)

    def losses(hidden_R1D: Tensor, labels_1R: Tensor) -> Tensor:
        with _of_gathered_rows(output_layer) if split else contextlib.nullcontext():
            logits, _ = output_layer(hidden_R1D, weight=output_weight)
        return compute_language_model_loss(labels_1R, scale_logits(logits))

    weight = output_layer.weight if output_weight is None else output_weight
    rest = tuple(parameter for parameter in output_layer.parameters() if parameter is not weight)
    is_fused = getattr(output_layer, "gradient_accumulation_fusion", False)
    layer = OutputLayer(losses, (weight, *rest), added_elsewhere=(weight,) if is_fused else ())
    return chunked_losses(layer, hidden_states, labels, context)


@contextlib.contextmanager
def _of_gathered_rows(output_layer: Any) -> Iterator[None]:
    """The layer takes all rows as they are, and leaves each process's part of their gradient to be summed.

    The backward pass of the gathering sums it, as that of a sequence-parallel layer does.
    """
    before = output_layer.sequence_parallel, output_layer.disable_grad_reduce
    output_layer.sequence_parallel, output_layer.disable_grad_reduce = False, True
    try:
        yield
    finally:
        output_layer.sequence_parallel, output_layer.disable_grad_reduce = before


def _is_deferred(args: Any) -> bool:
    return bool(getattr(args, "defer_embedding_wgrad_compute", False))
