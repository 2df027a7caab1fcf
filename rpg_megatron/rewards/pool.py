"""Worker pool with a deadline and a memory limit per input: runs one function in killable processes.

One thread per worker sends it inputs, one at a time. Whatever a worker does (hang, crash, run out of memory,
raise), its input gets an ``Outcome``, and a new worker starts in milliseconds (see ``fork_server``). An input
is retried once if its worker died, and not after other failures.
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

if TYPE_CHECKING:  # workers import this module; they do not need pydantic
    from rpg_megatron.config.reward import RewardSettings, RewardTerm

logger = logging.getLogger(__name__)

Failure = Literal["timeout", "crash", "memory", "error"]
FAILURES: tuple[Failure, ...] = ("timeout", "crash", "memory", "error")

_START_SECONDS = 300.0
"""Limit for importing the function, and for a fork, on a busy machine."""


class Outcome(NamedTuple):
    """Result of one input."""

    value: Any
    """Return value of the function: a bool, a number or None; for a call with a group, a list of these. None
    if it failed."""
    failure: Failure | None = None
    """Why it failed: killed at the deadline, crashed, out of memory, or an exception."""
    detail: str = ""
    """Type and message of the exception, or what else is wrong."""
    counts: Mapping[str, float] = MappingProxyType({})
    """Counts that the function returned, by name."""
    place: str = ""
    """Where it raised the exception, ``file:line``; empty if that is not known."""


def read_answer(answer: dict[str, Any]) -> Outcome:
    """The outcome in an answer of ``worker_process``."""
    found = (answer.get(key, empty) for key, empty in (("detail", ""), ("counts", {}), ("place", "")))
    return Outcome(answer.get("value"), answer.get("failure"), *found)


class RewardWorker(NamedTuple):
    """A fork of the fork server."""

    connection: Connection
    pid: int
    handle: int
    """pidfd of the process, because its pid may be reused before it is killed."""

    def kill(self) -> None:
        """Kill the worker and the processes that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.handle, signal.SIGKILL)

    def close(self) -> None:
        """Close the connection and the pidfd."""
        self.connection.close()
        os.close(self.handle)


class Function(NamedTuple):
    """The function that workers run, and its limits."""

    path: str
    """``module:name``."""
    deadline: float
    """Seconds for one call."""
    memory: int
    """Address space of a worker, in bytes."""
    async_deadline: float = 0.0
    """Seconds for one call of an async function."""
    custom: tuple[str, dict[str, Any], tuple[str, ...]] | None = None
    """For a custom reward: its key in the settings, its settings, and reserved names of settings."""


class ForkServer:
    """Client of the process that imports the function, and of its workers. Thread-safe."""

    def __init__(self, function: Function, *, lazy: bool = False):
        """Start the process, which imports the function. lazy: start it with the first worker.

        Raises UserError if the function cannot be imported, or does not have these settings.
        """
        self._function = function
        self.signature: dict[str, Any] = {}
        """``CustomReward.signature`` of a custom reward, else empty."""
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
        return self._function.async_deadline if self.signature.get("async") else self._function.deadline

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
                logger.warning("a reward worker died while starting (attempt %d)", attempt + 1)
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
        path, _, memory, deadline, custom = self._function
        where = custom[0] if custom else "reward"
        named = json.dumps(path if custom is None else [where, path, *custom[1:]])
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-P", "-m", "rpg_megatron.rewards.fork_server", named]
            command += [str(memory), str(deadline), str(os.getpid()), str(theirs.fileno())]
            # A process group of its own, so that Ctrl-C does not reach it; the session stays the same.
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
        self.signature = reply
        return process, ours

    def _request_worker(self, descriptor: int) -> None:
        """Ask the fork server for a worker that serves this descriptor."""
        with self._lock:
            server = self._process
            if server is not None and server[0].poll() is not None and not self.closed:
                logger.warning("the fork server of the reward workers has died; restarting it")
                server[1].close()
                server = None
            if server is None:
                server = self._process = self._start()
            socket.send_fds(server[1], [b"w"], [descriptor])


class WorkerPool:
    """Workers for one function. Its arguments are JSON-serialisable, its result is as in ``Outcome``."""

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
                for _ in range(2):  # a worker may be killed for reasons unrelated to its input
                    worker = worker or self._server.fork()
                    outcome, ended = self._call(worker, arguments)
                    if ended:
                        worker.kill()  # also ends the processes that it started
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
        """The outcome, and whether the worker has ended or must be replaced."""
        try:
            # The worker is idle and reading, so sending does not block for long, even with a large input.
            worker.connection.send_bytes(json.dumps(arguments).encode())
            if not worker.connection.poll(self._deadline):
                return Outcome(None, "timeout", f"killed after {self._deadline:g} s"), True
            answer = json.loads(worker.connection.recv_bytes())
        except (EOFError, OSError, ValueError):
            return Outcome(None, "crash", "the worker died"), True
        return read_answer(answer), bool(answer["exits"])


def start_custom_reward(settings: RewardSettings, term: RewardTerm) -> ForkServer:
    """Import a custom reward in a fork server. Raises UserError if that fails."""
    custom = term.where, term.settings, term.reserved
    limits = settings.deadline, settings.memory_bytes, settings.async_deadline
    return ForkServer(Function(term.type, *limits, custom))
