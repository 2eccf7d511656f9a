"""Profiles: measured or derived coefficients of one cluster, as strict JSON that says where its numbers come from."""

import dataclasses
import hashlib
import json
import math
import reprlib
from dataclasses import dataclass, field
from enum import IntEnum
from importlib import resources
from pathlib import Path
from typing import Any

from megatron_hdp.errors import ConfigError

PROFILE_SCHEMA = 2
"""Version of the JSON that `Profile.to_json` writes."""
READ_SCHEMAS = (1, PROFILE_SCHEMA)
"""Versions that `Profile.from_json` reads. Schema 2 adds fields only, each with a default that says "not known", so a
file of schema 1 means what it meant; what an older package cannot know it refuses by the number."""
_MOST = 1 << 31
"""No count of GPUs is larger."""
_MOST_BYTES = 1 << 52
"""No memory is larger, and the planner takes no more."""


class Tier(IntEnum):
    """Which links a ring uses; its slowest link decides."""

    INSIDE_NODE = 0
    ACROSS_NODES = 1


def _unit(unit: str, *, positive: bool = False) -> Any:
    """A coefficient: a finite number >= 0 (> 0 if ``positive``) that the JSON writes with its unit."""
    return field(metadata={"unit": unit, "positive": positive})


def _optional(unit: str, default: float | None = None) -> Any:
    """A coefficient that a file may leave out. Without a ``default`` it is then None, and else positive."""
    return field(default=default, kw_only=True, metadata={"unit": unit, "positive": default is None})


@dataclass(frozen=True, slots=True)
class LayerProfile:
    """One transformer layer of a named model shape on one rank (its tensor-parallel group), bf16 training."""

    tensor_parallel: int
    """GPUs that share the layer; every coefficient is per GPU, already divided by it."""
    attention_forward: float = _unit("s/token^2")
    """Causal core attention forward of one local sequence of s tokens takes this times s^2."""
    attention_backward_factor: float = _unit("1")
    """Core attention backward / forward, recompute not counted."""
    linear_forward: float = _unit("s/token")
    """Everything whose time is proportional to tokens."""
    linear_backward_factor: float = _unit("1")
    sequence_constant: float = _unit("s")
    """Once per piece, in forward and again in backward."""
    microbatch_constant: float = _unit("s")
    """Once per micro-batch, in forward and again in backward."""
    activation_per_token: float = _unit("byte/token", positive=True)
    activation_constant: float = _unit("byte")
    """Act(s) = activation_per_token s + activation_constant is kept for backward without recompute."""
    checkpoint_per_token: float = _unit("byte/token", positive=True)
    """Kept for backward with full recompute: the layer's input."""
    kv_per_token: float = _unit("byte/token")
    """Keys and values that travel round a ring: 2 x KV heads x head size x bytes, so GQA shows here."""
    kv_gradient_per_token: float = _unit("byte/token")
    """Gradients of keys and values that travel in backward."""
    loss_per_token: float = _optional("s/token", 0.0)
    """Output layer and loss on the last pipeline stage, forward and backward together, once per token of a model."""
    embedding_per_token: float = _optional("s/token", 0.0)
    """Embedding on the first pipeline stage, forward and backward together."""
    ring_step_forward: float = _optional("s", 0.0)
    """Each exchange with other ranks but for its transfers: every step of a ring after the first, a gather, swaps of
    heads. Calls, posting of messages, merging of results."""
    ring_step_backward: float = _optional("s", 0.0)


@dataclass(frozen=True, slots=True)
class LinkProfile:
    """One direction of a GPU's link to its neighbour on a ring."""

    latency: float = _unit("s")
    bandwidth: float = _unit("byte/s", positive=True)


@dataclass(frozen=True, slots=True)
class Profile:
    """Coefficients of one cluster. Build it from code, or read it with `load_profile`."""

    name: str
    hardware: str
    date: str
    sources: tuple[str, ...]
    calibrated: dict[str, str]
    """Coefficient -> from which measurement or data sheet, and how."""
    assumed: dict[str, str]
    """Coefficient -> what was assumed, and why."""
    gpus_per_node: int
    inside_node: LinkProfile
    across_nodes: LinkProfile
    d2h_bandwidth: float = _unit("byte/s", positive=True)
    h2d_bandwidth: float = _unit("byte/s", positive=True)
    d2h_bandwidth_shared: float | None = _optional("byte/s")
    """Copies to host memory while the NIC sends and receives, per GPU; None if that changes nothing."""
    h2d_bandwidth_shared: float | None = _optional("byte/s")
    """The same for copies back."""
    device_memory: float | None = _optional("byte")
    """Of one GPU; None if not known."""
    host_memory: float | None = _optional("byte")
    """What the activations of all GPUs of a node may take of its host memory; None if not known."""
    software: str | None = field(default=None, kw_only=True)
    """Versions with which it was measured, as text; None if not measured."""
    default_layer: str = field(kw_only=True)
    layers: dict[str, LayerProfile] = field(kw_only=True)

    def layer(self, name: str | None = None) -> LayerProfile:
        """The layer called ``name``, or the default one. Raises ConfigError for an unknown name."""
        name = self.default_layer if name is None else name
        if name not in self.layers:
            raise ConfigError(f"profile {self.name} has no layer {name!r}: choose one of {', '.join(self.layers)}")
        return self.layers[name]

    def to_json(self) -> str:
        """JSON that `from_json` reads back to an equal profile."""
        return json.dumps({"schema": PROFILE_SCHEMA} | _write(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str, source: str = "profile") -> "Profile":
        """Inverse of `to_json`. ``source`` is what errors call the text.

        Raises:
            ConfigError: no JSON, a missing or unknown field, a wrong type or unit, a number that is negative, infinite
                or too large.
        """
        try:
            data = json.loads(text, object_pairs_hook=lambda pairs: _no_twice(pairs, source))
        except ConfigError:
            raise
        except (ValueError, RecursionError) as error:  # also numbers of thousands of digits, and endless nesting
            raise ConfigError(f"{source}: not JSON: {error}") from error
        schema = data.get("schema") if isinstance(data, dict) else None
        if type(schema) is not int or schema not in READ_SCHEMAS:
            known = " or ".join(map(str, READ_SCHEMAS))
            raise ConfigError(f"{source}: field schema must be {known}: this is no profile that can be read")
        del data["schema"]
        profile: Profile = _read(cls, data, source, "")
        if profile.default_layer not in profile.layers:
            name = _shown(profile.default_layer)
            raise ConfigError(f"{source}: field default_layer is {name}, layers has {', '.join(profile.layers)}")
        return profile

    def digest(self) -> bytes:
        """SHA-256 of `to_json`: plans made with equal profiles have equal digests here."""
        return hashlib.sha256(self.to_json().encode()).digest()

    def __hash__(self) -> int:
        return int.from_bytes(self.digest()[:8], "little")

    def save(self, path: str | Path) -> None:
        """Write `to_json` to a file."""
        Path(path).write_text(self.to_json(), encoding="utf-8")


def profile_names() -> tuple[str, ...]:
    """Names of the profiles that ship with the package."""
    folder = resources.files("megatron_hdp") / "profiles"
    return tuple(sorted(f.name.removesuffix(".json") for f in folder.iterdir() if f.name.endswith(".json")))


def load_profile(name_or_path: str | Path) -> Profile:
    """A shipped profile by its name, or any profile by the path of its JSON file.

    Raises ConfigError: neither a shipped name nor a readable file, or the file is damaged (field and file are named).
    """
    text = str(name_or_path)
    if text in profile_names():
        file = resources.files("megatron_hdp") / "profiles" / f"{text}.json"
        return Profile.from_json(file.read_text(encoding="utf-8"), f"{text}.json")
    try:
        return Profile.from_json(Path(text).read_text(encoding="utf-8"), text)
    except (OSError, ValueError) as error:  # ValueError: no text in UTF-8, or no name of a file
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"profile {text!r} is neither a shipped one ({', '.join(profile_names())}) nor a readable file: {error}"
        ) from error


def _no_twice(pairs: list[tuple[str, Any]], source: str) -> dict[str, Any]:
    """JSON lets a key appear twice and the last one win; a profile does not."""
    data = dict(pairs)
    if len(data) != len(pairs):
        keys = [key for key, _ in pairs]
        raise ConfigError(f"{source}: field {_named(next(k for k in keys if keys.count(k) > 1))} appears twice")
    return data


def _write(value: Any) -> dict[str, Any]:
    """A dataclass as JSON data; coefficients as {"value", "unit"}. What is not known is left out."""
    data: dict[str, Any] = {}
    for f in dataclasses.fields(value):
        item = getattr(value, f.name)
        if item is None:
            continue
        if "unit" in f.metadata:
            data[f.name] = {"value": item, "unit": f.metadata["unit"]}
        elif dataclasses.is_dataclass(item):
            data[f.name] = _write(item)
        elif f.name == "layers":
            data[f.name] = {name: _write(layer) for name, layer in item.items()}
        else:
            data[f.name] = list(item) if isinstance(item, tuple) else item
    return data


def _read(cls: Any, data: Any, source: str, prefix: str) -> Any:
    """Inverse of `_write` for class ``cls``; ``prefix`` is the path of the fields' parent, as errors show it."""
    if not isinstance(data, dict):
        raise ConfigError(f"{source}: field {prefix.rstrip('.')} must be an object, got {_shown(data)}")
    fields = {f.name: f for f in dataclasses.fields(cls)}
    for name, f in fields.items():
        if name not in data and f.default is dataclasses.MISSING:
            raise ConfigError(f"{source}: field {prefix}{name} is missing")
    for name in data:
        if name not in fields:
            raise ConfigError(f"{source}: field {prefix}{_named(name)} is unknown; known are {', '.join(fields)}")
    given = {name: f for name, f in fields.items() if name in data}
    return cls(**{name: _field(f, data[name], f"{source}: field {prefix}{name}", source) for name, f in given.items()})


def _field(f: "dataclasses.Field[Any]", value: Any, where: str, source: str) -> Any:
    """One field's value from JSON."""
    prefix = where.removeprefix(f"{source}: field ") + "."
    if "unit" in f.metadata:
        return _coefficient(value, f.metadata["unit"], where, positive=f.metadata["positive"])
    if f.type is LinkProfile:
        return _read(LinkProfile, value, source, prefix)
    if f.name == "layers":
        if not isinstance(value, dict) or not value:
            raise ConfigError(f"{where} must be an object with at least one layer, got {_shown(value)}")
        for name in value:
            _check_text(name, f"{where} has a layer whose name")
        return {name: _read(LayerProfile, layer, source, f"{prefix}{name}.") for name, layer in value.items()}
    if f.type is int:
        if type(value) is not int or not 1 <= value <= _MOST:
            raise ConfigError(f"{where} must be a whole number of at least 1 and at most 2^31, got {_shown(value)}")
        return value
    if f.type is str or f.name == "software":
        _check_text(value, where)
        return value
    if f.name == "sources":
        if not isinstance(value, list) or not value or not all(isinstance(item, str) and item for item in value):
            raise ConfigError(
                f"{where} must be a list of texts that says where the numbers come from, got {_shown(value)}"
            )
        for item in value:
            _check_text(item, f"{where} has an entry that")
        return tuple(value)
    if not isinstance(value, dict) or not all(isinstance(item, str) for item in value.values()):
        raise ConfigError(f"{where} must be an object of texts, got {_shown(value)}")
    for name, item in value.items():
        _check_text(name, f"{where} has a name that")
        if item:
            _check_text(item, f"{where}.{name}")
    return value


def _check_text(value: Any, where: str) -> None:
    """Names and sources are printed, on terminals that may take neither control characters nor lone surrogates."""
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{where} must be a text, got {_shown(value)}")
    if not value.isprintable():
        raise ConfigError(f"{where} must be printable text, got {_shown(value)}")


def _coefficient(value: Any, unit: str, where: str, *, positive: bool) -> float:
    """The number of {"value": number, "unit": unit}."""
    if not isinstance(value, dict) or set(value) != {"value", "unit"}:
        raise ConfigError(f'{where} must be {{"value": NUMBER, "unit": "{unit}"}}, got {_shown(value)}')
    if value["unit"] != unit:
        raise ConfigError(f"{where} has unit {_shown(value['unit'])}, must be {unit!r}: convert the value")
    number = value["value"]
    if isinstance(number, bool) or not isinstance(number, int | float):
        raise ConfigError(f"{where} must be a number, got {_shown(number)}")
    try:
        result = float(number)
    except OverflowError:
        result = math.inf
    if not math.isfinite(result) or result < 0 or (positive and result == 0):
        kind = "positive" if positive else "not negative"
        raise ConfigError(f"{where} is {_shown(number)}, must be finite and {kind}")
    if unit == "byte" and result > _MOST_BYTES:
        raise ConfigError(f"{where} is {_shown(number)} bytes, can be at most 2^52")
    return result


def _shown(value: Any) -> str:
    """A wrong value for a message, shortened: it may be huge or deep."""
    return reprlib.repr(value)


def _named(name: str) -> str:
    """A field of a file for a message."""
    return name if name.isprintable() and len(name) < 60 else _shown(name)
