"""TCP connections between the processes of a run: free ports, reachable addresses, and quick notice of a lost node."""

import os
import socket
from contextlib import suppress
from dataclasses import dataclass

IO_S = 2.0
"""Seconds after which connecting, sending or receiving a small message gives up."""


@dataclass(frozen=True)
class Member:
    """What each process tells the others about itself at the start."""

    rank: int
    host: str
    pid: int
    port: int
    token: str
    addresses: tuple[str, ...]


@dataclass(eq=False)
class Link:
    """One connection. `peer` may be trusted once `greeted`; `opening` marks the ring's first connections."""

    sock: socket.socket
    peer: int = -1
    greeted: bool = False
    dialled: bool = False
    opening: bool = False
    buffer: bytes = b""


def has_more(sock: socket.socket) -> bool:
    """Read and discard; False at the end of the connection."""
    try:
        return bool(sock.recv(4096))
    except OSError:
        return False


def listen() -> socket.socket:
    """A listening socket on a free port of every interface; the tokens keep strangers out."""
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=128)
        except OSError:  # IPv6 compiled in but switched off
            pass
    return socket.create_server(("", 0), backlog=128)


def own_addresses() -> tuple[str, ...]:
    """Addresses under which the other nodes may reach this one, the likeliest first.

    The interface that leads to torch's MASTER_ADDR comes first, then what the host name resolves to. Connecting a UDP
    socket sends nothing; it only asks the kernel for the route.
    """
    found: list[str] = []
    for remote in (os.environ.get("MASTER_ADDR", ""), "192.0.2.1"):  # 192.0.2.1 (RFC 5737): the default route
        try:
            for family, kind, _, _, address in socket.getaddrinfo(remote, 9, type=socket.SOCK_DGRAM) if remote else ():
                with socket.socket(family, kind) as probe:
                    probe.connect(address)
                    found.append(probe.getsockname()[0])
        except OSError:
            continue
    with suppress(OSError):
        found += [str(info[4][0]) for info in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)]
    far = [address for address in found if not address.startswith(("127.", "::1"))]
    return (*dict.fromkeys(far), "127.0.0.1")


def tuned(sock: socket.socket) -> socket.socket:
    """Small messages at once; a node that vanished is noticed after 15 + 4 x 5 seconds of silence."""
    sock.settimeout(IO_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4), ("TCP_USER_TIMEOUT", 35_000)):
        if hasattr(socket, name):  # Linux has all four
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return sock
