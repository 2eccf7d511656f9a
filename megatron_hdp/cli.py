"""The `megatron-hdp` command. Everything but `doctor` works without torch and Megatron.

A subcommand is a typed function in `COMMANDS`: its parameters are its flags, its docstring its help, and what it
returns is the exit code (None counts as 0). Imports beyond the standard library belong inside the functions.
"""

import sys
from collections.abc import Callable, Sequence

import tyro

from megatron_hdp.errors import HdpError


def doctor(install: bool = True) -> int:
    """Say what is installed, which Megatron would be imported, and whether training could start.

    Args:
        install: also import Megatron and put every wrapper in place for a moment, which takes some seconds.

    Returns:
        0 if training could start, else 1.
    """
    from megatron_hdp.doctor import diagnose, exit_code, render

    sections = diagnose(try_install=install)
    print(render(sections))
    return exit_code(sections)


COMMANDS: dict[str, Callable[..., int | None]] = {
    "doctor": doctor,
}
"""Subcommand name -> function."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit code; 2 when the request itself was wrong."""
    try:
        code = tyro.extras.subcommand_cli_from_dict(
            COMMANDS,
            prog="megatron-hdp",
            description="Plan, simulate and check Hybrid Data Parallelism.",
            args=list(sys.argv[1:] if argv is None else argv),
        )
    except HdpError as error:
        print(f"megatron-hdp: {error}", file=sys.stderr)
        return 2
    return code or 0


if __name__ == "__main__":
    sys.exit(main())
