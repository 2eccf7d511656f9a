"""What the planner is told of parameters and gradients that travel beside micro-batches."""

from types import SimpleNamespace

import pytest
import torch

from megatron_hdp.cost import CostModel, load_profile
from megatron_hdp.seams.frame import framed
from megatron_hdp.seams.model_shape import UNKNOWN

COST = CostModel(load_profile("h100"), 4)
ARGS = {
    "num_layers": 4,
    "hidden_size": 4096,
    "ffn_hidden_size": 11008,
    "num_attention_heads": 32,
    "num_query_groups": 8,
    "group_query_attention": True,
    "kv_channels": 128,
    "padded_vocab_size": 32000,
    "swiglu": True,
    "quick_geglu": False,
    "untie_embeddings_and_output_weights": True,
    "params_dtype": torch.bfloat16,
    "normalization": "RMSNorm",
    "add_bias_linear": False,
    "add_qkv_bias": False,
    "qk_layernorm": False,
    "position_embedding_type": "rope",
    "optimizer": "adam",
    "num_experts": None,
    "pipeline_model_parallel_size": 1,
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
    "accumulate_allreduce_grads_in_fp32": True,
}


def args_with(**changes):
    return SimpleNamespace(**ARGS | changes)


def test_times_are_bytes_over_links():
    """4096 (2 x 4096 + 2 x 1024 + 3 x 11008 + 2) parameters a layer, two embeddings, a norm; 16 ranks on 2 nodes."""
    found = framed(COST, args_with(), 16)
    parameters = 4 * 4096 * (2 * 4096 + 2 * 1024 + 3 * 11008 + 2) + 2 * 32000 * 4096 + 4096
    links = load_profile("h100")
    seconds = 15 / 16 * 4 * parameters / min(links.inside_node.bandwidth, 8 * links.across_nodes.bandwidth)
    assert found.reduce_picoseconds == pytest.approx(1e12 * seconds, rel=0.01)
    assert found.gather_picoseconds == pytest.approx(found.reduce_picoseconds / 2, rel=0.01)


@pytest.mark.parametrize(
    ("changes", "known"),
    [
        ({"overlap_grad_reduce": False}, (True, False)),
        ({"overlap_param_gather": False}, (False, True)),
        ({"pipeline_model_parallel_size": 2}, (False, False)),
        ({"multi_latent_attention": True}, (False, False)),
    ],
)
def test_nothing_is_told_where_it_is_not_so(changes, known):
    assert any(name == "--multi-latent-attention" for name, _ in UNKNOWN)
    found = framed(COST, args_with(**changes), 16)
    assert (found.gather_picoseconds > 0, found.reduce_picoseconds > 0) == known


def test_bf16_gradients_take_half():
    whole = framed(COST, args_with(), 16).reduce_picoseconds
    half = framed(COST, args_with(accumulate_allreduce_grads_in_fp32=False), 16).reduce_picoseconds
    assert half == pytest.approx(whole / 2, rel=0.01)
