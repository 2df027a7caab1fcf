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
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rpg_megatron.config import UserError
from rpg_megatron.launcher.reaper import remove
from rpg_megatron.system import process_groups
from rpg_megatron.system.files import atomic_write_text

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
        noted = dict(_noted_segments(self.bridge))
        for segment in segments:
            with suppress(FileNotFoundError):
                noted[str(segment)] = segment.stat().st_ino
        with suppress(OSError):  # shared memory is full
            atomic_write_text(self.bridge / SEGMENTS, json.dumps(noted))

    def remove(self) -> None:
        """Delete both folders."""
        remove(self.work)
        remove(self.bridge)


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
        remove(bridge)
        raise
    return Workspace(work, bridge)


def remove_abandoned(parent: Path) -> list[Path]:
    """Remove this user's folders whose process has died; returns them. Unreadable ones are kept."""
    removed = []
    for folder in parent.glob(f"{PREFIX}*/"):
        try:
            if folder.stat().st_uid != os.getuid():
                continue
            owner = json.loads((folder / OWNER).read_text(encoding="utf-8"))
            dead = (
                owner["namespace"] == _pid_namespace()
                and process_groups.start_time(int(owner["pid"])) != owner["start"]
            )
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if dead:
            for segment, inode in _noted_segments(folder).items():
                with suppress(OSError):
                    if os.stat(segment).st_ino == inode:  # else another process has reused the name
                        os.unlink(segment)
            remove(folder)
            removed.append(folder)
    return removed


def _noted_segments(folder: Path) -> dict[str, int]:
    """The files that ``Workspace.note_segments`` recorded, and their inodes."""
    try:
        return dict(json.loads((folder / SEGMENTS).read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return {}


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
        (folder / OWNER).write_text(json.dumps(owner), encoding="utf-8")
    except OSError as e:
        raise UserError(
            f"{parent}: cannot create a folder there ({e.strerror}); free space or fix its permissions"
        ) from None
    return folder
