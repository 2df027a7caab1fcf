"""Operating-system process groups, read from /proc: members, termination, leftover shared memory.

Every child of the launcher leads a session of its own, and its own children stay in that session. So ending
the session also ends grandchildren (vLLM's engine core and workers), even if their parent has exited.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")


WARNINGS = (signal.SIGTERM, signal.SIGUSR1)
"""Signals by which schedulers announce, often to every process of a job, that it is about to end."""


@contextmanager
def holding_warnings() -> Iterator[None]:
    """Within the block ``WARNINGS`` wait; programs that are started in it never get them.

    For helpers that their parent ends: a signal that came before such a program ignores it would end it, and
    its parent would report a fault where it should save and exit.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, WARNINGS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def boot_id() -> str:
    """Identifies this machine since it was booted."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def _stat_fields(pid: int | str) -> list[str]:
    """Fields of /proc/PID/stat from the state on (the name before it may contain spaces); [] if it ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return text.rpartition(")")[2].split()


def start_time(pid: int) -> int | None:
    """Clock tick at which a process started; None if it has ended. Unique together with the pid."""
    fields = _stat_fields(pid)
    return int(fields[19]) if fields and fields[0] != "Z" else None


def address_space() -> int:
    """Bytes of this process's address space."""
    return int(_stat_fields("self")[20])


def members(*leaders: int) -> list[int]:
    """Pids of the running processes in the groups or sessions that ``leaders`` lead; no zombies."""
    return [pid for pid, _ in _members_of(leaders)]


def _members_of(leaders: Iterable[int]) -> list[tuple[int, int]]:
    """Pid and leader of each member of the groups. Reads /proc once, for any number of leaders."""
    leader_of = {str(leader): leader for leader in leaders}
    pairs = []
    for entry in os.listdir("/proc") if leader_of else ():
        if entry.isdigit():
            fields = _stat_fields(entry)
            if fields and fields[0] not in "ZX":
                leader = leader_of.get(fields[2]) or leader_of.get(fields[3])
                if leader is not None:
                    pairs.append((int(entry), leader))
    return pairs


def send(leaders: Iterable[int], number: signal.Signals, *, trackers: bool = True) -> None:
    """Send a signal to every member of the given groups.

    trackers: also to Python's resource trackers, which exit last and remove shared memory of the others.
    """
    for pid in members(*leaders):
        if not trackers and _is_tracker(pid):
            continue
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def wait_empty(leaders: Iterable[int], seconds: float) -> set[int]:
    """Wait until the groups have no running member. Returns those that still have one after ``seconds``."""
    remaining, end = set(leaders), time.monotonic() + seconds
    while True:
        remaining = {leader for _, leader in _members_of(remaining)}
        if not remaining or time.monotonic() >= end:
            return remaining
        time.sleep(0.05)


def end_groups(leaders: Iterable[int]) -> None:
    """Send SIGKILL to every member of the given groups, resource trackers last, and wait for their ends."""
    remaining = set(leaders)
    send(remaining, signal.SIGKILL, trackers=False)
    remaining = wait_empty(remaining, 3.0)
    end = time.monotonic() + 10.0
    while remaining and time.monotonic() < end:
        send(remaining, signal.SIGKILL)
        remaining = wait_empty(remaining, 0.5)


def _is_tracker(pid: int) -> bool:
    try:
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def leftover_segments(leaders: Iterable[int]) -> set[Path]:
    """Shared-memory files of vLLM that may remain when its processes end; call it before they end.

    Files of the CPU workers' all-reduce (cpushm) are removed by no process. Message queues (psm_) are removed
    by vLLM or by Python's resource tracker, unless both are killed. Only memory maps of the processes show
    which process uses a file.
    """
    return set().union(*segments_of(leaders).values())


def segments_of(leaders: Iterable[int]) -> dict[int, set[Path]]:
    """``leftover_segments`` by leader; leaders without any are left out."""
    by_leader: dict[int, set[Path]] = {}
    for pid, leader in _members_of(leaders):
        try:
            lines = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            continue
        paths = {Path(line[line.index("/") :]) for line in lines if f" {SHARED_MEMORY}/" in line}
        if segments := {p for p in paths if "-cpushm_" in p.name or p.name.startswith("psm_")}:
            by_leader.setdefault(leader, set()).update(segments)
    return by_leader
