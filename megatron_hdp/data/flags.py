"""What --split and --data-path say, read as Megatron reads them, with an error where it would stumble later."""

import math
import os
from collections.abc import Sequence

from megatron_hdp.data.blend import whole_weights
from megatron_hdp.data.corpus import SPLITS
from megatron_hdp.errors import ConfigError

DEFAULT_SPLIT = "969,30,1"
"""Megatron's default of --split."""


def split_shares(text: str | None) -> list[float]:
    """Shares of train, validation and test from --split, adding up to 1.

    Raises `ConfigError` unless it is one to three numbers, none negative, not all zero.
    """
    parts = [_number(part) for part in (text or DEFAULT_SPLIT).replace("/", ",").split(",")]
    shares = [part for part in parts if part is not None and part >= 0]
    if len(shares) < len(parts) or len(parts) > len(SPLITS) or sum(shares) <= 0:
        raise ConfigError(
            f"--split {text}: give up to three shares, of train, validation and test, as in --split 969,30,1: numbers, "
            "none negative, not all zero"
        )
    shares += [0.0] * (len(SPLITS) - len(shares))
    return [share / sum(shares) for share in shares]


def check_blend(words: Sequence[str], shown: str) -> None:
    """Raise `ConfigError` unless ``words`` are prefixes alone, or a weight before every prefix.

    ``shown`` is the flag that they were given to.
    """
    numbers = [_number(word) for word in words]
    weights = [number for number in numbers[::2] if number is not None]
    if weights and 2 * len(weights) == len(words):
        whole_weights(weights)
        return
    for place, (word, number) in enumerate(zip(words, numbers)):
        # a file may be called 2024; what is no file was meant as a weight
        if number is not None and not os.path.exists(f"{word}.idx"):
            raise ConfigError(
                f"{shown} {' '.join(words)}: {word!r} (word {place + 1}) looks like a weight: give a weight before "
                "every prefix, or prefixes alone"
            )


def _number(text: str) -> float | None:
    """The finite number that ``text`` writes, or None."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
