"""How much host memory is there for the arena? Asked before it is taken, as the kernel kills instead of refusing.

No torch. Linux says it in /proc/meminfo and in the limits of the control groups, versions 1 and 2; where neither can be
read there is no answer, and only the allocation itself shows.
"""

from pathlib import Path
from typing import NamedTuple

from megatron_hdp.errors import ConfigError

OFFLOAD_FLAG = "--hdp-offload-gib"


class Room(NamedTuple):
    """Bytes that can still be had, and who says so."""

    bytes: int
    source: str


def available_memory(root: Path = Path("/")) -> Room | None:
    """The tightest of the limits that hold for this process; None if the platform tells none."""
    rooms = [room for room in (_meminfo(root), *_group_rooms(root)) if room is not None]
    return min(rooms, default=None)


def require_host_memory(bytes: int, processes: int = 1, root: Path = Path("/")) -> None:
    """Raise ConfigError unless ``processes`` processes of this node can have ``bytes`` bytes each.

    For ranks that make their arenas at the same time: ask on all of them with the number of ranks on the node, then
    wait for each other (a barrier), then make the arenas; no rank then counts what another has just taken.
    """
    room = available_memory(root)
    if room is not None and bytes * processes > room.bytes:
        raise ConfigError(
            f"activation offload: {processes} x {gib(bytes)} of host memory asked for, "
            f"{gib(room.bytes)} available ({room.source}): lower {OFFLOAD_FLAG}, or free or add host memory"
        )


def gib(bytes: int) -> str:
    """For messages: 1.50 GiB, and small amounts in full."""
    return f"{bytes / 2**30:.2f} GiB" if bytes >= 2**27 else f"{bytes} bytes"


def _meminfo(root: Path) -> Room | None:
    text = _read(root / "proc/meminfo")
    for line in (text or "").splitlines():
        if line.startswith("MemAvailable:"):
            return Room(int(line.split()[1]) * 1024, "MemAvailable of /proc/meminfo")
    return None


def _group_rooms(root: Path) -> list[Room]:
    """Room under the memory limit of every control group that this process is in, up to the topmost visible one."""
    rooms = []
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":  # version 2
            mount, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            mount = root / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        folder = mount / path.lstrip("/")
        # In a container the path may be the host's, and the mount itself be the group.
        for group in [*_up_to(folder, mount), mount]:
            room = _group_room(group, *names)
            if room is not None:
                rooms.append(room)
    return rooms


def _up_to(folder: Path, mount: Path) -> list[Path]:
    """``folder`` and those above it, below ``mount``."""
    return [group for group in (folder, *folder.parents) if group != mount and group.is_relative_to(mount)]


def _group_room(group: Path, limit_name: str, used_name: str, reclaimable_name: str) -> Room | None:
    limit, used = _number(_read(group / limit_name)), _number(_read(group / used_name))
    if limit is None or used is None or limit >= 2**60:  # version 1 writes "no limit" as a huge number
        return None
    reclaimable = 0
    for line in (_read(group / "memory.stat") or "").splitlines():
        name, _, value = line.partition(" ")
        if name == reclaimable_name:  # file pages that the kernel drops before it refuses anybody
            reclaimable = _number(value) or 0
    return Room(max(0, limit - used + reclaimable), f"{limit_name} of control group {group}")


def _number(text: str | None) -> int | None:
    stripped = (text or "").strip()
    return int(stripped) if stripped.isdigit() else None  # "max" is no limit


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None
