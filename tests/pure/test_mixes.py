"""Mixes against the numbers they were made from; batches against dull walks and against training's own corpus."""

import math

import numpy as np
import pytest

from megatron_hdp.data.corpus import TokenBudget, open_corpus
from megatron_hdp.data.indexed import write_indexed
from megatron_hdp.errors import ConfigError
from megatron_hdp.mixes import NAMES, bucket_mix, corpus_batches, draw, is_mix, lognormal_mix, mix_batches, parse_mix

ALL = ["byted", "github", "wikipedia-like", "lognormal:128,8K,1K,1.5"]

PUBLISHED = {  # percent of tokens by end of bucket, 2K .. 2M, as read from Figure 4; GitHub's last three together
    "byted": [14.2, 11.4, 7.6, 7.6, 7.6, 7.6, 7.6, 7.6, 7.3, 9.7, 12.1],
    "github": [34.0, 9.5, 10.4, 10.7, 10.2, 8.8, 6.4, 4.5, 5.3],
}


def sampled(name, count=1 << 20, seed=0):
    return parse_mix(name).sample(np.random.RandomState(seed), count)


def batch_tokens_by_bucket(name, batches):
    """Percent of tokens by bucket over several drawn batches of 32M tokens, context 2M."""
    lengths = np.concatenate([draw(parse_mix(name), 32 << 20, 2 << 20, (7, k)) for k in range(batches)])
    ends = [2048 << k for k in range(len(PUBLISHED[name]))]
    ends[-1] = 2 << 20
    bucket = np.searchsorted(ends, lengths)
    return 100 * np.bincount(bucket, weights=lengths, minlength=len(ends)) / lengths.sum()


@pytest.mark.parametrize("name", PUBLISHED)
def test_drawn_batches_hold_the_published_shares_of_tokens(name):
    shares = batch_tokens_by_bucket(name, 100)
    published = np.array(PUBLISHED[name]) / sum(PUBLISHED[name]) * 100
    np.testing.assert_allclose(shares[:8], published[:8], rtol=0.05)  # many documents in each
    np.testing.assert_allclose(shares[8:], published[8:], rtol=0.15)  # few: 100 batches hold some 250 of 1M to 2M


def test_byted_has_the_published_shares_of_documents():
    lengths = sampled("byted", 1 << 21)
    assert np.mean(lengths <= 2048) == pytest.approx(0.60, rel=0.03)
    assert np.mean(lengths <= 4096) == pytest.approx(0.80, rel=0.06)  # "about 80 %"
    assert np.mean(lengths > 65536) == pytest.approx(0.01, rel=0.05)  # the 128K bar and up
    assert np.mean(lengths > 1 << 20) == pytest.approx(0.0005, rel=0.1)


def test_buckets_of_unequal_width_hold_their_shares():
    mix = bucket_mix("mine", "this test", [50, 100, 1000, 30_000], [1, 2, 5])
    lengths = mix.sample(np.random.RandomState(0), 1 << 20)
    tokens = np.bincount(np.searchsorted([100, 1000, 30_000], lengths), weights=lengths)
    np.testing.assert_allclose(tokens / tokens.sum(), [1 / 8, 2 / 8, 5 / 8], rtol=0.03)


@pytest.mark.parametrize("name", PUBLISHED)
def test_lengths_are_log_uniform_inside_a_bucket(name):
    lengths = sampled(name)
    assert (lengths.min(), lengths.max()) >= (1025, 2_000_000)
    assert lengths.max() <= 2 << 20
    inside = lengths[(lengths > 2048) & (lengths <= 4096)]
    deciles = 2048 * 2 ** (np.arange(1, 10) / 10)
    np.testing.assert_allclose(np.quantile(inside, np.arange(1, 10) / 10), deciles, rtol=0.01)


def test_wikipedia_like_has_the_published_statistics():
    lengths = sampled("wikipedia-like", 4 << 20)
    assert np.median(lengths) == pytest.approx(347, rel=0.01)
    assert lengths.mean() == pytest.approx(1013.6, rel=0.01)
    assert np.quantile(lengths, 0.99) == pytest.approx(10_900, rel=0.02)
    assert np.quantile(lengths, 0.999) == pytest.approx(37_000, rel=0.04)
    assert 500_000 < lengths.max() <= 1_820_000
    for low, documents, tokens in ((8192, 0.016, 0.275), (32768, 0.0013, 0.076)):
        tail = lengths[lengths > low]
        assert tail.size / lengths.size == pytest.approx(documents, rel=0.03)
        assert tail.sum() / lengths.sum() == pytest.approx(tokens, rel=0.05)


@pytest.mark.parametrize(
    ("low", "high", "mean", "sigma"), [(1024, 8192, 4096, 1.1), (100, 4096, 2048, 1.1), (128, 8192, 1024, 1.5)]
)
def test_lognormal_is_that_of_nvidia(low, high, mean, sigma):
    lengths = sampled(f"lognormal:{low},{high},{mean},{sigma}")
    assert lengths.min() == low
    assert lengths.max() == high
    mu = math.log(mean) - sigma**2 / 2

    def below(x):
        return (1 + math.erf((math.log(x) - mu) / sigma / math.sqrt(2))) / 2

    assert np.mean(lengths == high) == pytest.approx(1 - below(high), rel=0.02)
    for x in (mean // 2, mean, 2 * mean - 1):
        assert np.mean(lengths < x) == pytest.approx(below(x), rel=0.02)
    wide = lognormal_mix("wide", 1, 1 << 40, mean, sigma).sample(np.random.RandomState(0), 1 << 20)
    assert wide.mean() == pytest.approx(mean, rel=0.02)  # before it is clipped


@pytest.mark.parametrize("name", ALL)
def test_batches_hold_their_tokens_and_no_sequence_exceeds_the_context(name):
    mix = parse_mix(name)
    for tokens, context in ((1, 1), (100, 7), (1 << 20, 4096), (3_000_001, 1 << 21)):
        lengths = draw(mix, tokens, context, 3)
        assert lengths.dtype == np.int64
        assert lengths.sum() == tokens
        assert 1 <= lengths.min() <= lengths.max() <= context


def test_documents_are_cut_as_a_dull_walk_cuts_them():
    mix = parse_mix("byted")
    documents = iter(mix.sample(np.random.RandomState(5), 8192).tolist())
    expected, left = [], 4_000_000
    while left:
        document = min(next(documents), left)
        left -= document
        expected += [5000] * (document // 5000) + [document % 5000] * (document % 5000 > 0)
    assert draw(mix, 4_000_000, 5000, 5).tolist() == expected


def test_a_batch_larger_than_one_chunk_of_draws_continues_a_smaller_one():
    mix = parse_mix("wikipedia-like")
    small, large = (draw(mix, tokens, 1 << 21, 9) for tokens in (1 << 20, 40 << 20))
    assert large.size > 3 * 8192
    assert large[: small.size - 1].tolist() == small[:-1].tolist()


@pytest.mark.parametrize("name", ALL)
def test_same_seed_same_batch_other_seed_or_step_another(name):
    mix = parse_mix(name)
    streams = {
        tuple(mix_batches(mix, 1 << 20, 1 << 16, seed)(step).tolist()) for seed in (1, 2) for step in (0, 1, 0, 1)
    }
    assert len(streams) == 4
    assert tuple(draw(mix, 1 << 20, 1 << 16, (2, 1)).tolist()) in streams


def test_draws_do_not_touch_numpys_global_state():
    np.random.seed(1)
    expected = np.random.RandomState(1).random_sample()
    draw(parse_mix("byted"), 1000, 1000, 1)
    assert np.random.random_sample() == expected


def test_known_draws_stay():
    """Another order of draws would change every published number."""
    heads = {name: draw(parse_mix(name), 1 << 20, 1 << 16, 0)[:6].tolist() for name in ALL}
    assert heads == HEADS


@pytest.mark.parametrize("seed", [-1, 2**32, 1.5, (1, -1)])
def test_wrong_seeds(seed):
    with pytest.raises(ConfigError, match="seed is"):
        draw(parse_mix("byted"), 1000, 1000, seed)


@pytest.mark.parametrize(("tokens", "context"), [(0, 8), (8, 0), (-1, 8)])
def test_wrong_sizes(tokens, context):
    with pytest.raises(ConfigError, match="must be at least 1"):
        draw(parse_mix("byted"), tokens, context, 1)


def test_names():
    assert all(is_mix(name) for name in (*NAMES, *ALL, "lognormal:1"))
    assert not any(is_mix(name) for name in ("./byted", "byted.txt", "Byted", "wikipedia"))
    assert [parse_mix(name).name for name in ALL] == ALL
    assert all(parse_mix(name).source for name in ALL)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("commoncrawl", "no mix 'commoncrawl': choose one of byted, github, wikipedia-like, lognormal"),
        ("lognormal:1,2,3", "give four numbers"),
        ("lognormal:MIN,MAX,MEAN,SIGMA", "MIN in .* is 'MIN'"),
        ("lognormal:0,8K,1K,1", "MIN in"),
        ("lognormal:9K,8K,1K,1", "MIN may not exceed MAX"),
        ("lognormal:1,8K,1K,-1", "SIGMA must be"),
        ("lognormal:1,8K,1K,nan", "SIGMA must be"),
        ("lognormal:1,8K,1K,x", "SIGMA must be"),
        ("lognormal:1,2048G,1K,1", "MAX in .* is 2,199,023,255,552: it can be at most 1,099,511,627,776"),
    ],
)
def test_wrong_names(name, message):
    with pytest.raises(ConfigError, match=message):
        parse_mix(name)


def test_steps_of_a_list_are_the_steps_of_a_run_on_that_corpus(tmp_path):
    lengths = np.random.RandomState(0).geometric(0.01, 300)
    lengths[[3, 77]] = 0, 5000
    write_indexed(tmp_path / "corpus", [np.zeros(v, np.int64) for v in lengths], np.uint16)
    run = open_corpus([tmp_path / "corpus"], context=512, seed=11, size=TokenBudget(4000))
    batch = corpus_batches(lengths, "corpus", 4000, 512, 11)
    for step in range(20):  # more than one epoch
        assert batch(step).tolist() == run.batch(step).lengths.tolist()


def test_a_budget_that_could_leave_a_step_empty_is_refused():
    with pytest.raises(ConfigError, match="at least 100"):
        corpus_batches(np.array([100, 3]), "list", 50, 1000, 1)


def test_a_step_that_repeats_a_list_many_times_is_refused_at_once():
    lengths = np.array([7, 13])
    assert corpus_batches(lengths, "list", 64 * 20, 100, 1)(0).sum() == 64 * 20
    message = "batch-tokens is 1,281, and list has 20 tokens: a step .* 64 times; set .* to at most 1,280, or give more"
    with pytest.raises(ConfigError, match=message):
        corpus_batches(lengths, "list", 64 * 20 + 1, 100, 1)


def test_a_list_that_would_be_cut_into_too_many_sequences_is_refused_at_once():
    lengths = np.array([1 << 40, 5])
    with pytest.raises(ConfigError, match="cut at a context of 16 are 68,719,476,737 sequences, more than 268,435,456"):
        corpus_batches(lengths, "list", 1 << 20, 16, 1)
    with pytest.raises(
        ConfigError, match=r"are about 33,554,432 sequences, more than 16,777,216: lower .* to 67,108,864"
    ):
        corpus_batches(np.array([4 << 20]), "list", 128 << 20, 4, 1)


@pytest.mark.parametrize(
    ("name", "tokens", "context", "message"),
    [
        (
            "lognormal:1,1,1,0",
            2 << 30,
            4096,
            "2,147,483,648 tokens .* documents of 1.0 .* about 2,147,483,648 sequences",
        ),
        ("byted", 2 << 30, 2, "a context of 2 are about 1,073,741,824 sequences, more than 16,777,216"),
        ("lognormal:1,8,2,0.1", 1 << 30, 4096, r"documents of 1\.\d .* lower --hdp-batch-tokens to [23]\d,"),
    ],
)
def test_a_drawn_batch_of_too_many_sequences_is_refused_at_once(name, tokens, context, message):
    with pytest.raises(ConfigError, match=message):
        draw(parse_mix(name), tokens, context, 1)


HEADS = {
    "byted": [1446, 2190, 3299, 1329, 1037, 3388],
    "github": [1446, 1095, 1650, 1329, 1037, 1694],
    "wikipedia-like": [95, 341, 87, 2752, 509, 212],
    "lognormal:128,8K,1K,1.5": [4687, 605, 1443, 8192, 5474, 128],
}
