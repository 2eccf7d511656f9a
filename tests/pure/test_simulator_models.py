"""Models of the paper, and layers that are derived for them."""

import dataclasses

import pytest

from megatron_hdp.cost import load_profile
from megatron_hdp.cost.calibrate import SHAPES
from megatron_hdp.errors import ConfigError
from megatron_hdp.memory import Parallel, parameters
from megatron_hdp.simulator.models import MODELS, model_of, model_profile

BYTESCALE, H100 = load_profile("bytescale"), load_profile("h100")
PER_GPU = ("attention_forward", "linear_forward", "activation_per_token", "checkpoint_per_token")


def test_models_are_those_of_the_papers_table():
    table = {  # layers, heads, groups, hidden, experts, at least so many GPUs
        "llama-7b": (32, 32, 8, 4096, 1, 1000),
        "llama-13b": (40, 40, 8, 5120, 1, 2000),
        "llama-30b": (60, 56, 8, 6656, 1, 4000),
        "llama-70b": (80, 64, 8, 8192, 1, 8000),
        "mixtral-8x7b": (32, 32, 8, 4096, 8, 8000),
        "mixtral-8x22b": (56, 48, 8, 6144, 8, 12000),
    }
    assert list(MODELS) == list(table) == list(SHAPES)
    for name, (layers, heads, groups, hidden, experts, gpus) in table.items():
        model = MODELS[name]
        shape = model.shape
        assert (shape.layers, shape.heads, shape.kv_heads, shape.hidden) == (layers, heads, groups, hidden)
        assert (model.experts, model.experts_per_token) == (experts, 1 if experts == 1 else 2)
        assert gpus <= model.gpus <= 1.4 * gpus
        assert shape.heads * shape.head_dim == pytest.approx(hidden, rel=0.002)
        assert "assumed" in model.assumed
        ranks = model.gpus // (model.tensor_parallel * model.stages)
        assert ranks * 8192 >= 2 << 20  # the pool holds 2M tokens
        assert shape.layers % (model.stages * model.virtual_stages) == 0
    assert model_of("llama-7b") is MODELS["llama-7b"] is model_of(MODELS["llama-7b"])


def test_sizes_are_what_the_names_say():
    billions = {
        "llama-7b": 7,
        "llama-13b": 13,
        "llama-30b": 30,
        "llama-70b": 70,
        "mixtral-8x7b": 47,
        "mixtral-8x22b": 141,
    }
    for name, billion in billions.items():
        model = MODELS[name]
        dense = parameters(model.shape, Parallel(ranks=1), "only")
        experts = model.shape.layers * 3 * model.shape.hidden * model.shape.ffn * (model.experts - 1)
        assert (dense + experts) / 1e9 == pytest.approx(billion, rel=0.2), name


def test_on_h100_layers_are_those_of_the_shipped_profile():
    for name, layer in H100.layers.items():
        derived = model_profile(name, "h100", layer.tensor_parallel)
        assert derived.layers == {name: layer}
        assert derived.default_layer == name
        assert derived.across_nodes == H100.across_nodes


def test_a_layer_that_was_measured_is_kept():
    found = model_profile("llama-7b", "bytescale", 2)
    assert found.layers["llama-7b"] == BYTESCALE.layers["llama-7b"]
    assert "derived, not measured" in found.assumed["llama-7b"]


def test_from_7b_to_70b_by_hand():
    """Attention with the width, linear work with the weights, memory with what is kept; over 8 GPUs instead of 2."""
    source, target = BYTESCALE.layers["llama-7b"], model_profile("llama-70b", "bytescale", 8).layers["llama-70b"]
    weights_7b = 2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 11008
    weights_70b = 2 * 8192**2 + 2 * 8192 * 1024 + 3 * 8192 * 28672
    kept_7b, kept_70b = 6 * 4096 + 2 * 1024 + 3 * 11008, 6 * 8192 + 2 * 1024 + 3 * 28672
    assert target.tensor_parallel == 8
    assert target.attention_forward == pytest.approx(source.attention_forward * 2 / 4, rel=1e-5)
    assert target.linear_forward == pytest.approx(source.linear_forward * weights_70b / weights_7b / 4, rel=1e-5)
    assert target.activation_per_token == pytest.approx(source.activation_per_token * kept_70b / kept_7b / 4, rel=1e-5)
    assert target.checkpoint_per_token == pytest.approx(source.checkpoint_per_token * 2 / 4, rel=1e-5)
    assert target.kv_per_token == pytest.approx(source.kv_per_token / 4)
    assert target.kv_gradient_per_token == pytest.approx(source.kv_gradient_per_token / 4)
    for name in ("attention_backward_factor", "linear_backward_factor", "sequence_constant", "microbatch_constant"):
        assert getattr(target, name) == getattr(source, name)


def test_experts_count_as_often_as_a_token_meets_them():
    dense = model_profile("llama-7b", "h100", 4).layers["llama-7b"]
    sparse = model_profile("mixtral-8x7b", "h100", 4).layers["mixtral-8x7b"]
    assert sparse.attention_forward == pytest.approx(dense.attention_forward, rel=1e-5)
    mlp = 3 * 4096 * (2 * 14336 - 11008)
    attention = 2 * 4096**2 + 2 * 4096 * 1024
    ratio = 1 + mlp / (attention + 3 * 4096 * 11008)
    assert sparse.linear_forward / dense.linear_forward == pytest.approx(ratio, rel=1e-5)


@pytest.mark.parametrize("name", list(MODELS))
def test_work_and_bytes_are_shared_by_the_gpus_of_a_rank(name):
    sizes = [size for size in (1, 2, 4, 8) if MODELS[name].shape.heads % size == 0]
    layers = [model_profile(name, "h100", size).layers[name] for size in sizes]
    for size, layer in zip(sizes, layers):
        assert layer.tensor_parallel == size
        for field in (*PER_GPU, "kv_per_token", "kv_gradient_per_token"):
            assert getattr(layer, field) * size == pytest.approx(getattr(layers[0], field), rel=2e-5), field


def test_a_key_value_head_is_not_cut():
    wide = dataclasses.replace(H100, gpus_per_node=32)
    layers = {size: model_profile("llama-7b", wide, size).layers["llama-7b"] for size in (8, 32)}
    assert layers[32].kv_per_token == layers[8].kv_per_token
    assert layers[32].attention_forward == pytest.approx(layers[8].attention_forward / 4, rel=1e-5)


def test_embedding_and_loss_are_scaled_with_width_and_vocabulary():
    measured = dataclasses.replace(H100.layers["llama-7b"], loss_per_token=1e-6, embedding_per_token=1e-7)
    profile = dataclasses.replace(H100, layers={"llama-7b": measured})
    layer = model_profile("mixtral-8x22b", profile, 8).layers["mixtral-8x22b"]
    assert layer.loss_per_token == pytest.approx(1e-6 * 6144 * 32768 / (4096 * 32000) / 8, rel=1e-5)
    assert layer.embedding_per_token == pytest.approx(1e-7 * 6144 / 4096 / 8, rel=1e-5)


def test_what_cannot_be_derived_is_refused():
    with pytest.raises(ConfigError, match="model 'gpt-9' is not known: choose one of llama-7b"):
        model_profile("gpt-9", "h100")
    with pytest.raises(ConfigError, match="tensor parallelism of 3 does not cut the 32 heads of llama-7b"):
        model_profile("llama-7b", "h100", 3)
    with pytest.raises(ConfigError, match="tensor parallelism of 16 does not fit into nodes of 8 GPUs"):
        model_profile("llama-7b", "h100", 16)
    layers = {"mine": H100.layers["llama-7b"]}
    mine = dataclasses.replace(H100, layers=layers, default_layer="mine", name="some")
    with pytest.raises(ConfigError, match=r"profile some has no layer of a known model \(mine\)"):
        model_profile("llama-7b", mine)
    with pytest.raises(ConfigError, match="neither a shipped one"):
        model_profile("llama-7b", "nowhere.json")
