"""Fork server of the reward workers.

``python -m rpg_megatron.rewards.fork_server FUNCTION MEMORY DEADLINE PARENT FD``, started by
``pool.ForkServer``. FUNCTION is JSON: "module:name", which is called with a list of arguments; for a custom
reward, a list [key in the settings, module:name, its settings, reserved names] (``custom_reward``); else an
object with the path of an async server's loader, "load", and its arguments.

The server imports the function once. Each worker is a fork of it and starts in milliseconds, so replacing a
killed worker is cheap. The server reads a socket: each byte carries a file descriptor, and the server forks a
worker that serves it (``worker_process``).

No process outlives the pool's, not even after kill -9: the server ends when its socket is closed or its
parent has changed, and the kernel kills the workers when the server has ended.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import select
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any

from rpg_megatron.config.errors import UserError
from rpg_megatron.rewards.worker_process import serve, serve_async
from rpg_megatron.system.import_path import load_function
from rpg_megatron.system.parent_death import end_with_parent
from rpg_megatron.system.process_groups import WARNINGS
from rpg_megatron.system.terminal import protect_streams


def _run_worker(fd: int, run: Callable[[socket.socket], None], memory: int, server: int) -> None:
    # A process group of its own, so that processes started by a reward function are killed with the worker.
    os.setpgid(0, 0)
    end_with_parent(server)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    memory = memory if hard == resource.RLIM_INFINITY else min(memory, hard)
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    with socket.socket(fileno=fd) as connection:
        run(connection)


def _load(name: Any, deadline: float) -> tuple[Callable[[socket.socket], None], dict[str, Any]]:
    """What a worker runs, and the signature of a custom reward. Raises ValueError or UserError."""
    if isinstance(name, str):
        function = load_function(name)
        return lambda connection: serve(connection, lambda arguments: function(*arguments)), {}
    if isinstance(name, dict):
        load = load_function(name.pop("load"))
        return load(**name), {"async": True}
    from rpg_megatron.rewards.custom_reward import load_reward  # built-in graders do not need pydantic

    custom = load_reward(*name)
    if custom.is_async:
        return lambda c: serve_async(c, custom.call, deadline, custom.file), custom.signature
    return lambda c: serve(c, custom.call, custom.file), custom.signature


def main() -> None:
    """Run the fork server."""
    protect_streams()
    name, memory, deadline, parent = json.loads(sys.argv[1]), *map(float, sys.argv[2:4]), int(sys.argv[4])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the workers
    with socket.socket(fileno=int(sys.argv[5])) as control:
        try:
            run, signature = _load(name, deadline)
        except (ValueError, UserError) as e:
            control.sendall(json.dumps({"error": str(e)}).encode())
            return
        control.sendall(json.dumps(signature).encode())
        gc.freeze()  # imported objects stay in memory shared with the forks
        server = os.getpid()
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
                    signal.pthread_sigmask(signal.SIG_UNBLOCK, WARNINGS)  # what a reward starts can be ended
                    _run_worker(descriptors[0], run, int(memory), server)
                    code = 0
                finally:
                    os._exit(code)
            os.close(descriptors[0])


if __name__ == "__main__":
    main()
