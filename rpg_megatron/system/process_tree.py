"""The processes below this one: which they are, their end, and the memory that they take.

Memory is that of the processes, of file systems in memory, and what the kernel keeps for them: tables of
pages, lists of mappings, files, sockets, pipes. Each of these counts with the most that it can have under
``sandbox.program_filter``. Not counted: locks of files, pipes in transit between processes. Source: proc(5).
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from rpg_megatron.system.sandbox import LARGEST_SHARED

_INODE, _MAPPING, _SOCKET, _PIPE, _EPOLL = 1536, 1 << 10, 1 << 19, 1 << 16, 1 << 16
"""Most bytes that the kernel keeps for each."""
_HIDDEN = f"VmRSS:\t{1 << 40} kB"
"""What a process counts whose memory cannot be read."""
_MAPS = 1 << 19
"""Bytes of a list of mappings that are read; a longer one counts as the longest, of the largest mappings."""


def descendants() -> list[int]:
    """Pids of all processes below this one."""
    found = [os.getpid()]
    for pid in found:  # grows
        with suppress(OSError):
            for task in Path(f"/proc/{pid}/task").iterdir():
                found += map(int, (task / "children").read_text().split())
    return found[1:]


def kill_descendants() -> None:
    """End all processes below this one, which must be the parent of orphans, and wait for their ends."""
    with suppress(ChildProcessError):
        while True:
            for pid in descendants():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
            time.sleep(0.001)


class MemoryOfProcesses:
    """What processes take, over several looks."""

    def __init__(self, folders: Sequence[str]):
        """folders: mounts of file systems in memory. The content of the first is not counted."""
        self._folders = folders
        self._of_kernel: dict[int, tuple[int, set[str]]] = {}
        """By process, the one seen longest ago first."""
        self._outside = os.readlink("/proc/self/ns/net")

    def look(self, processes: list[int]) -> int:
        """Bytes. What the kernel keeps is read for two of them at each look: so it takes as long for many."""
        total, networks = 0, {self._outside}
        for pid in processes:
            with suppress(OSError):
                place, status = _thread_of(pid)
                sizes = re.findall(r"^(?:VmRSS|VmPTE|VmSwap|HugetlbPages):\s+(\d+)", status, re.MULTILINE)
                total += sum(map(int, sizes)) << 10
                if (network := os.readlink(place / "ns/net")) not in networks:
                    networks.add(network)  # its sockets, also those that no process has yet, or any more
                    total += (place / "net/unix").read_bytes().count(b"\n") * _SOCKET
        kept = self._of_kernel = {pid: seen for pid, seen in self._of_kernel.items() if pid in processes}
        unseen = [pid for pid in processes if pid not in kept]
        for pid in [*unseen[:1], *[*kept][:1]]:
            kept.pop(pid, None)
            kept[pid] = _of_kernel(pid)
        total += sum(size for size, _ in kept.values())
        total += len(set().union(*(pipes for _, pipes in kept.values()))) * _PIPE
        for number, folder in enumerate(map(os.statvfs, self._folders)):
            total += (folder.f_files - folder.f_ffree) * _INODE
            total += (folder.f_blocks - folder.f_bfree) * folder.f_frsize * (number > 0)
        return total


def _thread_of(pid: int) -> tuple[Path, str]:
    """Folder and status of a thread that tells of its process, as the first does not when it has ended."""
    for _ in range(10):
        threads = sorted(Path(f"/proc/{pid}/task").iterdir(), key=lambda place: place.name != str(pid))
        for place in threads:
            with suppress(OSError):
                if "VmRSS" in (status := (place / "status").read_text(errors="replace")):
                    return place, status
        if len(threads) < 2:
            return Path(f"/proc/{pid}"), ""
    return Path(f"/proc/{pid}"), _HIDDEN  # each was replaced by another before it could be read


def _of_kernel(pid: int) -> tuple[int, set[str]]:
    """Bytes that the kernel keeps for a process, and its pipes, which it may share."""
    total, pipes = 0, set()
    with suppress(OSError):
        with open(_thread_of(pid)[0] / "maps", "rb") as file:
            maps = file.read(_MAPS)
        total += maps.count(b"\n") * _MAPPING
        unread = (len(maps) == _MAPS) << 16
        total += (maps.count(b"/dev/zero (deleted)\n") + unread) * LARGEST_SHARED
        for task in Path(f"/proc/{pid}/task").iterdir():  # they may have descriptors of their own
            names = [os.readlink(place) for place in (task / "fd").iterdir()]
            pipes |= {name for name in names if name.startswith("pipe:")}
            total += names.count("anon_inode:[eventpoll]") * _EPOLL
    return total, pipes
