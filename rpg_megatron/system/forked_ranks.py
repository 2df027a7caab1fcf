"""Trainer ranks that are forks of one process, which has imported what they need.

Importing torch and Megatron takes most of a rank's start, and much of its memory; forks share both. Only
ranks on the CPUs of a single node are forked: CUDA cannot be used in a fork of a process that has used it,
and packages for GPUs may use it as they are imported.

The parent is the launcher's child. It never trains: it writes the ranks' pids and exit codes to a file, which
the launcher reads. Each rank has a process group in its session, so they are ended with it, and if it is
killed, the kernel kills them.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
from contextlib import suppress
from pathlib import Path
from typing import IO

from rpg_megatron.config.files import atomic_write_text, open_own, open_regular, read_json
from rpg_megatron.system.child import Child
from rpg_megatron.system.parent_death import end_with_parent
from rpg_megatron.system.process_groups import WARNINGS

STATUS = "ranks.json"
"""File in the work folder: [pid, bytes that the log had before, exit code or null, the parent's descriptor of
the log] of each rank."""


def fork_ranks(logs: Path, world: int, status: Path) -> int:
    """Fork a process for each rank, which writes to ``logs/rank_N.log``. Returns its number N in each.

    The caller must have no threads of its own; those of OpenBLAS, torch and Arrow are prepared for forks. It
    waits until all have ended, and exits. status: the file for the launcher.
    """
    gc.collect()
    gc.freeze()  # imported objects stay in memory shared with the forks
    parent = os.getpid()
    rows: dict[int, list[int | None]] = {}
    files: list[IO[bytes]] = []  # stay open: the launcher opens them here if a log was deleted by then
    for rank in range(world):
        files.append(open_own(_log_of(logs, rank), "ab"))
        log = files[-1].fileno()
        start = os.fstat(log).st_size
        if (pid := os.fork()) == 0:
            end_with_parent(parent)
            os.setpgid(0, 0)
            os.dup2(log, 1)
            os.dup2(log, 2)
            return rank
        rows[pid] = [pid, start, None, log]
    for number in WARNINGS:  # schedulers send them to every process: the ranks save and end
        signal.signal(number, signal.SIG_IGN)
    ends = select.poll()
    running = {os.pidfd_open(pid): pid for pid in rows}
    for descriptor in running:
        ends.register(descriptor, select.POLLIN)
    while True:
        atomic_write_text(status, json.dumps(list(rows.values())))
        if not running:
            os._exit(0)  # what the ranks have registered to be done at exit is theirs
        for descriptor, _ in ends.poll():
            pid = running.pop(descriptor)
            ends.unregister(descriptor)
            # It stays a zombie, so that its pid is not another process's while the launcher uses it.
            end = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
            assert end is not None
            rows[pid][2] = end.si_status if end.si_code == os.CLD_EXITED else -end.si_status


class ForkedRank:
    """The launcher's view of a forked rank, a ``ProcessStatus``."""

    def __init__(self, rank: int, logs: Path, status: Path, parent: Child) -> None:
        """logs, status: as for ``fork_ranks``, whose process is ``parent``. The file must exist."""
        self.log = _log_of(logs, rank)
        self.name = self.log.stem
        self.opened: IO[bytes] | None = None
        self._rank, self._status, self._parent = rank, status, parent
        self.pid, self.log_start, self._code, log = self._read()
        with suppress(OSError):  # the parent has ended
            self.opened = open_regular(Path(f"/proc/{parent.pid}/fd/{log}"))

    def exit_code(self) -> int | None:
        """None while it runs; negative after a signal."""
        if self._code is None:
            parent_ended = self._parent.exit_code() is not None
            with suppress(OSError, ValueError):  # the file was deleted or damaged
                self._code = self._read()[2]
            if self._code is None and parent_ended:
                self._code = -signal.SIGKILL
        return self._code

    def warn(self) -> None:
        """Send SIGTERM to the rank alone: it saves."""
        with suppress(ProcessLookupError):  # it was killed with its parent
            os.kill(self.pid, signal.SIGTERM)

    def _read(self) -> tuple[int, int, int | None, int]:
        pid, start, code, log = read_json(self._status)[self._rank]
        return pid, start, code, log


def _log_of(logs: Path, rank: int) -> Path:
    return logs / f"rank_{rank}.log"
