"""The command line of `profile`. No torch."""

import os
from dataclasses import dataclass
from pathlib import Path

from megatron_hdp.errors import ConfigError

USAGE = """usage: torchrun [options] -m megatron_hdp [--cpu] profile [--out FILE] [--seconds N] SCRIPT [SCRIPT ARGS...]

Runs the training script with its usual flags, --hdp among them. Once the model is built, it measures instead of
training, writes a profile for --hdp-profile, and ends. No data is read, no checkpoint is loaded or written.

  --out FILE   where to write the profile (default: profile.json)
  --seconds N  time to measure in, start-up not counted (default: 150)

Use the flags of the training run: the model's shape, parallel sizes, precision, kernel and --hdp-tokens-per-rank all
matter. One node measures everything but the links between nodes. docs/profiling.md says what is measured and how.
"""


@dataclass(frozen=True)
class ProfileRequest:
    """What `profile` was asked for."""

    out: str = "profile.json"
    seconds: float = 150.0


def parse_request(words: list[str]) -> tuple[ProfileRequest, list[str]]:
    """The options after the word `profile`, and what follows them: the script and its arguments.

    Raises ConfigError for an unknown option or a value that it cannot have.
    """
    out, seconds = ProfileRequest.out, ProfileRequest.seconds
    rest = list(words)
    while rest and rest[0].startswith("-"):
        option, equals, value = rest.pop(0).partition("=")
        if option not in ("--out", "--seconds"):
            raise ConfigError(f"profile: unknown option {option}: it takes --out FILE and --seconds N")
        if not equals:
            if not rest:
                raise ConfigError(f"profile: {option} needs a value")
            value = rest.pop(0)
        if option == "--out":
            out = value
        else:
            seconds = _seconds(value)
    if not out:
        raise ConfigError("profile: --out needs the name of a file")
    if not out.isprintable():  # it becomes the profile's name
        raise ConfigError(f"profile: --out is {out!a}, must be printable text")
    return ProfileRequest(out, seconds), rest


def check_out(out: str) -> None:
    """Refuse ahead of the measurement a file that could not be written after it. Nothing is made or changed.

    Raises ConfigError: a folder, a file or folder without the right to write, a folder that is not there.
    """
    path = Path(out)
    folder = path.resolve().parent
    why = None
    try:
        if path.is_dir():
            why = "it is a folder, name a file"
        elif path.exists():
            why = None if os.access(path, os.W_OK) else "the file is there and may not be changed"
        elif not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
            why = f"{folder} is no folder that can be written"
    except OSError as error:  # such as a name that is too long
        why = error.strerror
    if why is not None:
        raise ConfigError(f"profile: --out {out} cannot be written: {why}")


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 1 <= seconds <= 86400:
        raise ConfigError(f"profile: --seconds is {text!r}, must be a number of seconds from 1 to 86400")
    return seconds
