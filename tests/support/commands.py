"""``rpg-megatron`` in a process of its own, and checks that it leaves nothing behind.

A process is known by a variable in its environment or, because vLLM's workers write their titles over it, by
its session.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

from rpg_megatron.system.process_groups import members

MARK = "RPG_TEST_MARK"


def read_stats() -> dict[int, list[str]]:
    """Live process -> the fields of /proc/PID/stat after the name: state, parent, group, session, ..."""
    stats = {}
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
            if fields[0] not in "ZX":
                stats[int(entry)] = fields
    return stats


def read_proc_file(pid: int, name: str) -> bytes:
    """A file of /proc/PID, such as ``cmdline``; empty if the process has ended."""
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


def without_notice(err: str) -> str:
    """What a command wrote to stderr, without the lines that it adds on a busy machine."""
    return re.sub(r"^(reading the data|waiting for the check: .*)\n", "", err, flags=re.MULTILINE)


def wait_for_our_code(process: subprocess.Popen[Any]) -> None:
    """Wait until a command imports its packages, after its own code.

    Before that, Python is starting: Ctrl-C then prints Python's traceback, or is lost.
    """
    end = time.monotonic() + 120
    while b"pydantic_core" not in read_proc_file(process.pid, "maps"):
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < end, "it imports nothing"
        time.sleep(0.01)


class Command:
    """``rpg-megatron`` in a process of its own."""

    def __init__(self, folder: Path, *arguments: str):
        self.mark = uuid.uuid4().hex
        self.sessions: set[int] = set()
        self.out = folder / f"{self.mark}.out"
        self.process = subprocess.Popen(
            [sys.executable, "-m", "rpg_megatron.cli", *arguments],
            stdout=self.out.open("w"),
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {MARK: self.mark},
            start_new_session=True,
        )

    def finish(self, timeout: float = 600) -> tuple[int, str]:
        """Exit code and what was written to stderr."""
        _, err = self.process.communicate(timeout=timeout)
        return self.process.returncode, without_notice(err)

    def processes(self) -> list[int]:
        """All live descendants of the command."""
        alive = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
        for pid in alive:
            if self.mark.encode() in read_proc_file(pid, "environ"):
                with contextlib.suppress(OSError):  # it has ended meanwhile
                    self.sessions.add(os.getsid(pid))
        return sorted({pid for leader in self.sessions for pid in members(leader)})

    def folders(self) -> list[Path]:
        """Its private folders."""
        private_folders = []
        for parent in {Path("/dev/shm"), Path("/tmp"), Path(os.environ.get("TMPDIR", "/tmp"))}:
            for owner in parent.glob("rpg-*/owner.json"):
                try:
                    is_ours = json.loads(owner.read_text())["pid"] == self.process.pid
                except (OSError, ValueError):
                    continue
                private_folders += [owner.parent] if is_ours else []
        return private_folders

    def shared_memory(self) -> set[Path]:
        """Files in /dev/shm that its processes have mapped."""
        files = set()
        for pid in self.processes():
            try:
                lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
            except OSError:
                continue
            files |= {Path(line.split(maxsplit=5)[5]) for line in lines if " /dev/shm/" in line}
        return {file for file in files if file.exists()}

    def wait_for_output(self, text: str, seconds: float) -> None:
        end = time.monotonic() + seconds
        while text not in self.out.read_text():
            assert self.process.poll() is None, self.process.communicate()[1]
            assert time.monotonic() < end, self.out.read_text()
            time.sleep(0.1)

    def assert_nothing_left(self, seconds: float = 0) -> None:
        end = time.monotonic() + seconds
        while (self.processes() or self.folders()) and time.monotonic() < end:
            time.sleep(0.1)
        assert self.processes() == []
        assert self.folders() == []
