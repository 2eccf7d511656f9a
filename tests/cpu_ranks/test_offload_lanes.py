"""Copies in order: who waits for whom, what is held, and memory that was not to be had."""

import gc
import weakref

import pytest
import torch
from offload_cases import CPU, LateStreams, LiveBytes, Stack, batch, make_offload

from megatron_hdp.errors import ConfigError
from megatron_hdp.offload import arena as arena_module
from megatron_hdp.offload.allocator import PythonArena
from megatron_hdp.offload.arena import HostArena
from megatron_hdp.offload.context import ActivationOffload
from megatron_hdp.offload.lanes import Lanes, Order
from megatron_hdp.offload.streams import CpuStreams, make_streams


class RecordingStreams(CpuStreams):
    """Notes every call; events are numbers, and over when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[tuple] = []
        self.stream = "compute"
        self.names = iter(("out", "in"))
        self.events = 0
        self.over: set[int] = set()

    def current(self):
        return self.stream

    def new(self):
        return next(self.names)

    def record(self, stream, *, timed=False):
        self.events += 1
        self.log.append(("record timed" if timed else "record", stream, self.events))
        return self.events

    def wait(self, stream, event):
        self.log.append(("wait", stream, event))

    def done(self, event):
        return event in self.over

    def seconds(self, begin, end):
        return float(end - begin) if end in self.over else None

    def copy(self, target, source, stream):
        self.log.append(("copy", stream, target.nbytes))
        target.copy_(source)

    def hold(self, tensor, stream):
        self.log.append(("hold", stream, tensor.nbytes))

    def synchronize(self, stream):
        self.log.append(("synchronize", stream))

    def take(self) -> list[tuple]:
        log, self.log = self.log, []
        return log


def bytes_of(count: int) -> torch.Tensor:
    return torch.arange(count, dtype=torch.int64).to(torch.uint8)


@pytest.fixture
def streams() -> RecordingStreams:
    return RecordingStreams()


@pytest.fixture
def lanes(streams: RecordingStreams) -> Lanes:
    return Lanes(HostArena(2**16, CPU), streams)


def test_a_copy_out_waits_for_compute_and_compute_for_it(lanes, streams):
    source = bytes_of(1000)
    sent = lanes.send(source, ((0, 600), (1024, 400)))
    assert streams.take() == [
        ("record", "compute", 1),
        ("wait", "out", 1),
        ("copy", "out", 600),
        ("copy", "out", 400),
        ("record", "out", 2),
    ]
    lanes.settle(sent, source)
    assert streams.take() == [
        ("record timed", "compute", 3),
        ("wait", "compute", 2),
        ("record timed", "compute", 4),
    ]


def test_compute_does_not_wait_for_a_copy_out_that_is_over(lanes, streams):
    source = bytes_of(1000)
    sent = lanes.send(source, ((0, 1000),))
    streams.take()
    streams.over.add(sent.event)
    assert lanes.is_over(sent)
    lanes.settle(sent, source)
    assert streams.take() == []


def test_a_copy_in_waits_for_compute_and_its_copy_out_and_the_next_copy_out_for_it(lanes, streams):
    extents = ((256, 700), (2048, 300))
    sent = lanes.send(bytes_of(1000), extents)
    target = torch.zeros(1000, dtype=torch.uint8)
    streams.take()
    arrival = lanes.fetch([Order(target, extents, sent)])
    assert streams.take() == [
        ("record", "compute", 3),
        ("wait", "in", 3),
        ("wait", "in", 2),
        ("copy", "in", 700),
        ("copy", "in", 300),
        ("record", "in", 4),
    ]
    assert torch.equal(target, bytes_of(1000))
    # the room of the arena may be the next one's already: its copy must not overtake the one that reads
    lanes.send(bytes_of(10), ((256, 10),))
    assert streams.take()[:3] == [("wait", "out", 4), ("record", "compute", 5), ("wait", "out", 5)]
    lanes.send(bytes_of(10), ((512, 10),))
    assert streams.take()[0] == ("record", "compute", 7)  # once is enough
    lanes.receive(arrival, target)
    lanes.receive(arrival, target)
    assert streams.take() == [("record timed", "compute", 9), ("wait", "compute", 4), ("record timed", "compute", 10)]


def test_tensors_on_other_streams_are_held(lanes, streams):
    source, target = bytes_of(500), torch.zeros(500, dtype=torch.uint8)
    streams.stream = "side"
    sent = lanes.send(source, ((0, 500),))
    assert streams.take()[:2] == [("record", "side", 1), ("wait", "out", 1)]
    streams.stream = "compute"
    lanes.settle(sent, source)
    assert ("hold", "out", 500) in streams.take()
    arrival = lanes.fetch([Order(target, ((0, 500),), sent)])
    streams.take()
    streams.stream = "side"
    lanes.receive(arrival, target)
    assert streams.take()[1:] == [("wait", "side", arrival.event), ("record timed", "side", 8), ("hold", "side", 500)]
    # the side stream's wait does not cover the stream that the memory goes back to
    lanes.abandon(arrival)
    assert streams.take() == [("wait", "compute", arrival.event)]
    lanes.abandon(arrival)
    assert streams.take() == []


def test_waits_are_counted_when_the_device_has_told(lanes, streams):
    source = bytes_of(100)
    first, second = (lanes.send(source, ((offset, 100),)) for offset in (0, 256))
    lanes.settle(first, source)
    lanes.settle(second, source)
    assert lanes.take_wait_seconds() == 0.0
    waits = [event for kind, _, event in streams.take() if kind == "record timed"]
    streams.over.update(waits[:2])
    assert lanes.take_wait_seconds() == 1.0
    streams.over.update(waits)
    assert lanes.take_wait_seconds() == 1.0
    assert lanes.take_wait_seconds() == 0.0


def test_a_whole_step_on_recorded_streams(streams):
    stack = Stack(4)
    offload = ActivationOffload(HostArena(2**22, CPU), streams=streams)
    out = stack(batch(32, 64, 0), offload, 1.0).sum()
    forward = streams.take()
    assert not [call for call in forward if "in" in call[1:]]
    # Compute waits for each copy out of layers 1 and 2 once, and only where layer 3 begins and at the end.
    copied = [event for kind, stream, event in forward if (kind, stream) == ("record", "out")]
    waited = [event for kind, stream, event in forward if (kind, stream) == ("wait", "compute")]
    assert waited == copied
    last_copy = max(i for i, call in enumerate(forward) if call[:2] == ("copy", "out"))
    assert forward.index(("wait", "compute", copied[0])) > last_copy
    out.backward()
    backward = streams.take()
    arrived = [event for kind, stream, event in backward if (kind, stream) == ("record", "in")]
    assert len(arrived) == 2  # one group a layer
    assert [event for kind, stream, event in backward if (kind, stream) == ("wait", "compute")] == arrived
    # the second layer's copies are queued before compute waits for the first's
    assert backward.index(("record", "in", arrived[1])) > backward.index(("record", "in", arrived[0]))
    assert {call[1] for call in backward} == {"compute", "in"}
    assert not [call for call in forward + backward if call[0] in ("synchronize", "hold")]
    offload.close()
    assert streams.take() == [("synchronize", "out"), ("synchronize", "in")]


def test_cpu_streams_count_the_time_of_their_copies():
    offload = make_offload(2**26)
    x = torch.randn(2**20).requires_grad_()
    with offload.micro_batch(1.0, 1, keep_first=False, keep_last=False) as mine:
        mine.layer(0)
        y = x.exp()
    assert offload.take_metrics().wait_seconds > 1e-5  # 4 MiB
    y.sum().backward()
    assert offload.take_metrics().wait_seconds > 1e-5


# ---- the memory


@pytest.mark.parametrize("core", [True, False])
def test_arena_without_and_with_the_compiled_core(core, monkeypatch):
    if not core:
        monkeypatch.setattr(arena_module, "_core", None)
    elif arena_module._core is None:
        pytest.skip("megatron_hdp._core is not built")
    arena = HostArena(10_000, CPU, None if core else PythonArena(10_000))
    assert arena.bytes == 9984
    assert arena.numa_node >= -1
    assert (arena.numa_node == -1) or core
    assert arena.view(0, arena.bytes).eq(0).all()
    stack = Stack(4)
    results = []
    for mine in (None, ActivationOffload(HostArena(2**22, CPU, None if core else PythonArena(2**22)))):
        loss = stack(batch(32, 64, 0), mine, 0.6).sum()
        loss.backward()
        results.append([p.grad.clone() for p in stack.parameters()])
        stack.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(*results))


def test_scattered_room_is_room():
    arena = HostArena(4096, CPU)
    blocks = [arena.allocate(512) for _ in range(8)]
    for block in blocks[::2]:
        arena.release(block)
    assert (arena.bytes_in_use, arena.largest_free) == (2048, 512)
    scattered = arena.allocate(1100)
    assert scattered == ((0, 512), (1024, 512), (2048, 76))
    assert arena.bytes_in_use == 2048 + 512 + 512 + 256
    assert arena.allocate(1000) is None  # 768 bytes are left
    rest = arena.allocate(768)
    assert arena.bytes_in_use == arena.bytes
    for block in (*blocks[1::2], scattered, rest):
        arena.release(block)
    assert (arena.bytes_in_use, arena.largest_free) == (0, 4096)


def test_scattered_tensors_come_back():
    offload = make_offload(2**16)
    blocks = [offload.arena.allocate(2048) for _ in range(32)]
    for block in blocks[::2]:
        offload.arena.release(block)
    x = torch.randn(64, 64).requires_grad_()
    with offload.micro_batch(1.0, 1, keep_first=False, keep_last=False) as mine:
        mine.layer(0)
        y = x.exp()
    assert offload.arena.largest_free <= 2048
    assert offload.take_metrics().bytes_out == x.nbytes
    y.sum().backward()
    assert torch.equal(x.grad, x.detach().exp())


def test_memory_that_is_not_there_is_refused_before_it_is_taken():
    with pytest.raises(
        ConfigError, match=r"1 x 1048576.00 GiB of host memory asked for, .* available .*lower --hdp-of"
    ):
        HostArena(2**50, CPU)
    with pytest.raises(ConfigError, match="--hdp-offload-gib: the arena needs at least 256 bytes, not 0"):
        HostArena(0, CPU)


def test_memory_that_the_kernel_refuses_is_an_error(monkeypatch):
    monkeypatch.setattr(arena_module, "require_host_memory", lambda bytes: None)
    with pytest.raises(
        ConfigError, match=r"1073741824.00 GiB of host memory could not be had .*lower --hdp-offload-gib"
    ):
        HostArena(2**60, CPU)


class FakeDriver:
    def __init__(self, answer: int) -> None:
        self.answer = answer
        self.calls: list[tuple] = []

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.calls.append(("register", address, size))
        return self.answer

    def cudaHostUnregister(self, address: int) -> int:
        self.calls.append(("unregister", address))
        return 0


def test_pinned_memory_is_unpinned_once(monkeypatch):
    driver = FakeDriver(0)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    arena = HostArena(2**20, torch.device("cuda", 0))
    ((_, address, size),) = driver.calls
    assert address == arena.view(0, 1).data_ptr()
    assert size >= 2**20
    arena.close()
    arena.close()
    del arena
    gc.collect()
    assert driver.calls[1:] == [("unregister", address)]
    forgotten = HostArena(2**20, torch.device("cuda", 0))
    address = forgotten.view(0, 1).data_ptr()
    del forgotten
    gc.collect()
    assert driver.calls[3:] == [("unregister", address)]


def test_memory_that_the_driver_does_not_pin_is_an_error(monkeypatch):
    monkeypatch.setattr(torch.cuda, "cudart", lambda: FakeDriver(2))
    with pytest.raises(
        ConfigError, match=r"refused to pin 1048576 bytes of host memory \(CUDA error 2\): lower .*ulimit -l"
    ):
        HostArena(2**20, torch.device("cuda", 0))


def test_a_closed_arena_says_so_and_its_memory_is_gone():
    with HostArena(2**20, CPU) as arena:
        memory = weakref.ref(arena._memory)
    assert memory() is None
    with pytest.raises(ConfigError, match="the host arena is closed"):
        arena.allocate(5)
    with pytest.raises(ConfigError, match="the host arena is closed"):
        arena.view(0, 5)


def test_streams_are_chosen_by_the_kind_of_device():
    assert isinstance(make_streams(CPU), CpuStreams)
    assert type(make_streams(torch.device("cuda", 1))).__name__ == "CudaStreams"


# ---- the tests' own tools


def test_late_copies_see_memory_that_was_given_back_too_early():
    streams = LateStreams()
    lanes = Lanes(HostArena(2**16, CPU), streams)
    source = bytes_of(5000)
    sent = lanes.send(source, ((0, 5000),))
    del source
    with pytest.raises(AssertionError, match="given back before its copy was over"):
        streams.run_until(sent.event)


def test_live_bytes_count_storages_once():
    with LiveBytes() as live:
        x = torch.ones(1000)
        views = x[5:], x.t(), x.detach()
        y = x + 1
        assert live.bytes() == 8000
        del x, views
        assert live.bytes() == 4000
        y.untyped_storage().resize_(0)
        assert live.bytes() == 0
