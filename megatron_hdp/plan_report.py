"""Tables of planned steps: what `megatron-hdp plan` prints and writes."""

import hashlib
import statistics
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from megatron_hdp.errors import ConfigError
from megatron_hdp.plan_step import PlannedStep
from megatron_hdp.planner.check import MAX_PEERS
from megatron_hdp.planner.summary import BOUND_PARTS

_BAR = 40
"""Characters of a bar that stands for 100 %."""
_NOTE = "Seconds: of a step, by the profile (docs/cost-model.md). Plan time: measured on this machine."
_PARTS = {
    "work": "all work, shared out evenly",
    "longest": "the longest sequence alone",
    "pipeline": "filling and draining the pipeline",
    "crowded": "rings too wide to run side by side",
    "window": "what runs while the longest sequence does",
}


def render_steps(steps: Sequence[PlannedStep]) -> str:
    """Table of the numbers of one step, or of their distribution over several; ring sizes; digest."""
    one_slice: list[tuple[str, Callable[[PlannedStep], float], int]] = [
        ("span, a pack's keys in one slice, s", lambda s: s.one_slice_seconds or 0.0, 4)
    ]
    offload: list[tuple[str, Callable[[PlannedStep], float], int]] = [
        ("sequences that offload", lambda s: s.offloaded, 0),
        ("host memory of a GPU, most, GiB", lambda s: s.host_bytes / 2**30, 2),
    ]
    rows: list[tuple[str, Callable[[PlannedStep], float], int]] = [
        ("sequences", lambda s: s.summary.sequences, 0),
        ("tokens", lambda s: s.summary.tokens, 0),
        ("padding, % of tokens held", lambda s: 100 * s.summary.padding_fraction, 4),
        ("micro-batches, rank with fewest", lambda s: s.summary.microbatches_min, 0),
        ("micro-batches, rank with most", lambda s: s.summary.microbatches_max, 0),
        ("span, s", lambda s: s.summary.span_seconds, 4),
        *(one_slice if steps[0].one_slice_seconds is not None else []),
        ("bound: no plan is faster, s", lambda s: s.summary.bound_seconds, 4),
        ("efficiency: bound / span, %", lambda s: 100 * s.summary.efficiency, 2),
        ("imbalance: busiest rank / mean work", lambda s: s.summary.imbalance, 4),
        ("ring hops of a token, mean", lambda s: s.hops, 2),
        ("peers of a rank, most", lambda s: s.summary.peers_max, 0),
        *(offload if any(step.offloaded for step in steps) else []),
        ("plan time, ms", lambda s: 1e3 * s.seconds, 1),
    ]
    several = len(steps) > 1
    lines = [f"{'':<36}{'min':>14}{'median':>14}{'max':>14}"] if several else []
    for label, value, digits in rows:
        values = [value(step) for step in steps]
        shown = (min(values), statistics.median(values), max(values)) if several else values
        lines.append(f"{label:<36}" + "".join(f"{v:>14,.{digits}f}" for v in shown))
    return "\n".join(
        [*lines, "", _binding(steps), *_exchanges(steps), "", *_ring_rows(steps), "", _digest(steps), _NOTE]
    )


def _binding(steps: Sequence[PlannedStep]) -> str:
    """Which part is the bound, and how often."""
    if len(steps) == 1:
        parts = steps[0].summary.bound_parts
        others = ", ".join(f"{name} {parts[name]:.4f}" for name in BOUND_PARTS)
        return f"the bound is that of {_PARTS[steps[0].summary.binding]} ({others})"
    binding = [step.summary.binding for step in steps]
    found = [f"{_PARTS[name]} in {binding.count(name)}" for name in BOUND_PARTS if name in binding]
    return f"the bound is that of {', '.join(found)} of {len(steps)} steps"


def _exchanges(steps: Sequence[PlannedStep]) -> list[str]:
    """Who uses which exchange, if not all use the ring; and why ranks have more peers than rings give them."""
    used = [step.summary.exchanges for step in steps]
    if not any(count for found in used for name, count in found.items() if name != "ring"):
        return []
    total = {name: sum(found[name] for found in used) for name in used[0]}
    lines = [f"exchanges of sequences on rings: {', '.join(f'{name} {count:,}' for name, count in total.items())}"]
    others = [step.summary for step in steps if step.summary.exchanges["ring"] < sum(step.summary.exchanges.values())]
    saving = statistics.median(summary.exchange_saving for summary in others)
    compared = f"{100 * abs(saving):.2f} % {'shorter' if saving >= 0 else 'longer'} than the ring"
    most = max(step.summary.peers_max for step in steps)
    where = "across nodes" if any(step.summary.exchanges_leave_nodes for step in steps) else "inside nodes"
    peers = f"; a rank has up to {most} peers, more than the {MAX_PEERS} of rings, {where}" if most > MAX_PEERS else ""
    return [*lines, f"gather and heads: {compared}{peers}"]


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


def render_comparison(found: Mapping[str, Sequence[PlannedStep] | str]) -> str:
    """One row per algorithm, medians over its steps; spans relative to the first one's. Strings say why not."""
    first = next(iter(found.values()))
    assert not isinstance(first, str)
    base = _median(first, lambda s: s.summary.span_seconds)
    titles = ("span, s", "x", "efficiency %", "padding %", "hops", "plan, ms")
    lines = [f"{'':<30}" + "".join(f"{title:>14}" for title in titles)]
    for name, steps in found.items():
        if isinstance(steps, str):
            lines.append(f"{name:<30}  cannot: {textwrap.shorten(steps, 180)}")
            continue
        span, bound, padding, hops, milliseconds = (
            _median(steps, value)
            for value in (
                lambda s: s.summary.span_seconds,
                lambda s: s.summary.efficiency,
                lambda s: s.summary.padding_fraction,
                lambda s: s.hops,
                lambda s: 1e3 * s.seconds,
            )
        )
        lines.append(
            f"{name:<30}{span:>14,.4f}{span / base:>14.3f}{100 * bound:>14.2f}"
            + f"{100 * padding:>14.3f}{hops:>14.2f}{milliseconds:>14,.1f}"
        )
        if any(s.one_slice_seconds not in (None, s.summary.span_seconds) for s in steps):
            together = _median(steps, lambda s: s.one_slice_seconds or 0.0)
            ratio = _median(steps, lambda s: s.summary.bound_seconds / (s.one_slice_seconds or 1.0))
            lines.append(f"{'  a pack in one slice':<30}{together:>14,.4f}{together / base:>14.3f}{100 * ratio:>14.2f}")
    several = f"Medians of {len(first)} steps. " if len(first) > 1 else ""
    return "\n".join([*lines, "", f"{several}x: of the first row's span.", _NOTE])


def _median(steps: Sequence[PlannedStep], value: Callable[[PlannedStep], float]) -> float:
    return statistics.median(map(value, steps))


def write_plans(out: Path, flag: str, plans: Iterable[str]) -> None:
    """Write one plan's JSON as it is, several as a JSON list with one plan a line.

    Raises `ConfigError`, which names the flag, if the file cannot be written.
    """
    texts = list(plans)
    text = texts[0] if len(texts) == 1 else "[\n" + ",\n".join(texts) + "\n]"
    try:
        out.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{flag} {out}: cannot be written ({error.strerror})") from error
