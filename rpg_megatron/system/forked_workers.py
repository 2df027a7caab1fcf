"""Worker processes that can be killed, forked by a fork server (``fork_server``), and their calls.

Whatever a worker does (hang, crash, run out of memory, raise), its calls get an ``Outcome``. A worker has one
call at a time or, if its code is asynchronous, many. If one of these blocks the worker's event loop, the
worker is killed a little after the deadline: calls past their deadline have timed out, the others crashed.

Calls and answers are lines of JSON over a socket pair whose other end the worker inherits, not messages of
``system/messages.py``: nobody else can connect to it, and its end is the worker's.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from functools import partial
from multiprocessing.connection import wait
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import msgspec

from rpg_megatron.config.errors import UserError
from rpg_megatron.system import fork_server
from rpg_megatron.system.child import module_command, start_program
from rpg_megatron.system.fork_server import FailureKind

logger = logging.getLogger(__name__)

_START_SECONDS = 300.0
"""Limit for importing the code, and for a fork, on a busy machine."""
GRACE_SECONDS = 5.0
"""A worker with many calls is killed this long after the deadline of a call that has not ended."""
_LONGEST = 64 << 20
"""Bytes of a line of a worker; one that sends more is killed."""
_LATE_SECONDS = 0.05
"""Pause before the next look at a call that is late, if there are answers to read first."""


class Outcome(NamedTuple):
    """Result of one call."""

    value: Any = None
    """What it returned; None if it failed."""
    failure: FailureKind | None = None
    """Why it failed: killed at the deadline, crashed, out of memory, or an exception."""
    detail: str = ""
    """Type and message of the exception, or what else is wrong."""
    counts: Mapping[str, float] = MappingProxyType({})
    """Counts that it returned, by name."""
    place: str = ""
    """Where it raised the exception, ``file:line``; empty if that is not known."""


class ForkedWorker(NamedTuple):
    """A fork of the fork server."""

    connection: socket.socket
    pid: int
    handle: int
    """pidfd of the process, because its pid may be reused before it is killed."""

    def kill(self) -> None:
        """Kill the worker and the processes that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.handle, signal.SIGKILL)


class Loader(NamedTuple):
    """Makes what workers run, in the fork server."""

    path: str
    """``module:function``; called with ``arguments``, it returns what a worker runs, with its end of the
    connection, and a description. That has "deadline", the seconds for a call, and "async", whether a worker
    runs many calls at the same time; and may have "grace", the seconds in which workers clean up when the
    parent has gone. It may raise ValueError or UserError."""
    arguments: dict[str, Any]
    """JSON-serialisable."""
    imports: str
    """What it imports, and the key in the settings: for messages."""
    memory: int = 1 << 40
    """Address space of a worker beyond what its imports take, in bytes; by default without a limit."""
    python: str = sys.executable
    environment: dict[str, str] | None = None
    """Of the process; None: this process's."""


class ForkServer:
    """Client of the process that imports the workers' code, and of the workers. Thread-safe."""

    def __init__(self, loader: Loader, *, lazy: bool = False):
        """Start the process. lazy: start it with the first worker. Raises UserError as the loader does."""
        self._loader = loader
        self.description: dict[str, Any] = {}
        """What the loader says of the code; empty until the process has started."""
        self._lock = threading.Lock()
        self.closed = False
        self._owner = os.getpid()
        self.workers: dict[int, ForkedWorker] = {}
        self._process: tuple[subprocess.Popen[bytes], socket.socket] | None = None
        if not lazy:
            self._process = self._start()

    @property
    def is_async(self) -> bool:
        """Whether a worker runs many calls at the same time."""
        return bool(self.description.get("async"))

    @property
    def deadline(self) -> float:
        """Seconds for one call."""
        return float(self.description["deadline"])

    def fork(self) -> ForkedWorker:
        """A new worker. Restarts the fork server if it was killed."""
        for attempt in range(3):
            parent_end, child_end = socket.socketpair()
            parent_end.settimeout(_START_SECONDS)
            try:
                with child_end:
                    self._request_worker(child_end.fileno())
                pid = int(parent_end.recv(64))
                worker = ForkedWorker(parent_end, pid, os.pidfd_open(pid))
            except (ValueError, OSError):
                parent_end.close()
                logger.warning("a worker process died while starting (attempt %d)", attempt + 1)
                continue
            with self._lock:
                self.workers[pid] = worker
                if self.closed:
                    worker.kill()
            return worker
        raise RuntimeError("worker processes cannot be started; see the warnings above")

    def remove(self, worker: ForkedWorker) -> None:
        """Forget a worker that has ended."""
        with self._lock:
            self.workers.pop(worker.pid, None)
            os.close(worker.handle)  # not while ``kill`` uses it

    def kill(self) -> bool:
        """Kill the workers; new ones die at once. Returns False if it was already closed, or in a fork."""
        if os.getpid() != self._owner:  # in a fork that exits: the workers belong to its parent
            return False
        with self._lock:
            if self.closed:
                return False
            self.closed = True
            for worker in self.workers.values():
                worker.kill()
        return True

    def close(self) -> None:
        """End the process. Call ``kill`` first."""
        if self._process is not None:
            process, control = self._process
            control.close()
            process.wait()

    def _start(self) -> tuple[subprocess.Popen[bytes], socket.socket]:
        path, arguments, imports, memory, python, environment = self._loader
        parent_end, child_end = socket.socketpair()
        with child_end:
            number = child_end.fileno()
            command = [python, *module_command(fork_server.__name__, path, memory, os.getpid(), number)[1:]]
            options: dict[str, Any] = {"stdout": subprocess.DEVNULL, "pass_fds": [number], "env": environment}
            process = start_program(command, None, **options)
        parent_end.settimeout(_START_SECONDS)
        try:
            parent_end.sendall(json.dumps(arguments).encode() + b"\n")
            reply = json.loads(parent_end.recv(65536) or b"null")
        except TimeoutError:
            reply = {"error": f"{imports}: importing it took more than {_START_SECONDS:.0f} s"}
        except ConnectionError:
            reply = None
        if not isinstance(reply, dict) or "error" in reply:
            parent_end.close()
            if reply is None:  # it ends, and says why
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(5.0)
            process.kill()
            ended = f"{imports}: importing it ended the process (exit code {process.wait()}); fix it"
            raise UserError(reply["error"] if reply else ended)
        self.description = reply
        return process, parent_end

    def _request_worker(self, descriptor: int) -> None:
        """Ask the fork server for a worker that serves this descriptor."""
        with self._lock:
            server = self._process
            if server is not None and server[0].poll() is not None and not self.closed:
                logger.warning("the fork server has died; restarting it")
                server[1].close()
                server = None
            if server is None:
                server = self._process = self._start()
            socket.send_fds(server[1], [b"w"], [descriptor])


def _decode(line: bytearray) -> Any:
    try:
        return msgspec.json.decode(line)
    except msgspec.MsgspecError:  # it refuses what ``json`` writes of NaN and of half a surrogate pair
        return json.loads(line)


class _Call(NamedTuple):
    """A call that a worker runs."""

    outcome: asyncio.Future[Outcome]
    sent: float
    timer: asyncio.TimerHandle | None
    on_request: Callable[[dict[str, Any]], None] | None

    def stop_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()


class WorkerProcess(asyncio.Protocol):
    """A worker and its calls: one at a time, or many."""

    def __init__(self, server: ForkServer, worker: ForkedWorker):
        self.is_full = False
        """Whether it gets no more calls: its memory has grown, it is for a single call, or it has ended."""
        self._server, self._worker = server, worker
        self._calls: dict[int, _Call] = {}
        self._numbers = itertools.count()
        self._unread = bytearray()
        self._ended = False

    @classmethod
    async def start(cls, server: ForkServer) -> WorkerProcess:
        """A new worker, for the running event loop."""
        worker = await asyncio.to_thread(server.fork)
        loop = asyncio.get_running_loop()
        _, process = await loop.create_unix_connection(partial(cls, server, worker), sock=worker.connection)
        return process

    @property
    def takes_calls(self) -> bool:
        """Whether it can run one more."""
        return not self.is_full and (self._server.is_async or not self._calls)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection to the worker is open."""
        self._transport = cast(asyncio.WriteTransport, transport)
        self._transport.set_write_buffer_limits(0)

    @property
    def calls(self) -> int:
        """Number of running calls."""
        return len(self._calls)

    def call(
        self, arguments: Any, on_request: Callable[[dict[str, Any]], None] | None = None
    ) -> tuple[int, asyncio.Future[Outcome]]:
        """Run a call; its outcome is a crash if the worker dies meanwhile. Returns its number too.

        on_request: called with what the function asks for; the call then has no deadline.
        """
        loop, number = asyncio.get_running_loop(), next(self._numbers)
        timer = self._limit(number) if on_request is None else None
        call = self._calls[number] = _Call(loop.create_future(), loop.time(), timer, on_request)
        self.send(number, arguments)
        if self._ended:  # before it got the call
            self.end()
        return number, call.outcome

    def send(self, number: int, value: Any) -> None:
        """Send a value to a call."""
        self._transport.write(json.dumps([number, value]).encode() + b"\n")

    def _limit(self, number: int) -> asyncio.TimerHandle:
        limit = self._server.deadline + (GRACE_SECONDS if self._server.is_async else 0.0)
        return asyncio.get_running_loop().call_later(limit, self._check, number)

    def resume_writing(self) -> None:
        """A worker has read its input, which may be large; the time for its call begins."""
        if not self._server.is_async:
            for number, call in self._calls.items():
                call.stop_timer()
                self._calls[number] = call._replace(timer=self._limit(number))

    def data_received(self, data: bytes) -> None:
        """Read answers and requests."""
        self._unread += data
        if b"\n" not in data and len(self._unread) <= _LONGEST:
            return
        *lines, self._unread = self._unread.split(b"\n")
        try:
            if len(self._unread) > _LONGEST:
                raise ValueError("a line without an end")
            for line in lines:
                answer = _decode(line)
                number = answer["number"]
                if "ask" in answer:
                    asking = self._calls.get(number)
                    if asking is not None and asking.on_request is not None:
                        asking.on_request(answer)
                    continue
                outcome = Outcome(**{key: answer[key] for key in Outcome._fields if key in answer})
                exits = answer["exits"]
                if not isinstance(exits, bool):
                    raise ValueError("not an answer")
                call = self._calls.pop(number)  # from here on nothing raises: its outcome is set
                call.stop_timer()
                self.is_full |= exits
                if not call.outcome.done():
                    call.outcome.set_result(outcome)
        except (ValueError, LookupError, TypeError, RecursionError):  # something else has written to it
            self.end()
        if self.is_full and not self._calls:
            self.end()

    def connection_lost(self, _: Exception | None) -> None:
        """The worker has ended."""
        self.end()

    def end(self, overdue: int | None = None) -> None:
        """Kill the worker and what it has started. overdue: the call that has exceeded its limit."""
        if not self._ended:
            self._ended = self.is_full = True
            self._worker.kill()
            self._server.remove(self._worker)
            self._transport.abort()
        deadline = self._server.deadline
        late = asyncio.get_running_loop().time() - deadline
        for number, call in self._calls.items():
            call.stop_timer()
            if overdue is not None and (number == overdue or call.sent < late):
                outcome = Outcome(None, "timeout", f"killed after {deadline:g} s")
            else:
                died = "the process died" if self._server.is_async else "the worker died"
                outcome = Outcome(None, "crash", died)
            if not call.outcome.done():
                call.outcome.set_result(outcome)
        self._calls.clear()

    def _check(self, number: int) -> None:
        """End the worker if the call still runs, unless there are answers to read: this process was late."""
        if number in self._calls and (self._server.is_async or not self._transport.get_write_buffer_size()):
            if wait([self._worker.connection], 0):
                asyncio.get_running_loop().call_later(_LATE_SECONDS, self._check, number)
            else:
                self.end(overdue=number)
