"""Calls of an async reward function, many at a time, in one process that can be killed.

The process ends a call at its deadline. One that blocks the process's event loop, so that no call ends there,
is found here a little later, and the process is killed: calls that were past their deadline have timed out.
The others are made again, as are those of a process that died, each in a process of its own: so a call that
crashes costs no other one its result.
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

_GRACE = 5.0
"""Seconds after its deadline in which a call has to end in its process."""
_POLL = 0.25


class _Call:
    """A call from its submission to its outcome."""

    def __init__(self, number: int, given: Any):
        self.number, self.given = number, given
        self.future: Future[Outcome] = Future()
        self.deaths = 0
        """Processes that died with it."""
        self.begun = 0.0


class _Process:
    """A process and the calls under way in it."""

    def __init__(self, worker: RewardWorker):
        self.worker = worker
        self.calls: dict[int, _Call] = {}
        self.full = False
        """Whether it gets no more calls: its memory has grown, or it is for one only."""
        self.sending = threading.Lock()
        """While something is written to the connection, or it is closed."""


class AsyncPool:
    """See ``WorkerPool``, for an async function."""

    def __init__(self, server: ForkServer, concurrency: int):
        """concurrency: most calls at a time; the others wait, which does not count for their deadline."""
        self._server, self._deadline = server, server.deadline
        self._waiting: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._free = threading.Semaphore(concurrency)
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._numbers = 0
        self._process: _Process | None = None
        self._readers: list[threading.Thread] = []
        self._sender = threading.Thread(target=self._send, name="async-rewards", daemon=True)
        self._sender.start()

    def submit(self, given: Any) -> Future[Outcome]:
        """Queue one call. The future gets an Outcome whatever happens to the process."""
        with self._lock:
            self._numbers += 1
            call = _Call(self._numbers, given)
        self._waiting.put(call)
        return call.future

    def pop_counts(self) -> dict[str, int]:
        """Number of failed calls by kind of failure, since the last call of this method."""
        with self._lock:
            counts: dict[str, int] = {failure: self._counts[failure] for failure in FAILURES}
            self._counts.clear()
        return counts

    def close(self) -> None:
        """Kill the process; wait for threads and fork server to end. Unfinished calls count as crashed."""
        if self._server.kill():
            self._waiting.put(None)
            self._free.release()
            self._sender.join()
            for reader in self._readers:
                reader.join()
            self._finish_waiting()  # of readers that did not see that it is closed
            self._server.close()

    # -- threads ---------------------------------------------------------------------------------------------

    def _send(self) -> None:
        while (call := self._waiting.get()) is not None:
            if call.deaths == 0 and not call.future.set_running_or_notify_cancel():
                continue
            self._free.acquire()
            if self._server.closed:
                self._finish(call, Outcome(None, "crash", "the pool was closed"))
                continue
            try:
                self._begin(call)
            except Exception as e:
                self._free.release()
                call.future.set_exception(e)
        self._finish_waiting()

    def _finish_waiting(self) -> None:
        while not self._waiting.empty():
            call = self._waiting.get()
            if call is not None and (call.deaths or call.future.set_running_or_notify_cancel()):
                self._finish(call, Outcome(None, "crash", "the pool was closed"))

    def _begin(self, call: _Call) -> None:
        """Send a call to the process, or to a new one."""
        message = json.dumps([call.number, call.given]).encode()
        with self._lock:
            process = self._process if call.deaths == 0 else None
            if process is not None:
                call.begun = time.monotonic()
                process.calls[call.number] = call
        if process is None:
            process = _Process(self._server.fork())
            with self._lock:
                call.begun = time.monotonic()
                process.calls[call.number] = call
                process.full = call.deaths > 0
                self._process = self._process if process.full else process
            reader = threading.Thread(target=self._read, args=(process,), daemon=True)
            self._readers = [thread for thread in self._readers if thread.is_alive()] + [reader]
            reader.start()
        # If it has died, the reader knows, and the call is made again.
        with process.sending, contextlib.suppress(OSError):
            process.worker.connection.send_bytes(message)

    def _read(self, process: _Process) -> None:
        """Take the answers of a process, to its end."""
        connection, overdue = process.worker.connection, False
        while not overdue:
            try:
                if connection.poll(_POLL):
                    self._take(process, json.loads(connection.recv_bytes()))
            except (EOFError, OSError, ValueError):
                break
            limit = time.monotonic() - self._deadline - _GRACE
            with self._lock:
                overdue = any(call.begun < limit for call in process.calls.values())
                if process.full and not process.calls:
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
            if overdue and call.begun < limit:
                self._finish(call, Outcome(None, "timeout", f"killed after {self._deadline:g} s"))
            elif call.deaths == 2 or self._server.closed:
                self._finish(call, Outcome(None, "crash", "the process died"))
            else:
                self._free.release()
                self._waiting.put(call)

    def _take(self, process: _Process, answer: dict[str, Any]) -> None:
        with self._lock:
            call = process.calls.pop(answer["number"])
            if answer["exits"] and not process.full:
                process.full = True
                if self._process is process:
                    self._process = None
        self._finish(call, read_answer(answer))

    def _finish(self, call: _Call, outcome: Outcome) -> None:
        self._free.release()
        if outcome.failure:
            with self._lock:
                self._counts[outcome.failure] += 1
        call.future.set_result(outcome)
