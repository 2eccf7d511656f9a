"""Where the command line's lengths come from: a file, or a mix by name. No torch."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megatron_hdp.errors import ConfigError, DataError
from megatron_hdp.length_files import read_lengths
from megatron_hdp.mixes import NAMES, corpus_batches, is_mix, mix_batches, parse_mix
from megatron_hdp.types import IntArray


@dataclass(frozen=True)
class LengthSource:
    """Where the sequences of steps come from."""

    text: str
    """For people."""
    longest: int
    """No document is longer."""
    batches: Callable[[int, int, int], Callable[[int], IntArray]]
    """(batch tokens, context, seed) -> step -> sequences, int64 [num_sequences]."""


def read_source(name: str, field: str | None) -> LengthSource:
    """A mix, or the lengths of a file. Raises what `read_file` and `parse_mix` raise."""
    if is_mix(name):
        refuse_field(field)
        mix = parse_mix(name)
        return LengthSource(mix.source, mix.longest, lambda *sizes: mix_batches(mix, *sizes))
    found = read_file(name, field)
    text = f"{found.size:,} documents, {int(found.sum()):,} tokens"
    return LengthSource(text, int(found.max()), lambda *sizes: corpus_batches(found, name, *sizes))


def read_file(name: str, field: str | None) -> IntArray:
    """Lengths in a file, int64 [documents]. Raises `DataError` if it is missing or damaged."""
    if not (Path(name).exists() or Path(f"{name}.idx").exists()):
        raise DataError(f"{name}: no such file, and no mix of that name (mixes: {', '.join(NAMES)})")
    return read_lengths(name, field)


def refuse_field(field: str | None) -> None:
    """Raise `ConfigError` if a field was named for a mix."""
    if field is not None:
        raise ConfigError(f"--field {field}: a mix has no fields; leave it out")


def check_seed(seed: int) -> None:
    """Raise `ConfigError` for a seed that numpy cannot take."""
    if not 0 <= seed < 2**32:
        raise ConfigError(f"--seed is {seed}: it must be from 0 to {2**32 - 1}")
