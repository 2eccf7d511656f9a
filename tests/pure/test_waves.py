"""Rings and packs in waves: C++ and its Python twin place alike, nobody is in two places, and what they refuse."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_hdp.planner import core_backend
from megatron_hdp.planner.waves import place_units, place_units_python, powers_of_two

compiled = pytest.mark.skipif(core_backend() == "python", reason="megatron_hdp._core is not built")

Case = tuple[np.ndarray, np.ndarray, int, int]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Size, work, number of packs, ranks; few values, so that there are ties."""
    num_ranks = draw(st.integers(1, 20) | st.sampled_from([32, 48, 64]))
    num_packs = draw(st.integers(0, 30))
    rings = draw(st.lists(st.sampled_from(powers_of_two(num_ranks).tolist()), max_size=25))
    size = np.array([1] * num_packs + rings, dtype=np.int64)
    works = st.integers(0, 5) | st.integers(0, 2**50)
    work = np.array(draw(st.lists(works, min_size=size.size, max_size=size.size)), dtype=np.int64)
    return size, work, num_packs, num_ranks


@compiled
@settings(max_examples=300, deadline=None)
@given(cases())
def test_core_and_twin_place_alike(case):
    for core, twin in zip(place_units(*case), place_units_python(*case), strict=True):
        assert core.dtype == twin.dtype == np.int64
        assert core.tolist() == twin.tolist()


@settings(max_examples=100, deadline=None)
@given(cases())
def test_units_have_their_cells_alone_and_rings_are_aligned(case):
    size, _, _, num_ranks = case
    start, wave = place_units_python(*case)
    cells = {(w, r) for s, d, w in zip(start.tolist(), size.tolist(), wave.tolist()) for r in range(s, s + d)}
    assert len(cells) == int(size.sum())
    assert all(0 <= rank < num_ranks for _, rank in cells)
    assert np.all(start % size == 0)


def test_by_hand():
    """8 ranks: the long rings share wave 0, the pool's ring has wave 1, after which all ranks have the same work."""
    size = np.array([1, 1, 1, 8, 4, 2])
    work = np.array([1, 9, 5, 50, 100, 60])
    for place in (place_units, place_units_python):
        start, wave = place(size, work, 3, 8)
        assert start.tolist() == [2, 0, 1, 0, 0, 4]  # packs from heavy to light, ties to the lowest rank
        assert wave.tolist() == [2, 2, 2, 1, 0, 0]  # 17 cells need three waves; ranks 6 and 7 alone are free in wave 0
    lighter = np.array([1, 9, 5, 50, 100, 60])
    start, wave = place_units(size[[0, 1, 2, 4, 5]], lighter[[0, 1, 2, 4, 5]], 3, 8)
    assert start.tolist() == [7, 6, 7, 0, 4]
    assert wave.tolist() == [1, 0, 0, 0, 0]  # load 5 on rank 7 is less than 9 on rank 6


@compiled
def test_the_core_refuses_what_would_index_outside():
    for size, packs in (([1, 9], 1), ([2, 4], 1), ([1, 0], 1), ([1, 1], 3)):
        with pytest.raises(ValueError, match="ranks"):
            place_units(np.array(size), np.zeros(2, dtype=np.int64), packs, 8)
