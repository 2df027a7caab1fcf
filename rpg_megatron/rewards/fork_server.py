"""Fork server of the reward workers.

``python -m rpg_megatron.rewards.fork_server FUNCTION MEMORY PARENT FD``, started by ``pool.WorkerPool``.

The server imports the function (``module:name``) once; each worker is a fork of it and starts in
milliseconds, so replacing a killed worker is cheap. The server reads a socket: each byte carries a file
descriptor, and it forks a worker that serves that descriptor. A worker reads JSON lists of arguments and
answers each with a JSON object.

No process outlives the pool's, not even after kill -9: the server ends when its socket is closed or its
parent has changed, and the kernel kills the workers when the server is gone.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import resource
import select
import signal
import socket
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from rpg_megatron.system.import_path import load_function

_PR_SET_PDEATHSIG = 1
_MAX_GROWTH = 256 * 1024
"""Growth of a worker's memory, in KiB, after which it is replaced."""
_MAX_DETAIL = 300
"""Characters of an exception's message that are kept."""

_libc = ctypes.CDLL(None, use_errno=True)


def serve(connection: Connection, function: Callable[..., Any]) -> None:
    """Answer requests until the other end is closed or this process should be replaced.

    An answer has ``value``, or ``failure`` ("error" or "memory") and ``detail``; ``exits`` means that the
    worker exits after this answer.
    """
    start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    connection.send_bytes(str(os.getpid()).encode())
    exits = False
    while not exits:
        try:
            arguments = json.loads(connection.recv_bytes())
        except (EOFError, OSError):
            return
        answer: dict[str, bool | float | str | None]
        try:
            answer = {"value": _plain(function(*arguments))}
        except MemoryError:
            answer = {"failure": "memory", "detail": "out of memory"}
        except (Exception, SystemExit) as e:
            answer = {"failure": "error", "detail": f"{type(e).__name__}: {str(e)[:_MAX_DETAIL]}"}
        growth = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - start
        exits = answer.get("failure") == "memory" or growth > _MAX_GROWTH
        try:
            connection.send_bytes(json.dumps(answer | {"exits": exits}).encode())
        except OSError:
            return


def _plain(value: Any) -> bool | float:
    """The value as a Python bool or float; it may be of a library's own type, such as NumPy's."""
    if isinstance(value, bool):
        return value
    number = float(value)
    if number != number or number in (float("inf"), float("-inf")):
        raise ValueError(f"the reward is {number}, not a finite number")
    return bool(value) if type(value).__name__ == "bool_" else number


def _run_worker(fd: int, function: Callable[..., Any], memory: int, server: int) -> None:
    # A process group of its own, so that processes which a reward function starts are killed with it.
    os.setpgid(0, 0)
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != server:
        return
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    with Connection(fd) as connection:
        serve(connection, function)


def main() -> None:
    """Run the fork server."""
    name, memory, parent = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the workers
    with socket.socket(fileno=int(sys.argv[4])) as control:
        try:
            function = load_function(name)
        except ValueError as e:
            control.sendall(json.dumps({"error": str(e)}).encode())
            return
        control.sendall(b"{}")
        gc.freeze()  # imported objects stay in memory shared with the forks
        own = os.getpid()
        while os.getppid() == parent:
            if not select.select([control], [], [], 1.0)[0]:
                continue
            data, descriptors, _flags, _address = socket.recv_fds(control, 1, 1)
            if not data:
                return
            if os.fork() == 0:
                code = 1
                try:
                    control.close()
                    _run_worker(descriptors[0], function, memory, own)
                    code = 0
                finally:
                    os._exit(code)
            os.close(descriptors[0])


if __name__ == "__main__":
    main()
