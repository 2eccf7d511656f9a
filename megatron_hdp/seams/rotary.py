"""Rotary positions of every token, bit-equal to what Megatron's own modules give at these positions."""

from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding
from torch import Tensor

from megatron_hdp.errors import ConfigError

# Shapes: T tokens of the micro-batch, R rotary dimensions of a head.


class HdpRotaryEmbedding(torch.nn.Module):  # type: ignore[misc]
    """The model's rotary embedding, evaluated at each token's own position instead of 0 .. T - 1.

    The arithmetic is that of Megatron's `RotaryEmbedding` (plain, partial, interpolated, interleaved or not, llama 3
    scaling) and `YarnRotaryEmbedding`: one fp32 product of position and frequency. Their caches keyed by length, which
    would pin one full table per length, are left out.

    Near position 2M such an angle is off by up to 0.125 radians against float64 (dimension 128, base 10000, measured by
    the test): half from the rounding of the frequency, half from that of the product; half the error at half the
    position. It is kept on purpose. What counts is to be equal to Megatron on one rank, and models learn with it.

    Kernels: the angles have the shape [T, 1, 1, R] that Megatron's "sbhd" path wants of a sequence of T tokens, fp32
    and contiguous, so Transformer Engine's fused kernel (--apply-rope-fusion) and its fused QKV one read row t for
    token t, as the plain path does, and neither cuts by context-parallel rank. Only their "thd" variants do, which
    micro-batches of this package never reach.
    """

    def __init__(self, original: Any, is_latent: bool = False) -> None:
        """``original``: the module that this one replaces, of the model or, if ``is_latent``, of a latent attention.

        Latent attention of pieces has no batch dimension, so angles have none there: [T, 1, R].

        Raises `ConfigError` for a kind of which the positions are not known, or that Megatron itself cannot run.
        """
        super().__init__()
        self.is_yarn = isinstance(original, YarnRotaryEmbedding)
        if not isinstance(original, RotaryEmbedding) or type(original) not in (RotaryEmbedding, YarnRotaryEmbedding):
            raise ConfigError(
                f"--hdp knows the positions of RotaryEmbedding and YarnRotaryEmbedding, the model has "
                f"{type(original).__name__}: use --position-embedding-type rope or yarn"
            )
        self.is_latent = is_latent
        self.interleaved = original.rotary_interleaved
        if self.is_yarn and self.interleaved:
            raise ConfigError("--rotary-interleaved with --position-embedding-type yarn: Megatron has no such rotary")
        self.interpolation_factor = None if self.is_yarn else original.seq_len_interpolation_factor
        self.concentration = 1.0
        """YaRN's factor on cosine and sine; Megatron's attention takes its own from the model's configuration."""
        self.inv_freq = original.inv_freq
        if self.is_yarn:
            angles, self.concentration = original.get_emb(2)
            # the angles of position 1 are 1.0 times the frequencies: those of YaRN are mixed inside of get_emb only
            self.inv_freq = angles[1, 0, 0, : angles.shape[-1] // 2].clone()

    def get_rotary_seq_len(self, context: Any, block: Any, block_input: Any, config: Any, params: Any, **_: Any) -> Any:
        """Megatron asks for a length and passes the answer to `forward`; we answer with the positions."""
        positions_T = getattr(params, "positions_T", None)
        assert positions_T is not None, "the model was called without pieces"
        return positions_T

    def forward(self, positions_T: Tensor, packed_seq: bool = False, cp_group: Any = None) -> Any:
        """Angles [T, 1, 1, R], or [T, 1, R] if latent, fp32.

        For YaRN, as in Megatron, the pair of them and the factor on cosine and sine.
        """
        if self.inv_freq.device != positions_T.device:
            self.inv_freq = self.inv_freq.to(positions_T.device)
        positions = positions_T.to(self.inv_freq.dtype)  # fp32 is exact up to 2^24
        if self.interpolation_factor is not None:
            positions = positions * (1 / self.interpolation_factor)
        angles = torch.outer(positions, self.inv_freq)
        both = (
            torch.stack((angles, angles), dim=-1).flatten(-2) if self.interleaved else torch.cat((angles, angles), -1)
        )
        both = both[:, None, :] if self.is_latent else both[:, None, None, :]
        return (both, self.concentration) if self.is_yarn else both
