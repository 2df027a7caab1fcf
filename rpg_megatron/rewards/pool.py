"""Runs one function on many inputs in processes that are killed when an input takes too long.

A thread for each worker passes inputs on, one at a time. Whatever a worker does (hang, crash, use up its
memory, raise), its input gets an ``Outcome`` that says so and the next worker is there in milliseconds: see
``fork_server``.
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

_START = 300.0
"""Seconds that importing the function, or a fork, may take on a busy machine."""


class Outcome(NamedTuple):
    """What came of one input."""

    value: bool | float | None
    """What the function returned; None if it did not."""
    failure: Failure | None = None
    """Why it did not: killed at the deadline, died, out of memory, or an exception."""
    detail: str = ""
    """The exception."""


class _Worker(NamedTuple):
    connection: Connection
    pid: int
    handle: int
    """File descriptor of the process: its number may be another process's by the time we kill it."""

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)  # with what it started
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.handle, signal.SIGKILL)

    def close(self) -> None:
        self.connection.close()
        os.close(self.handle)


class WorkerPool:
    """Workers for one function, ``module:name``, whose arguments JSON can hold and that returns a bool or a
    number.
    """

    def __init__(self, function: str, *, workers: int, deadline: float, memory: int, lazy: bool = False):
        """Import the function, in another process.

        deadline: seconds for one input. memory: address space of a worker, in bytes. lazy: import it when
        there is the first input.
        Raises UserError if the function cannot be imported.
        """
        self._function, self._deadline, self._memory = function, deadline, memory
        self._tasks: queue.SimpleQueue[tuple[list[Any], Future[Outcome]] | None] = queue.SimpleQueue()
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._closed = False
        self._owner = os.getpid()
        self._living: dict[int, _Worker] = {}
        self._nursery: tuple[subprocess.Popen[bytes], socket.socket] | None = None
        if not lazy:
            self._nursery = self._start_nursery()
        self._threads = [
            threading.Thread(target=self._work, name=f"reward-{i}", daemon=True) for i in range(workers)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, *arguments: Any) -> Future[Outcome]:
        """Queue one input. The future holds an Outcome whatever happens to the worker."""
        future: Future[Outcome] = Future()
        self._tasks.put((list(arguments), future))
        return future

    def pop_counts(self) -> dict[str, int]:
        """How many inputs failed, by failure, since this was asked last."""
        with self._lock:
            counts: dict[str, int] = {failure: self._counts[failure] for failure in FAILURES}
            self._counts.clear()
        return counts

    def close(self) -> None:
        """Kill the workers and wait until they are gone. Inputs under way count as crashed."""
        if os.getpid() != self._owner:  # a fork at its exit: the workers are its parent's
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
            living = list(self._living.values())
        for worker in living:
            worker.kill()
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads:
            thread.join()
        if self._nursery is not None:
            process, control = self._nursery
            control.close()
            process.wait()

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- processes -------------------------------------------------------------------------------------------

    def _start_nursery(self) -> tuple[subprocess.Popen[bytes], socket.socket]:
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", "rpg_megatron.rewards.fork_server", self._function]
            command += [str(self._memory), str(os.getpid()), str(theirs.fileno())]
            # A group of its own, so that Ctrl-C does not reach it, but this process's session.
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                process_group=0,
            )
        ours.settimeout(_START)
        try:
            said = json.loads(ours.recv(65536) or b"null")
        except TimeoutError:
            said = {"error": f"{self._function}: importing it took more than {_START:.0f} s"}
        except ConnectionError:
            said = None
        if not isinstance(said, dict) or "error" in said:
            ours.close()
            process.kill()
            code = process.wait()
            raise UserError(
                f"reward.type: {said['error']}"
                if said
                else f"reward.type: importing {self._function} ended the process (exit code {code}); mend it"
            )
        return process, ours

    def _fork(self) -> _Worker:
        """A fresh worker. A nursery that was killed is started again."""
        for attempt in range(3):
            ours, theirs = socket.socketpair()
            connection = Connection(ours.detach())
            try:
                with theirs:
                    self._request(theirs.fileno())
                if not connection.poll(_START):
                    raise EOFError
                pid = int(connection.recv_bytes())
                worker = _Worker(connection, pid, os.pidfd_open(pid))
            except (EOFError, OSError):
                connection.close()
                logger.warning("a reward worker died as it started (attempt %d)", attempt + 1)
                continue
            with self._lock:
                self._living[pid] = worker
                if self._closed:
                    worker.kill()
            return worker
        raise RuntimeError("reward workers cannot be started; see the messages above")

    def _request(self, descriptor: int) -> None:
        """Have a worker forked that serves this descriptor."""
        with self._lock:
            if self._nursery is not None and self._nursery[0].poll() is not None and not self._closed:
                logger.warning("the process that starts reward workers is gone; starting it again")
                self._nursery[1].close()
                self._nursery = None
            if self._nursery is None:
                self._nursery = self._start_nursery()
            socket.send_fds(self._nursery[1], [b"w"], [descriptor])

    def _forget(self, worker: _Worker) -> None:
        with self._lock:
            self._living.pop(worker.pid, None)
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
                worker = worker or self._fork()
                outcome, leaves = self._ask(worker, arguments)
            except Exception as e:
                future.set_exception(e)
                continue
            if leaves:
                self._forget(worker)
                worker = None
            if outcome.failure:
                with self._lock:
                    self._counts[outcome.failure] += 1
            future.set_result(outcome)
        if worker:
            worker.kill()
            self._forget(worker)

    def _ask(self, worker: _Worker, arguments: list[Any]) -> tuple[Outcome, bool]:
        """The outcome, and whether the worker is of no more use."""
        try:
            # It is idle and reads, so this cannot block for long, however large the input.
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
            bool(answer["leaves"]),
        )
