"""Activation offloading inside Megatron's model: what part of a micro-batch leaves, and who tells when layers begin."""

import functools
from collections.abc import Callable
from typing import Any

import torch

from megatron_hdp.errors import SeamError
from megatron_hdp.offload.arena import HostArena
from megatron_hdp.offload.context import ActivationOffload, OffloadMetrics
from megatron_hdp.offload.host_memory import require_host_memory
from megatron_hdp.pool import together
from megatron_hdp.seams.spec import HdpPackedSeqParams
from megatron_hdp.types import MicroBatch


def micro_batch_ratio(micro_batch: MicroBatch, layers: int) -> float:
    """Fraction of the bytes that leaves of all layers but the first and the last of a model part of ``layers`` layers.

    `Piece.offload` is the share of all layers, and first and last keep theirs: s of l layers are s l / (l - 2) of those
    between them. Tensors hold the tokens of all pieces, so what leaves is the mean over tokens, padding counted. Where
    a part has too few layers between for the share, all of those leave.
    """
    tokens = micro_batch.tokens
    if layers < 3 or tokens == 0:
        return 0.0
    share = sum(piece.tokens * piece.offload for piece in micro_batch.pieces) / tokens
    return min(1.0, share * layers / (layers - 2))


class ModelOffload:
    """The arena of this process, and the hooks in its model parts."""

    def __init__(self, arena_bytes: int, device: torch.device, ranks_per_node: int) -> None:
        """Collective over the whole run. Raises `ConfigError` on every process if one lacks the memory."""
        together(lambda: require_host_memory(arena_bytes, ranks_per_node))
        self.arena = together(lambda: HostArena(arena_bytes, device))
        # what leaves is what the capacity does not hold: a full arena is an error, not a reason to keep more
        self._offload = ActivationOffload(self.arena, keep_when_full=False)
        self._models: list[torch.nn.Module] = []
        self._is_protected = False
        self.moved: OffloadMetrics | None = None
        """Of the last training step of this process."""

    def bind(self, model: Any) -> None:
        """Have the layers of one model part (a GPTModel) send away what its micro-batches' pieces say."""
        self._models.append(model)
        block = getattr(model, "decoder", None)
        layers = getattr(block, "layers", ())
        if len(layers) == 0:
            return
        assert block is not None
        block.forward = _offloading(block, block.forward, self._offload)
        for index, layer in enumerate(layers):
            layer.register_forward_pre_hook(functools.partial(_begin, self._offload, index), with_kwargs=True)

    def begin_step(self) -> None:
        """Before the first step: what lives as long as the model never leaves. Its buffers are laid out by now."""
        if not self._is_protected:
            self._is_protected = True
            for model in self._models:
                self._offload.protect(tensor.detach() for tensor in (*model.parameters(), *model.buffers()))

    def end_step(self) -> None:
        """Take the metrics of the step into `moved`."""
        self.moved = self._offload.take_metrics()

    def close(self) -> None:
        """Wait for the copies and give the arena back."""
        self._offload.close()
        self.arena.close()


def _offloading(block: Any, forward: Callable[..., Any], offload: ActivationOffload) -> Callable[..., Any]:
    """``block.forward`` in the context of its micro-batch. In evaluation, without gradients, that does nothing."""

    @functools.wraps(forward)
    def offloading_forward(*args: Any, **kwargs: Any) -> Any:
        params = kwargs.get("packed_seq_params")
        if not isinstance(params, HdpPackedSeqParams) or params.micro_batch is None:
            raise SeamError("--hdp-offload: the decoder was called without pieces: Megatron's model has changed")
        layers = len(block.layers)
        with offload.micro_batch(micro_batch_ratio(params.micro_batch, layers), layers):
            return forward(*args, **kwargs)

    return offloading_forward


def _begin(offload: ActivationOffload, index: int, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Forward pre-hook of a layer. When a layer is recomputed in backward no context is open, and nothing happens."""
    offload.layer(index, args[0] if args else kwargs.get("hidden_states"))
