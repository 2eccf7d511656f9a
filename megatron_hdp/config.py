"""One dataclass for every --hdp-* option: Megatron flags, strict YAML (--hdp-config) and the API read it.

Precedence: a flag on the command line, then the YAML file, then the default. The set of options is frozen by a test.
"""

import dataclasses
import reprlib
import types
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pydantic
import yaml
from pydantic import ConfigDict, TypeAdapter, ValidationError

from megatron_hdp.errors import ConfigError

MOST_GIB = 1 << 20
"""No amount of host memory of one process is larger."""


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
    force_profile: bool = False
    """Use a measured profile even where this machine or this model is another than the one it was measured for."""
    kernel: str = "auto"
    """Attention kernel for one block; `megatron-hdp doctor` lists them. auto: the fastest that can run."""
    exchange: Literal["auto", "ring", "gather", "heads"] = "auto"
    """How the ranks of a ring share a sequence's attention. ring: keys and values walk round it. gather: each rank gets
    all keys and values that it needs at once. heads: ranks swap rows for heads, as far as heads and ring divide; such
    groups form a ring. auto: for each sequence what the profile says is fastest."""
    loss_chunk: int | None = None
    """Tokens whose logits exist at a time, where a micro-batch has more: output layer and loss then run in chunks, and
    again in the backward pass. 0: never. Default: as many as fit into 256 MiB of fp32 logits per process. Larger chunks
    are faster: each one reads and writes a gradient of the whole output weight."""
    offload: bool = False
    """Let a part of the activations of long sequences leave for host memory between forward and backward, where the
    copies hide behind compute and the step gets shorter by smaller rings. Needs 3 layers or more in a model part."""
    offload_gib: float | None = None
    """Host memory of each process for --hdp-offload, in GiB, taken at the start. Default: its part of what the profile
    says that a node has for it."""
    lookahead: int = 1
    """Steps that are planned and read from disk ahead of time, in a thread."""
    log: str | None = None
    """File for one JSON line per step: loss, gradient norm, seconds, ring sizes, imbalance, padding, bytes sent."""
    timeline: str | None = None
    """Folder where each process notes when every micro-batch ran and for how long it computed, and the first one every
    plan; `megatron-hdp report` shows it beside what the simulator says. A run that is resumed goes on in it."""


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
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # also numbers of thousands of digits
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
    if config.loss_chunk is not None and config.loss_chunk < 0:
        raise ConfigError(f"--hdp-loss-chunk is {config.loss_chunk}: it must be a number of tokens, or 0 for no chunks")
    if config.offload_gib is not None and not (0 < config.offload_gib <= MOST_GIB):
        shown = reprlib.repr(config.offload_gib)  # YAML can hold whole numbers of any length
        raise ConfigError(
            f"--hdp-offload-gib is {shown}: it must be a positive number of GiB, and at most {MOST_GIB:,}"
        )
    if config.offload_gib is not None and not config.offload:
        raise ConfigError(f"--hdp-offload-gib {config.offload_gib} without --hdp-offload: nothing would use it")
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
