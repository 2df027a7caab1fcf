"""The TCP sockets of a process, as the kernel lists them."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def listening_ports(process: int | str = "self") -> list[int]:
    """The TCP ports that a process listens on, ascending."""
    proc, inodes, ports = Path("/proc") / str(process), set(), []
    for link in (proc / "fd").iterdir():
        with suppress(OSError):  # closed in the meantime
            inodes.add(os.readlink(link))
    for family in ("tcp", "tcp6"):
        for line in (proc / "net" / family).read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == "0A" and f"socket:[{rest[5]}]" in inodes:
                ports.append(int(local.rpartition(":")[2], 16))
    return sorted(ports)
