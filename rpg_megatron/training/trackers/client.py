"""Trackers on rank 0: for each a bounded queue and a thread, which sends rows to the tracker's process.

A tracker never blocks or fails the training: if it is slow, rows are dropped and counted; if its process dies
or hangs, it is restarted.
"""

from __future__ import annotations

import json
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rpg_megatron.config import Settings
from rpg_megatron.config.trackers import RESPONSES, MLflowSettings, TensorBoardSettings, WandbSettings
from rpg_megatron.data.trajectory import Trajectory
from rpg_megatron.system.child import Child, module_command, start_child
from rpg_megatron.training.trackers.tracker import COLUMNS, file_name

_QUEUED = 256
"""Maximum rows in the queue of a tracker; then the oldest row is dropped."""
_WAITS = (2.0, 10.0, 60.0)
"""Seconds before each retry of a row; then it is dropped."""
_START_WAITS = (10.0, 60.0, 300.0)
"""Seconds before each restart of a tracker; the last one is repeated."""
_SILENT = 60.0
"""Seconds without a response after which a warning is shown."""
_HUNG = 600.0
"""Seconds without a response after which the process is killed and restarted."""
_HINTS = {
    "wandb": "check the network and WANDB_API_KEY (or `wandb login`), or set WANDB_MODE=offline",
    "mlflow": "check the server of trackers.uri or MLFLOW_TRACKING_URI",
}


class TrackerClient:
    """One tracker; index: in ``settings.trackers``."""

    def __init__(self, run_dir: Path, index: int, kind: str, warn: Callable[[str], None]) -> None:
        """Start it, without waiting. warn: called from a thread with the first problem, and at the end."""
        self.kind = kind
        self._command = module_command("rpg_megatron.training.trackers.process", run_dir, index)
        self._log, self._warn = run_dir / "logs" / f"tracker_{file_name(kind)}.log", warn
        self._waiting: deque[dict[str, Any]] = deque()
        self._changed = threading.Condition()
        self._closing = threading.Event()
        self._given_up = False
        """Whether no process may be started any more."""
        self._given, self._delivered, self._dropped, self._reported = 0, 0, 0, 0
        self._warned = False
        self._process: Child | None = None
        self._thread = threading.Thread(target=self._run, name=f"tracker {kind}", daemon=True)
        self._thread.start()

    def put(self, item: dict[str, Any]) -> None:
        """Queue a row, which must not change afterwards. Never blocks or raises."""
        with self._changed:
            self._given += 1
            if len(self._waiting) >= _QUEUED:
                self._waiting.popleft()
                self._dropped += 1
            self._waiting.append(item)
            self._changed.notify()

    def pop_dropped(self) -> int:
        """Rows dropped since the last call."""
        with self._changed:
            new, self._reported = self._dropped - self._reported, self._dropped
        return new

    def begin_to_close(self) -> None:
        """Start closing: send the queued rows without further retries, then end."""
        with self._changed:
            self._closing.set()
            self._changed.notify()

    def close(self, seconds: float) -> None:
        """Close within ``seconds``, then end the process. Warns if rows were not delivered."""
        self.begin_to_close()
        self._thread.join(seconds)
        late = self._thread.is_alive()
        self._given_up = True  # set first: the thread then ends a process that it is just starting
        self._end_process()
        self._thread.join(1.0)
        lost = self._given - self._delivered
        if lost or late:
            subject = f"{lost} of {self._given} rows were" if lost else "the end of the run was"
            self._warn(f"trackers: {subject} not delivered to {self.kind}; metrics.jsonl has all rows")

    # -- the thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        self._ensure_started()  # at once, to report problems before the first row
        while (item := self._next()) is not None:
            done = self._deliver(item)
            with self._changed:
                self._delivered += done
                self._dropped += not done
            if not done and self._closing.is_set():
                return
        if self._process is not None and self._ask("close") is None:
            self._end_process(patience=5.0)

    def _next(self) -> dict[str, Any] | None:
        """Wait for the oldest row; None when closing and the queue is empty."""
        with self._changed:
            while not self._waiting and not self._closing.is_set():
                self._changed.wait()
            return self._waiting.popleft() if self._waiting else None

    def _deliver(self, item: dict[str, Any]) -> bool:
        """Send a row, with retries; returns whether it was delivered."""
        for wait in (*_WAITS, None):
            if not self._ensure_started():
                return False
            problem = self._ask(item)
            if problem is None:
                return True
            self._report(problem)
            if wait is None or self._closing.wait(wait):
                break
        return False

    def _ensure_started(self) -> bool:
        """Start the process if there is none, with retries; False if the run ends before that succeeds."""
        waits = iter(_START_WAITS)
        while self._process is None:
            problem = self._start()
            if problem is None:
                return True
            self._report(problem)
            self._end_process()
            if self._closing.wait(next(waits, _START_WAITS[-1])):
                return False
        return True

    def _start(self) -> str | None:
        start = partial(start_child, self.kind, self._command, dict(os.environ), pipes=True, nested=True)
        try:
            try:
                self._process = start(self._log)
            except OSError:  # a full disk: without a log
                self._process = start(None)
        except OSError as e:
            return str(e)
        if self._given_up:
            self._end_process()
        return self._ask(None)

    def _ask(self, item: Any) -> str | None:
        """Send a line and wait for the response; returns an error message or None."""
        child = self._process
        if child is None:
            return "its process has ended"
        began = time.monotonic()
        answer = bytearray()
        try:
            for _ in self._exchange(child, json.dumps(item).encode() + b"\n", answer):
                seconds = time.monotonic() - began
                if seconds > _SILENT:
                    self._report(f"no response for {_SILENT:.0f} seconds")
                if seconds > _HUNG:
                    self._end_process()
                    return f"no response for {_HUNG:.0f} seconds"
        except OSError:
            answer.clear()
        if not answer.endswith(b"\n"):
            self._end_process()
            return f"its process ended (exit code {child.process.wait()})"
        problem: str | None = json.loads(answer)
        return problem

    def _exchange(self, child: Child, line: bytes, answer: bytearray) -> Iterator[None]:
        """Send the line and read the response; yields about once a second until it is complete."""
        requests, answers = child.pipes
        os.set_blocking(requests.fileno(), False)  # a hung tracker does not read either
        while not answer.endswith(b"\n"):
            readable, writable, _ = select.select([answers], [requests] if line else [], [], 1.0)
            if writable:
                line = line[os.write(requests.fileno(), line) :]
            if readable:
                part = os.read(answers.fileno(), 1 << 16)
                if not part:
                    break
                answer += part
            yield

    def _end_process(self, patience: float = 0.0) -> None:
        """End the process. patience: seconds to wait for it to exit by itself first."""
        child, self._process = self._process, None
        if child is None:
            return
        if patience:
            child.pipes[0].close()  # nothing is buffered: this does not block
            end = time.monotonic() + patience
            while child.exit_code() is None and time.monotonic() < end:
                time.sleep(0.05)
        child.kill()

    def _report(self, problem: str) -> None:
        if self._warned or self._closing.is_set():
            return
        self._warned = True
        hint = _HINTS.get(self.kind, f"fix {self.kind}")
        self._warn(
            f"trackers: {self.kind}: {problem}; {hint}. Training continues, and the tracker is retried; "
            f"details: {self._log.parent.name}/{self._log.name}"
        )


class Trackers:
    """The trackers of a run besides TensorBoard."""

    def __init__(self, settings: Settings, run_dir: Path, warn: Callable[[str], None]) -> None:
        """Start them, without waiting. warn: see ``TrackerClient``."""
        chosen = [(i, t) for i, t in enumerate(settings.trackers) if not isinstance(t, TensorBoardSettings)]
        self._clients = [TrackerClient(run_dir, index, t.type, warn) for index, t in chosen]
        self._counts = [
            t.responses if isinstance(t, WandbSettings | MLflowSettings) else RESPONSES for _, t in chosen
        ]
        self._responses: list[dict[str, Any]] = []

    def add_responses(self, trajectories: Sequence[Trajectory]) -> None:
        """Keep some of a step's responses for the next ``put``."""
        self._responses = sample_responses(trajectories, max(self._counts, default=0))

    def put(self, row: dict[str, Any]) -> None:
        """Queue a row of metrics, with its ``step``. Never blocks or raises."""
        responses, self._responses = self._responses, []
        metrics = {k: v for k, v in row.items() if k != "step" and isinstance(v, int | float)}
        for client, count in zip(self._clients, self._counts, strict=True):
            client.put({"step": row["step"], "metrics": metrics, "responses": spread(responses, count)})

    def metrics(self) -> dict[str, float]:
        """``trackers/dropped``: rows dropped since the last call; empty without trackers."""
        if not self._clients:
            return {}
        return {"trackers/dropped": float(sum(client.pop_dropped() for client in self._clients))}

    def close(self, seconds: float) -> None:
        """Send the remaining rows and close all trackers within ``seconds``."""
        end = time.monotonic() + seconds
        for client in self._clients:
            client.begin_to_close()
        for client in self._clients:
            client.close(max(0.0, end - time.monotonic()))
        self._clients, self._counts = [], []


def spread[T](items: Sequence[T], count: int) -> list[T]:
    """At most ``count`` of the items, evenly spaced."""
    if len(items) <= count:
        return list(items)
    return [items[i * len(items) // count] for i in range(count)]


def sample_responses(trajectories: Sequence[Trajectory], count: int) -> list[dict[str, Any]]:
    """Rows of the table of responses, for at most ``count`` trajectories; ``prompt`` as token ids."""
    return [_columns_of(t) for t in spread(trajectories, count)]


def _columns_of(t: Trajectory) -> dict[str, Any]:
    values = {"prompt": t.prompt.tolist(), "response": t.text, "advantage": float(t.advantage)}
    values["tokens"] = t.sampled
    return {name: values[name] if name in values else getattr(t, name) for name in COLUMNS}
