"""The command line of the launcher's `doctor`. No torch."""

from dataclasses import dataclass

from megatron_hdp.errors import ConfigError

USAGE = """usage: python -m megatron_hdp [--cpu] doctor [--gpus N] [--gpus-per-node N] [--device-gib G] SCRIPT [ARGS...]

Runs the training script with its usual flags, --hdp among them, up to the point where training would start, and says
which process sits where and what memory the run needs. One process, without torchrun and without connections, for a
run of any size. Ends with 0 if it fits, 1 if it cannot, 2 for a wrong command line.

  --gpus N           GPUs of the run (default: WORLD_SIZE, else 1); CPU ranks with --cpu
  --gpus-per-node N  of each node (default: LOCAL_WORLD_SIZE, else the GPUs of this machine; with --cpu all)
  --device-gib G     count for GPUs with G GiB, whatever this machine has; where it has none, use it with --cpu
"""

_MOST = 1 << 31


@dataclass(frozen=True)
class DoctorRequest:
    """What the launcher's `doctor` was asked for."""

    gpus: int | None = None
    """Ranks of the run; None: as the environment says."""
    gpus_per_node: int | None = None
    device_gib: float | None = None
    """Memory of a GPU; None: that of this machine's."""


def parse_request(words: list[str]) -> tuple[DoctorRequest, list[str]]:
    """The options after the word `doctor`, and what follows them: the script and its arguments.

    Raises ConfigError for an unknown option or a value that it cannot have.
    """
    given: dict[str, str] = {}
    rest = list(words)
    while rest and rest[0].startswith("-"):
        option, equals, value = rest.pop(0).partition("=")
        if option not in ("--gpus", "--gpus-per-node", "--device-gib"):
            raise ConfigError(
                f"doctor: unknown option {option}: it takes --gpus N, --gpus-per-node N and --device-gib G"
            )
        if not equals:
            if not rest:
                raise ConfigError(f"doctor: {option} needs a value")
            value = rest.pop(0)
        given[option] = value
    if not rest:
        raise ConfigError(
            "doctor: no script was given, whose flags say what the run needs; `megatron-hdp doctor` looks at what is "
            "installed"
        )
    return DoctorRequest(_count(given, "--gpus"), _count(given, "--gpus-per-node"), _gib(given)), rest


def _count(given: dict[str, str], option: str) -> int | None:
    text = given.get(option)
    if text is None:
        return None
    number = int(text) if text.isascii() and text.isdigit() and len(text) < 12 else 0
    if not 1 <= number < _MOST:
        raise ConfigError(f"doctor: {option} is {text!r}, must be a number of GPUs, at least 1")
    return number


def _gib(given: dict[str, str]) -> float | None:
    text = given.get("--device-gib")
    if text is None:
        return None
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < 1 << 20:
        raise ConfigError(f"doctor: --device-gib is {text!r}, must be the memory of a GPU in GiB")
    return number
