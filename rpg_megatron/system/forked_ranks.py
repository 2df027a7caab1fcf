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
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from rpg_megatron.config.files import atomic_write_text, open_own, read_json
from rpg_megatron.system.child import Child
from rpg_megatron.system.parent_death import end_with_parent
from rpg_megatron.system.process_groups import WARNINGS

STATUS = "ranks.json"
"""File in the work folder: [pid, exit code or null] of each rank."""


def fork_ranks(logs: Sequence[Path], status: Path) -> int:
    """Fork a process for each log, to which it writes. Returns its number in each of them.

    The caller must have no threads of its own; those of OpenBLAS, torch and Arrow are prepared for forks. It
    waits until all have ended, and exits; status: its file.
    """
    gc.collect()
    gc.freeze()  # imported objects stay in memory shared with the forks
    parent = os.getpid()
    pids = []
    for rank, log in enumerate(logs):
        with open_own(log, "ab") as file:
            if (pid := os.fork()) == 0:
                end_with_parent(parent)
                os.setpgid(0, 0)
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
                return rank
            pids.append(pid)
    for number in WARNINGS:  # schedulers send them to every process: the ranks save and end
        signal.signal(number, signal.SIG_IGN)
    codes: dict[int, int] = {}
    ends = select.poll()
    for pid in pids:
        ends.register(os.pidfd_open(pid), select.POLLIN)
    while True:
        atomic_write_text(status, json.dumps([[pid, codes.get(pid)] for pid in pids]))
        if len(codes) == len(pids):
            os._exit(0)  # what the ranks have registered to be done at exit is theirs
        for descriptor, _ in ends.poll():
            # It stays a zombie, so that its pid is not another process's while the launcher uses it.
            end = os.waitid(os.P_PIDFD, descriptor, os.WEXITED | os.WNOWAIT)
            assert end is not None
            codes[end.si_pid] = end.si_status if end.si_code == os.CLD_EXITED else -end.si_status
            ends.unregister(descriptor)


@dataclass
class ForkedRank:
    """The launcher's view of a forked rank."""

    name: str
    log: Path
    parent: Child
    number: int
    """Its place in the parent's file."""
    status: Path
    log_start: int
    opened: IO[bytes] | None = field(init=False)
    pid: int = field(init=False)

    def __post_init__(self) -> None:
        self.opened = open_own(self.log)
        self.pid = self._read()[0]
        self._code: int | None = None

    def exit_code(self) -> int | None:
        """None while it runs; negative after a signal."""
        if self._code is None:
            parent_ended = self.parent.exit_code() is not None
            with suppress(OSError, ValueError):  # the file was deleted or damaged
                self._code = self._read()[1]
            if self._code is None and parent_ended:
                self._code = -signal.SIGKILL
        return self._code

    def warn(self) -> None:
        """Send SIGTERM to the rank alone: it saves."""
        with suppress(ProcessLookupError):  # it was killed with its parent
            os.kill(self.pid, signal.SIGTERM)

    def _read(self) -> tuple[int, int | None]:
        pid, code = read_json(self.status)[self.number]
        return pid, code
