"""Worker pool with a deadline and a memory limit per input: runs one function in killable processes.

One thread per worker sends it inputs, one at a time. Whatever a worker does (hang, crash, run out of memory,
raise), its input gets an ``Outcome``, and a new worker starts in milliseconds (see ``fork_server``). Only the
input of a worker that died is tried a second time.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections import Counter
from concurrent.futures import Future
from multiprocessing.connection import Connection
from typing import Any, Literal, NamedTuple

from rpg_megatron.config.errors import UserError

logger = logging.getLogger(__name__)

Failure = Literal["timeout", "crash", "memory", "error"]
FAILURES: tuple[Failure, ...] = ("timeout", "crash", "memory", "error")

_START_SECONDS = 300.0
"""Limit for importing the function, and for a fork, on a busy machine."""


class Outcome(NamedTuple):
    """Result of one input."""

    value: bool | float | None
    """Return value of the function; None if it failed."""
    failure: Failure | None = None
    """Why it failed: killed at the deadline, crashed, out of memory, or an exception."""
    detail: str = ""
    """Type and message of the exception."""


class _Worker(NamedTuple):
    connection: Connection
    pid: int
    handle: int
    """pidfd of the process: its pid may be reused before we kill it."""

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)  # and the processes that it started
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.handle, signal.SIGKILL)

    def close(self) -> None:
        self.connection.close()
        os.close(self.handle)


class WorkerPool:
    """Workers for one function, ``module:name``: JSON-serialisable arguments, a bool or number as result."""

    def __init__(self, function: str, *, workers: int, deadline: float, memory: int, lazy: bool = False):
        """Start the fork server, which imports the function.

        deadline: seconds for one input. memory: address space of a worker, in bytes. lazy: start the fork
        server with the first input.
        Raises UserError if the function cannot be imported.
        """
        self._function, self._deadline, self._memory = function, deadline, memory
        self._tasks: queue.SimpleQueue[tuple[list[Any], Future[Outcome]] | None] = queue.SimpleQueue()
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._closed = False
        self._owner = os.getpid()
        self._workers: dict[int, _Worker] = {}
        self._fork_server: tuple[subprocess.Popen[bytes], socket.socket] | None = None
        if not lazy:
            self._fork_server = self._start_fork_server()
        self._threads = [
            threading.Thread(target=self._work, name=f"reward-{i}", daemon=True) for i in range(workers)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, *arguments: Any) -> Future[Outcome]:
        """Queue one input. The future gets an Outcome whatever happens to the worker."""
        future: Future[Outcome] = Future()
        self._tasks.put((list(arguments), future))
        return future

    def pop_counts(self) -> dict[str, int]:
        """Number of failed inputs by kind of failure, since the last call."""
        with self._lock:
            counts: dict[str, int] = {failure: self._counts[failure] for failure in FAILURES}
            self._counts.clear()
        return counts

    def close(self) -> None:
        """Kill the workers; wait for threads and fork server to end. Unfinished inputs count as crashed."""
        if os.getpid() != self._owner:  # a fork that exits: the workers belong to its parent
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
            workers = list(self._workers.values())
        for worker in workers:
            worker.kill()
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads:
            thread.join()
        if self._fork_server is not None:
            process, control = self._fork_server
            control.close()
            process.wait()

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- processes -------------------------------------------------------------------------------------------

    def _start_fork_server(self) -> tuple[subprocess.Popen[bytes], socket.socket]:
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-P", "-m", "rpg_megatron.rewards.fork_server", self._function]
            command += [str(self._memory), str(os.getpid()), str(theirs.fileno())]
            # Its own process group, so that Ctrl-C does not reach it, in this process's session.
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                process_group=0,
            )
        ours.settimeout(_START_SECONDS)
        try:
            reply = json.loads(ours.recv(65536) or b"null")
        except TimeoutError:
            reply = {"error": f"{self._function}: importing it took more than {_START_SECONDS:.0f} s"}
        except ConnectionError:
            reply = None
        if not isinstance(reply, dict) or "error" in reply:
            ours.close()
            process.kill()
            code = process.wait()
            raise UserError(
                f"reward.type: {reply['error']}"
                if reply
                else f"reward.type: importing {self._function} ended the process (exit code {code}); fix it"
            )
        return process, ours

    def _fork(self) -> _Worker:
        """A new worker. Restarts the fork server if it was killed."""
        for attempt in range(3):
            ours, theirs = socket.socketpair()
            connection = Connection(ours.detach())
            try:
                with theirs:
                    self._request_worker(theirs.fileno())
                if not connection.poll(_START_SECONDS):
                    raise EOFError
                pid = int(connection.recv_bytes())
                worker = _Worker(connection, pid, os.pidfd_open(pid))
            except (EOFError, OSError):
                connection.close()
                logger.warning("a reward worker died at its start (attempt %d)", attempt + 1)
                continue
            with self._lock:
                self._workers[pid] = worker
                if self._closed:
                    worker.kill()
            return worker
        raise RuntimeError("reward workers cannot be started; see the warnings above")

    def _request_worker(self, descriptor: int) -> None:
        """Ask the fork server for a worker that serves this descriptor."""
        with self._lock:
            server = self._fork_server
            if server is not None and server[0].poll() is not None and not self._closed:
                logger.warning("the fork server of the reward workers is gone; starting it again")
                server[1].close()
                server = None
            if server is None:
                server = self._fork_server = self._start_fork_server()
            socket.send_fds(server[1], [b"w"], [descriptor])

    def _remove(self, worker: _Worker) -> None:
        with self._lock:
            self._workers.pop(worker.pid, None)
        worker.close()

    # -- threads ---------------------------------------------------------------------------------------------

    def _work(self) -> None:
        worker: _Worker | None = None
        while (task := self._tasks.get()) is not None:
            arguments, future = task
            if not future.set_running_or_notify_cancel():
                continue
            if self._closed:
                future.set_result(Outcome(None, "crash", "the pool was closed"))
                continue
            try:
                for _ in range(2):  # a worker may have been killed whatever its input was
                    worker = worker or self._fork()
                    outcome, ended = self._call(worker, arguments)
                    if ended:
                        self._remove(worker)
                        worker = None
                    if outcome.failure != "crash" or self._closed:
                        break
            except Exception as e:
                future.set_exception(e)
                continue
            if outcome.failure:
                with self._lock:
                    self._counts[outcome.failure] += 1
            future.set_result(outcome)
        if worker:
            worker.kill()
            self._remove(worker)

    def _call(self, worker: _Worker, arguments: list[Any]) -> tuple[Outcome, bool]:
        """The outcome, and whether the worker has ended."""
        try:
            # The worker is idle and reads, so sending does not block for long, even with a large input.
            worker.connection.send_bytes(json.dumps(arguments).encode())
            if not worker.connection.poll(self._deadline):
                worker.kill()
                return Outcome(None, "timeout", f"killed after {self._deadline:g} s"), True
            answer = json.loads(worker.connection.recv_bytes())
        except (EOFError, OSError, ValueError):
            worker.kill()
            return Outcome(None, "crash", "the worker died"), True
        return (
            Outcome(answer.get("value"), answer.get("failure"), answer.get("detail", "")),
            bool(answer["exits"]),
        )
