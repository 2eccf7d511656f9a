"""Attention over rings inside Megatron's model, through its public extension points."""

import copy
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.multi_latent_attention import MultiLatentAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.training.models.gpt import default_layer_spec
from torch import Tensor

from megatron_hdp.attention.attend import hdp_attention
from megatron_hdp.attention.kernels import BlockKernel
from megatron_hdp.errors import ConfigError
from megatron_hdp.pool import Pool
from megatron_hdp.router_loss import Routing
from megatron_hdp.seams.costs import window_tokens
from megatron_hdp.seams.rotary import HdpRotaryEmbedding
from megatron_hdp.types import MicroBatch

_CAUSAL_MASKS = (AttnMaskType.causal, AttnMaskType.padding_causal, AttnMaskType.causal_bottom_right)
"""The same thing here: a sequence has as many keys as queries, and padding lies at its tail."""

# Shapes: T tokens of the micro-batch, H heads, G K/V heads, D head size; Megatron's sequence-first layout is T1HD.


@dataclass
class HdpPackedSeqParams(PackedSeqParams):  # type: ignore[misc]
    """Carries the micro-batch's pieces through the model; Megatron passes it on untouched."""

    micro_batch: MicroBatch | None = None
    positions_T: Tensor | None = None
    """Position of every token in its sequence, for rotary embeddings."""
    most_tokens: int | None = None
    """Tokens of the longest micro-batch among the ranks that share experts; None where all have equally many."""
    sequences: int = 1
    """Sequences of the global batch."""
    routing: Routing | None = None
    """What the routers of the model part that runs chose; made when it begins."""


class HdpCoreAttention(MegatronModule):  # type: ignore[misc]
    """Causal attention of each sequence over its own ring, in the core-attention slot of a layer.

    Has no parameters, so checkpoints are those of a model without it.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        **unused: Any,
    ) -> None:
        super().__init__(config=config)
        if attention_type != "self":
            raise ConfigError(f"--hdp has self-attention only; layer {layer_number} wants {attention_type!r}")
        _require_causal(attn_mask_type, layer_number)
        if attention_dropout:
            raise ConfigError(f"--hdp has no attention dropout; layer {layer_number} wants {attention_dropout}")
        self.layer_number = layer_number
        self.softmax_scale = config.kv_channels**-0.5 if softmax_scale is None else softmax_scale
        self.window = window_tokens(config.window_size, config.window_attn_skip_freq, layer_number)
        """Tokens that a query sees, itself included; None for all before it."""
        normed = config.qk_layernorm or config.qk_l2_norm
        self._owns_memory = not (normed and config.transformer_impl == "local")
        """Norms of q and k that are not Transformer Engine's save views of the projection's output themselves."""
        self._pool: Pool | None = None
        self._kernel: BlockKernel | None = None
        self.calls = 0

    def bind(self, pool: Pool, kernel: BlockKernel) -> None:
        """Give the module its pool, once process groups exist."""
        self._pool, self._kernel = pool, kernel

    def forward(
        self,
        query_T1HD: Tensor,
        key_T1GD: Tensor,
        value_T1GD: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **unused: Any,
    ) -> Tensor:
        """Attention output [T, 1, H * D], D the size of values. The mask is implied by the pieces: one is an error.

        Latent attention hands over [T, H, D], and may have shorter values than keys.
        """
        if not isinstance(packed_seq_params, HdpPackedSeqParams) or packed_seq_params.micro_batch is None:
            raise ConfigError("the model was called without pieces: under --hdp only its own forward step may call it")
        if attn_mask_type is not None:
            _require_causal(attn_mask_type, self.layer_number)
        assert self._pool is not None, "bind() was not called"
        assert self._kernel is not None, "bind() was not called"
        assert attention_mask is None, "attention masks follow from the pieces"
        assert attention_bias is None, "attention bias is not supported"
        self.calls += 1
        value_size = value_T1GD.shape[-1]
        inputs = [query_T1HD, key_T1GD, _as_long(value_T1GD, query_T1HD.shape[-1])]
        query_T1HD, key_T1GD, value_T1GD = owning_memory(inputs) if self._owns_memory else inputs
        out_THD = hdp_attention(
            _without_batch(query_T1HD),
            _without_batch(key_T1GD),
            _without_batch(value_T1GD),
            packed_seq_params.micro_batch,
            self._pool.rank,
            self._pool.comm,
            softmax_scale=self.softmax_scale,
            kernel=self._kernel,
            window=self.window,
        )
        return out_THD[..., :value_size].reshape(out_THD.shape[0], 1, -1)


def _without_batch(tensor: Tensor) -> Tensor:
    """[T, H, D] of [T, 1, H, D]; latent attention hands over the former."""
    return tensor.squeeze(1) if tensor.ndim == 4 else tensor


def _as_long(value_T1GD: Tensor, size: int) -> Tensor:
    """Values with zeros behind them where keys are longer, as in latent attention: they add zeros to the output."""
    short = size - value_T1GD.shape[-1]
    return torch.nn.functional.pad(value_T1GD, (0, short)) if short > 0 else value_T1GD


def owning_memory(tensors: Sequence[Tensor]) -> list[Tensor]:
    """``tensors``, which autograd is about to save, but not as small views that hold on to a large storage.

    The values are a view of the projection's whole output (q, k, v of each group of heads in turn); queries and keys
    no longer are, once they have their positions. Saved as it is, v would keep q and k from before the positions until
    backward, and where v leaves for host memory they would have to leave with it. Views are copied where all views of a
    storage together are smaller than it: never where that saves nothing, as without positions.

    The copy takes less than 0.1 % of a layer's time (docs/memory.md), and backward has none.
    """
    if not torch.is_grad_enabled():
        return list(tensors)
    needed: dict[int, int] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        needed[storage.data_ptr()] = needed.get(storage.data_ptr(), 0) + tensor.nbytes

    def owning(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        # without a history it is somebody's own, who holds on to it anyway: a checkpoint's, in its second forward
        if tensor.grad_fn is None or needed[storage.data_ptr()] >= storage.nbytes():
            return tensor
        return tensor.clone(memory_format=torch.contiguous_format)

    return [owning(tensor) for tensor in tensors]


def _require_causal(attn_mask_type: Any, layer_number: int) -> None:
    if attn_mask_type not in _CAUSAL_MASKS:
        raise ConfigError(
            f"--hdp has causal attention only; the mask of layer {layer_number} is "
            f"{getattr(attn_mask_type, 'name', attn_mask_type)}: use a layer spec with AttnMaskType.causal"
        )


def hdp_layer_spec(user_spec: Any) -> Callable[..., ModuleSpec]:
    """The layer spec of the model (the user's or Megatron's default) with our core attention in every layer."""

    def layer_spec(config: Any, vp_stage: int | None = None) -> ModuleSpec:
        if user_spec is None:
            spec = default_layer_spec(config, vp_stage)
        elif callable(user_spec) and not isinstance(user_spec, ModuleSpec):
            takes_stage = "vp_stage" in inspect.signature(user_spec).parameters
            spec = user_spec(config, vp_stage=vp_stage) if takes_stage else user_spec(config)
        else:
            spec = user_spec
        spec = copy.deepcopy(spec)
        layers = getattr(spec, "layer_specs", None) or [spec]
        for layer in layers:
            _use_hdp_attention(layer)
        return spec

    return layer_spec


def _use_hdp_attention(layer_spec: Any) -> None:
    attention = getattr(getattr(layer_spec, "submodules", None), "self_attention", None)
    submodules: Any = getattr(attention, "submodules", None)
    if not hasattr(submodules, "core_attention"):
        raise ConfigError(
            "--hdp puts its ring attention in the core_attention slot of SelfAttention, which this layer spec lacks: "
            "use a spec whose layers have self_attention.submodules.core_attention"
        )
    submodules.core_attention = HdpCoreAttention


def bind_model(model: torch.nn.Module, pool: Pool, kernel: BlockKernel) -> list[HdpCoreAttention]:
    """Connect every ring attention of one model chunk to the pool and make its rotary positions exact.

    Returns those attentions. Raises `ConfigError` if the chunk has layers but none of them is ours.
    """
    attentions = [module for module in model.modules() if isinstance(module, HdpCoreAttention)]
    if not attentions and len(getattr(getattr(model, "decoder", None), "layers", ())) > 0:
        raise ConfigError("--hdp: the model was built without ring attention; use megatron.training's GPTModelConfig")
    for attention in attentions:
        attention.bind(pool, kernel)
    for module in [model, *(m for m in model.modules() if isinstance(m, MultiLatentAttention))]:
        rotary = getattr(module, "rotary_pos_emb", None)
        if rotary is not None:
            module.rotary_pos_emb = HdpRotaryEmbedding(rotary, is_latent=module is not model)
    return attentions
