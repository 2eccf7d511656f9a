"""Plan steps from lengths and print how good the plans are: what `megatron-hdp plan` does."""

import hashlib
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_hdp.errors import ConfigError
from megatron_hdp.planner import PlanSummary, plan, summarize
from megatron_hdp.types import IntArray, Plan

_BAR = 40
"""Characters of a bar that stands for 100 %."""
_NOTE = "Work: computation in the planner's units, without sending, not seconds. Plan time: on this machine."


@dataclass(frozen=True)
class PlanOptions:
    """What `megatron_hdp.plan` takes besides lengths."""

    num_ranks: int
    tokens_per_rank: int
    algorithm: str
    balance: str
    stages: int
    virtual_stages: int


@dataclass(frozen=True)
class PlannedStep:
    """What is kept of the plan of one step."""

    summary: PlanSummary
    tokens_by_ring: dict[int, int]
    """Ring size -> real tokens of the sequences with such rings."""
    digest: bytes
    seconds: float
    """Time of making and checking the plan, on this machine."""
    json: str | None
    """Canonical JSON of the plan, where it was asked for."""

    @property
    def hops(self) -> float:
        """Other ranks that need a token's keys and values, mean over real tokens: ring size - 1."""
        return sum((size - 1) * tokens for size, tokens in self.tokens_by_ring.items()) / self.summary.tokens


def plan_step(lengths: IntArray, options: PlanOptions, *, keep_json: bool = False) -> PlannedStep:
    """Plan one step of sequences, int64 [num_sequences]. Raises what `megatron_hdp.plan` raises."""
    start = time.perf_counter()
    planned = plan(
        lengths,
        options.num_ranks,
        options.tokens_per_rank,
        algorithm=options.algorithm,
        balance=options.balance,
        stages=options.stages,
        virtual_stages=options.virtual_stages,
    )
    seconds = time.perf_counter() - start
    summary = summarize(planned)
    json = planned.to_json() if keep_json else None
    return PlannedStep(summary, _tokens_by_ring(planned, summary), planned.digest(), seconds, json)


def _tokens_by_ring(planned: Plan, summary: PlanSummary) -> dict[int, int]:
    return {size: int(planned.lengths[planned.ring_size == size].sum()) for size in summary.ring_sizes}


def check_fits(longest: int, context: int, options: PlanOptions) -> None:
    """Raise `ConfigError` unless the pool can hold the longest sequence that may come, as training does at its start.

    ``longest``: tokens of the longest document, before it is cut at the context.
    """
    if options.num_ranks < 1:
        raise ConfigError(f"--ranks is {options.num_ranks}: the pool must have at least 1")
    held = options.num_ranks * options.tokens_per_rank
    sequence = min(longest, context)
    if sequence > held:
        raise ConfigError(
            f"the longest sequence has {sequence:,} tokens, a pool of {options.num_ranks} ranks with "
            f"{options.tokens_per_rank:,} tokens each holds {held:,}: set --ranks to at least "
            f"{-(-sequence // options.tokens_per_rank)}, --tokens-per-rank to at least "
            f"{-(-sequence // (2 * options.num_ranks)) * 2:,}, or --context to at most {held:,}"
        )


def render_steps(steps: Sequence[PlannedStep]) -> str:
    """Table of the numbers of one step, or of their distribution over several; ring sizes; digest."""
    rows: list[tuple[str, Callable[[PlannedStep], float], int]] = [
        ("sequences", lambda s: s.summary.sequences, 0),
        ("tokens", lambda s: s.summary.tokens, 0),
        ("padding, % of tokens held", lambda s: 100 * s.summary.padding_fraction, 4),
        ("micro-batches, rank with fewest", lambda s: s.summary.microbatches_min, 0),
        ("micro-batches, rank with most", lambda s: s.summary.microbatches_max, 0),
        ("imbalance: busiest rank / mean work", lambda s: s.summary.imbalance, 4),
        ("span / mean work", lambda s: s.summary.span_over_mean, 4),
        ("ring hops of a token, mean", lambda s: s.hops, 2),
        ("peers of a rank, most", lambda s: s.summary.peers_max, 0),
        ("plan time, ms", lambda s: 1e3 * s.seconds, 1),
    ]
    several = len(steps) > 1
    lines = [f"{'':<36}{'min':>14}{'median':>14}{'max':>14}"] if several else []
    for label, value, digits in rows:
        values = [value(step) for step in steps]
        shown = (min(values), statistics.median(values), max(values)) if several else values
        lines.append(f"{label:<36}" + "".join(f"{v:>14,.{digits}f}" for v in shown))
    return "\n".join([*lines, "", *_ring_rows(steps), "", _digest(steps), _NOTE])


def _ring_rows(steps: Sequence[PlannedStep]) -> list[str]:
    """Sequences and tokens by ring size in powers of two, all steps together."""
    sequences: dict[int, int] = {}
    tokens: dict[int, int] = {}
    for step in steps:
        for size, count in step.summary.ring_sizes.items():
            top = (size - 1).bit_length()
            sequences[top] = sequences.get(top, 0) + count
            tokens[top] = tokens.get(top, 0) + step.tokens_by_ring[size]
    lines = [f"{'ring size':<12}{'sequences':>12}{'share %':>10}{'tokens %':>10}"]
    for top in sorted(sequences):
        low, high = (1 << top - 1) + 1 if top else 1, 1 << top
        share, token_share = sequences[top] / sum(sequences.values()), tokens[top] / sum(tokens.values())
        label = str(low) if low == high else f"{low} - {high}"
        bar = "#" * round(_BAR * token_share)
        row = f"{label:<12}{sequences[top]:>12,}{100 * share:>10.2f}{100 * token_share:>10.2f}  {bar}"
        lines.append(row.rstrip())
    return lines


def _digest(steps: Sequence[PlannedStep]) -> str:
    """The plan's digest; that of all digests in order for several steps."""
    if len(steps) == 1:
        return f"digest {steps[0].digest.hex()}"
    return f"digest of all {len(steps)} digests {hashlib.sha256(b''.join(s.digest for s in steps)).hexdigest()}"


def write_plans(out: Path, steps: Sequence[PlannedStep]) -> None:
    """Write one plan as its canonical JSON, several as a JSON list with one plan a line.

    Raises `ConfigError` if the file cannot be written.
    """
    plans = [step.json for step in steps if step.json is not None]
    text = plans[0] if len(plans) == 1 else "[\n" + ",\n".join(plans) + "\n]"
    try:
        out.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--json {out}: cannot be written ({error.strerror})") from error
