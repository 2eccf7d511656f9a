"""Launcher: ``torchrun ... -m megatron_hdp [--cpu] SCRIPT ARGS...`` runs a Megatron script with HDP available.

With the word ``profile`` ahead of the script it is measured instead of trained, with ``doctor`` it is only looked at.

The order matters: environment, then the script's folder on the import path (a Megatron tree beside the script wins),
then the CPU mode, then Megatron and our seams, then the script.
"""

import os
import sys
import time
from dataclasses import dataclass
from typing import NoReturn

from megatron_hdp import __version__, cpu, doctor_request, install
from megatron_hdp.errors import ConfigError, HdpError
from megatron_hdp.profiler.request import USAGE as PROFILE_USAGE
from megatron_hdp.profiler.request import ProfileRequest, parse_request
from megatron_hdp.script import find_script, run_as_main
from megatron_hdp.seams.flag_group import group_help

USAGE = """usage: torchrun [torchrun options] -m megatron_hdp [--cpu] SCRIPT [SCRIPT ARGS...]
       torchrun [torchrun options] -m megatron_hdp [--cpu] profile [--out FILE] [--seconds N] SCRIPT [SCRIPT ARGS...]
       python -m megatron_hdp [--cpu] doctor [--gpus N] [--gpus-per-node N] [--device-gib G] SCRIPT [SCRIPT ARGS...]

Runs a Megatron-LM training script with Hybrid Data Parallelism available. Without --hdp among the script's arguments
the run is stock Megatron. `profile` measures the script's model instead and writes a file for --hdp-profile. `doctor`
says what memory the script's run would need on N GPUs, in one process; `megatron-hdp doctor` looks at the installation.

  --cpu      run on CPU ranks (gloo); the script's GPU flags are adapted and each change is printed
  --version  print the version
  --help     print this

Script arguments come after SCRIPT; `SCRIPT --help` shows all of them, --help alone those of this package.
"""

_MESSAGE_HEAD_START_SECONDS = 5.0
_HELP = (["--help"], ["-h"])
_ADDRESS = ("MASTER_ADDR", "MASTER_PORT")
_START = "torchrun --nproc-per-node N -m megatron_hdp ..."


@dataclass(frozen=True)
class Launch:
    """What the command line asked for."""

    script: str
    argv: list[str]
    cpu: bool
    profile: ProfileRequest | None = None
    """Measure instead of training."""
    doctor: doctor_request.DoctorRequest | None = None
    """Look at the run instead of starting it."""


def main(argv: list[str] | None = None) -> None:
    """Run the launcher with ``argv`` (default: the process's own arguments).

    Raises:
        SystemExit: with code 1 for an error of the run that this package understands, 2 for a wrong command line.
    """
    argv = sys.argv[1:] if argv is None else argv
    asked = _information(argv)
    if asked is not None:
        print(asked, flush=True)
        return
    try:
        launch = parse(argv)
    except ConfigError as error:
        _fail(f"{error}\n\n{USAGE}", 2)
    if launch.doctor is not None and os.environ.get("RANK", "0") != "0":
        return  # under torchrun rank 0 answers for all
    try:
        run(launch)
    except HdpError as error:
        _fail(f"{type(error).__name__}: {error}", 1)
    except ValueError as error:
        missing = [name for name in _ADDRESS if name not in os.environ]
        if not missing or "rendezvous" not in str(error):  # torch's, when processes are to find each other
            raise
        _fail(f"{' and '.join(missing)} not set: start this with torchrun, also for one process: {_START}", 1)


def _information(argv: list[str]) -> str | None:
    """What --help or --version prints, of the launcher or of one of its words; None if there is something to run."""
    words = argv[1:] if argv[:1] == ["--cpu"] else argv
    if words[:1] == ["--version"]:
        return __version__
    if words[:1] in _HELP:
        return f"{USAGE}\n{group_help()}"
    usages = {"profile": PROFILE_USAGE, "doctor": doctor_request.USAGE}
    return usages[words[0]] if words[1:2] in _HELP and words[0] in usages else None


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
    request = question = None
    if rest and rest[0] == "profile":
        request, rest = parse_request(rest[1:])
    elif rest and rest[0] == "doctor":
        question, rest = doctor_request.parse_request(rest[1:])
    if not rest:
        raise ConfigError("no script was given")
    return Launch(find_script(rest[0]), rest[1:], bool(options), request, question)


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
    if launch.profile is not None:
        from megatron_hdp.seams.profile import ask

        ask(launch.profile)
    if launch.doctor is not None:
        from megatron_hdp.seams import doctor

        doctor.ask(launch.doctor)
    run_as_main(launch.script, launch.argv)
    if launch.doctor is not None:
        raise ConfigError(f"doctor: {launch.script} ended without calling Megatron's pretrain(): nothing was looked at")


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
