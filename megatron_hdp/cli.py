"""The `megatron-hdp` command. Everything but `doctor` works without torch and Megatron.

A subcommand is a typed function in `COMMANDS`: its parameters are its flags, its docstring its help, and what it
returns is the exit code (None counts as 0). Imports beyond the standard library belong inside the functions.
"""

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from megatron_hdp.errors import ConfigError, HdpError
from megatron_hdp.plan_flags import PlanFlags, Size
from megatron_hdp.report.flags import ReportFlags
from megatron_hdp.reproduce.command import ReproduceFlags
from megatron_hdp.simulate.flags import SimulateFlags

if TYPE_CHECKING:
    from megatron_hdp.plan_step import Planner, PlanOptions
    from megatron_hdp.types import IntArray, Plan

_MAX_DRAW = 64 << 20
"""Documents that `lengths` draws at most: 8 bytes each, several times over."""


def doctor(install: bool = True) -> int:
    """Say what is installed, which Megatron would be imported, and whether training could start.

    What memory a training script needs with its flags: python -m megatron_hdp [--cpu] doctor --gpus N SCRIPT ARGS...

    Args:
        install: also import Megatron and put every wrapper in place for a moment, which takes some seconds.

    Returns:
        0 if training could start, else 1.
    """
    from megatron_hdp.doctor import diagnose, exit_code, render

    sections = diagnose(try_install=install)
    print(render(sections))
    print("what memory a run needs: python -m megatron_hdp [--cpu] doctor --gpus N SCRIPT ARGS...")
    return exit_code(sections)


def lengths(
    data: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="FILE|NAME")],
    field: str | None = None,
    documents: Size = "1M",
    seed: int = 1234,
) -> None:
    """How long the documents are: quantiles, and who holds the tokens and the attention work.

    Sizes take the suffixes K, M and G, which are 1024, 1024^2 and 1024^3.

    Args:
        data: .idx (with its .bin), .jsonl, .parquet, .csv or .txt; or a mix: byted, github, wikipedia-like,
            lognormal:MIN,MAX,MEAN,SIGMA.
        field: field or column of .jsonl, .parquet or .csv: lengths, or lists whose lengths count. Default: length,
            then tokens, then the only column.
        documents: documents to draw from a mix.
        seed: seed of that draw.
    """
    import numpy as np

    from megatron_hdp.length_source import check_seed, read_file, refuse_field
    from megatron_hdp.lengths import parse_size, render_lengths, summarize_lengths
    from megatron_hdp.mixes import is_mix, parse_mix

    if is_mix(data):
        refuse_field(field)
        mix = parse_mix(data)
        count = parse_size(documents, "--documents")
        if count > _MAX_DRAW:
            raise ConfigError(f"--documents is {count:,}: draw at most {_MAX_DRAW:,}")
        check_seed(seed)
        found = mix.sample(np.random.RandomState(seed), count)
        print(f"{mix.name}: {mix.source}; {count:,} documents drawn, seed {seed}\n")
    else:
        found = read_file(data, field)
    print(render_lengths(summarize_lengths(found), data))


def plan(flags: Annotated[PlanFlags, tyro.conf.arg(name="")]) -> None:
    """Plan steps of a run from the lengths of its data, and say how good the plans are.

    Sizes take the suffixes K, M and G, which are 1024, 1024^2 and 1024^3. Seconds of a step are those of the profile's
    cost model (docs/cost-model.md); no plan of the same batch can be faster than the bound. Plan times are measured on
    this machine.
    """
    from megatron_hdp.plan_command import run

    run(flags, _megatron_planner)


def simulate(flags: Annotated[SimulateFlags, tyro.conf.arg(name="")]) -> None:
    """Say whether HDP is worth it for your data, by how much at most, and with which settings, before you rent GPUs.

    Steps of the run are simulated on a described cluster, by HDP and by other ways to train. Sizes take the suffixes
    K, M and G, which are 1024, 1024^2 and 1024^3. See docs/simulate.md.
    """
    from megatron_hdp.simulate.command import run

    run(flags, _megatron_planner)


def report(flags: Annotated[ReportFlags, tyro.conf.arg(name="")]) -> None:
    """Write one HTML page, which works offline, that shows plans, simulations and training runs to people.

    Several inputs make one page; logs of several runs are drawn over each other. See docs/report.md.
    """
    from megatron_hdp.report.command import run

    run(flags)


def reproduce(flags: Annotated[ReproduceFlags, tyro.conf.arg(name="")]) -> None:
    """Print the ByteScale paper's figures beside what the simulator says, and by how much it is off.

    What the profile was fitted to and what it predicts is marked, misses are explained, and what the paper does not
    publish is varied. See docs/reproduce.md.
    """
    from megatron_hdp.reproduce.command import run

    run(flags)


def profile() -> None:
    """Say how to measure a profile: it takes a run of the training script, under torchrun."""
    from megatron_hdp.profiler.request import USAGE

    print(USAGE, end="")


def _megatron_planner(options: "PlanOptions", checkout: Path | None) -> "Planner":
    """Lengths -> the plan that Megatron's own scheduler makes, checked."""
    from megatron_hdp.plan_step import forced_exchange
    from megatron_hdp.planner import check

    with _without_gpu_unsaid():
        from megatron_hdp.seams.scheduler import plan_megatron

    interleaved = options.virtual_stages > 1

    def planner(lengths: "IntArray") -> "Plan":
        with _without_gpu_unsaid():  # it imports Megatron and torch
            made = plan_megatron(
                lengths,
                options.num_ranks,
                options.tokens_per_rank,
                options.cost.pad_multiple,
                checkout=checkout,
                count_multiple=options.stages if interleaved else 1,
                equal_counts=options.balance == "pp",
            )
        made = forced_exchange(made, options)
        check(made, **options.layout)
        return made

    return planner


@contextlib.contextmanager
def _without_gpu_unsaid() -> Iterator[None]:
    """Torch warns where it finds no GPU, as soon as Megatron is imported; planning needs none. Other lines stay."""

    def told(record: logging.LogRecord) -> bool:
        return "No CUDA runtime is found" not in record.getMessage()

    logger = logging.getLogger("torch.utils.cpp_extension")
    logger.addFilter(told)
    try:
        yield
    finally:
        logger.removeFilter(told)


COMMANDS: dict[str, Callable[..., int | None]] = {
    "doctor": doctor,
    "lengths": lengths,
    "plan": plan,
    "profile": profile,
    "report": report,
    "reproduce": reproduce,
    "simulate": simulate,
}
"""Subcommand name -> function."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit code.

    2 when the request itself was wrong or the output cannot be written. Who stops the command or reads only the head
    of its output knows why it ends: 130 after Ctrl-C and 141 after a closed pipe, as the shell counts them, quietly.
    """
    try:
        try:
            return _run(argv)
        finally:
            if sys.stdout is not None:  # None if it was closed before the start (>&-)
                sys.stdout.flush()
    except KeyboardInterrupt:
        code = 130
    except BrokenPipeError:
        code = 141
    except OSError as error:
        what = "the output cannot be written" if error.filename is None else str(error.filename)
        print(f"megatron-hdp: {what}: {error.strerror or error}", file=sys.stderr)
        code = 2
    _drop_output()
    return code


def _drop_output() -> None:
    """Let Python's last flush, at its exit, write what is left to nowhere: a second failure would print a traceback."""
    if sys.stdout is None:
        return
    with contextlib.suppress(OSError, ValueError):  # no file descriptor where the output is captured
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(argv: Sequence[str] | None) -> int:
    """Run one subcommand; an error of its request is one line."""
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
