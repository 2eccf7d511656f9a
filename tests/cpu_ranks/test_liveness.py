"""Real processes, really killed: who is named, who ends, how fast, and who must not be disturbed."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from megatron_hdp.liveness import EXIT_CODE, News, _Watcher, watch

RANK = """
import os, sys, threading, time
from pathlib import Path
from megatron_hdp.liveness import watch

rank, world, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])

def exchange(text):
    own = folder / f"address-{rank}"
    own.with_suffix(".part").write_text(text)
    own.with_suffix(".part").rename(own)
    files = [folder / f"address-{r}" for r in range(world)]
    while not all(f.exists() for f in files):
        time.sleep(0.01)
    return [f.read_text() for f in files]

def wait_for(name):
    while not (folder / name).exists():
        time.sleep(0.01)

def body():
    (folder / f"in-{rank}").touch()
    exec(sys.argv[4])

with watch(rank, world, exchange, step=lambda: 7):
    body()
print("left normally")
"""

BLOCK = "lock = threading.Lock(); lock.acquire(); lock.acquire()"


@dataclass
class Ranks:
    """Processes of one run, their folder, and what they wrote when they have ended."""

    processes: list[subprocess.Popen]
    folder: Path

    def kill(self, *ranks):
        for rank in ranks:
            self.processes[rank].send_signal(signal.SIGKILL)

    def tell(self, name):
        (self.folder / name).touch()

    def end(self, rank, timeout=10):
        out, err = self.processes[rank].communicate(timeout=timeout)
        return self.processes[rank].returncode, out, err


@pytest.fixture
def start(tmp_path):
    """Start one process per body and wait until all are inside `watch`; whatever is left is killed at the end."""
    ranks = Ranks([], tmp_path)

    def start_all(*bodies, program=RANK):
        for rank, body in enumerate(bodies):
            command = [sys.executable, "-c", program, str(rank), str(len(bodies)), str(tmp_path), body]
            ranks.processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        deadline = time.monotonic() + 60
        while not all((tmp_path / f"in-{rank}").exists() for rank in range(len(bodies))):
            assert time.monotonic() < deadline, "the ranks never started"
            time.sleep(0.01)
        return ranks

    yield start_all
    for process in ranks.processes:
        if process.poll() is None:
            process.kill()
        process.communicate()


def assert_names(ranks, survivor, dead, text="stopped without saying goodbye during step 7"):
    code, _, err = ranks.end(survivor)
    assert code == EXIT_CODE, err
    assert f"rank {dead} (host " in err, err
    assert f"pid {ranks.processes[dead].pid}) {text}" in err, err
    assert f"rank {survivor} ends now" in err, err


@pytest.mark.parametrize("world", [2, 3, 4, 6])
def test_killed_rank_is_named_by_all_others_while_they_block(start, world):
    ranks = start(*[BLOCK] * world)
    began = time.monotonic()
    ranks.kill(1)
    for survivor in [rank for rank in range(world) if rank != 1]:
        assert_names(ranks, survivor, dead=1)
    assert time.monotonic() - began < 5


def test_only_the_dead_rank_is_named(start):
    ranks = start(*[BLOCK] * 5)
    ranks.kill(3)
    for survivor in (0, 1, 2, 4):
        _, _, err = ranks.end(survivor)
        assert err.count("ends now") == 1, err


def test_ranks_that_end_earlier_on_the_same_news_are_not_named(start):
    hasty = "import megatron_hdp.liveness as l; l._GRACE_S = 0.1\n"
    ranks = start(hasty + BLOCK, BLOCK, hasty + BLOCK, BLOCK, BLOCK)
    ranks.kill(1)
    for survivor in (3, 4):
        _, _, err = ranks.end(survivor)
        assert err.count("ends now") == 1, err
        assert "rank 1 (host" in err, err


@pytest.mark.parametrize("dead", [(1, 2), (0, 2)], ids=["neighbours", "opposite"])
def test_two_ranks_killed_at_once(start, dead):
    ranks = start(*[BLOCK] * 4)
    ranks.kill(*dead)
    for survivor in {0, 1, 2, 3} - set(dead):
        code, _, err = ranks.end(survivor)
        assert code == EXIT_CODE
        assert any(f"rank {rank} (host" in err for rank in dead), err
        assert not any(f"rank {rank} (host" in err for rank in {0, 1, 2, 3} - set(dead)), err


def test_exception_is_told_with_its_reason(start):
    failing = "wait_for('go'); raise RuntimeError('out of luck\\nsecond line')"
    ranks = start(BLOCK, BLOCK, failing, BLOCK)
    ranks.tell("go")
    for survivor in (0, 1, 3):
        assert_names(ranks, survivor, dead=2, text="failed during step 7: RuntimeError: out of luck; rank")
    code, _, err = ranks.end(2)
    assert code == 1
    assert "second line" in err
    assert "ends now" not in err


def test_rank_that_fails_because_of_a_death_does_not_take_the_blame(start):
    """A collective raises on the neighbours of a dead rank at once: the news must still name the dead one."""
    consequence = "wait_for('killed'); raise RuntimeError('connection reset by peer')"
    ranks = start(consequence, "wait_for('never')", BLOCK, consequence)
    ranks.tell("killed")
    time.sleep(0.3)  # the exceptions come first, as they may
    ranks.kill(1)
    for survivor in (0, 2, 3):
        assert_names(ranks, survivor, dead=1)
    for failed in (0, 3):
        assert ranks.processes[failed].returncode == EXIT_CODE


def test_own_traceback_is_not_lost_when_an_earlier_death_ends_the_rank(start):
    ranks = start("wait_for('go'); raise KeyError('mine')", BLOCK, BLOCK)
    ranks.tell("go")
    time.sleep(0.3)
    ranks.kill(1)
    _, _, err = ranks.end(0)
    assert "had itself just failed" in err
    assert "KeyError: 'mine'" in err


@pytest.mark.parametrize("stop", ["raise SystemExit", "sys.exit(0)", "pass"])
def test_normal_end_is_silent(start, stop):
    ranks = start(*[stop] * 4)
    for rank in range(4):
        code, out, err = ranks.end(rank)
        assert (code, err) == (0, "")
        assert ("left normally" in out) == (stop == "pass")


def test_exit_with_a_code_is_a_failure(start):
    ranks = start("sys.exit(3)", BLOCK)
    assert_names(ranks, 1, dead=0, text="failed during step 7: SystemExit: 3")
    assert ranks.end(0)[0] == 3


def test_goodbye_codes_are_no_failure(start):
    """Megatron ends all ranks with codes such as 17 to tell its scheduler something."""
    program = RANK.replace("step=lambda: 7)", "step=lambda: 7, goodbye_codes=(0, 17))")
    ranks = start("sys.exit(17)", "sys.exit(17)", "sys.exit(17)", program=program)
    for rank in range(3):
        code, _, err = ranks.end(rank)
        assert (code, err) == (17, "")


@pytest.mark.parametrize("end", ["leave", "fail"])
def test_the_thread_may_end_before_it_is_woken(end):
    """A neighbour's goodbye can wake the thread between the request to leave and the byte that should wake it."""
    watcher = object.__new__(_Watcher)
    watcher._pid = os.getpid()
    watcher._wake, other = socket.socketpair()
    watcher._wake.close()
    other.close()
    watcher._thread = threading.Thread(target=lambda: None)
    watcher._thread.start()
    watcher.leave() if end == "leave" else watcher.fail(KeyError("mine"))


def test_ranks_that_leave_early_disturb_nobody(start):
    ranks = start("pass", "wait_for('go')", "pass", "wait_for('go')", "pass")
    for rank in (0, 2, 4):
        assert ranks.end(rank)[0] == 0
    time.sleep(0.5)
    assert ranks.processes[1].poll() is None
    ranks.tell("go")
    for rank in (1, 3):
        assert ranks.end(rank)[::2] == (0, "")


@pytest.mark.parametrize("leaving", [(1,), (1, 3), (3, 4), (1, 3, 4)])
def test_rest_is_still_watched_after_goodbyes(start, leaving):
    """Without connecting around the ranks that left, 0 and 2 would not be joined any more."""
    bodies = ["wait_for('go')" if rank in leaving else BLOCK for rank in range(5)]
    ranks = start(*bodies)
    ranks.tell("go")
    for rank in leaving:
        assert ranks.end(rank)[0] == 0
    time.sleep(0.5)
    ranks.kill(2)
    for survivor in {0, 1, 3, 4} - set(leaving):
        assert_names(ranks, survivor, dead=2)


def test_forked_child_does_not_hide_the_death_of_its_parent(start):
    """Data workers and checkpoint writers are forked and outlive a killed parent with its open files."""
    forks = "child = os.fork()\nif child == 0: time.sleep(60); os._exit(0)\n(folder / 'child').write_text(str(child))\n"
    ranks = start(forks + BLOCK, BLOCK, BLOCK)
    while not (ranks.folder / "child").exists() or not (ranks.folder / "child").read_text():
        time.sleep(0.01)
    ranks.kill(0)
    try:
        for survivor in (1, 2):
            assert_names(ranks, survivor, dead=0)
    finally:
        os.kill(int((ranks.folder / "child").read_text()), signal.SIGKILL)


def test_strangers_on_the_port_change_nothing(start):
    strange = """
import json, socket
member = json.loads((folder / "address-0").read_text())
for words in (b"", b"GET / HTTP/1.1\\r\\n\\r\\n", b'{"kind": "hello", "rank": 1, "token": "wrong"}\\n',
              b'{"kind": "news", "rank": 1, "host": "", "pid": 1, "step": 1, "reason": "lie"}\\n'):
    with socket.create_connection(("127.0.0.1", member["port"])) as sock:
        sock.sendall(words)
wait_for("go")
"""
    ranks = start("wait_for('go')", strange)
    time.sleep(0.5)
    ranks.tell("go")
    assert [ranks.end(rank)[0] for rank in (0, 1)] == [0, 0]


COLLECTIVE = """
import sys, time, torch, torch.distributed as dist
from datetime import timedelta
from pathlib import Path
from megatron_hdp.liveness import watch

rank, world, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world,
                        timeout=timedelta(minutes=10))

def exchange(text):
    told = [None] * world
    dist.all_gather_object(told, text)
    return told

with watch(rank, world, exchange, step=lambda: 7):
    (folder / f"in-{rank}").touch()
    if rank == 1:
        time.sleep(600)
    dist.all_reduce(torch.ones(8))
"""


def test_rank_killed_in_a_collective(start):
    """Gloo raises on some ranks at once and would block others for its ten minutes."""
    ranks = start("", "", "", program=COLLECTIVE)
    time.sleep(0.5)
    ranks.kill(1)
    for survivor in (0, 2):
        assert_names(ranks, survivor, dead=1)


def test_one_process_needs_no_exchange():
    def exchange(_):
        raise AssertionError("called")

    with watch(0, 1, exchange):
        pass


def test_sentence():
    news = News(rank=3, host="node7", pid=41, step=None, reason="")
    assert news.sentence(0) == (
        "megatron_hdp: rank 3 (host node7, pid 41) stopped without saying goodbye; rank 0 ends now\n"
    )
    assert "lost the connection to rank 3" in news.sentence(3)
