"""Process groups as /proc shows them: who is in one, how to end one, what it left in shared memory.

Every child of the launcher leads a session of its own, and what it starts stays in that session: ending the
session ends grandchildren too (vLLM's engine core and workers), whether or not their parent still lives.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")


def _stat_fields(pid: int | str) -> list[str]:
    """Fields of /proc/PID/stat from the state on (the name before it may hold blanks), or nothing."""
    try:
        return (
            Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        )
    except OSError:
        return []


def start_time(pid: int) -> int | None:
    """Clock tick at which a process started, None if it is gone. With the pid it names a process for good."""
    fields = _stat_fields(pid)
    return int(fields[19]) if fields and fields[0] != "Z" else None


def members(leader: int) -> list[int]:
    """Living processes of the group or session that ``leader`` leads; zombies do not count."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            fields = _stat_fields(entry)
            if fields and fields[0] not in "ZX" and str(leader) in (fields[2], fields[3]):
                found.append(int(entry))
    return found


def send(leaders: Iterable[int], number: signal.Signals, *, trackers: bool = True) -> None:
    """Signal every member of the given groups; those that are gone already are skipped.

    trackers: also Python's resource trackers. They outlive the rest by a moment and remove its shared memory.
    """
    for leader in leaders:
        for pid in members(leader):
            if not trackers and _is_tracker(pid):
                continue
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue


def wait_empty(leaders: Iterable[int], seconds: float) -> set[int]:
    """Wait until the groups have no living member. Returns those that still have one when time is up."""
    left, end = set(leaders), time.monotonic() + seconds
    while True:
        left = {leader for leader in left if members(leader)}
        if not left or time.monotonic() >= end:
            return left
        time.sleep(0.05)


def end_groups(leaders: Iterable[int], grace: float) -> None:
    """SIGTERM, up to ``grace`` seconds to leave, then SIGKILL to whatever is left of the groups."""
    left = set(leaders)
    if grace > 0:
        send(left, signal.SIGTERM)
        left = wait_empty(left, grace)
    if left:
        send(left, signal.SIGKILL, trackers=False)
        left = wait_empty(left, 3.0)
    end = time.monotonic() + 10.0
    while left and time.monotonic() < end:
        send(left, signal.SIGKILL)
        left = wait_empty(left, 0.5)


def _is_tracker(pid: int) -> bool:
    try:
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def leftover_segments(leaders: Iterable[int]) -> set[Path]:
    """Shared-memory files of vLLM that may stay behind when its processes end; look before they do.

    Those of the CPU workers' all-reduce (cpushm) nobody removes; message queues (psm_) are removed by vLLM or
    by Python's resource tracker, unless both are killed. Only the processes' maps say whose a file is.
    """
    found = set()
    for leader in leaders:
        for pid in members(leader):
            try:
                lines = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace").splitlines()
            except OSError:
                continue
            found |= {Path(line[line.index("/") :]) for line in lines if f" {SHARED_MEMORY}/" in line}
    return {path for path in found if "-cpushm_" in path.name or path.name.startswith("psm_")}
