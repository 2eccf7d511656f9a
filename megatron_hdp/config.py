"""One dataclass for every --hdp-* option: Megatron flags, strict YAML (--hdp-config) and the API read it.

Precedence: a flag on the command line, then the YAML file, then the default. The set of options is frozen by a test.
"""

import dataclasses
import types
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pydantic
import yaml
from pydantic import ConfigDict, TypeAdapter, ValidationError

from megatron_hdp.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class HdpConfig:
    """Options of a run with --hdp. The text under each field is its --help."""

    tokens_per_rank: int | None = None
    """Capacity: tokens that one rank holds in one micro-batch. Even. Required. A sequence of s tokens needs a ring of
    at least s / capacity ranks, so the context may be at most pool size x capacity."""
    batch_tokens: int | None = None
    """Global batch as a token budget: a sequence belongs to the step in whose budget its first token falls, so steps
    average exactly this many tokens. Without it a step holds --global-batch-size sequences."""
    balance: Literal["auto", "dp", "pp"] = "auto"
    """dp: ranks run as many micro-batches as they have time for. pp: a ring also has the same slot on all its ranks, as
    pipeline schedules need. auto: pp when pipeline stages are used, else dp."""
    algorithm: Literal["hdp", "static"] = "hdp"
    """hdp: each sequence gets the ring that shortens the step most. static: one ring over the whole pool for every
    sequence, as context parallelism does; the same data, attention and loss, to compare with."""
    profile: str = "bytescale"
    """What pieces cost: a profile that ships with the package (bytescale, h100) or the path of a profile's JSON. It
    decides who runs what, never what is computed."""
    kernel: str = "auto"
    """Attention kernel for one block; `megatron-hdp doctor` lists them. auto: the fastest that can run."""
    lookahead: int = 1
    """Steps that are planned and read from disk ahead of time, in a thread."""
    log: str | None = None
    """File for one JSON line per step: loss, gradient norm, seconds, ring sizes, imbalance, padding, bytes sent."""


_ADAPTER: TypeAdapter[dict[str, Any]] = TypeAdapter(
    pydantic.create_model(
        "HdpOptions",
        __config__=ConfigDict(extra="forbid", strict=True),
        **{field.name: (field.type, field.default) for field in dataclasses.fields(HdpConfig)},  # type: ignore[call-overload]
    )
)


def option_names() -> tuple[str, ...]:
    """Field names of `HdpConfig`; the flag of ``batch_tokens`` is ``--hdp-batch-tokens``."""
    return tuple(field.name for field in dataclasses.fields(HdpConfig))


def flag(name: str) -> str:
    """Command-line flag of an option."""
    return f"--hdp-{name.replace('_', '-')}"


def option_parser(name: str) -> tuple[Any, tuple[str, ...] | None]:
    """Type and choices that argparse needs for an option."""
    hint = typing.get_type_hints(HdpConfig)[name]
    if typing.get_origin(hint) is Literal:
        return str, typing.get_args(hint)
    if isinstance(hint, types.UnionType):
        hint = next(part for part in typing.get_args(hint) if part is not type(None))
    return hint, None


def read_yaml(path: str | Path) -> dict[str, Any]:
    """Options from a YAML file, checked; keys are field names of `HdpConfig`.

    Raises `ConfigError` for a missing or malformed file, an unknown key or a value of the wrong type.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--hdp-config {path}: cannot be read ({error.strerror})") from error
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"--hdp-config {path}: not valid YAML: {error}") from error
    data = {} if data is None else data
    if not isinstance(data, dict):
        raise ConfigError(f"--hdp-config {path}: expected `option: value` lines, found {type(data).__name__}")
    try:
        _ADAPTER.validate_python(data)
    except ValidationError as error:
        raise ConfigError(f"--hdp-config {path}: {_explain(error)}") from error
    return data


def resolve(explicit: dict[str, Any], yaml_path: str | Path | None = None) -> HdpConfig:
    """The run's options: explicit flags over the YAML file over the defaults, checked.

    Raises `ConfigError` that names the option, its value and what it must be.
    """
    options = read_yaml(yaml_path) if yaml_path is not None else {}
    options.update(explicit)
    try:
        _ADAPTER.validate_python(options)
    except ValidationError as error:
        raise ConfigError(_explain(error)) from error
    config = HdpConfig(**options)
    if config.tokens_per_rank is None:
        raise ConfigError("--hdp needs --hdp-tokens-per-rank: the tokens that one rank holds in one micro-batch")
    for name in ("tokens_per_rank", "batch_tokens"):
        value = getattr(config, name)
        if value is not None and value <= 0:
            raise ConfigError(f"{flag(name)} is {value}: it must be a positive number of tokens")
    if config.lookahead < 0:
        raise ConfigError(f"--hdp-lookahead is {config.lookahead}: it must be 0 or more steps")
    return config


def _explain(error: ValidationError) -> str:
    """One line per wrong option, in the user's words."""
    lines = []
    for item in error.errors():
        name = ".".join(str(part) for part in item["loc"]) or "(file)"
        if item["type"] == "extra_forbidden":
            lines.append(f"unknown option {name!r}; known: {', '.join(option_names())}")
        else:
            lines.append(f"option {name!r} is {item['input']!r}: {item['msg']}")
    return "; ".join(lines)
