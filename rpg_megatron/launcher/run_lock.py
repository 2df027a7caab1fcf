"""The lock of a run's folder, or of an evaluation's: one process writes into it."""

from __future__ import annotations

import fcntl
import os
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

from rpg_megatron.config.files import open_own, open_regular, real_path

LOCK = ".lock"


def hold_folder(folder: Path, seconds: float = 0.0) -> IO[str] | None:
    """Lock a folder and write this process's id into the lock file; None if another process has locked it.

    seconds: how long to wait, since other launchers and reports lock it briefly to read the folder.
    Raises OSError if the lock file cannot be written.
    """
    # Mode 0600, also for files of earlier versions: anyone who can open it can lock it and block a resume.
    lock: IO[str] = open_own(folder / LOCK, "a", permissions=0o600, encoding="utf-8")
    with suppress(OSError):  # another user's, in a shared folder
        os.fchmod(lock.fileno(), 0o600)
    end = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() >= end:
                lock.close()
                return None
            time.sleep(0.05)
        except OSError:
            break  # a file system without locks: the user must avoid two launchers per run
    with suppress(OSError):  # a full disk
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on {socket.gethostname()}")
        lock.flush()
    return lock


def is_held(folder: Path) -> bool:
    """Whether a launcher has locked the run. Takes a shared lock briefly, and never waits."""
    try:
        with open_regular(folder / LOCK, real_path(folder)) as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False
