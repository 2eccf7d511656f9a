"""The arena's allocator: C++, its Python twin and plain search agree; and what is known of the host's memory."""

import random
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_hdp.errors import ConfigError
from megatron_hdp.offload.allocator import ALIGNMENT, PythonArena
from megatron_hdp.offload.host_memory import Room, available_memory, require_host_memory
from megatron_hdp.offload.quota import STEP, Quota
from megatron_hdp.planner.native import _core

needs_core = pytest.mark.skipif(_core is None, reason="megatron_hdp._core is not built")
ARENAS = [PythonArena] if _core is None else [PythonArena, _core.Arena]
both = pytest.mark.parametrize("make", ARENAS)


class ArenaBySearch:
    """A list with an owner for every 256 bytes."""

    def __init__(self, bytes: int) -> None:
        self.owners: list[int | None] = [None] * (bytes // ALIGNMENT)
        self.high_water = 0

    def holes(self) -> list[tuple[int, int]]:
        """(units, first unit) of every free stretch."""
        found, start = [], None
        for unit, owner in enumerate([*self.owners, 0]):
            if owner is None and start is None:
                start = unit
            elif owner is not None and start is not None:
                found.append((unit - start, start))
                start = None
        return found

    def allocate(self, bytes: int) -> int | None:
        units = -(-bytes // ALIGNMENT)
        fits = [hole for hole in self.holes() if hole[0] >= units]
        if not fits:
            return None
        start = min(fits)[1]
        self.owners[start : start + units] = [start] * units
        self.high_water = max(self.high_water, self.bytes_in_use)
        return start * ALIGNMENT

    def free(self, offset: int) -> None:
        self.owners = [None if owner == offset // ALIGNMENT else owner for owner in self.owners]

    @property
    def bytes_in_use(self) -> int:
        return sum(owner is not None for owner in self.owners) * ALIGNMENT

    @property
    def largest_free(self) -> int:
        return max(self.holes(), default=(0, 0))[0] * ALIGNMENT


requests = st.lists(st.one_of(st.integers(1, 9000), st.integers(-40, -1)), max_size=120)
"""Positive: bytes to allocate. Negative: give back one of what is out."""


@both
@settings(deadline=None)
@given(bytes=st.integers(ALIGNMENT, 40_000), requests=requests)
def test_allocator_is_best_fit(make, bytes, requests):
    arena, plain = make(bytes), ArenaBySearch(bytes)
    out: list[int] = []
    for request in requests:
        if request > 0:
            offset = arena.allocate(request)
            assert offset == plain.allocate(request)
            if offset is not None:
                out.append(offset)
        elif out:
            offset = out.pop(request % len(out))
            arena.free(offset)
            plain.free(offset)
        for name in ("bytes_in_use", "high_water", "largest_free"):
            assert getattr(arena, name) == getattr(plain, name)
    for offset in out:
        arena.free(offset)
    assert arena.bytes_in_use == 0
    assert arena.largest_free == arena.bytes == bytes // ALIGNMENT * ALIGNMENT


@needs_core
def test_twins_agree_on_a_long_run():
    draw = random.Random(4)
    arenas, out = [make(2**32) for make in ARENAS], []
    for turn in range(20_000):
        if out and draw.random() < 0.35 + 0.3 * (turn // 2000 % 2):
            offset = out.pop(draw.randrange(len(out)))
            for arena in arenas:
                arena.free(offset)
        else:
            size = draw.randrange(1, 2 ** draw.randrange(8, 24))
            offset, twin = (arena.allocate(size) for arena in arenas)
            assert offset == twin
            if offset is not None:
                out.append(offset)
        assert arenas[0].largest_free == arenas[1].largest_free
    assert arenas[0].high_water == arenas[1].high_water > 2**28


@both
def test_high_water_starts_anew_at_what_is_in_use(make):
    arena = make(4096)
    first, second = arena.allocate(1000), arena.allocate(2000)
    arena.free(second)
    assert arena.high_water == 3072
    arena.reset_high_water()
    assert arena.high_water == arena.bytes_in_use == 1024
    arena.free(first)
    assert arena.high_water == 1024


@both
@pytest.mark.parametrize("bytes", [0, -5])
def test_bad_requests_are_refused(make, bytes):
    with pytest.raises(ValueError, match=f"cannot hand out {bytes} bytes"):
        make(4096).allocate(bytes)
    with pytest.raises(ValueError, match="an arena needs at least 256 bytes, not 255"):
        make(255)


@both
def test_free_of_what_is_not_out_is_refused(make):
    arena = make(4096)
    offset = arena.allocate(512)
    with pytest.raises(ValueError, match="nothing is handed out at offset 256"):
        arena.free(offset + 256)
    arena.free(offset)
    with pytest.raises(ValueError, match="nothing is handed out at offset 0"):
        arena.free(offset)


@both
@pytest.mark.parametrize("bytes", [4097, 2**62, 2**63 - 1])
def test_more_than_the_arena_is_full_not_an_error(make, bytes):
    assert make(4096).allocate(bytes) is None


@needs_core
def test_time_grows_like_log_n():
    def seconds_per_call(blocks: int) -> float:
        arena = _core.Arena(blocks * 512)
        offsets = [arena.allocate(512) for _ in range(blocks)]
        for offset in offsets[::2]:
            arena.free(offset)  # every other block free: nothing merges
        best = float("inf")
        for _ in range(5):
            begin = time.perf_counter()
            for _ in range(2000):
                arena.free(arena.allocate(512))
            best = min(best, time.perf_counter() - begin)
        return best

    assert seconds_per_call(200_000) < 8 * seconds_per_call(2_000)  # 100 x the blocks


@needs_core
def test_host_memory_is_zeroed_writable_and_as_large_as_asked():
    array, node = _core.host_memory(10_000)
    assert array.size >= 10_000
    assert array.flags.writeable
    assert not array.any()
    assert node >= -1
    with pytest.raises(RuntimeError, match=f"mmap of {2**60} bytes failed: Cannot allocate memory"):
        _core.host_memory(2**60)
    with pytest.raises(ValueError, match="cannot map 0 bytes"):
        _core.host_memory(0)


# ---- how much is there


def host(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


MEMINFO = {"proc/meminfo": "MemTotal: 9000 kB\nMemFree: 10 kB\nMemAvailable:    5000 kB\n"}


def test_available_memory_of_a_machine_without_limits(tmp_path):
    assert available_memory(host(tmp_path, MEMINFO)) == Room(5000 * 1024, "MemAvailable of /proc/meminfo")


def test_a_limit_of_a_group_above_counts_and_file_pages_do_not(tmp_path):
    groups = "sys/fs/cgroup/"
    root = host(
        tmp_path,
        {
            **MEMINFO,
            "proc/self/cgroup": "0::/job/step\n",
            groups + "job/step/memory.max": "max\n",
            groups + "job/step/memory.current": "70\n",
            groups + "job/memory.max": "1000\n",
            groups + "job/memory.current": "900\n",
            groups + "job/memory.stat": "anon 200\ninactive_file 600\n",
        },
    )
    room = available_memory(root)
    assert room.bytes == 700
    assert room.source.endswith("cgroup/job")


def test_groups_of_version_1_and_a_path_that_is_the_hosts(tmp_path):
    mount = "sys/fs/cgroup/memory/"
    root = host(
        tmp_path,
        {
            **MEMINFO,
            "proc/self/cgroup": "5:cpu:/docker/a\n4:hugetlb,memory:/docker/a\n",
            mount + "memory.limit_in_bytes": "2000\n",
            mount + "memory.usage_in_bytes": "500\n",
        },
    )
    assert available_memory(root).bytes == 1500
    (root / mount / "memory.limit_in_bytes").write_text(f"{2**63 - 4096}\n")
    assert available_memory(root).bytes == 5000 * 1024


def test_nothing_known_asks_nothing(tmp_path):
    assert available_memory(tmp_path) is None
    require_host_memory(2**60, root=tmp_path)


def test_too_much_is_refused_with_the_numbers(tmp_path):
    root = host(tmp_path, {"proc/meminfo": f"MemAvailable: {3 * 2**20} kB\n"})
    require_host_memory(2**30, 3, root)
    with pytest.raises(
        ConfigError,
        match=r"4 x 1.00 GiB of host memory asked for, 3.00 GiB available \(MemAvailable.*lower --hdp-offload-gib",
    ):
        require_host_memory(2**30, 4, root)


# ---- which bytes leave


@given(
    ratio=st.one_of(st.floats(0, 1), st.sampled_from([0.0, 0.3, 0.5, 1.0])),
    sizes=st.lists(st.integers(1, 10**9), min_size=1, max_size=60),
    tolerance=st.integers(0, 10**9),
)
def test_the_bytes_gone_stay_close_to_the_ratio(ratio, sizes, tolerance):
    quota, seen, gone = Quota(ratio, tolerance), 0, 0
    for size in sizes:
        leave = quota.take(size)
        assert 0 <= leave <= size
        assert leave in (0, size) or leave % STEP == 0
        seen, gone = seen + size, gone + leave
        # within half a tensor, and within the tolerance but for the grain of the cuts
        assert abs(gone - ratio * seen) <= min(max(sizes) / 2, tolerance + STEP) + STEP
    assert (quota.seen, quota.gone) == (seen, gone)
    if ratio in (0.0, 1.0):
        assert gone == ratio * seen


def test_whole_tensors_leave_where_that_is_close_enough():
    quota = Quota(0.3, tolerance=600)
    assert [quota.take(1000) for _ in range(10)] == [0, 1000, 0, 0, 1000, 0, 0, 0, 1000, 0]
    exact = Quota(0.5)
    assert [exact.take(8192) for _ in range(3)] == [4096, 4096, 4096]


def test_no_part_of_a_split_is_tiny():
    quota = Quota(0.1, min_bytes=4096)
    assert quota.take(8192) == 0  # 819 bytes are not worth a copy
    assert quota.take(40 * 4096) == round((0.1 * 42 * 4096) / STEP) * STEP
