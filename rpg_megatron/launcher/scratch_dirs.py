"""The two private folders of a run that is under way, and what dead runs left of theirs.

Sockets live in the work folder (a socket's path holds 107 bytes at most, too few for many run directories);
published weights live in the bridge folder, in shared memory. Both are open to their owner only and go when
the run ends.
"""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from rpg_megatron.config import UserError
from rpg_megatron.launcher.reaper import remove
from rpg_megatron.system import process_groups

PREFIX = "rpg-"
OWNER = "owner.json"
_LONGEST_FOLDER = 107 - len("/12345678-1234-1234-1234-123456789012.sock")


@dataclass(frozen=True)
class Workspace:
    """Where the processes of one run meet."""

    work: Path
    bridge: Path

    def remove(self) -> None:
        """Delete both folders."""
        remove(self.work)
        remove(self.bridge)


def create_workspace(shared_memory: Path = process_groups.SHARED_MEMORY) -> Workspace:
    """Make both folders, after removing those of runs that are dead.

    Raises UserError if one of them cannot be made.
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
    """Remove folders of ours whose owner is dead; returns them. Other people's and unreadable ones stay."""
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
            remove(folder)
            removed.append(folder)
    return removed


def _pid_namespace() -> str:
    """Where a pid means something: on this boot of this machine, in this namespace.

    Machines may share $TMPDIR, and containers /dev/shm, but neither shares process numbers.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"


def _temporary_folder() -> Path:
    """$TMPDIR if socket paths below it stay short enough, else /tmp."""
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
            f"{parent}: cannot make a private folder there ({e.strerror}); free space or mend rights"
        ) from None
    return folder
