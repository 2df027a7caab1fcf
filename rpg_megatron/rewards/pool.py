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
from collections.abc import Mapping
from concurrent.futures import Future
from multiprocessing.connection import Connection
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from rpg_megatron.config.errors import UserError

if TYPE_CHECKING:  # workers import this module, and do without pydantic
    from rpg_megatron.config.reward import RewardSettings, RewardTerm

logger = logging.getLogger(__name__)

Failure = Literal["timeout", "crash", "memory", "error"]
FAILURES: tuple[Failure, ...] = ("timeout", "crash", "memory", "error")

_START_SECONDS = 300.0
"""Limit for importing the function, and for a fork, on a busy machine."""


class Outcome(NamedTuple):
    """Result of one input."""

    value: Any
    """Return value of the function: a bool, a number or None; of a call for a group, a list of these. None if
    it failed."""
    failure: Failure | None = None
    """Why it failed: killed at the deadline, crashed, out of memory, or an exception."""
    detail: str = ""
    """Type and message of the exception."""
    counts: Mapping[str, float] = MappingProxyType({})
    """What the function counted."""


def read_answer(answer: dict[str, Any]) -> Outcome:
    """The outcome in an answer of ``worker_process``."""
    return Outcome(
        answer.get("value"), answer.get("failure"), answer.get("detail", ""), answer.get("counts", {})
    )


class RewardWorker(NamedTuple):
    """A fork of the fork server."""

    connection: Connection
    pid: int
    handle: int
    """pidfd of the process: its pid may be reused before we kill it."""

    def kill(self) -> None:
        """Kill it, and the processes that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.handle, signal.SIGKILL)

    def close(self) -> None:
        """Free what it holds here."""
        self.connection.close()
        os.close(self.handle)


class Function(NamedTuple):
    """What the workers run, and its limits."""

    path: str
    """module:name"""
    deadline: float
    """Seconds for one call."""
    memory: int
    """Address space of a worker, in bytes."""
    async_deadline: float = 0.0
    """Seconds for one call of an async function."""
    own: tuple[str, dict[str, Any], tuple[str, ...]] | None = None
    """Of a reward of the user: its key in the settings, its settings, and names that these cannot have."""


class ForkServer:
    """The process that imported the function, and its workers. Thread-safe."""

    def __init__(self, function: Function, *, lazy: bool = False):
        """Start it, and import the function. lazy: with the first worker.

        Raises UserError if the function cannot be imported, or does not have these settings.
        """
        self._function = function
        self.asks: dict[str, Any] = {}
        """What a reward of the user asks for (``OwnReward.asks``)."""
        self._lock = threading.Lock()
        self.closed = False
        self._owner = os.getpid()
        self.workers: dict[int, RewardWorker] = {}
        self._process: tuple[subprocess.Popen[bytes], socket.socket] | None = None
        if not lazy:
            self._process = self._start()

    @property
    def deadline(self) -> float:
        """Seconds for one call."""
        return self._function.async_deadline if self.asks.get("async") else self._function.deadline

    def fork(self) -> RewardWorker:
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
                worker = RewardWorker(connection, pid, os.pidfd_open(pid))
            except (EOFError, OSError):
                connection.close()
                logger.warning("a reward worker died at its start (attempt %d)", attempt + 1)
                continue
            with self._lock:
                self.workers[pid] = worker
                if self.closed:
                    worker.kill()
            return worker
        raise RuntimeError("reward workers cannot be started; see the warnings above")

    def remove(self, worker: RewardWorker) -> None:
        """Forget a worker that has ended."""
        with self._lock:
            self.workers.pop(worker.pid, None)
            worker.close()  # not while ``kill`` uses it

    def kill(self) -> bool:
        """Kill the workers; new ones die at once. False: that was done before, or by another process."""
        if os.getpid() != self._owner:  # a fork that exits: the workers belong to its parent
            return False
        with self._lock:
            if self.closed:
                return False
            self.closed = True
            for worker in self.workers.values():
                worker.kill()
        return True

    def close(self) -> None:
        """End the process, after ``kill``."""
        if self._process is not None:
            process, control = self._process
            control.close()
            process.wait()

    def _start(self) -> tuple[subprocess.Popen[bytes], socket.socket]:
        path, _, memory, deadline, own = self._function
        where = own[0] if own else "reward"
        named = json.dumps(path if own is None else [where, path, *own[1:]])
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-P", "-m", "rpg_megatron.rewards.fork_server", named]
            command += [str(memory), str(deadline), str(os.getpid()), str(theirs.fileno())]
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
            reply = {"error": f"{where}.type: {path}: importing it took more than {_START_SECONDS:.0f} s"}
        except ConnectionError:
            reply = None
        if not isinstance(reply, dict) or "error" in reply:
            ours.close()
            process.kill()
            code = process.wait()
            raise UserError(
                reply["error"]
                if reply
                else f"{where}.type: importing {path} ended the process (exit code {code}); fix it"
            )
        self.asks = reply
        return process, ours

    def _request_worker(self, descriptor: int) -> None:
        """Ask the fork server for a worker that serves this descriptor."""
        with self._lock:
            server = self._process
            if server is not None and server[0].poll() is not None and not self.closed:
                logger.warning("the fork server of the reward workers is gone; starting it again")
                server[1].close()
                server = None
            if server is None:
                server = self._process = self._start()
            socket.send_fds(server[1], [b"w"], [descriptor])


class WorkerPool:
    """Workers for one function: JSON-serialisable arguments, a bool, a number or None as result."""

    def __init__(self, server: ForkServer, workers: int):
        """workers: number of processes."""
        self._server, self._deadline = server, server.deadline
        self._tasks: queue.SimpleQueue[tuple[Any, Future[Outcome]] | None] = queue.SimpleQueue()
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=self._work, name=f"reward-{i}", daemon=True) for i in range(workers)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, arguments: Any) -> Future[Outcome]:
        """Queue one input. The future gets an Outcome whatever happens to the worker."""
        future: Future[Outcome] = Future()
        self._tasks.put((arguments, future))
        return future

    def pop_counts(self) -> dict[str, int]:
        """Number of failed inputs by kind of failure, since the last call."""
        with self._lock:
            counts: dict[str, int] = {failure: self._counts[failure] for failure in FAILURES}
            self._counts.clear()
        return counts

    def close(self) -> None:
        """Kill the workers; wait for threads and fork server to end. Unfinished inputs count as crashed."""
        if self._server.kill():
            for _ in self._threads:
                self._tasks.put(None)
            for thread in self._threads:
                thread.join()
            self._server.close()

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _work(self) -> None:
        worker: RewardWorker | None = None
        while (task := self._tasks.get()) is not None:
            arguments, future = task
            if not future.set_running_or_notify_cancel():
                continue
            if self._server.closed:
                future.set_result(Outcome(None, "crash", "the pool was closed"))
                continue
            try:
                for _ in range(2):  # a worker may have been killed whatever its input was
                    worker = worker or self._server.fork()
                    outcome, ended = self._call(worker, arguments)
                    if ended:
                        worker.kill()  # also what it started, if it ends by itself
                        self._server.remove(worker)
                        worker = None
                    if outcome.failure != "crash" or self._server.closed:
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
            self._server.remove(worker)

    def _call(self, worker: RewardWorker, arguments: Any) -> tuple[Outcome, bool]:
        """The outcome, and whether the worker has ended or has to."""
        try:
            # The worker is idle and reads, so sending does not block for long, even with a large input.
            worker.connection.send_bytes(json.dumps(arguments).encode())
            if not worker.connection.poll(self._deadline):
                return Outcome(None, "timeout", f"killed after {self._deadline:g} s"), True
            answer = json.loads(worker.connection.recv_bytes())
        except (EOFError, OSError, ValueError):
            return Outcome(None, "crash", "the worker died"), True
        return read_answer(answer), bool(answer["exits"])


def start_function(settings: RewardSettings, term: RewardTerm) -> ForkServer:
    """Import a reward of the user, in a process of its own. Raises UserError if that fails."""
    own = term.where, term.settings, term.reserved
    limits = settings.deadline, settings.memory_bytes, settings.async_deadline
    return ForkServer(Function(term.type, *limits, own))
