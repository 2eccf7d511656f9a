"""Lengths by name, for planning without data: mixes of document lengths and batches drawn from them. No torch.

Draws come from numpy's `RandomState`, whose streams never change. They go through exp and log, so a length could differ
by one token between platforms; a plan, which is integers, cannot.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron_hdp.data.corpus import Corpus, TokenBudget
from megatron_hdp.data.stream import cut_documents
from megatron_hdp.errors import ConfigError, DataError
from megatron_hdp.lengths import parse_size
from megatron_hdp.types import IntArray

_CHUNK = 8192
"""Documents drawn at a time; part of what a seed means."""

_LONGEST = 1 << 40
_MOST_SEQUENCES = 16 << 20
"""Sequences of a step: more take minutes and gigabytes, and no run has them."""
_MOST_PIECES = 256 << 20
"""Sequences that a whole file is cut into."""
_MOST_EPOCHS = 64
"""How often a step may repeat a file."""

_FIGURE_4 = "reconstructed from Figure 4 of ByteScale (SIGCOMM 2025)"


@dataclass(frozen=True)
class Mix:
    """A distribution of document lengths."""

    name: str
    source: str
    """Where the numbers come from, for people."""
    longest: int
    """No document is longer."""
    sample: Callable[[np.random.RandomState, int], IntArray]
    """Lengths of so many documents, int64, at least 1."""


def bucket_mix(name: str, source: str, edges: Sequence[int], token_share: Sequence[float]) -> Mix:
    """Documents that hold given shares of all tokens, by bucket of length.

    Bucket i holds lengths in (edges[i], edges[i + 1]], log-uniform, and token_share[i] of the tokens (any unit). A
    bucket's share of the documents is then proportional to its token share over its mean length.
    """
    low, high = np.array(edges[:-1], float), np.array(edges[1:], float)
    documents = np.array(token_share) / ((high - low) / np.log(high / low))  # over the mean of a log-uniform length
    below = np.cumsum(documents / documents.sum())
    below[-1] = 1

    def sample(random: np.random.RandomState, count: int) -> IntArray:
        bucket = np.searchsorted(below, random.random_sample(count), side="right")
        drawn = np.ceil(low[bucket] * (high / low)[bucket] ** random.random_sample(count))
        lengths: IntArray = np.clip(drawn, low[bucket] + 1, high[bucket]).astype(np.int64)
        return lengths

    return Mix(name, source, edges[-1], sample)


def lognormal_mix(name: str, low: int, high: int, mean: float, sigma: float) -> Mix:
    """Log-normal lengths, mu = ln(mean) - sigma^2 / 2, rounded down and clipped to [low, high].

    Clipping moves the mean: ``mean`` is that of the distribution before it, as in NVIDIA's Megatron examples.
    """
    mu = math.log(mean) - sigma**2 / 2

    def sample(random: np.random.RandomState, count: int) -> IntArray:
        drawn = np.exp(mu + sigma * random.standard_normal(count))
        return np.clip(drawn, low, high).astype(np.int64)  # clipped as floats: a large sigma leaves int64

    return Mix(name, "log-normal, clipped, with the parameters of NVIDIA's Megatron examples", high, sample)


def wikipedia_like() -> Mix:
    """Lengths like those of Wikipedia articles: a log-normal body up to 8K tokens and a power-law tail.

    Fitted to published statistics of the one million lengths in Hetu-Galvatron's FlexSP data: median 347, mean 1013.6,
    98.4 % of documents up to 8K with 72.5 % of the tokens, p99 10.9K, 0.13 % over 32K with 7.6 % of the tokens, longest
    1.82M. The body's two parameters follow from the overall median and the mean length up to 8K; above 32K the exponent
    a follows from the mean length there, 59.3K = 32K a / (a - 1); between the given points the tail is log-log linear.
    """
    body, tail_share = 8192, 0.016
    mu, sigma = 5.84151, 1.39625
    exponent = 2.237
    over, longest = 32768, 1_820_000
    survival = [tail_share, 0.01, 0.0013, 0.0013 * (over / longest) ** exponent]
    log_survival = np.log(survival[::-1])
    log_length = np.log([longest, over, 10900, body])

    def sample(random: np.random.RandomState, count: int) -> IntArray:
        chance = 1 - random.random_sample(count)  # in (0, 1]
        lengths = np.exp(np.interp(np.log(chance), log_survival, log_length))
        inside = np.flatnonzero(chance > tail_share)
        while inside.size:
            lengths[inside] = np.exp(mu + sigma * random.standard_normal(inside.size))
            inside = inside[lengths[inside] > body]
        return np.maximum(np.rint(lengths), 1).astype(np.int64)

    source = "parametric fit to published statistics of a million Wikipedia articles (Hetu-Galvatron, FlexSP)"
    return Mix("wikipedia-like", source, longest, sample)


_EDGES = [1024 << k for k in range(12)]
"""Figure 4's labels 2K .. 2M, each the end of a bucket.

The figure does not say where the first bucket begins. From 1K the shares of documents come out as published: Byted then
has 60 % of its documents up to 2K, 1.0 % over 64K (the figure's 128K bar and up, "1 %" in the text), and 0.05 % over
1M (the 2M bar, "0.05 %").
"""

_BUCKETS = {
    "byted": (
        _FIGURE_4,
        (14.158, 11.366, 7.577, 7.577, 7.577, 7.577, 7.577, 7.577, 7.278, 9.671, 12.064),
    ),
    "github": (
        f"{_FIGURE_4}; its top three bars are given together as 5.3 %, split here 2.4, 1.6 and 1.3",
        (34.068, 9.519, 10.421, 10.721, 10.22, 8.818, 6.413, 4.509, 2.405, 1.603, 1.303),
    ),
}
"""Name -> source, percent of tokens by bucket."""


def figure_4(name: str) -> tuple[float, ...]:
    """Percent of tokens by bar of Figure 4, 2K .. 2M, of "byted" or "github"."""
    return _BUCKETS[name][1]


NAMES = (*_BUCKETS, "wikipedia-like", "lognormal:MIN,MAX,MEAN,SIGMA")
"""What `parse_mix` knows."""


def is_mix(name: str) -> bool:
    """Whether a name is meant for `parse_mix`; a file of the same name can be given as ./NAME."""
    return name in NAMES or name.startswith("lognormal:")


def parse_mix(name: str) -> Mix:
    """The mix of that name, one of `NAMES`. Raises `ConfigError` for another name or parameters that cannot work."""
    if name == "wikipedia-like":
        return wikipedia_like()
    if name in _BUCKETS:
        source, shares = _BUCKETS[name]
        return bucket_mix(name, source, _EDGES, shares)
    if not name.startswith("lognormal:"):
        raise ConfigError(f"no mix {name!r}: choose one of {', '.join(NAMES)}")
    parts = name.removeprefix("lognormal:").split(",")
    if len(parts) != 4:
        raise ConfigError(f"{name!r}: give four numbers, lognormal:MIN,MAX,MEAN,SIGMA, such as lognormal:128,8K,1K,1.5")
    low, high, mean = (
        parse_size(part, f"{title} in {name!r}", _LONGEST) for title, part in zip(("MIN", "MAX", "MEAN"), parts)
    )
    try:
        sigma = float(parts[3])
    except ValueError:
        sigma = math.nan
    if not 0 <= sigma <= 20 or low > high:
        raise ConfigError(f"{name!r}: MIN may not exceed MAX, and SIGMA must be a number from 0 to 20")
    return lognormal_mix(name, low, high, mean, sigma)


def draw(mix: Mix, batch_tokens: int, context: int, seed: int | Sequence[int]) -> IntArray:
    """Sequences of one batch from a mix: their tokens, int64 [num_sequences], ``batch_tokens`` in all.

    Documents are drawn until the batch is full, the last one is cut to fit, and documents longer than the context are
    cut into parts of ``context`` tokens and a rest. A pure function of its arguments; several integers as ``seed``,
    such as (seed, step), give independent batches. Raises `ConfigError` for sizes below 1, a seed that numpy cannot
    take, and a batch of more than 16M sequences, judged by the documents drawn so far.
    """
    if batch_tokens < 1 or context < 1:
        raise ConfigError(f"a batch of {batch_tokens} tokens, context {context}: both must be at least 1")
    try:
        random = np.random.RandomState(seed)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"seed is {seed}: give whole numbers from 0 to {2**32 - 1}") from error
    _refuse_crowd(mix.name, batch_tokens, -(-batch_tokens // context), f"a context of {context:,}")
    chunks, tokens = [], 0
    while tokens < batch_tokens:
        chunks.append(mix.sample(random, _CHUNK))
        tokens += int(chunks[-1].sum())
        drawn = _CHUNK * len(chunks)
        documents_needed = batch_tokens * drawn // tokens
        _refuse_crowd(mix.name, batch_tokens, documents_needed, f"documents of {tokens / drawn:,.1f} on average")
    documents = np.concatenate(chunks)
    ends = np.cumsum(documents)
    last = int(np.searchsorted(ends, batch_tokens))
    documents[last] -= ends[last] - batch_tokens
    return cut_documents(documents, 0, last + 1, context).lengths.astype(np.int64)


def _refuse_crowd(name: str, batch_tokens: int, sequences: int, because: str) -> None:
    """Raise `ConfigError` for a step of too many sequences, before they are made."""
    if sequences > _MOST_SEQUENCES:
        raise ConfigError(
            f"{name}: {batch_tokens:,} tokens of a step with {because} are about {sequences:,} sequences, more than "
            f"{_MOST_SEQUENCES:,}: lower --hdp-batch-tokens to {batch_tokens * _MOST_SEQUENCES // sequences:,}, or "
            "take longer sequences"
        )


@dataclass
class _LengthsOnly:
    """Documents of which only the lengths are known, to run training's batching on."""

    prefix: str
    lengths: npt.NDArray[np.integer]
    read_bytes: int = 0

    def read(self, document: int, begin: int, end: int) -> IntArray:
        raise DataError(f"{self.prefix}: only lengths were read")


def corpus_batches(
    lengths: IntArray, name: str, batch_tokens: int, context: int, seed: int
) -> Callable[[int], IntArray]:
    """Step -> sequences of that step, int64 [num_sequences], as a run trains on them.

    The batches are those of a run with --hdp-batch-tokens, --seq-length and --seed whose one dataset has documents of
    these ``lengths``, all of them in the train split. Raises `ConfigError` for sizes that cannot work, among them a
    step that repeats the file more than 64 times or has more than 16M sequences, and `DataError` for no tokens.
    """
    size, tokens = TokenBudget(batch_tokens), int(lengths.sum())
    if 0 < tokens * _MOST_EPOCHS < batch_tokens:
        raise ConfigError(
            f"--hdp-batch-tokens is {batch_tokens:,}, and {name} has {tokens:,} tokens: a step would repeat it more "
            f"than {_MOST_EPOCHS} times; set --hdp-batch-tokens to at most {tokens * _MOST_EPOCHS:,}, or give more data"
        )
    pieces = int((-(-lengths // max(1, context))).sum())
    if pieces > _MOST_PIECES:
        raise ConfigError(
            f"{name}: {tokens:,} tokens cut at a context of {context:,} are {pieces:,} sequences, more than "
            f"{_MOST_PIECES:,}: raise --seq-length"
        )
    if tokens:
        _refuse_crowd(name, batch_tokens, batch_tokens * pieces // tokens, f"sequences of {tokens / pieces:,.1f}")
    documents = [_LengthsOnly(name, lengths)]
    corpus = Corpus(documents, None, [(0, lengths.size)], context=context, seed=seed, size=size)
    return lambda step: corpus.batch(step).lengths


def mix_batches(mix: Mix, batch_tokens: int, context: int, seed: int) -> Callable[[int], IntArray]:
    """Step -> sequences of that step, drawn from a mix by (seed, step)."""
    return functools.partial(_mix_batch, mix, batch_tokens, context, seed)


def _mix_batch(mix: Mix, batch_tokens: int, context: int, seed: int, step: int) -> IntArray:
    return draw(mix, batch_tokens, context, (seed, step))
