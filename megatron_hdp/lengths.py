"""How long is the data, and what does that mean for balance? Reading lengths: `megatron_hdp.length_files`."""

import itertools
import re
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron_hdp.errors import ConfigError, DataError
from megatron_hdp.types import IntArray

QUANTILES = (0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 0.999)
TAIL_FROM = (8 << 10, 32 << 10, 128 << 10, 512 << 10)
"""Tokens from which on a document counts as tail, one row of the summary each."""

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_BAR = 24
"""Characters of a bar that stands for 100 %."""
_FIRST_BUCKET = 6
"""Documents of up to 2^6 tokens share a row."""


def parse_size(text: str, flag: str, most: int | None = None) -> int:
    """Tokens from ``8192``, ``8K`` or ``2M``: K, M and G are 1024, 1024^2 and 1024^3.

    Raises `ConfigError` that names ``flag`` for anything but a positive whole number with at most one such suffix, and
    for more than ``most``.
    """
    match = re.fullmatch(r"([0-9]{1,18})([KMG]?)", text.strip().upper())
    if match is None or int(match[1]) == 0:
        raise ConfigError(f"{flag} is {text!r}: give a positive whole number, such as 8192, 8K or 2M (K = 1024)")
    tokens = int(match[1]) * _UNITS[match[2]]
    if most is not None and tokens > most:
        raise ConfigError(f"{flag} is {tokens:,}: it can be at most {most:,}")
    return tokens


def format_size(tokens: int) -> str:
    """Inverse of `parse_size` where a suffix is exact (131072 is 128K); other numbers with thousands separators."""
    for unit in ("G", "M", "K"):
        if tokens and tokens % _UNITS[unit] == 0:
            return f"{tokens // _UNITS[unit]}{unit}"
    return f"{tokens:,}"


@dataclass(frozen=True)
class Share:
    """Some of the documents, and what they hold of all."""

    low: int
    """Longer than this many tokens ..."""
    high: int
    """... and at most this many."""
    documents: int
    document_share: float
    token_share: float
    attention_share: float
    """Share of the sum of squared lengths, to which the work of causal attention is proportional."""


@dataclass(frozen=True)
class LengthSummary:
    """Lengths of documents in tokens; documents without tokens count in ``empty`` only."""

    documents: int
    empty: int
    tokens: int
    mean: float
    shortest: int
    longest: int
    quantiles: dict[float, int]
    """Smallest length that at least this fraction of the documents does not exceed."""
    buckets: tuple[Share, ...]
    """Documents by length: up to 64 tokens, then up to each power of two; the first and the last are not empty."""
    tail: tuple[Share, ...]
    """What is longer than each length of `TAIL_FROM`, as far as there is any."""


@dataclass(frozen=True)
class _Sorted:
    """Lengths in ascending order, and sums over the first i of them, shape [documents] and [documents + 1]."""

    lengths: IntArray
    tokens: IntArray
    squares: npt.NDArray[np.float64]
    """Floats, because the sum of squares can exceed int64."""

    def share(self, low: int, high: int) -> Share:
        """Documents longer than ``low`` and at most ``high``."""
        begin, end = (int(np.searchsorted(self.lengths, edge, side="right")) for edge in (low, high))
        documents = end - begin
        token_share, attention_share = (float((s[end] - s[begin]) / s[-1]) for s in (self.tokens, self.squares))
        return Share(low, high, documents, documents / self.lengths.size, token_share, attention_share)


def summarize_lengths(lengths: IntArray) -> LengthSummary:
    """Summary of document lengths, int64 [documents]. Raises `DataError` if there is not a single token."""
    present = np.sort(lengths[lengths > 0])
    if present.size == 0:
        raise DataError(f"not a single token in {lengths.size} documents")
    zero = np.zeros(1, np.int64)
    squares = np.cumsum(np.square(present, dtype=np.float64))
    ordered = _Sorted(present, np.concatenate([zero, np.cumsum(present)]), np.concatenate([zero, squares]))
    longest, tokens = int(present[-1]), int(ordered.tokens[-1])
    ends = [1 << k for k in range(_FIRST_BUCKET, 64) if 1 << k < 2 * longest] or [1 << _FIRST_BUCKET]
    buckets = [ordered.share(low, high) for low, high in itertools.pairwise([0, *ends])]
    while not buckets[0].documents:
        buckets.pop(0)
    return LengthSummary(
        documents=int(present.size),
        empty=int(lengths.size - present.size),
        tokens=tokens,
        mean=tokens / present.size,
        shortest=int(present[0]),
        longest=longest,
        quantiles={q: int(np.quantile(present, q, method="inverted_cdf")) for q in QUANTILES},
        buckets=tuple(buckets),
        tail=tuple(ordered.share(low, longest) for low in TAIL_FROM if low < longest),
    )


def render_lengths(summary: LengthSummary, name: str) -> str:
    """The summary as a table with a histogram of tokens and of attention work, at most 120 columns wide."""
    empty = f" (and {summary.empty:,} empty ones)" if summary.empty else ""
    columns = {f"{100 * q:g} %": value for q, value in summary.quantiles.items()}
    columns = {"shortest": summary.shortest, **columns, "longest": summary.longest}
    lines = [
        f"{name}: {summary.documents:,} documents{empty}, {summary.tokens:,} tokens, mean {summary.mean:,.1f}",
        "",
        "".join(f"{title:>11}" for title in columns),
        "".join(f"{value:>11,}" for value in columns.values()),
        "",
        f"{'up to':>11}{'documents':>12}{'share %':>9}{'tokens %':>10}{'attention %':>13}  "
        f"{'# tokens':<{_BAR}} = attention work (sum of squares)",
    ]
    for share in summary.buckets:
        tokens, attention = (round(_BAR * part) for part in (share.token_share, share.attention_share))
        lines.append(f"{_row(format_size(share.high), share)}  {'#' * tokens:<{_BAR}} {'=' * attention}")
    if summary.tail:
        lines += ["", f"{'longer than':>11}"]
        lines += [_row(format_size(share.low), share) for share in summary.tail]
    return "\n".join(line.rstrip() for line in lines)


def _row(label: str, share: Share) -> str:
    percent = (100 * part for part in (share.document_share, share.token_share, share.attention_share))
    return f"{label:>11}{share.documents:>12,}" + "".join(
        f"{part:>{width}.2f}" for part, width in zip(percent, (9, 10, 13), strict=True)
    )
