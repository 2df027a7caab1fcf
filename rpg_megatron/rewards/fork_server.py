"""Forks the pool's workers: ``python -m rpg_megatron.rewards.fork_server FUNCTION MEMORY PARENT FD``.

One process imports the function (``module:name``) once; each worker is a fork of it, there in milliseconds,
so a killed one costs little. It reads a socket: with each byte comes a file descriptor, and a worker is
forked that serves it. A worker takes JSON lists of arguments and answers each with a JSON object.

Nothing outlives the pool's process, not even one that is ended by kill -9: the nursery ends when its socket
is closed or its parent is another one, and the kernel kills the workers when the nursery is gone.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
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

_PR_SET_PDEATHSIG = 1
_GROWN = 256 * 1024
"""A worker that has used so much more memory than at its start, in KiB, makes way for a fresh one."""
_DETAIL = 300

_libc = ctypes.CDLL(None, use_errno=True)


def load_function(name: str) -> Callable[..., Any]:
    """Import ``module:function``. Raises ValueError that says what is wrong with it."""
    module, _, attribute = name.partition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")  # the working directory, for a function in a file beside the config
    try:
        function: Callable[..., Any] = getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError as e:
        raise ValueError(
            f"{name}: there is no module {e.name!r}; put its folder into PYTHONPATH, or start in that folder"
        ) from None
    except AttributeError:
        raise ValueError(f"{name}: the module {module} has no {attribute!r}") from None
    except Exception as e:
        raise ValueError(f"{name}: importing {module} fails: {type(e).__name__}: {e}") from None
    if not callable(function):
        raise ValueError(f"{name}: is a {type(function).__name__}, not a function")
    return function


def serve(connection: Connection, function: Callable[..., Any]) -> None:
    """Answer requests until the other end is closed, or until this process should be replaced.

    An answer holds ``value``, or ``failure`` ("error" or "memory") and ``detail``; ``leaves`` says that this
    was the last one.
    """
    start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    connection.send_bytes(str(os.getpid()).encode())
    leaves = False
    while not leaves:
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
            answer = {"failure": "error", "detail": f"{type(e).__name__}: {str(e)[:_DETAIL]}"}
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - start
        leaves = answer.get("failure") == "memory" or grown > _GROWN
        try:
            connection.send_bytes(json.dumps(answer | {"leaves": leaves}).encode())
        except OSError:
            return


def _plain(value: Any) -> bool | float:
    """A verdict or a number, whatever library's type it came in."""
    if isinstance(value, bool):
        return value
    number = float(value)
    if number != number or number in (float("inf"), float("-inf")):
        raise ValueError(f"the reward is {number}")
    return bool(value) if type(value).__name__ == "bool_" else number


def _become_worker(fd: int, function: Callable[..., Any], memory: int, nursery: int) -> None:
    # A group of its own: what a reward function starts is killed with it.
    os.setpgid(0, 0)
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != nursery:
        return
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    with Connection(fd) as connection:
        serve(connection, function)


def main() -> None:
    """Run the nursery."""
    name, memory, parent = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the workers
    with socket.socket(fileno=int(sys.argv[4])) as control:
        try:
            function = load_function(name)
        except ValueError as e:
            control.sendall(json.dumps({"error": str(e)}).encode())
            return
        control.sendall(b"{}")
        gc.freeze()  # what was imported stays shared with the forks
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
                    _become_worker(descriptors[0], function, memory, own)
                    code = 0
                finally:
                    os._exit(code)
            os.close(descriptors[0])


if __name__ == "__main__":
    main()
