"""The `megatron-hdp` command. Everything but `doctor` works without torch and Megatron.

A subcommand is a typed function in `COMMANDS`: its parameters are its flags, its docstring its help, and what it
returns is the exit code (None counts as 0). Imports beyond the standard library belong inside the functions.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from megatron_hdp.errors import ConfigError, DataError, HdpError

if TYPE_CHECKING:
    from megatron_hdp.plan_report import PlannedStep, PlanOptions

Size = Annotated[str, tyro.conf.arg(metavar="SIZE")]
"""Tokens: 8192, 8K or 2M."""

_MAX_DRAW = 64 << 20
"""Documents that `lengths` draws at most: 8 bytes each, several times over."""


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

    from megatron_hdp.lengths import parse_size, render_lengths, summarize_lengths
    from megatron_hdp.mixes import is_mix, parse_mix

    if is_mix(data):
        _refuse_field(field)
        mix = parse_mix(data)
        count = parse_size(documents, "--documents")
        if count > _MAX_DRAW:
            raise ConfigError(f"--documents is {count:,}: draw at most {_MAX_DRAW:,}")
        _check_seed(seed)
        found = mix.sample(np.random.RandomState(seed), count)
        print(f"{mix.name}: {mix.source}; {count:,} documents drawn, seed {seed}\n")
    else:
        found = _read_file(data, field)
    print(render_lengths(summarize_lengths(found), data))


def plan(
    lengths: Annotated[str, tyro.conf.arg(metavar="FILE|NAME")],
    ranks: int,
    tokens_per_rank: Size,
    context: Size,
    batch_tokens: Size,
    stages: int = 1,
    virtual_stages: int = 1,
    algorithm: str = "hdp",
    balance: str | None = None,
    steps: int = 1,
    seed: int = 1234,
    field: str | None = None,
    json: Annotated[Path | None, tyro.conf.arg(metavar="OUT")] = None,
) -> None:
    """Plan steps of a run from the lengths of its data, and say how good the plans are.

    Sizes take the suffixes K, M and G, which are 1024, 1024^2 and 1024^3. Plan times are measured on this machine. Work
    is in the planner's own units, the tokens of the linear layers that take as long, not yet in seconds; sending over
    rings is counted (hops), but not as work.

    Args:
        lengths: a file or a mix, as for `megatron-hdp lengths`. Steps of a file hold the sequences that a run with
            the same context, batch tokens and seed trains on, all documents in the train split.
        ranks: ranks of the pool (data-parallel x context-parallel size).
        tokens_per_rank: capacity, tokens that one rank holds in one micro-batch (--hdp-tokens-per-rank).
        context: longest sequence (--seq-length); longer documents are cut.
        batch_tokens: tokens of a step (--hdp-batch-tokens).
        stages: pipeline stages.
        virtual_stages: model parts of a stage, for interleaved schedules.
        algorithm: hdp, or static: every sequence over the whole pool, as context parallelism does.
        balance: dp: counts of micro-batches may differ between ranks; pp: equal counts. Default: pp with pipeline
            stages, else dp.
        steps: steps to plan; with more than one, the distribution is shown.
        seed: seed of the data order (--seed), or of the draw from a mix.
        field: field or column of the file, as for `megatron-hdp lengths`.
        json: write the plan here as canonical JSON; with more than one step, a list of plans.
    """
    from megatron_hdp.lengths import parse_size
    from megatron_hdp.plan_report import PlanOptions, render_steps, write_plans

    capacity, longest, budget = (
        parse_size(text, flag)
        for text, flag in (
            (tokens_per_rank, "--tokens-per-rank"),
            (context, "--context"),
            (batch_tokens, "--batch-tokens"),
        )
    )
    balance = balance or ("pp" if stages > 1 else "dp")
    _check_plan_flags(algorithm, budget, steps, seed, json)
    options = PlanOptions(ranks, capacity, algorithm, balance, stages, virtual_stages)
    source = _read_source(lengths, field)
    planned = _plan_steps(source, options, longest, budget, seed, steps, keep_json=json is not None)
    pipeline = f", {stages} stages x {virtual_stages}" if stages > 1 else ""
    print(f"{lengths}: {source.text}")
    print(
        f"{steps} step{'s' * (steps > 1)} of {batch_tokens} tokens, context {context}, seed {seed}; {ranks} ranks x "
        f"{tokens_per_rank} tokens, {algorithm}, balance {balance}{pipeline}\n"
    )
    print(render_steps(planned))
    if json is not None:
        write_plans(json, planned)
        print(f"written: {json}")


def _check_plan_flags(algorithm: str, budget: int, steps: int, seed: int, json: Path | None) -> None:
    """Refuse before lengths are read what the planner would refuse after, or not in the words of this command."""
    from megatron_hdp.planner.entry import ALGORITHMS, MAX_BATCH_TOKENS

    if algorithm not in ALGORITHMS:
        raise ConfigError(f"--algorithm is {algorithm!r}: choose one of {', '.join(ALGORITHMS)}")
    if budget > MAX_BATCH_TOKENS:
        raise ConfigError(f"--batch-tokens is {budget:,}: Megatron counts them in int32, at most {MAX_BATCH_TOKENS:,}")
    if steps < 1:
        raise ConfigError(f"--steps is {steps}: plan at least 1")
    _check_seed(seed)
    if json is not None and not json.parent.is_dir():
        raise ConfigError(f"--json {json}: no folder {json.parent}")


def _plan_steps(
    source: "_Source", options: "PlanOptions", context: int, budget: int, seed: int, steps: int, *, keep_json: bool
) -> "list[PlannedStep]":
    """Plan the steps 0 .. steps - 1 of ``budget`` tokens each; errors name the flags of this command."""
    from megatron_hdp.plan_report import check_fits, plan_step

    try:
        check_fits(source.longest, context, options)
        batch = source.batches(budget, context, seed)
        return [plan_step(batch(step), options, keep_json=keep_json) for step in range(steps)]
    except HdpError as error:
        raise type(error)(_own_flags(str(error))) from error


@dataclass(frozen=True)
class _Source:
    """Where the sequences of `plan` come from."""

    text: str
    longest: int
    """No document is longer."""
    batches: Callable[[int, int, int], Callable[[int], Any]]
    """(batch tokens, context, seed) -> step -> sequences."""


def _read_source(name: str, field: str | None) -> _Source:
    """A mix, or the lengths of a file."""
    from megatron_hdp.mixes import corpus_batches, is_mix, mix_batches, parse_mix

    if is_mix(name):
        _refuse_field(field)
        mix = parse_mix(name)
        return _Source(mix.source, mix.longest, lambda *sizes: mix_batches(mix, *sizes))
    found = _read_file(name, field)
    text = f"{found.size:,} documents, {int(found.sum()):,} tokens"
    return _Source(text, int(found.max()), lambda *sizes: corpus_batches(found, name, *sizes))


def _read_file(name: str, field: str | None) -> Any:
    """Lengths in a file, int64 [documents]."""
    from megatron_hdp.lengths import read_lengths
    from megatron_hdp.mixes import NAMES

    if not (Path(name).exists() or Path(f"{name}.idx").exists()):
        raise DataError(f"{name}: no such file, and no mix of that name (mixes: {', '.join(NAMES)})")
    return read_lengths(name, field)


def _refuse_field(field: str | None) -> None:
    if field is not None:
        raise ConfigError(f"--field {field}: a mix has no fields; leave it out")


def _check_seed(seed: int) -> None:
    if not 0 <= seed < 2**32:
        raise ConfigError(f"--seed is {seed}: it must be from 0 to {2**32 - 1}")


def _own_flags(message: str) -> str:
    """A message about a run's flags in the words of this command, whose flags are shorter."""
    return message.replace("--hdp-", "--").replace("--seq-length", "--context").replace("--global-batch-size or ", "")


COMMANDS: dict[str, Callable[..., int | None]] = {
    "doctor": doctor,
    "lengths": lengths,
    "plan": plan,
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
