"""A rank that stops in mid-step is noticed, named and followed by all others within seconds, instead of a silent hang.

Every process holds one TCP connection to its successor on a ring of all processes, and a daemon thread watches both
ends. A process that leaves normally says goodbye first. A connection that closes without goodbye means that the process
behind it is dead: the thread prints who it was, passes the news on, and after a short grace ends its own process with
exit code 70, even while the main thread sits in a collective. The kernel closes the connections of a killed process, so
no heartbeat is needed and nothing is added to the training path; TCP keepalive covers a lost node (within 35 seconds).

Rules that keep the blame right:
- News travel before the process that tells them ends, and are told back to whom they came from. So a connection that
  closes after news came over it is a consequence, and one that closes without any is a death of its own.
- A rank that fails with an exception waits a moment for news of an earlier death, since a collective often raises on
  the neighbours of a dead rank before anything else is known.
- When a neighbour says goodbye, its predecessor connects around it, so the rest stays one ring. A connection that fails
  on that way is never called a death: at the end of a run all ranks leave at once. The dead rank's other neighbour
  still notices a real death.

Out of scope: a process that is stopped (SIGSTOP) or stuck on its GPU keeps its connections, and a thread that never
gives up Python's global lock silences this one. Timeouts of the collectives are for those.
"""

import json
import os
import secrets
import selectors
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Any

from megatron_hdp.errors import HdpError, RankLostError
from megatron_hdp.tcp import IO_S, Link, Member, has_more, listen, own_addresses, tuned

EXIT_CODE = 70
"""Exit code of a process that ends because of another one (EX_SOFTWARE of sysexits.h)."""

_GRACE_S = 1.0  # between hearing the news and ending, so that they travel on
_LISTEN_S = 2.0  # how long a failing rank listens for the news of an earlier death
_DRAIN_S = 0.5  # closing while unread bytes are waiting would reset the connection and lose our last words
_DETOUR_S = 10.0
_START_S = 60.0
_MAX_LINE_BYTES = 8192
_MAX_REASON = 300


@dataclass(frozen=True)
class News:
    """Who stopped first. `reason` is "" for a process that vanished without a word; `step` is None when unknown, and
    negative before the first one."""

    rank: int
    host: str
    pid: int
    step: int | None
    reason: str

    def sentence(self, reader: int) -> str:
        """The line that rank `reader` prints before it ends."""
        during = ""
        if self.step is not None:
            during = f" during step {self.step}" if self.step >= 0 else " before the first step"
        if reader == self.rank:
            return (
                f"megatron_hdp: the other ranks lost the connection to rank {reader}{during}; rank {reader} ends now\n"
            )
        how = f"failed{during}: {self.reason}" if self.reason else f"stopped without saying goodbye{during}"
        return f"megatron_hdp: rank {self.rank} (host {self.host}, pid {self.pid}) {how}; rank {reader} ends now\n"


@contextmanager
def watch(
    rank: int,
    world_size: int,
    exchange: Callable[[str], list[str]],
    step: Callable[[], int | None] = lambda: None,
    goodbye_codes: Container[int | str] = (0,),
) -> Iterator[None]:
    """Watch all processes of the run while the body runs. Collective: every process enters it with its own rank.

    Leaving normally, or by SystemExit with None or a goodbye code, says goodbye. Any other exception is told to the
    others, which print it and end; it is then raised on as usual, after up to two seconds of listening for an earlier
    death.

    Args:
        rank: rank of this process, 0 <= rank < world_size.
        world_size: number of processes. With 1 there is nothing to watch and `exchange` is not called.
        exchange: gathers one string from every process and returns them in the order of ranks (all_gather_object).
        step: current training step, for the message, negative before the first; called in the watching thread.
        goodbye_codes: exit codes with which all processes leave together, on purpose.

    Raises:
        RankLostError: the neighbours could not be reached at the start.
    """
    if world_size == 1:
        yield
        return
    watcher = _Watcher(rank, world_size, exchange, step)
    try:
        yield
    except SystemExit as stop:
        if stop.code is None or stop.code in goodbye_codes:
            watcher.leave()
        else:
            watcher.fail(stop)
        raise
    except BaseException as error:
        watcher.fail(error)
        raise
    watcher.leave()


class _Watcher:
    """The watching thread and its connections. After `__init__` only that thread touches the connections."""

    def __init__(
        self, rank: int, world_size: int, exchange: Callable[[str], list[str]], step: Callable[[], int | None]
    ) -> None:
        self._rank, self._size, self._step, self._pid = rank, world_size, step, os.getpid()
        self._server = listen()
        self._me = Member(
            rank,
            socket.gethostname(),
            self._pid,
            self._server.getsockname()[1],
            secrets.token_hex(16),
            own_addresses(),
        )
        told = [json.loads(text) for text in exchange(json.dumps(asdict(self._me)))]
        self._members = [Member(**{**member, "addresses": tuple(member["addresses"])}) for member in told]
        if [member.rank for member in self._members] != list(range(world_size)):
            raise RankLostError(
                f"expected one address from each of {world_size} ranks in order, got ranks "
                f"{[member.rank for member in self._members]}"
            )
        self._links: set[Link] = set()
        self._left: set[int] = set()  # said goodbye
        self._informed: set[int] = set()  # told us news; their end is a consequence
        self._known: set[int] = set()  # ranks that news were about
        self._ends_at: float | None = None
        self._fails_at: float | None = None
        self._request: str | None = None  # set by the main thread: "" to leave, else the reason for failing
        self._own_error = ""
        self._wake, self._woken = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._server, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._ready = threading.Event()
        self._met: set[str] = set()
        self._successor = (rank + 1) % world_size
        # A forked child (data worker, checkpoint writer) would keep a killed parent's connections open.
        os.register_at_fork(after_in_child=self._forget)
        self._open()

    def _open(self) -> None:
        """Connect to the successor, start the thread, and wait until both neighbours have greeted."""
        if not self._dial(self._successor, opening=True):
            member = self._members[self._successor]
            raise RankLostError(
                f"rank {self._rank} could not connect to rank {member.rank} (host {member.host}, pid {member.pid}) at "
                f"any of {', '.join(member.addresses)} port {member.port}: either it stopped, or a firewall blocks TCP "
                "between the nodes"
            )
        self._thread = threading.Thread(target=self._run, name="megatron_hdp-liveness", daemon=True)
        self._thread.start()
        if not self._ready.wait(_START_S):
            raise RankLostError(
                f"rank {self._rank} waited {_START_S:.0f} s for rank {(self._rank - 1) % self._size} to connect to one "
                f"of {', '.join(self._me.addresses)} port {self._me.port}: a firewall blocks TCP between the nodes"
            )

    def leave(self) -> None:
        """Say goodbye and stop watching."""
        self._ask("")

    def fail(self, error: BaseException) -> None:
        """Listen for an earlier death; if there was none, tell the others why this rank stops."""
        own = isinstance(error, HdpError)  # written for the user, who needs no stack
        self._own_error = f"{type(error).__name__}: {error}\n" if own else "".join(traceback.format_exception(error))
        first_line = str(error).strip().partition("\n")[0]
        self._ask(f"{type(error).__name__}: {first_line}"[:_MAX_REASON])

    def _ask(self, request: str) -> None:
        if os.getpid() != self._pid:  # a forked child leaves the body too, but is no member
            return
        self._request = request
        with suppress(OSError):  # another event may have woken the thread just now: then it has acted, and closed this
            self._wake.send(b"x")
        self._thread.join(_LISTEN_S + _DETOUR_S)

    # ---- the watching thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            due = min((at for at in (self._ends_at, self._fails_at) if at is not None), default=None)
            events = self._selector.select(None if due is None else max(0.0, due - time.monotonic()))
            for key, _ in events:
                if key.fileobj is self._server:
                    self._accept()
                elif key.fileobj is self._woken:
                    self._woken.recv(1)
                elif isinstance(key.data, Link):
                    self._receive(key.data)
            now = time.monotonic()
            if self._ends_at is not None:
                if now >= self._ends_at:
                    os._exit(EXIT_CODE)
            elif self._request == "":
                self._say({"kind": "goodbye"})
                return self._close()
            elif self._request is not None and self._fails_at is None:
                self._fails_at = now + (_LISTEN_S if self._links else 0.0)
            elif self._fails_at is not None and now >= self._fails_at:
                self._say({"kind": "news", **asdict(self._news(self._rank, self._request or ""))})
                return self._close()

    def _accept(self) -> None:
        try:
            sock, _ = self._server.accept()
        except OSError:
            return
        self._register(Link(tuned(sock)))

    def _register(self, link: Link) -> None:
        self._links.add(link)
        self._selector.register(link.sock, selectors.EVENT_READ, link)

    def _drop(self, link: Link) -> None:
        if link in self._links:
            self._links.remove(link)
            self._selector.unregister(link.sock)
            link.sock.close()

    def _dial(self, rank: int, opening: bool = False) -> bool:
        """Connect to a rank and greet it; whether that worked. Its answer comes later."""
        member = self._members[rank]
        for address in member.addresses:
            if address.startswith(("127.", "::1")) and member.host != self._me.host:
                continue  # would reach somebody on this host
            try:
                sock = tuned(socket.create_connection((address, member.port), IO_S))
            except OSError:
                continue
            link = Link(sock, peer=rank, dialled=True, opening=opening)
            self._register(link)
            self._send(link, {"kind": "hello", "rank": self._rank, "token": member.token})
            return True
        return False

    def _detour(self, after: int) -> None:
        """Connect to the next rank behind `after` that still listens, if any."""
        give_up = time.monotonic() + _DETOUR_S
        for offset in range(1, self._size):
            rank = (after + offset) % self._size
            if rank == self._rank or self._request is not None or time.monotonic() > give_up:
                return
            self._successor = rank
            if rank not in self._left and self._dial(rank):
                return

    def _receive(self, link: Link) -> None:
        try:
            data = link.sock.recv(4096)
        except TimeoutError:
            return
        except OSError:
            data = b""  # a reset is an end like any other
        if not data:
            return self._ended(link)
        *lines, link.buffer = (link.buffer + data).split(b"\n")
        for line in lines:
            try:
                message = json.loads(line)
                kind = message["kind"]
            except (ValueError, TypeError, KeyError):
                return self._drop_stranger(link)
            if kind == "hello":
                self._greet(link, message)
            elif not link.greeted:
                return self._drop_stranger(link)
            elif kind == "goodbye":
                return self._departed(link)
            elif kind == "news":
                self._informed.add(link.peer)
                self._spread(News(**{name: message[name] for name in News.__dataclass_fields__}))
        if len(link.buffer) > _MAX_LINE_BYTES:
            self._drop_stranger(link)

    def _drop_stranger(self, link: Link) -> None:
        """Members never send what brings us here, so whoever did is none and nothing follows from it."""
        if not link.greeted:
            self._drop(link)

    def _greet(self, link: Link, message: dict[str, Any]) -> None:
        rank, token = message.get("rank"), message.get("token")
        if token != self._me.token or not isinstance(rank, int) or not 0 <= rank < self._size:
            return self._drop_stranger(link)
        if not link.dialled:
            link.peer = rank
            self._send(link, {"kind": "hello", "rank": self._rank, "token": self._members[rank].token})
        link.greeted = True
        self._met.add("successor" if link.dialled else "predecessor")
        if len(self._met) == 2:
            self._ready.set()

    def _departed(self, link: Link) -> None:
        self._left.add(link.peer)
        self._drop(link)
        if link.peer == self._successor:
            self._detour(link.peer)

    def _ended(self, link: Link) -> None:
        """A connection closed, and no goodbye came over it."""
        self._drop(link)
        if link.peer in self._left or link.peer in self._informed or link.peer < 0:
            return
        if link.greeted or link.opening:
            self._spread(self._news(link.peer, ""))
        elif link.dialled:
            self._detour(link.peer)

    def _news(self, rank: int, reason: str) -> News:
        try:
            step = self._step()
        except Exception:  # the message matters more than the step in it
            step = None
        member = self._members[rank]
        return News(rank, member.host, member.pid, step, reason)

    def _spread(self, news: News) -> None:
        """Print news heard for the first time, tell all neighbours, and prepare to end."""
        if news.rank in self._known:
            return
        self._known.add(news.rank)
        text = news.sentence(self._rank)
        if self._own_error:  # the main thread will not get to print it
            text += f"megatron_hdp: rank {self._rank} had itself just failed:\n{self._own_error}"
        # In a thread of its own, because a full pipe must not keep this process from ending.
        threading.Thread(target=_print, args=(text,), daemon=True).start()
        self._say({"kind": "news", **asdict(news)})
        if self._ends_at is None:
            self._ends_at = time.monotonic() + _GRACE_S

    def _say(self, message: dict[str, Any]) -> None:
        for link in list(self._links):
            if link.greeted or link.dialled:  # a dialled rank trusts us from our hello on, before we hear from it
                self._send(link, message)

    @staticmethod
    def _send(link: Link, message: dict[str, Any]) -> None:
        with suppress(OSError):  # the end of this connection is noticed when it is read
            link.sock.sendall(json.dumps(message).encode() + b"\n")

    def _close(self) -> None:
        """Close so that the last words arrive."""
        self._selector.unregister(self._server)
        self._server.close()
        for link in self._links:
            with suppress(OSError):
                link.sock.shutdown(socket.SHUT_WR)
        give_up = time.monotonic() + _DRAIN_S
        while self._links and time.monotonic() < give_up:
            for key, _ in self._selector.select(give_up - time.monotonic()):
                if isinstance(key.data, Link) and not has_more(key.data.sock):
                    self._drop(key.data)
        self._forget()

    def _forget(self) -> None:
        """Close this process's ends without a word (the parent of a forked child still has its own)."""
        for link in self._links:
            link.sock.close()
        for end in (self._server, self._wake, self._woken):
            end.close()
        self._selector.close()


def _print(text: str) -> None:
    """Write to stderr past `sys.stderr`, whose lock the main thread may hold; then save what stdout still buffers."""
    os.write(2, text.encode())
    sys.stdout.flush()
