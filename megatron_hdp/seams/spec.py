"""Ring attention and exact rotary positions inside Megatron's model, through its public extension points."""

import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.training.models.gpt import default_layer_spec
from torch import Tensor

from megatron_hdp.attention.kernels import BlockKernel
from megatron_hdp.attention.ring import hdp_attention
from megatron_hdp.errors import ConfigError
from megatron_hdp.pool import Pool
from megatron_hdp.types import MicroBatch

# Shapes: T tokens of the micro-batch, H heads, G K/V heads, D head size; Megatron's sequence-first layout is T1HD.


@dataclass
class HdpPackedSeqParams(PackedSeqParams):  # type: ignore[misc]
    """Carries the micro-batch's pieces through the model; Megatron passes it on untouched."""

    micro_batch: MicroBatch | None = None
    positions_T: Tensor | None = None
    """Position of every token in its sequence, for rotary embeddings."""


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
        head_dim = config.kv_channels
        self.softmax_scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
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
        """Attention output [T, 1, H * D]. The mask is implied by the pieces; a given one is an error."""
        if not isinstance(packed_seq_params, HdpPackedSeqParams) or packed_seq_params.micro_batch is None:
            raise ConfigError("the model was called without pieces: under --hdp only its own forward step may call it")
        assert self._pool is not None, "bind() was not called"
        assert self._kernel is not None, "bind() was not called"
        assert attention_mask is None, "attention masks follow from the pieces"
        assert attention_bias is None, "attention bias is not supported"
        self.calls += 1
        out_THD = hdp_attention(
            query_T1HD.squeeze(1),
            key_T1GD.squeeze(1),
            value_T1GD.squeeze(1),
            packed_seq_params.micro_batch,
            self._pool.rank,
            self._pool.comm,
            softmax_scale=self.softmax_scale,
            kernel=self._kernel,
        )
        return out_THD.reshape(out_THD.shape[0], 1, -1)


class HdpRotaryEmbedding(torch.nn.Module):  # type: ignore[misc]
    """The model's rotary embedding, evaluated at each token's own position instead of 0 .. T - 1.

    Same arithmetic as Megatron's `RotaryEmbedding` (fp32 outer product), without its cache keyed by length, which
    would pin one full table per length.
    """

    def __init__(self, original: Any) -> None:
        super().__init__()
        self.inv_freq = original.inv_freq
        self.interpolation_factor = original.seq_len_interpolation_factor
        self.interleaved = original.rotary_interleaved

    def get_rotary_seq_len(self, context: Any, block: Any, block_input: Any, config: Any, params: Any, **_: Any) -> Any:
        """Megatron asks for a length and passes the answer to `forward`; we answer with the positions."""
        assert isinstance(params, HdpPackedSeqParams), "the model was called without pieces"
        return params.positions_T

    def forward(self, positions_T: Tensor, packed_seq: bool = False, cp_group: Any = None) -> Tensor:
        """Angles [T, 1, 1, rotary dim], fp32."""
        if self.inv_freq.device != positions_T.device:
            self.inv_freq = self.inv_freq.to(positions_T.device)
        positions = positions_T.to(self.inv_freq.dtype)
        if self.interpolation_factor is not None:
            positions = positions * (1 / self.interpolation_factor)
        angles = torch.outer(positions, self.inv_freq)
        both = (
            torch.stack((angles, angles), dim=-1).flatten(-2) if self.interleaved else torch.cat((angles, angles), -1)
        )
        return both[:, None, None, :]


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
    rotary = getattr(model, "rotary_pos_emb", None)
    if rotary is not None:
        model.rotary_pos_emb = HdpRotaryEmbedding(rotary)
    return attentions
