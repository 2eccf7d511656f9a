"""The recorder of --hdp-timeline by itself: a toy model, waits, clocks of both devices, and what it costs."""

import json
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from megatron_hdp.attention.trace import COMPUTE, WAIT
from megatron_hdp.seams import timeline_clock
from megatron_hdp.seams.timeline import TimelineRecorder
from megatron_hdp.seams.timeline_clock import CpuClock, CudaClock
from megatron_hdp.timeline_writer import TimelineWriter

CPU = torch.device("cpu")


def recorder_of(folder, device=CPU):
    recorder, comm, jobs = TimelineRecorder(device), SimpleNamespace(trace=None), []
    recorder.connect(TimelineWriter(folder, "lane.jsonl", 3, None), comm, jobs.append)
    return recorder, comm.trace, jobs


def lines(folder):
    return [json.loads(text) for text in (folder / "lane.jsonl").read_text().splitlines()]


PLAN = SimpleNamespace(digest=lambda: b"\x12", to_json=lambda: "{}")


def bundle(step):
    return SimpleNamespace(step=step, plan=PLAN, record=SimpleNamespace(summary=SimpleNamespace(span_seconds=2.5)))


def burn(seconds):
    begin = time.thread_time()
    while time.thread_time() - begin < seconds:
        sum(range(100))


class Slow(torch.autograd.Function):
    """Takes the seconds that it is told, in both directions, and waits 50 ms forward."""

    @staticmethod
    def forward(context, x, seconds, trace):
        context.seconds = seconds
        burn(seconds)
        begin = time.perf_counter()
        trace.begin_wait()
        time.sleep(0.05)
        trace.add("message", WAIT, begin, time.perf_counter())
        return x * 2

    @staticmethod
    def backward(context, gradient):
        burn(2 * context.seconds)
        return gradient * 2, None, None


def test_what_a_step_leaves(tmp_path):
    recorder, trace, jobs = recorder_of(tmp_path)
    weight = torch.ones(3, requires_grad=True)
    parts = [SimpleNamespace(name="first"), SimpleNamespace(name="second")]

    def loss_of(output):
        burn(0.01)
        return output.sum(), 3, {}

    def step(data, model, return_schedule_plan=False):
        assert return_schedule_plan is False
        return Slow.apply(weight, next(data), trace), loss_of

    timed = recorder.timed(step)
    assert timed.__name__ == "step"
    output, loss = timed(iter([0.0]), parts[0])  # evaluation: nothing is noted
    assert loss is loss_of
    recorder.ask()
    recorder.begin_step(bundle(4), parts)
    data = iter([0.02, 0.04])
    output, loss = timed(data, parts[1])
    total, _, _ = loss(output)
    last, _ = timed(data, parts[0])
    assert trace.span("block", COMPUTE).__enter__() is None
    total.backward()
    torch.autograd.backward(last, torch.ones(3))
    recorder.end_step()
    timed(iter([0.0]), parts[0])
    (line,) = lines(tmp_path)
    assert (line["start"], line["step"], line["digest"]) == (3, 4, "12")
    assert line["phase"] == [0, 0, 1, 1]
    assert line["slot"] == [0, 0, 0, 0]
    assert line["part"] == [1, 0, 1, 0]
    for found, least in zip(line["compute"], (0.03, 0.04, 0.04, 0.08)):
        assert least <= found < least + 0.02
    for found, least in zip(line["ring"], (0.05, 0.05, 0, 0)):
        assert least <= found < least + 0.04 + 0.2 * (least > 0)
    times = [line["asked"], *(t for pair in zip(line["begin"], line["end"]) for t in pair), line["done"]]
    assert times == sorted(times)
    assert abs(line["done"] - time.time()) < 10
    (job,) = jobs
    job()
    assert json.loads((tmp_path / "plans.jsonl").read_text()) == {
        "start": 3,
        "step": 4,
        "planned_span": 2.5,
        "plan": "{}",
    }


def test_gradients_are_the_same(tmp_path):
    weight = torch.linspace(-1, 1, 5, requires_grad=True)

    def step(data, model):
        return weight.sin() * 3, lambda output: (output.square().sum(), 1, {})

    def gradient(forward_step):
        output, loss = forward_step(iter(()), None)
        total = loss(output)[0]
        (total * 2).backward()
        found, weight.grad = weight.grad.clone(), None
        return found

    recorder, _, _ = recorder_of(tmp_path)
    plain = gradient(step)
    recorder.begin_step(bundle(0), [None])
    assert torch.equal(gradient(recorder.timed(step)), plain)
    recorder.end_step()
    assert lines(tmp_path)[0]["phase"] == [0, 1]


def test_other_threads_do_not_count(tmp_path):
    recorder, _, _ = recorder_of(tmp_path)

    def step(data, model):
        helper = threading.Thread(target=burn, args=(0.1,))
        helper.start()
        helper.join()
        return torch.ones(1), lambda output: (output, 1, {})

    recorder.begin_step(bundle(0), [None])
    recorder.timed(step)(iter(()), None)
    recorder.end_step()
    (line,) = lines(tmp_path)
    assert line["compute"][0] < 0.06
    assert line["end"][0] - line["begin"][0] > 0.1
    assert line["phase"] == [0]  # nothing needs a gradient


def test_it_costs_next_to_nothing(tmp_path):
    """CPU time of a micro-batch's two passes, waits and its share of the line: less than 0.4 ms, on any machine."""
    recorder, trace, _ = recorder_of(tmp_path)
    recorder._submit = None
    weight = torch.ones(1, requires_grad=True)
    num, waits = 200, 20

    def step(data, model):
        for _ in range(waits):
            trace.begin_wait()
            trace.add("message", WAIT, 0.0, 0.1)
        return weight * 2, lambda output: (output, 1, {})

    def run(forward_step):
        begin = time.thread_time()
        for _ in range(num):
            output, loss = forward_step(None, None)
            loss(output)[0].backward()
        return time.thread_time() - begin

    plain = min(run(step) for _ in range(5))
    noted = []
    for number in range(5):
        begin = time.thread_time()
        recorder.begin_step(bundle(number), [None])
        run(recorder.timed(step))
        recorder.end_step()
        noted.append(time.thread_time() - begin)
    assert len(lines(tmp_path)) == 5
    cost = (min(noted) - plain) / num
    print(f"{1e6 * cost:.1f} us for a micro-batch of {waits} waits")
    assert cost < 4e-4


class Event:
    """A CUDA event on a device that is ``behind`` seconds, and that has come as far as ``over``."""

    now, over, made = 0.0, 0.0, 0

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        Event.now += 1.0
        self.at = Event.now

    def query(self):
        return self.at <= Event.over

    def elapsed_time(self, other):
        assert max(self.at, other.at) <= Event.over, "read before it was over"
        return 1e3 * (other.at - self.at)


def test_events_are_read_when_they_are_over(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: setattr(Event, "over", 1e9))
    monkeypatch.setattr(CpuClock, "now", lambda self: 1000.0)
    Event.now = Event.over = 0.0
    recorder, trace, _ = recorder_of(tmp_path, torch.device("cuda"))
    weight = torch.ones(1, requires_grad=True)

    def step(data, model):
        trace.begin_wait()
        trace.add("message", WAIT, 0.0, 0.1)
        return weight * 2, lambda output: (output, 1, {})

    def one(number):
        recorder.ask()
        recorder.begin_step(bundle(number), [None])
        output, loss = recorder.timed(step)(None, None)
        loss(output)[0].backward()
        recorder.end_step()

    def written():
        return [line["step"] for line in lines(tmp_path)]

    one(0)
    assert written() == []
    Event.over = Event.now - 0.5  # its last event is not over
    one(1)
    assert written() == []
    Event.over = Event.now
    one(2)
    assert written() == [0, 1]
    recorder.close()
    assert written() == [0, 1, 2]
    # marks: step 1; forward begins 2; wait 3, 4; output 5; loss 6; backward 7, 8
    line = lines(tmp_path)[0]
    assert line["begin"] == [1001.0, 1006.0]
    assert line["end"] == [1005.0, 1007.0]
    assert line["ring"] == [1.0, 0.0]
    assert line["compute"] == [3.0, 1.0]
    assert line["asked"] == line["done"] == 1000.0


def test_clock_is_that_of_the_device():
    assert type(timeline_clock.clock_of(CPU)) is CpuClock
    assert type(timeline_clock.clock_of(torch.device("cuda", 1))) is CudaClock


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_cuda_clock_on_a_gpu():
    clock = CudaClock()
    step, begin = clock.begin_step(), clock.mark()
    torch.cuda._sleep(10_000_000)
    waiting = clock.begin_wait()
    wait, end = clock.end_wait(waiting, 0.0), clock.mark()
    clock.finish()
    assert clock.is_over(end)
    first, last, compute, ring = clock.read(step, begin, end, [wait])
    assert last - first == pytest.approx(compute + ring, abs=1e-4)
    assert compute > 1e-3
