"""Run a command that gets a signal when its parent process ends (prctl PR_SET_PDEATHSIG).

``python -m rpg_megatron.system.parent_death PARENT SIGNAL COMMAND...``

The kernel sends SIGNAL when the parent ends, even by kill -9. This is a separate program, because code
between fork and exec (``preexec_fn``) may deadlock once the parent has threads. The setting survives exec.
The signal is sent when the *thread* that started the child ends, so start children only from the main thread.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG, _PR_SET_NAME, _PR_SET_CHILD_SUBREAPER = 1, 15, 36

_libc = ctypes.CDLL(None, use_errno=True)


def with_parent_death_signal(command: list[str], number: signal.Signals) -> list[str]:
    """Command line that runs ``command`` as a child that gets signal ``number`` when this process ends."""
    return [sys.executable, "-P", "-m", __spec__.name, str(os.getpid()), str(int(number)), *command]


def end_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal when its parent ends; exit at once if it has ended already.

    parent: its pid.
    """
    set_parent_death_signal(number)
    if os.getppid() != parent:  # it ended before the request: no signal would be sent
        os._exit(1)


def set_parent_death_signal(number: int) -> None:
    """Have the kernel send this process a signal when its parent ends, if it has not ended yet."""
    if _libc.prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")


def set_child_subreaper() -> None:
    """Become the parent of all orphans below this process."""
    if _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


def set_process_name(name: str) -> None:
    """Set the name of this process that ps and top show, at most 15 bytes."""
    _libc.prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)


def main() -> None:
    """Request the signal, then exec the command."""
    end_with_parent(int(sys.argv[1]), int(sys.argv[2]))
    os.execvp(sys.argv[3], sys.argv[3:])


if __name__ == "__main__":
    main()
