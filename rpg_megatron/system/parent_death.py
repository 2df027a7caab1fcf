"""Become a command that ends when its parent does.

``python -m rpg_megatron.system.parent_death PARENT SIGNAL COMMAND...``

The kernel sends SIGNAL to this process when the launcher is gone, even by kill -9. A program of its own,
because code between fork and exec (``preexec_fn``) may deadlock once the launcher has threads. The setting
survives exec, and it fires when the *thread* that started the child ends: so children are started from the
main thread only.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def with_parent_death_signal(command: list[str], number: signal.Signals) -> list[str]:
    """The command line that runs ``command`` as a child which gets ``number`` when this process is gone."""
    return [sys.executable, "-m", __spec__.name, str(os.getpid()), str(int(number)), *command]


def main() -> None:
    """Ask for the signal, then exec."""
    parent, number, command = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:  # it died before the request: no signal would come
        sys.exit(1)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
