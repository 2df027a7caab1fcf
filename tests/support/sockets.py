"""The TCP sockets of a process, as the kernel lists them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_LISTENS, _CONNECTED = "0A", "01"


def listening_ports(process: int | str = "self") -> list[int]:
    """The TCP ports that a process listens on, ascending."""
    return sorted(_local_ports(process, _LISTENS))


def connections(process: int | str = "self") -> int:
    """How many TCP connections a process has open."""
    return len(list(_local_ports(process, _CONNECTED)))


def _local_ports(process: int | str, wanted: str) -> Iterator[int]:
    proc, inodes = Path("/proc") / str(process), set()
    for link in (proc / "fd").iterdir():
        with suppress(OSError):  # closed in the meantime
            inodes.add(os.readlink(link))
    for family in ("tcp", "tcp6"):
        for line in (proc / "net" / family).read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == wanted and f"socket:[{rest[5]}]" in inodes:
                yield int(local.rpartition(":")[2], 16)
