"""Worker pool with a deadline and a memory limit per input: runs one function in killable processes.

Whatever a worker does (hang, crash, run out of memory, raise), its input gets an ``Outcome``, and a new
worker starts in milliseconds (see ``fork_server``). An input is retried once if its worker died, and not
after other failures. A worker runs one call at a time. Those of an async function run together in one worker,
which ends each at the deadline. If one blocks the worker's event loop, the worker is killed a little later:
calls past their deadline have timed out, the others are retried.

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
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from multiprocessing.connection import wait
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import msgspec

from rpg_megatron.config.errors import UserError
from rpg_megatron.rewards.failures import FAILURES, FailureKind
from rpg_megatron.system.process_groups import holding_warnings

if TYPE_CHECKING:
    from rpg_megatron.config.reward import RewardSettings, RewardTerm

logger = logging.getLogger(__name__)

_START_SECONDS = 300.0
"""Limit for importing the function, and for a fork, on a busy machine."""
GRACE_SECONDS = 5.0
"""The worker of an async function is killed this long after the deadline of a call that has not ended."""
_LATE_SECONDS = 0.05
"""Pause before the next look at a call that is late, if there are answers to read first."""


class Outcome(NamedTuple):
    """Result of one input."""

    value: Any
    """Return value of the function: a bool, a number or None; for a call with a group, a list of these. None
    if it failed."""
    failure: FailureKind | None = None
    """Why it failed: killed at the deadline, crashed, out of memory, or an exception."""
    detail: str = ""
    """Type and message of the exception, or what else is wrong."""
    counts: Mapping[str, float] = MappingProxyType({})
    """Counts that the function returned, by name."""
    place: str = ""
    """Where it raised the exception, ``file:line``; empty if that is not known."""


_CLOSED = Outcome(None, "crash", "the pool was closed")


def read_answer(answer: dict[str, Any]) -> Outcome:
    """The outcome in an answer of ``worker_process``."""
    details = (answer.get(key, empty) for key, empty in (("detail", ""), ("counts", {}), ("place", "")))
    return Outcome(answer.get("value"), answer.get("failure"), *details)


class RewardWorker(NamedTuple):
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
    episode: dict[str, Any] | None = None
    """For an episode: "load", the path of the loader of its server, and the loader's arguments."""


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
    def is_async(self) -> bool:
        """Whether the function is."""
        return bool(self.signature.get("async"))

    @property
    def deadline(self) -> float:
        """Seconds for one call."""
        return self._function.async_deadline if self.is_async else self._function.deadline

    def fork(self) -> RewardWorker:
        """A new worker. Restarts the fork server if it was killed."""
        for attempt in range(3):
            parent_end, child_end = socket.socketpair()
            parent_end.settimeout(_START_SECONDS)
            try:
                with child_end:
                    self._request_worker(child_end.fileno())
                pid = int(parent_end.recv(64))
                worker = RewardWorker(parent_end, pid, os.pidfd_open(pid))
            except (ValueError, OSError):
                parent_end.close()
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
        path, _, memory, deadline, custom, episode = self._function
        where = custom[0] if custom else "rollout.episode" if episode else "reward"
        function = json.dumps(episode or (path if custom is None else [where, path, *custom[1:]]))
        parent_end, child_end = socket.socketpair()
        with child_end:
            command = [sys.executable, "-P", "-m", "rpg_megatron.rewards.fork_server", function]
            command += [str(memory), str(deadline), str(os.getpid()), str(child_end.fileno())]
            # A process group of its own, so that Ctrl-C does not reach it; the session stays the same. Not
            # ``start_child``: any thread may start it, and it watches the process, not the thread.
            with holding_warnings():
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    pass_fds=[child_end.fileno()],
                    process_group=0,
                )
        parent_end.settimeout(_START_SECONDS)
        try:
            reply = json.loads(parent_end.recv(65536) or b"null")
        except TimeoutError:
            reply = {"error": f"{where}.type: {path}: importing it took more than {_START_SECONDS:.0f} s"}
        except ConnectionError:
            reply = None
        if not isinstance(reply, dict) or "error" in reply:
            parent_end.close()
            process.kill()
            code = process.wait()
            raise UserError(
                reply["error"]
                if reply
                else f"{where}.type: importing {path} ended the process (exit code {code}); fix it"
            )
        self.signature = reply
        return process, parent_end

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


def _decode(line: bytes) -> Any:
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
    """A worker and its calls: one at a time or, for an async function, many."""

    def __init__(self, server: ForkServer, worker: RewardWorker):
        self.is_full = False
        """Whether it gets no more calls: its memory has grown, it is for a single call, or it has ended."""
        self._server, self._worker = server, worker
        self._calls: dict[int, _Call] = {}
        self._numbers = itertools.count()
        self._unread = b""
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
        *lines, self._unread = (self._unread + data).split(b"\n")
        try:
            for line in lines:
                answer = _decode(line)
                number = answer["number"]
                if "ask" in answer:
                    asking = self._calls.get(number)
                    if asking is not None and asking.on_request is not None:
                        asking.on_request(answer)
                    continue
                call = self._calls.pop(number)
                call.stop_timer()
                self.is_full |= answer["exits"]
                if not call.outcome.done():
                    call.outcome.set_result(read_answer(answer))
        except (ValueError, LookupError, TypeError):  # something else has written to the connection
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


class WorkerPool:
    """Workers for one function. Its arguments are JSON-serialisable, its result is as in ``Outcome``.

    An event loop in a thread of its own calls them.
    """

    def __init__(self, server: ForkServer, size: int):
        """size: number of workers or, for an async function, of running calls, in one worker; a call that
        waits for its turn uses up no time.
        """
        self._server = server
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._processes: list[WorkerProcess] = []
        self._turns, self._choosing = asyncio.Semaphore(size), asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rewards", daemon=True)
        self._thread.start()

    def submit(self, arguments: Any) -> Future[Outcome]:
        """Queue one input. The future gets an Outcome whatever happens to the worker."""
        future: Future[Outcome] = Future()
        if self._server.closed:
            future.set_result(_CLOSED)
        else:
            self._loop.call_soon_threadsafe(self._begin, arguments, future)
        return future

    def pop_counts(self) -> dict[str, int]:
        """Number of failed inputs by kind of failure, since the last call."""
        with self._lock:
            counts: dict[str, int] = {failure: self._counts[failure] for failure in FAILURES}
            self._counts.clear()
        return counts

    def close(self) -> None:
        """Kill the workers; wait for thread and fork server to end. Unfinished inputs count as crashed."""
        if self._server.kill():
            asyncio.run_coroutine_threadsafe(self._finish(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
            self._server.close()

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- in the thread ---------------------------------------------------------------------------------------

    def _begin(self, arguments: Any, future: Future[Outcome]) -> None:
        task = self._loop.create_task(self._run(arguments, future))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, arguments: Any, future: Future[Outcome]) -> None:
        async with self._turns:
            if not future.set_running_or_notify_cancel():
                return
            outcome = _CLOSED
            try:
                for again in (False, True):  # a worker may be killed for reasons unrelated to its input
                    if outcome.failure == "crash" and not self._server.closed:
                        outcome = await (await self._start(arguments, again=again))
            except Exception as e:
                future.set_exception(e)
                return
        if outcome.failure:
            with self._lock:
                self._counts[outcome.failure] += 1
        future.set_result(outcome)

    async def _start(self, arguments: Any, *, again: bool) -> asyncio.Future[Outcome]:
        """Give a call to a worker. again: the worker of the first attempt has died.

        Such a call of an async function gets a worker of its own, since it may crash that again.
        """
        alone = again and self._server.is_async
        async with self._choosing:
            self._processes = [process for process in self._processes if not process.is_full]
            process = next((p for p in self._processes if p.takes_calls), None)
            if process is None or alone:
                process = await WorkerProcess.start(self._server)
                self._processes.append(process)
                process.is_full |= alone
            return process.call(arguments)[1]

    async def _finish(self) -> None:
        while self._tasks:
            await asyncio.wait(self._tasks)
        for process in self._processes:
            process.end()


def start_custom_reward(settings: RewardSettings, term: RewardTerm) -> ForkServer:
    """Import a custom reward in a fork server. Raises UserError if that fails."""
    custom = term.where, term.settings, term.reserved
    limits = settings.deadline, settings.memory_bytes, settings.async_deadline
    return ForkServer(Function(term.type, *limits, custom))
