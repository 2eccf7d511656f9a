"""Launcher: ``torchrun ... -m megatron_hdp [--cpu] SCRIPT ARGS...`` runs a Megatron script with HDP available.

The order matters: environment, then the script's folder on the import path (a Megatron tree beside the script wins),
then the CPU mode, then Megatron and our seams, then the script.
"""

import os
import sys
import time
from dataclasses import dataclass
from typing import NoReturn

from megatron_hdp import __version__, cpu, install
from megatron_hdp.errors import ConfigError, HdpError
from megatron_hdp.script import find_script, run_as_main
from megatron_hdp.seams.flag_group import group_help

USAGE = """usage: torchrun [torchrun options] -m megatron_hdp [--cpu] SCRIPT [SCRIPT ARGS...]

Runs a Megatron-LM training script with Hybrid Data Parallelism available. Without --hdp among the script's arguments
the run is stock Megatron.

  --cpu      run on CPU ranks (gloo); the script's GPU flags are adapted and each change is printed
  --version  print the version
  --help     print this

Script arguments come after SCRIPT; `SCRIPT --help` shows all of them, --help alone those of this package.
"""

_MESSAGE_HEAD_START_SECONDS = 5.0


@dataclass(frozen=True)
class Launch:
    """What the command line asked for."""

    script: str
    argv: list[str]
    cpu: bool


def main(argv: list[str] | None = None) -> None:
    """Run the launcher with ``argv`` (default: the process's own arguments).

    Raises:
        SystemExit: with code 1 for an error of the run that this package understands, 2 for a wrong command line.
    """
    argv = sys.argv[1:] if argv is None else argv
    if argv and argv[0] in ("--help", "-h", "--version"):
        print(__version__ if argv[0] == "--version" else f"{USAGE}\n{group_help()}", flush=True)
        return
    try:
        launch = parse(argv)
    except ConfigError as error:
        _fail(f"{error}\n\n{USAGE}", 2)
    try:
        run(launch)
    except HdpError as error:
        _fail(f"{type(error).__name__}: {error}", 1)


def parse(argv: list[str]) -> Launch:
    """The command line before and after SCRIPT.

    Raises:
        ConfigError: no script, no such script, or an option before it that is not ours.
    """
    options = []
    rest = list(argv)
    while rest and rest[0].startswith("-"):
        options.append(rest.pop(0))
    unknown = [option for option in options if option != "--cpu"]
    if unknown:
        raise ConfigError(f"unknown option {unknown[0]} before the script: the script's own arguments go after it")
    if not rest:
        raise ConfigError("no script was given")
    return Launch(find_script(rest[0]), rest[1:], bool(options))


def run(launch: Launch) -> None:
    """Set the process up and run the script as its main module.

    Raises:
        HdpError: whatever this package or the script raises on purpose.
    """
    sys.path.insert(0, os.path.dirname(launch.script))
    if launch.cpu:
        cpu.enable()

    install()
    if launch.cpu:
        from megatron_hdp.seams import cpu as cpu_seams

        cpu_seams.apply()
    run_as_main(launch.script, launch.argv)


def _fail(message: str, code: int) -> NoReturn:
    """Leave, with ``message`` printed once per run if all ranks have it, else on the rank that has it.

    Rank 0 speaks at once and exits, whereupon torchrun stops the other ranks while they hold back theirs.
    """
    rank = int(os.environ.get("RANK", "0"))
    if rank != 0:
        time.sleep(_MESSAGE_HEAD_START_SECONDS)
    sys.stdout.flush()
    print(f"megatron_hdp: rank {rank}: {message}", file=sys.stderr, flush=True)
    sys.exit(code)


if __name__ == "__main__":
    main()
