"""Best fit decreasing: C++, its Python twin, and the definition by plain search give the same bins."""

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_hdp.planner import core_backend
from megatron_hdp.planner.packing import best_fit, best_fit_python

NO_ROOMS = np.zeros(0, dtype=np.int64)


def best_fit_by_search(sizes: list[int], capacity: int, rooms: list[int]) -> list[int]:
    room = list(rooms)
    bins = [-1] * len(sizes)
    for item in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        fits = [(left, b) for b, left in enumerate(room) if left >= sizes[item]]
        if not fits:
            room.append(capacity)
            fits = [(capacity, len(room) - 1)]
        bins[item] = min(fits)[1]
        room[bins[item]] -= sizes[item]
    return bins


capacities = st.sampled_from([1, 2, 7, 63, 64, 65, 4095, 4096, 4097, 300_000, 2**31])


@st.composite
def items(draw: st.DrawFn) -> tuple[list[int], int, list[int]]:
    capacity = draw(capacities)
    sizes = draw(st.lists(st.integers(1, capacity), max_size=60))
    return sizes, capacity, draw(st.lists(st.integers(-1, capacity + 5), max_size=20))


@given(items())
def test_python_twin_is_best_fit(case):
    sizes, capacity, rooms = case
    got = best_fit_python(np.array(sizes, dtype=np.int64), capacity, np.array(rooms, dtype=np.int64))
    assert got.tolist() == best_fit_by_search(sizes, capacity, rooms)


@pytest.mark.skipif(core_backend() == "python", reason="megatron_hdp._core is not built")
@given(items())
def test_cpp_is_best_fit(case):
    sizes, capacity, rooms = case
    got = best_fit(np.array(sizes, dtype=np.int64), capacity, np.array(rooms, dtype=np.int64))
    assert got.dtype == np.int64
    assert got.tolist() == best_fit_by_search(sizes, capacity, rooms)


@pytest.mark.skipif(core_backend() == "python", reason="megatron_hdp._core is not built")
@pytest.mark.parametrize("seed", range(3))
def test_cpp_equals_python_on_a_large_batch(seed):
    sizes = np.random.default_rng(seed).integers(1, 8193, 20_000)
    rooms = np.random.default_rng(seed + 9).integers(0, 4096, 500)
    assert np.array_equal(best_fit(sizes, 8192, rooms), best_fit_python(sizes, 8192, rooms))


@pytest.mark.parametrize("pack", [lambda s: best_fit(s, 8192), lambda s: best_fit_python(s, 8192, NO_ROOMS)])
@pytest.mark.parametrize("bad", [0, -3, 8193])
def test_sizes_out_of_range_are_refused(pack, bad):
    with pytest.raises(ValueError, match=f"item 2 has size {bad}, .*8192"):
        pack(np.array([5, 8192, bad, 1]))


@pytest.mark.parametrize("pack", [lambda s: best_fit(s, 2**30), lambda s: best_fit_python(s, 2**30, NO_ROOMS)])
def test_time_grows_like_n_log_n(pack):
    # all sizes above half the capacity: every item opens a bin and leaves a room of its own, the worst case of a
    # sorted list of rooms. 8 x the items may take 8 x log-factor the time; a quadratic method takes 64 x.
    def seconds(n: int) -> float:
        sizes = np.random.default_rng(0).integers(2**29 + 1, 2**30, n)
        best = float("inf")
        for _ in range(3):
            begin = time.perf_counter()
            pack(sizes)
            best = min(best, time.perf_counter() - begin)
        return best

    assert seconds(64_000) < 40 * seconds(8_000)
