"""Concurrent calls of an async reward function, in one process that can be killed.

The process ends a call at its deadline. If a call blocks the process's event loop, so that no call can end,
the process is killed a little later: calls past their deadline have timed out. The others are retried, each
in a process of its own, and so are the calls of a process that died. So a call that crashes does not affect
the result of another one.
"""

from __future__ import annotations

import contextlib
import json
import queue
import threading
import time
from collections import Counter
from concurrent.futures import Future
from typing import Any

from rpg_megatron.rewards.pool import FAILURES, ForkServer, Outcome, RewardWorker, read_answer

_GRACE_SECONDS = 5.0
"""A process is killed this long after the deadline of a call that has not ended."""
_POLL_SECONDS = 0.25


class _Call:
    """A call from its submission to its outcome."""

    def __init__(self, number: int, arguments: Any):
        self.number, self.arguments = number, arguments
        self.future: Future[Outcome] = Future()
        self.deaths = 0
        """Number of processes that died while they ran it."""
        self.started = 0.0
        """``time.monotonic()`` when it was last sent to a process."""


class _Process:
    """A process and its running calls."""

    def __init__(self, worker: RewardWorker):
        self.worker = worker
        self.calls: dict[int, _Call] = {}
        self.is_full = False
        """Whether it gets no more calls: its memory has grown, or it is for a single call."""
        self.sending = threading.Lock()
        """Held while the connection is written to or closed."""


class AsyncPool:
    """Like ``WorkerPool``, for an async function."""

    def __init__(self, server: ForkServer, concurrency: int):
        """concurrency: maximum number of running calls; waiting does not count towards a call's deadline."""
        self._server, self._deadline = server, server.deadline
        self._queue: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._slots = threading.Semaphore(concurrency)
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._numbers = 0
        self._process: _Process | None = None
        self._readers: list[threading.Thread] = []
        self._sender = threading.Thread(target=self._send, name="async-rewards", daemon=True)
        self._sender.start()

    def submit(self, arguments: Any) -> Future[Outcome]:
        """Queue one call. The future gets an Outcome whatever happens to the process."""
        with self._lock:
            self._numbers += 1
            call = _Call(self._numbers, arguments)
        self._queue.put(call)
        return call.future

    def pop_counts(self) -> dict[str, int]:
        """Number of failed calls by kind of failure, since this method was last called."""
        with self._lock:
            counts: dict[str, int] = {failure: self._counts[failure] for failure in FAILURES}
            self._counts.clear()
        return counts

    def close(self) -> None:
        """Kill the process; wait for threads and fork server to end. Unfinished calls count as crashed."""
        if self._server.kill():
            self._queue.put(None)
            self._slots.release()
            self._sender.join()
            for reader in self._readers:
                reader.join()
            self._end_queued_calls()  # that readers queued before they saw that the pool is closed
            self._server.close()

    # -- threads ---------------------------------------------------------------------------------------------

    def _send(self) -> None:
        while (call := self._queue.get()) is not None:
            if call.deaths == 0 and not call.future.set_running_or_notify_cancel():
                continue
            self._slots.acquire()
            if self._server.closed:
                self._finish(call, Outcome(None, "crash", "the pool was closed"))
                continue
            try:
                self._start(call)
            except Exception as e:
                self._slots.release()
                call.future.set_exception(e)
        self._end_queued_calls()

    def _end_queued_calls(self) -> None:
        while not self._queue.empty():
            call = self._queue.get()
            if call is not None and (call.deaths or call.future.set_running_or_notify_cancel()):
                self._finish(call, Outcome(None, "crash", "the pool was closed"))

    def _start(self, call: _Call) -> None:
        """Send a call to the process, or to a new one."""
        message = json.dumps([call.number, call.arguments]).encode()
        with self._lock:
            process = self._process if call.deaths == 0 else None
            if process is not None:
                call.started = time.monotonic()
                process.calls[call.number] = call
        if process is None:
            process = _Process(self._server.fork())
            with self._lock:
                call.started = time.monotonic()
                process.calls[call.number] = call
                process.is_full = call.deaths > 0
                self._process = self._process if process.is_full else process
            reader = threading.Thread(target=self._read, args=(process,), daemon=True)
            self._readers = [thread for thread in self._readers if thread.is_alive()] + [reader]
            reader.start()
        # If it has died, the reader detects that and retries the call.
        with process.sending, contextlib.suppress(OSError):
            process.worker.connection.send_bytes(message)

    def _read(self, process: _Process) -> None:
        """Receive the answers of a process until it ends or must be killed."""
        connection, overdue = process.worker.connection, False
        while not overdue:
            try:
                if connection.poll(_POLL_SECONDS):
                    self._handle(process, json.loads(connection.recv_bytes()))
            except (EOFError, OSError, ValueError):
                break
            limit = time.monotonic() - self._deadline - _GRACE_SECONDS
            with self._lock:
                overdue = any(call.started < limit for call in process.calls.values())
                if process.is_full and not process.calls:
                    break
        process.worker.kill()
        with self._lock:
            if self._process is process:
                self._process = None
            calls = list(process.calls.values())
        with process.sending:
            self._server.remove(process.worker)
        limit = time.monotonic() - self._deadline
        for call in calls:
            call.deaths += 1
            if overdue and call.started < limit:
                self._finish(call, Outcome(None, "timeout", f"killed after {self._deadline:g} s"))
            elif call.deaths == 2 or self._server.closed:
                self._finish(call, Outcome(None, "crash", "the process died"))
            else:
                self._slots.release()
                self._queue.put(call)

    def _handle(self, process: _Process, answer: dict[str, Any]) -> None:
        with self._lock:
            call = process.calls.pop(answer["number"])
            if answer["exits"] and not process.is_full:
                process.is_full = True
                if self._process is process:
                    self._process = None
        self._finish(call, read_answer(answer))

    def _finish(self, call: _Call, outcome: Outcome) -> None:
        self._slots.release()
        if outcome.failure:
            with self._lock:
                self._counts[outcome.failure] += 1
        call.future.set_result(outcome)
