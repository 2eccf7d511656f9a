"""Our rotary embedding against Megatron's own modules, bit for bit, at positions up to 2M in any order."""

import math

import pytest
import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import MultimodalRotaryEmbedding, RotaryEmbedding
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding

from megatron_hdp.errors import ConfigError
from megatron_hdp.seams.rotary import HdpRotaryEmbedding

TOKENS = 2**21
BLOCK = 4096
HERE = {"use_cpu_initialization": True}

MODULES = {
    "plain": lambda dim: RotaryEmbedding(dim, 1.0, **HERE),
    "base 5e5": lambda dim: RotaryEmbedding(dim, 1.0, rotary_base=500_000, **HERE),
    "interleaved": lambda dim: RotaryEmbedding(dim, 1.0, rotary_interleaved=True, **HERE),
    "partial": lambda dim: RotaryEmbedding(dim, 0.5, **HERE),
    "interpolated": lambda dim: RotaryEmbedding(dim, 1.0, seq_len_interpolation_factor=3, **HERE),
    "llama 3": lambda dim: RotaryEmbedding(dim, 1.0, rope_scaling=True, rotary_base=500_000, **HERE),
    "llama 3, interleaved, partial": lambda dim: RotaryEmbedding(
        dim, 0.25, rope_scaling=True, rope_scaling_factor=32.0, rotary_interleaved=True, **HERE
    ),
    "yarn": lambda dim: YarnRotaryEmbedding(dim, scaling_factor=40.0, mscale=1.0, mscale_all_dim=0.0, **HERE),
    "yarn, other settings": lambda dim: YarnRotaryEmbedding(
        dim,
        scaling_factor=4.0,
        rotary_base=150_000.0,
        original_max_position_embeddings=8192,
        beta_fast=16.0,
        beta_slow=2.0,
        mscale=0.7,
        mscale_all_dim=0.3,
        correction_range_round_to_int=False,
        **HERE,
    ),
}


class Params:
    """Stands for a micro-batch's parameters."""

    def __init__(self, positions_T):
        self.positions_T = positions_T


def angles_of(module, positions_T):
    """As GPTModel asks for them."""
    length = module.get_rotary_seq_len(None, None, None, None, Params(positions_T))
    return module(length, packed_seq=False, cp_group=None)


def check(name, make):
    whole = [(8, 0, TOKENS)] if name in ("plain", "yarn") else []
    blocks = [(128, begin, BLOCK) for begin in (0, 8192, 131072 - 7, 2**20 + 1, TOKENS - BLOCK)]
    ours = {dim: HdpRotaryEmbedding(make(dim)) for dim in (8, 128)}
    for dim, begin, count in whole + blocks:
        theirs = make(dim).get_emb(count, begin)
        order = torch.randperm(count, generator=torch.Generator().manual_seed(begin))
        found = angles_of(ours[dim], order + begin)
        if isinstance(theirs, tuple):
            theirs, factor = theirs
            found, our_factor = found
            assert factor == our_factor != 1.0, (name, factor, our_factor)
        assert found.dtype == torch.float32
        assert found.is_contiguous()
        assert found.shape == (count, 1, 1, theirs.shape[-1]), name
        assert torch.equal(found, theirs[order]), (name, dim, begin)


def error_against_float64():
    """Largest error of an angle near position 2M, in radians."""
    dim = 128
    positions = torch.arange(TOKENS - BLOCK, TOKENS)
    angles = angles_of(HdpRotaryEmbedding(MODULES["plain"](dim)), positions)[:, 0, 0, : dim // 2]
    exact = positions.double()[:, None] * 10000.0 ** (-torch.arange(0, dim, 2).double() / dim)
    return float((angles.double() - exact).abs().max())


def main():
    for name, make in MODULES.items():
        check(name, make)
    error = error_against_float64()
    print(f"error against float64 at {TOKENS} positions: {error:.3f} radians")
    assert 0.01 < error < 0.25
    assert math.isclose(MODULES["yarn"](8).get_emb(2)[1], 0.1 * math.log(40.0) + 1.0)
    for wrong in (
        MultimodalRotaryEmbedding(8, 1.0),
        YarnRotaryEmbedding.__new__(type("Other", (YarnRotaryEmbedding,), {})),
        torch.nn.Identity(),
    ):
        with pytest.raises(ConfigError, match="use --position-embedding-type rope or yarn"):
            HdpRotaryEmbedding(wrong)
    print("all bit-equal", flush=True)


if __name__ == "__main__":
    main()
