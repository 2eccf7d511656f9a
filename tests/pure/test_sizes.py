"""Sizes of pieces and packs that a pipeline's plan is tried with."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_hdp.planner.sizes import Size, best_size

WHOLE = Size(9600, 9600)


def search(spans, *, whole=WHOLE, unit=2, piped=True, few=False):
    """The best size, and all that were asked for; ``spans``: size -> picoseconds or None."""
    asked = []

    def span_of(size):
        asked.append(size)
        return spans(size)

    return best_size(whole, unit, span_of, piped=piped, few=few), asked


def test_smaller_ones_up_to_the_first_that_does_not_help():
    best, asked = search(lambda size: size.pack)
    assert asked == [(9600, 4800), (6400, 3200), (4800, 3200)]
    assert best == (6400, 3200)  # equal is no help
    best, asked = search(lambda size: 10_000 - size.pack)
    assert asked == [(9600, 4800), (6400, 3200)]
    assert best == (9600, 4800)


def test_without_stages_the_whole_capacity_comes_first():
    best, asked = search(lambda size: 10_000 - size.pack, piped=False)
    assert asked == [(9600, 9600), (9600, 4800)]
    assert best == WHOLE


def test_few_micro_batches_want_far_smaller_ones():
    best, asked = search(lambda size: abs(size.pack - 290), few=True)
    assert (600, 300) in asked
    assert best == (600, 300)
    assert (37, 18) not in asked  # two misses end the search
    best, asked = search(lambda size: abs(size.piece - 1250), few=True)
    assert best == (1200, 600)  # twice 600, which was better than 2400
    assert asked[-1] == best


def test_what_the_pool_does_not_hold_is_passed_over():
    best, _ = search(lambda size: None if size.piece < 9600 else size.pack)
    assert best == (9600, 4800)
    best, _ = search(lambda size: size.pack if size == WHOLE else None, few=True)
    assert best == WHOLE


@given(
    st.integers(1, 300),
    st.sampled_from([2, 4, 6]),
    st.booleans(),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_the_least_of_what_was_asked_and_nobody_is_asked_twice(units, unit, piped, few, random):
    spans = {}
    whole = Size(units * unit, units * unit)
    best, asked = search(
        lambda size: spans.setdefault(size, random.choice([None, *range(9)]) if size != whole else 5),
        whole=whole,
        unit=unit,
        piped=piped,
        few=few,
    )
    assert all(size.piece % unit == 0 and size.pack % unit == 0 and min(size) > 0 for size in asked)
    found = [spans[size] for size in asked if spans[size] is not None]
    assert spans.get(best, 5) == min(found, default=5)


@pytest.mark.parametrize("few", [False, True])
def test_a_capacity_of_one_unit_is_taken_whole(few):
    best, asked = search(lambda size: size.pack, whole=Size(2, 2), few=few)
    assert best == (2, 2)
    assert set(asked) == {(2, 2)}
