"""The six models of the ByteScale paper, and what a layer of each costs where only another one was measured.

Published are layers, heads, groups of keys and values, width, experts and the size of the cluster (SIGCOMM 2025,
section 8, Figure 17). Widths of MLPs are those of the public models. Not published, and assumed here: tensor-parallel,
pipeline and expert-parallel sizes, and the vocabulary. Tensor parallelism of 2 for LLaMA-7B follows from Figure 18 (a
static ring of 256 ranks for 2M tokens on 1,024 GPUs). Others are chosen so that the pool holds 2M tokens with 8K tokens
a rank. Experts are cut over the tensor-parallel group like other weights: no text says that they have groups of their
own.
"""

import dataclasses
from dataclasses import dataclass

from megatron_hdp.cost import LayerProfile, Profile, load_profile
from megatron_hdp.errors import ConfigError
from megatron_hdp.memory import ModelShape

_HEAD = 128
"""Width of keys and values of a group."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model, and how it is assumed to be spread in Figure 17 of the paper."""

    name: str
    shape: ModelShape
    """`ModelShape.ffn` is that of one expert."""
    experts: int = 1
    """Of a layer; 1 for a dense model."""
    experts_per_token: int = 1
    gpus: int
    """Of the paper's run."""
    tensor_parallel: int
    stages: int = 1
    virtual_stages: int = 1
    expert_group: int = 1
    assumed: str
    """Which of the above no text says, and why they are what they are; for people."""


_TP2 = "tensor parallelism of 2 follows from Figure 18; vocabulary assumed"
_ASSUMED = "tensor-parallel and pipeline sizes and the vocabulary are assumed"


def _llama(
    layers: int, hidden: int, ffn: int, heads: int, head_dim: int = _HEAD, vocabulary: int = 32000
) -> ModelShape:
    return ModelShape(
        layers=layers, hidden=hidden, ffn=ffn, heads=heads, kv_heads=8, head_dim=head_dim, vocabulary=vocabulary
    )


MODELS: dict[str, Model] = {
    model.name: model
    for model in (
        Model(name="llama-7b", shape=_llama(32, 4096, 11008, 32), gpus=1024, tensor_parallel=2, assumed=_TP2),
        Model(name="llama-13b", shape=_llama(40, 5120, 13824, 40), gpus=2048, tensor_parallel=4, assumed=_ASSUMED),
        Model(
            name="llama-30b",
            shape=_llama(60, 6656, 17920, 56, head_dim=119),
            gpus=4096,
            tensor_parallel=8,
            assumed=_ASSUMED + "; 56 heads as published, each of 6656 / 56 = 119, which is no whole number",
        ),
        Model(
            name="llama-70b",
            shape=_llama(80, 8192, 28672, 64),
            gpus=8192,
            tensor_parallel=8,
            stages=4,
            assumed=_ASSUMED,
        ),
        Model(
            name="mixtral-8x7b",
            shape=_llama(32, 4096, 14336, 32),
            experts=8,
            experts_per_token=2,
            gpus=8192,
            tensor_parallel=4,
            stages=4,
            assumed=_ASSUMED + "; experts cut over the tensor-parallel group",
        ),
        Model(
            name="mixtral-8x22b",
            shape=_llama(56, 6144, 16384, 48, vocabulary=32768),
            experts=8,
            experts_per_token=2,
            gpus=16384,
            tensor_parallel=8,
            stages=8,
            assumed=_ASSUMED + "; experts cut over the tensor-parallel group",
        ),
    )
}
"""Name -> model, in the order of the paper's table; names are those of layers in profiles."""


def model_of(model: str | Model) -> Model:
    """The model called so, or the one that is given. Raises ConfigError for an unknown name."""
    if isinstance(model, Model):
        return model
    if model not in MODELS:
        raise ConfigError(f"model {model!r} is not known: choose one of {', '.join(MODELS)}")
    return MODELS[model]


def model_profile(model: str | Model, hardware: str | Profile, tensor_parallel: int | None = None) -> Profile:
    """The profile with one layer: that of ``model`` on ``tensor_parallel`` GPUs.

    A layer of the profile with the model's name, or else one of another known model (the profile's default first), is
    scaled: attention with the width and the square of tokens, linear work with the weights that a token meets, memory
    and what rings send with their bytes, all over the tensor-parallel size; factors and constants stay. That is a
    derivation, not a measurement: it takes equal efficiency for granted, and experts that are equally busy.

    Args:
        model: a name of `MODELS`, or a model.
        hardware: "bytescale", "h100" or another name or path for `load_profile`, or a profile.
        tensor_parallel: GPUs of a rank and stage; the model's own when None.

    Raises:
        ConfigError: no such model or profile, no layer to start from, or heads that cannot be cut over so many GPUs.
    """
    model = model_of(model)
    profile = hardware if isinstance(hardware, Profile) else load_profile(hardware)
    size = model.tensor_parallel if tensor_parallel is None else tensor_parallel
    if size < 1 or model.shape.heads % size:
        raise ConfigError(
            f"tensor parallelism of {size} does not cut the {model.shape.heads} heads of {model.name}: use a divisor"
        )
    if size > profile.gpus_per_node:
        raise ConfigError(
            f"tensor parallelism of {size} does not fit into nodes of {profile.gpus_per_node} GPUs: its traffic is "
            "part of a layer's time there; use less"
        )
    source = _source(model, profile)
    layer = _scaled(profile.layers[source], MODELS.get(source, model), model, size)
    words = f"derived, not measured: from layer {source} on {profile.layers[source].tensor_parallel} GPUs"
    return dataclasses.replace(
        profile,
        assumed={**profile.assumed, model.name: f"{words}, by work and bytes, for {size}; {model.assumed}"},
        default_layer=model.name,
        layers={model.name: layer},
    )


def _source(model: Model, profile: Profile) -> str:
    """The layer to start from."""
    if model.name in profile.layers:
        return model.name
    for name in (profile.default_layer, *profile.layers):
        if name in MODELS:
            return name
    raise ConfigError(
        f"profile {profile.name} has no layer of a known model ({', '.join(profile.layers)}), so there is nothing to "
        f"derive one of {model.name} from: name one of its layers {model.name}, or as the model that it is of "
        f"({', '.join(MODELS)})"
    )


def _scaled(layer: LayerProfile, source: Model, target: Model, size: int) -> LayerProfile:
    """A layer of ``target`` on ``size`` GPUs from one of ``source``."""
    spread = layer.tensor_parallel / size
    linear = spread * _weights(target) / _weights(source)
    kept = spread * _kept(target) / _kept(source)
    width = spread * target.shape.hidden / source.shape.hidden
    rows = target.shape.hidden * target.shape.vocabulary / (source.shape.hidden * source.shape.vocabulary)
    kv = _kv_heads(target, size) / _kv_heads(source, layer.tensor_parallel)
    return dataclasses.replace(
        layer,
        tensor_parallel=size,
        attention_forward=_short(layer.attention_forward * width),
        linear_forward=_short(layer.linear_forward * linear),
        activation_per_token=_short(layer.activation_per_token * kept),
        checkpoint_per_token=_short(layer.checkpoint_per_token * width),
        kv_per_token=_short(layer.kv_per_token * kv),
        kv_gradient_per_token=_short(layer.kv_gradient_per_token * kv),
        loss_per_token=_short(layer.loss_per_token * spread * rows),
        embedding_per_token=_short(layer.embedding_per_token * width),
    )


def _weights(model: Model) -> float:
    """Weights of a layer that one token meets."""
    shape = model.shape
    attention = 2 * shape.hidden * shape.hidden + 2 * shape.hidden * _HEAD * shape.kv_heads
    return attention + 3.0 * shape.hidden * shape.ffn * model.experts_per_token


def _kept(model: Model) -> float:
    """Numbers of a token that a layer keeps for backward, as `megatron_hdp.cost.calibrate.h100_layer` counts them."""
    shape = model.shape
    return 6.0 * shape.hidden + 2 * _HEAD * shape.kv_heads + 3 * shape.ffn * model.experts_per_token


def _kv_heads(model: Model, size: int) -> float:
    """Heads of keys and values of one GPU; where there are fewer than GPUs, some hold the same."""
    return max(1.0, model.shape.kv_heads / size)


def _short(value: float) -> float:
    """Six digits, as in shipped profiles."""
    return float(f"{value:.6g}")
