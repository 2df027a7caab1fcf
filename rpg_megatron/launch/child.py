"""``python -m rpg_megatron.launch.child PARENT COMMAND...``: becomes COMMAND, and dies when PARENT does.

The kernel kills this process when the launcher is gone, even by kill -9. A program of its own, because code
between fork and exec (``preexec_fn``) may deadlock once the launcher has threads. The setting survives exec,
and it fires when the *thread* that started the child ends: so children are started from the main thread only.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Ask for the signal, then exec."""
    parent, command = int(sys.argv[1]), sys.argv[2:]
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:  # it died before the request: no signal would come
        sys.exit(1)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
