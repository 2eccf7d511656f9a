"""Which model `megatron-hdp simulate` runs: a known one, one by its sizes, or the measured layer of a profile."""

import dataclasses
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from megatron_hdp.errors import ConfigError

if TYPE_CHECKING:
    from megatron_hdp.cost import Profile
    from megatron_hdp.memory import ModelShape
    from megatron_hdp.simulator.models import Model

_SIZES = ("layers", "hidden", "ffn", "heads", "kv_heads", "head_dim", "vocab")
_EXPERTS = ("experts", "experts_per_token")
_NAMED = {*_SIZES, *_EXPERTS}
_SHAPE = {"vocab": "vocabulary"}
"""Names of `ModelShape` where they are others than the flag's."""
_MOST = 1 << 24
_MOST_LAYERS = 1 << 12
_MEASURED = re.compile(
    r"h(?P<hidden>\d+)-f(?P<ffn>\d+)(?P<gated>-glu)?(?:-e(?P<experts>\d+)k(?P<experts_per_token>\d+))?"
    r"-q(?P<heads>\d+)x(?P<head_dim>\d+)-kv(?P<kv_heads>\d+)-(?P<bits>16|32)bit-tp(?P<tp>\d+)"
)
"""Names that the profiler gives to layers, see `megatron_hdp.profiler.match.layer_name`; latent attention is not
simulated."""


def unset(metavar: str, default: str) -> Any:
    """For flags that are None when nobody gives them: what that means, which "None" does not say."""
    return tyro.conf.arg(metavar=metavar, help_behavior_hint=f"(default: {default})")


_Size = Annotated[int | None, unset("INT", "the model's")]


@dataclass(frozen=True, kw_only=True)
class ModelFlags:
    """Flags of the model, a part of those of `megatron-hdp simulate`."""

    model: Annotated[str | None, tyro.conf.arg(metavar="NAME", help_behavior_hint="(this or --layer is needed)")] = None
    """llama-7b, llama-13b, llama-30b, llama-70b, mixtral-8x7b or mixtral-8x22b. Sizes below change it."""
    layer: Annotated[str | None, unset("NAME", "what is derived for the model")] = None
    """Or: a layer of the profile, whose coefficients are taken as they are. A layer that was measured by
    `python -m megatron_hdp profile` has its sizes in its name; --layers and --vocab say the rest."""
    layers: _Size = None
    """Layers of the model."""
    hidden: _Size = None
    """Hidden size (--hidden-size)."""
    ffn: _Size = None
    """Width of the MLP, of one expert (--ffn-hidden-size)."""
    heads: _Size = None
    """Query heads of the whole model (--num-attention-heads)."""
    kv_heads: _Size = None
    """Key/value heads of the whole model (--num-query-groups)."""
    head_dim: Annotated[
        int | None, unset("INT", "the model's; where --hidden or --heads is given, hidden size over heads")
    ] = None
    """Size of a head (--kv-channels)."""
    vocab: _Size = None
    """Entries of the vocabulary."""
    experts: _Size = None
    """Experts of a layer (--num-experts); 1 for a dense model."""
    experts_per_token: _Size = None
    """Experts that a token meets (--moe-router-topk)."""

    def model_of(self, profile: "Profile") -> "Model":
        """The model that is simulated. Raises `ConfigError`."""
        from megatron_hdp.simulator.models import MODELS, model_of

        given = self._given()
        if self.model is not None and self.model not in MODELS:
            raise ConfigError(
                f"--model {self.model!r} is not known: choose one of {', '.join(MODELS)}; or for another model the one "
                "most like it, and change its sizes with --layers, --hidden, --ffn, --heads, --kv-heads, --vocab and "
                "others (docs/simulate.md, Your own model)"
            )
        base = None if self.model is None else model_of(self.model)
        if self.layer is not None:
            return self._of_layer(self.layer, profile, base, given)
        if base is None:
            raise ConfigError(f"--model is missing: choose one of {', '.join(MODELS)}, or give --layer of a profile")
        if not given:
            return base
        sizes = _sizes(base) | given
        return dataclasses.replace(
            base,
            name="custom",
            shape=_shape(base.shape, sizes, given),
            **_experts(sizes),
            assumed=f"sizes as given, else of {base.name}",
        )

    def _given(self) -> dict[str, int]:
        """Sizes that flags give. Raises `ConfigError` for those that cannot be."""
        given = {name: getattr(self, name) for name in (*_SIZES, *_EXPERTS) if getattr(self, name) is not None}
        for name, value in given.items():
            most = _MOST_LAYERS if name == "layers" else _MOST
            if not 1 <= value <= most:
                raise ConfigError(f"{_flag(name)} is {value:,}: it must be from 1 to {most:,}")
        return given

    def _of_layer(self, layer: str, profile: "Profile", base: "Model | None", given: dict[str, int]) -> "Model":
        """A model of layers that the profile knows by this name; what neither flags nor name say is as in ``base``."""
        from megatron_hdp.memory import ModelShape
        from megatron_hdp.simulator.models import MODELS, Model

        measured = profile.layer(layer)
        if layer in MODELS:
            raise ConfigError(
                f"--layer {layer} is a layer of a known model: use --model {layer}, and sizes to change it"
            )
        named = _MEASURED.fullmatch(layer)
        in_name = {} if named is None else {k: int(v) for k, v in named.groupdict().items() if k in _NAMED and v}
        sizes = ({} if base is None else _sizes(base)) | in_name | given
        missing = [_flag(name) for name in _SIZES if name not in sizes and name != "head_dim"]
        if missing:
            raise ConfigError(f"--layer {layer} without {', '.join(missing)}: its name does not say them; give them")
        plain = ModelShape(layers=1, hidden=1, ffn=1, heads=1, kv_heads=1, head_dim=1, vocabulary=1)
        shape = _shape(plain if base is None else base.shape, sizes, in_name | given)
        if named is not None:
            wide = named["bits"] == "32"
            shape = dataclasses.replace(shape, gated=named["gated"] is not None, element_bytes=4 if wide else 2)
        return Model(
            name=layer,
            shape=shape,
            **_experts(sizes),
            gpus=measured.tensor_parallel,
            tensor_parallel=measured.tensor_parallel,
            assumed=f"layer {layer} of profile {profile.name}",
        )


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _sizes(model: "Model") -> dict[str, int]:
    """All sizes of a model, by flag."""
    sizes = {name: getattr(model.shape, _SHAPE.get(name, name)) for name in _SIZES}
    return sizes | {name: getattr(model, name) for name in _EXPERTS}


def _shape(base: "ModelShape", sizes: dict[str, int], given: dict[str, int]) -> "ModelShape":
    """A shape of these sizes. Where hidden size or heads are given, a head's size follows from them if it is not.

    Raises `ConfigError` for sizes that do not divide.
    """
    hidden, heads, kv_heads = (sizes[name] for name in ("hidden", "heads", "kv_heads"))
    if heads % kv_heads:
        raise ConfigError(f"--kv-heads is {kv_heads}, which does not divide --heads {heads}")
    head_dim = sizes.get("head_dim")
    if head_dim is None or ("head_dim" not in given and ("hidden" in given or "heads" in given)):
        if hidden % heads:
            raise ConfigError(f"--hidden is {hidden}, which {heads} heads do not divide: give --head-dim")
        head_dim = hidden // heads
    named: dict[str, Any] = {_SHAPE.get(name, name): sizes[name] for name in _SIZES if name in sizes}
    return dataclasses.replace(base, **named | {"head_dim": head_dim})


def _experts(sizes: dict[str, int]) -> dict[str, int]:
    """Experts, of which a token meets some. Raises `ConfigError`."""
    experts, chosen = (sizes.get(name, 1) for name in _EXPERTS)
    if chosen > experts:
        raise ConfigError(f"--experts-per-token is {chosen}, and a layer has {experts}: raise --experts")
    return {"experts": experts, "experts_per_token": chosen}
