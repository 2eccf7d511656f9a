"""How long the sequences of a step are, and over how many ranks they are spread."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from megatron_hdp.lengths import LengthSummary, Share, format_size, summarize_lengths
from megatron_hdp.report.chart import Chart, Section, Table, axis, percent, plain
from megatron_hdp.report.palette import LINES, hatch
from megatron_hdp.types import IntArray

type RingShares = Mapping[int, tuple[float, float]]
"""Ring size -> sequences and tokens on such rings; counts, or sums over steps."""

_PATTERNS = ("", "/", ".")


def length_section(name: str, lengths: IntArray, capacity: int | None) -> Section:
    """Histogram of a step's sequences, int64 [num_sequences]; ``capacity`` marks what one rank holds."""
    summary = summarize_lengths(lengths)
    limit = capacity if capacity is not None and capacity < summary.longest else _telling(summary)
    long = lengths > limit
    squares = np.square(lengths, dtype=np.float64)
    shares = (
        float(long.mean()),
        float(lengths[long].sum() / lengths.sum()),
        float(squares[long].sum() / squares.sum()),
    )
    fits = " and do not fit one rank" if limit == capacity else ""
    heading = (
        f"{percent(shares[0])} of the sequences are longer than {format_size(limit)} tokens{fits}: "
        f"they hold {percent(shares[1])} of the tokens and make {percent(shares[2])} of the attention work"
    )
    if capacity is not None and summary.longest <= capacity:
        heading = f"Every sequence fits one rank: the longest has {format_size(summary.longest)} tokens"
    chart = Chart(
        name=f"{name}-lengths",
        heading=heading,
        caption=(
            "Sequences of one step by their length in tokens (K = 1024): each group of bars is one range of lengths, "
            "up to the number below it. The three bars are that range's share, in percent, of all sequences, of all "
            "tokens, and of the work of attention, which grows with the square of a sequence's length."
            + (
                f" The dashed line is what one rank holds at a time, {format_size(capacity)} tokens."
                if capacity
                else ""
            )
        ),
        traces=[
            _bars("sequences", [100 * share.document_share for share in summary.buckets], summary.buckets, 0),
            _bars("tokens", [100 * share.token_share for share in summary.buckets], summary.buckets, 1),
            _bars("attention work", [100 * share.attention_share for share in summary.buckets], summary.buckets, 2),
        ],
        layout={
            "barmode": "group",
            "xaxis": axis("sequence length, tokens", type="category"),
            "yaxis": axis("share, %", rangemode="tozero"),
            "shapes": _capacity_line(summary.buckets, capacity),
        },
        table=Table(
            ("up to, tokens", "sequences", "of sequences", "of tokens", "of attention work"),
            tuple(
                (
                    format_size(share.high),
                    f"{share.documents:,}",
                    percent(share.document_share),
                    percent(share.token_share),
                    percent(share.attention_share),
                )
                for share in summary.buckets
            ),
        ),
    )
    words = (
        f"The step has {summary.documents:,} sequences with {summary.tokens:,} tokens; half of them have at most "
        f"{summary.quantiles[0.5]:,} tokens, the longest has {summary.longest:,}."
    )
    return Section(name=f"{name}-data", title="How long the data is", words=words, charts=(chart,))


def _telling(summary: LengthSummary) -> int:
    """The bucket's edge above which about half of the attention work is."""
    above = 1.0
    for share in summary.buckets[:-1]:
        above -= share.attention_share
        if above <= 0.6:
            return share.high
    return summary.buckets[0].high if len(summary.buckets) > 1 else summary.shortest


def _bars(words: str, values: Sequence[float], buckets: Sequence[Share], index: int) -> dict[str, Any]:
    colour = ("#9ecae1", "#3f7fb5", "#d55e00")[index]
    return {
        "type": "bar",
        "name": words,
        "x": [format_size(share.high) for share in buckets],
        "y": [round(value, 4) for value in values],
        "marker": {
            "color": colour,
            "line": {"color": "#404040", "width": 0.5},
            **hatch(colour, _PATTERNS[index]),
        },
        "hovertemplate": f"up to %{{x}} tokens: %{{y:.3g}} % of {words}<extra></extra>",
    }


def _capacity_line(buckets: Sequence[Share], capacity: int | None) -> list[dict[str, Any]]:
    """A line between the buckets that fit one rank and those that do not; only where it is an edge of buckets."""
    below = [index for index, share in enumerate(buckets) if capacity is not None and share.high <= capacity]
    if not below or len(below) == len(buckets):
        return []
    place = below[-1] + 0.5
    style = {"color": "#202020", "width": 1.5, "dash": "dash"}
    return [{"type": "line", "x0": place, "x1": place, "y0": 0, "y1": 1, "yref": "paper", "line": style}]


def ring_section(name: str, rings: Mapping[str, RingShares], ranks: int | None, *, tokens: bool = True) -> Section:
    """Ring sizes of each way to run the same sequences; name of the way -> `RingShares`.

    The first one is the one that the heading speaks of. Without ``tokens`` only sequences are counted.
    """
    what = "tokens" if tokens else "sequences"
    chart = Chart(
        name=f"{name}-rings",
        heading=_ring_heading(rings, tokens),
        caption=(
            f"Share of all {what}, in percent, by the number of ranks that share {'their' if tokens else 'the'} "
            "sequence (its ring size; both ends of a range count). A ring of 1 is a sequence that lies whole on one "
            "rank and needs no data from others; on a ring of d ranks keys and values of every token travel to d - 1 "
            "other ranks." + (f" The pool has {ranks:,} ranks." if ranks else "")
        ),
        traces=_ring_traces(rings, int(tokens)),
        layout={
            "barmode": "group",
            "xaxis": axis("ring size, ranks", type="category", categoryorder="array", categoryarray=_labels(rings)),
            "yaxis": axis(f"share of {what}, %", rangemode="tozero"),
        },
        table=_ring_table(rings, (0, 1) if tokens else (0,)),
        height=320,
    )
    return Section(name=f"{name}-ring-sizes", title="How many ranks share a sequence", charts=(chart,))


def _ring_heading(rings: Mapping[str, RingShares], tokens: bool) -> str:
    (first, shares), *others = rings.items()
    sequences, held = (sum(pair[i] for pair in shares.values()) for i in (0, 1))
    local = shares.get(1, (0.0, 0.0))
    of_tokens = f" and {percent(local[1] / held)} of the tokens" if tokens else ""
    text = (
        f"With {_short(first)} {percent(local[0] / sequences)} of the sequences{of_tokens} stay on one rank; the "
        f"widest ring has {max(shares):,} ranks"
    )
    for words, other in others:
        if len(other) == 1 and (size := max(other)) > 1:
            return f"{text}. With {_short(words)} every sequence is cut over {size:,} ranks"
    return text


def _short(words: str) -> str:
    """What is ahead of a comma."""
    return words.partition(",")[0]


def _edges(rings: Mapping[str, RingShares]) -> list[tuple[int, int]]:
    """Ranges of ring sizes: 1, 2, 3 - 4, 5 - 8 and so on, up to the widest."""
    widest = max(size for shares in rings.values() for size in shares)
    edges = [(1, 1)]
    while edges[-1][1] < widest:
        edges.append((edges[-1][1] + 1, 2 * edges[-1][1]))
    return edges


def _label(edge: tuple[int, int]) -> str:
    return f"{edge[0]:,}" if edge[0] == edge[1] else f"{edge[0]:,}–{edge[1]:,}"


def _labels(rings: Mapping[str, RingShares]) -> list[str]:
    return [_label(edge) for edge in _edges(rings)]


def _binned(shares: RingShares, edges: Sequence[tuple[int, int]], column: int) -> list[float]:
    """Share of each range, 0 .. 1."""
    total = sum(pair[column] for pair in shares.values())
    return [
        sum(pair[column] for size, pair in shares.items() if low <= size <= high) / total if total else 0.0
        for low, high in edges
    ]


def _ring_traces(rings: Mapping[str, RingShares], column: int) -> list[dict[str, Any]]:
    edges, what = _edges(rings), _COLUMNS[column]
    return [
        {
            "type": "bar",
            "name": plain(words),
            "x": [_label(edge) for edge in edges],
            "y": [round(100 * share, 4) for share in _binned(shares, edges, column)],
            "marker": {
                "color": LINES[index % len(LINES)],
                **hatch(LINES[index % len(LINES)], ("", "/", "x", ".", "-")[index % 5], "#ffffff"),
            },
            "hovertemplate": f"rings of %{{x}}: %{{y:.3g}} % of {what}<extra>{plain(words)}</extra>",
        }
        for index, (words, shares) in enumerate(rings.items())
    ]


_COLUMNS = ("sequences", "tokens")


def _ring_table(rings: Mapping[str, RingShares], shown: Sequence[int]) -> Table:
    edges = _edges(rings)
    columns = ["ring size", *(f"{words}: {_COLUMNS[column]}" for words in rings for column in shown)]
    cells = [[percent(share) for share in _binned(shares, edges, c)] for shares in rings.values() for c in shown]
    return Table(tuple(columns), tuple((_label(edge), *row) for edge, row in zip(edges, zip(*cells, strict=True))))
