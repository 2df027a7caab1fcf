"""Fork server: imports code once; each worker is a fork of it and starts in milliseconds.

``python -m rpg_megatron.system.fork_server LOAD MEMORY PARENT FD``, started by
``forked_workers.ForkServer``. LOAD is the ``module:function`` that is called with the arguments in the
first line that the socket FD receives, a JSON object: all users can read command lines.
It returns what a worker runs, with its end of a connection, and a description for the parent
(``forked_workers``). Replacing a killed worker is cheap. The server reads a socket: each byte carries a file
descriptor, and the server forks a worker that serves it.

What a worker needs to answer is here too: calls are lines of JSON, [number, value]; an answer is an object
with ``number`` and ``exits`` (the worker must get no more calls), and ``value``, or ``failure`` ("error",
"memory" or "timeout"), ``detail`` and, for an exception in the user's file, ``place``, ``file:line``.

No process outlives the parent, not even after kill -9: the server ends when its socket is closed or its
parent has changed, and the kernel kills the workers when the server has ended. Workers that must remove what
they have made get the "grace" of the description, in seconds: they see that their connection is closed.
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
import threading
import time
import traceback
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Literal

from rpg_megatron.config.errors import UserError
from rpg_megatron.system.import_path import load_function
from rpg_megatron.system.limits import lower_limits
from rpg_megatron.system.parent_death import end_with_parent
from rpg_megatron.system.process_groups import WARNINGS, address_space
from rpg_megatron.system.terminal import protect_streams

_MAX_GROWTH = 256 * 1024
"""Growth of a worker's memory, in KiB, after which it is replaced."""
_MAX_DETAIL = 300
"""Characters of an exception's message that are kept."""

FailureKind = Literal["timeout", "crash", "memory", "error"]
FAILURES: tuple[FailureKind, ...] = ("timeout", "crash", "memory", "error")

type Serve = Callable[[socket.socket], None]
"""What a worker runs."""


def send_line(connection: socket.socket, value: Any) -> None:
    """Send a value to the parent."""
    connection.sendall(json.dumps(value).encode() + b"\n")


class Call:
    """A call that a worker runs beside others."""

    def __init__(self, connection: socket.socket, number: int, value: Any):
        self._connection, self._number, self.value = connection, number, value
        self.receive: Callable[[Any], None] = lambda value: None
        """Gets what the parent sends to it later."""

    def send(self, **line: Any) -> None:
        """Send something before the answer."""
        send_line(self._connection, line | {"number": self._number})


async def serve_calls(
    connection: socket.socket,
    run: Callable[[Call], Awaitable[dict[str, Any]]],
    file: str = "",
    growth: float = _MAX_GROWTH,
) -> None:
    """Run calls beside each other until the other end is closed.

    run: returns the answer, or raises. file: the user's. growth: see ``must_exit``. A second value with a
    call's number goes to that call; ``{"cancel": true}`` cancels it.
    """
    import asyncio  # workers without an event loop do not need it

    start, loop, ended = peak_memory(), asyncio.get_running_loop(), asyncio.Event()
    running: dict[int, tuple[Call, asyncio.Task[None]]] = {}
    newest = -1

    async def answer(number: int, call: Call) -> None:
        try:
            value = await run(call)
            call.send(**value, exits=must_exit(value, start, growth))
        except BaseException as e:  # also SystemExit, and a panic of a library in Rust
            value = failure_of(e, file)
            with suppress(ConnectionError):  # nobody waits for it
                call.send(**value, exits=must_exit(value, start, growth))
        del running[number]

    def receive(number: int, value: Any) -> None:
        nonlocal newest
        if number > newest:
            newest, call = number, Call(connection, number, value)
            running[number] = call, asyncio.create_task(answer(number, call))
        elif number in running:
            call, task = running[number]
            if value == {"cancel": True}:
                loop.call_soon(task.cancel)  # after its begin: it answers then
            else:
                call.receive(value)

    def read() -> None:
        try:
            with suppress(ConnectionError):  # the other end has closed it without reading all answers
                for line in connection.makefile("rb"):
                    loop.call_soon_threadsafe(receive, *json.loads(line))
        finally:
            loop.call_soon_threadsafe(ended.set)

    threading.Thread(target=read, daemon=True).start()
    await ended.wait()


def must_exit(answer: dict[str, Any], start: int, growth: float = _MAX_GROWTH) -> bool:
    """Whether this process must get no more calls. start: ``peak_memory`` when it had begun. growth: KiB."""
    return answer.get("failure") == "memory" or peak_memory() - start > growth


def failure_of(error: BaseException, file: str) -> dict[str, Any]:
    """The answer to a call that raised. file: the user's."""
    if isinstance(error, MemoryError):
        return {"failure": "memory", "detail": "out of memory"}
    lines = [n for frame, n in traceback.walk_tb(error.__traceback__) if frame.f_code.co_filename == file]
    place = {"place": f"{file}:{lines[-1]}"} if lines else {}
    message = str(error)[:_MAX_DETAIL].encode(errors="backslashreplace").decode()  # for logs and messages
    detail = ": ".join(filter(None, (type(error).__name__, " ".join(message.split()))))
    return {"failure": "error", "detail": detail} | place


def peak_memory() -> int:
    """Most memory that this process had, in KiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _run_worker(fd: int, serve: Serve, memory: int, server: int) -> None:
    # A process group of its own, so that processes started by a worker are killed with it.
    os.setpgid(0, 0)
    end_with_parent(server)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    lower_limits({resource.RLIMIT_CORE: 0, resource.RLIMIT_AS: memory})
    with socket.socket(fileno=fd) as connection:
        connection.set_inheritable(False)  # a received descriptor is: programs would answer for this process
        serve(connection)


def main() -> None:
    """Run the fork server."""
    protect_streams()
    load, memory, parent = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the workers
    with socket.socket(fileno=int(sys.argv[4])) as control:
        control.set_inheritable(False)
        with control.makefile("rb") as lines:  # nothing else is sent before the answer
            arguments = json.loads(lines.readline() or b"null")
        try:
            serve, description = load_function(load)(**arguments)
        except (ValueError, UserError) as e:
            control.sendall(json.dumps({"error": str(e)}).encode())
            return
        control.sendall(json.dumps(description).encode())
        gc.freeze()  # imported objects stay in memory shared with the forks
        server, memory = os.getpid(), memory + address_space()
        while os.getppid() == parent:
            if not select.select([control], [], [], 1.0)[0]:
                continue
            data, descriptors, _flags, _address = socket.recv_fds(control, 1, 1)
            if not data:
                break
            if os.fork() == 0:
                code = 1
                try:
                    control.close()
                    signal.pthread_sigmask(signal.SIG_UNBLOCK, WARNINGS)  # what a worker starts can be ended
                    _run_worker(descriptors[0], serve, memory, server)
                    code = 0
                finally:
                    os._exit(code)
            os.close(descriptors[0])
    _wait_for_workers(description.get("grace", 0.0))


def _wait_for_workers(seconds: float) -> None:
    end = time.monotonic() + seconds
    with suppress(ChildProcessError):  # there are none
        while time.monotonic() < end:
            os.waitpid(-1, os.WNOHANG)
            time.sleep(0.05)


if __name__ == "__main__":
    main()
