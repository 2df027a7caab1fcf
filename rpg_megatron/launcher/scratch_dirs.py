"""The two private folders of a running job, and the removal of those left by dead jobs.

The work folder contains sockets (a socket's path has at most 107 bytes, too few for many run folders). The
bridge folder, in shared memory, contains published weights. Both are accessible only by their owner, and are
removed when the job ends.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rpg_megatron.config import UserError
from rpg_megatron.config.files import atomic_write_text, open_own, open_private, parse_json, remove
from rpg_megatron.system import process_groups

PREFIX = "rpg-"
OWNER = "owner.json"
SEGMENTS = "segments.json"
_LONGEST_FOLDER = 107 - len("/12345678-1234-1234-1234-123456789012.sock")


@dataclass(frozen=True)
class Workspace:
    """The private folders of one job on this node."""

    work: Path
    bridge: Path

    def note_segments(self, segments: Iterable[Path]) -> None:
        """Record files in shared memory, which the next job removes if all processes of this one are killed
        at the same time.
        """
        with suppress(OSError), ExitStack() as stack:  # shared memory is full
            descriptor = open_private(self.bridge)
            stack.callback(os.close, descriptor)
            noted = {str(file): inode for file, inode in _noted_segments(descriptor).items()}
            for segment in segments:
                with suppress(FileNotFoundError):
                    noted[str(segment)] = segment.lstat().st_ino
            atomic_write_text(self.bridge / SEGMENTS, json.dumps(noted))

    def remove(self) -> None:
        """Delete both folders."""
        remove(self.work, ignore_errors=True)
        remove(self.bridge, ignore_errors=True)


def create_workspace(shared_memory: Path = process_groups.SHARED_MEMORY) -> Workspace:
    """Create both folders, after removing those of dead jobs.

    Raises UserError if one of them cannot be created.
    """
    remove_abandoned(shared_memory)
    bridge = _make(shared_memory)
    try:
        work = _make(_temporary_folder())
        remove_abandoned(work.parent)
    except BaseException:
        remove(bridge, ignore_errors=True)
        raise
    return Workspace(work, bridge)


def remove_abandoned(parent: Path) -> list[Path]:
    """Remove this user's folders whose process has died; returns them. Unreadable ones are kept."""
    removed = []
    for folder in parent.glob(f"{PREFIX}*"):
        with suppress(OSError, ValueError, KeyError, TypeError), ExitStack() as stack:
            # Others can make such folders too, and what they list must not be removed.
            descriptor = open_private(folder)
            stack.callback(os.close, descriptor)
            owner = _read(descriptor, OWNER)
            elsewhere = owner["namespace"] != _pid_namespace()
            if elsewhere or process_groups.start_time(int(owner["pid"])) == owner["start"]:
                continue
            for segment, inode in _noted_segments(descriptor).items():
                remove(segment, inode=inode, ignore_errors=True)
            remove(folder, ignore_errors=True)
            removed.append(folder)
    return removed


def _noted_segments(folder: int) -> dict[Path, int]:
    """The files directly in shared memory that ``Workspace.note_segments`` recorded, and their inodes."""
    try:
        noted = {Path(name): int(inode) for name, inode in dict(_read(folder, SEGMENTS)).items()}
    except (OSError, ValueError, TypeError):
        return {}
    return {file: inode for file, inode in noted.items() if file.parent == process_groups.SHARED_MEMORY}


def _read(folder: int, name: str) -> Any:
    """The value in a JSON file of an open folder."""
    with open_own(Path(name), "r", dir_fd=folder, encoding="utf-8") as file:
        return parse_json(file.read())


def _pid_namespace() -> str:
    """Identifies the pid namespace: boot id and namespace of this machine.

    Machines may share $TMPDIR, and containers /dev/shm, without sharing process ids.
    """
    return f"{process_groups.boot_id()} {os.readlink('/proc/self/ns/pid')}"


def _temporary_folder() -> Path:
    """$TMPDIR if socket paths in it are short enough, else /tmp."""
    chosen = Path(tempfile.gettempdir())
    return chosen if len(os.fsencode(chosen / f"{PREFIX}12345678")) <= _LONGEST_FOLDER else Path("/tmp")


def _make(parent: Path) -> Path:
    try:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))  # mode 0700
        pid = os.getpid()
        owner = {"pid": pid, "start": process_groups.start_time(pid), "namespace": _pid_namespace()}
        atomic_write_text(folder / OWNER, json.dumps(owner))
    except OSError as e:
        raise UserError(
            f"{parent}: cannot create a folder there ({e.strerror}); free space or fix its permissions"
        ) from None
    return folder
