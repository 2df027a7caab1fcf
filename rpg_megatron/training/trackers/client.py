"""Trackers on rank 0: for each a bounded queue and a thread, which calls it.

A tracker never blocks or fails the training: if it is slow or fails, rows are dropped and counted; a call
that hangs is left behind when the run ends.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain, repeat
from pathlib import Path
from typing import Any, cast

from rpg_megatron.config import Settings, UserError
from rpg_megatron.config.trackers import (
    RESPONSES,
    ImportedTrackerSettings,
    MLflowSettings,
    TensorBoardSettings,
    WandbSettings,
)
from rpg_megatron.data.trajectory import Trajectory
from rpg_megatron.system.custom_code import CustomCode, load_custom
from rpg_megatron.system.process_groups import WARNINGS
from rpg_megatron.training.trackers.texts import ResponseTexts
from rpg_megatron.training.trackers.tracker import COLUMNS, FOLDER, TrackedRun, Tracker

_LONGEST = 8000
"""Maximum characters of a text in the table of responses; the middle of longer ones is removed."""
_QUEUED = 256
"""Maximum rows in the queue of a tracker; then the oldest row is dropped."""
_WAITS = (2.0, 10.0, 60.0)
"""Seconds before each retry of a row; then it is dropped."""
_START_WAITS = (10.0, 60.0, 300.0)
"""Seconds before each retry of a start; the last one is repeated."""
_SILENT = 60.0
"""Seconds that a call may take before a warning is shown, with the next row."""
_DEFAULTS = {
    # MLflow would otherwise retry for a quarter of an hour before it raises.
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_ENABLE_ASYNC_LOGGING": "false",
    # By default the last 15 seconds of an offline run are lost when it is killed.
    "WANDB_X_TRANSACTION_LOG_FLUSH_INTERVAL": "1",
}
_HINTS = {
    "wandb": "check the network and WANDB_API_KEY (or `wandb login`), or set WANDB_MODE=offline",
    "mlflow": "check the server of trackers.uri or MLFLOW_TRACKING_URI",
}
_started = threading.Event()
"""Set when this process has had a tracker."""


def open_tracker(settings: Settings, index: int, folder: Path) -> Tracker:
    """Start or resume ``settings.trackers[index]``. Raises the exceptions of its package."""
    chosen = settings.trackers[index]
    (folder / FOLDER).mkdir(exist_ok=True)
    for key, value in _DEFAULTS.items():
        os.environ.setdefault(key, value)
    run = TrackedRun(folder.name, folder, settings.model_dump(mode="json"), chosen.type)
    if isinstance(chosen, WandbSettings):
        from rpg_megatron.training.trackers.wandb_tracker import WandbTracker

        return WandbTracker(run, chosen)
    if isinstance(chosen, MLflowSettings):
        from rpg_megatron.training.trackers.mlflow_tracker import MLflowTracker

        return MLflowTracker(run, chosen)
    assert isinstance(chosen, ImportedTrackerSettings)
    return cast(Tracker, load_custom(CustomCode(f"trackers[{index}]", chosen.type, chosen.keywords, 1))(run))


class TrackerClient:
    """One tracker; index: in ``settings.trackers``."""

    def __init__(self, settings: Settings, index: int, run_dir: Path, warn: Callable[[str], None]) -> None:
        """Start it, without waiting. warn: called with the first problem, from a thread, and at the end."""
        self.kind, self._warn = settings.trackers[index].type, warn
        self._model, self._open = settings.model.path, partial(open_tracker, settings, index, run_dir)
        self._waiting: deque[dict[str, Any]] = deque()
        self._changed, self._closing = threading.Condition(), threading.Event()
        self._given, self._delivered, self._dropped, self._reported = 0, 0, 0, 0
        self._warned = False
        self._called: float | None = None
        """When the call in progress began."""
        self._thread = threading.Thread(target=self._run, name=f"tracker {self.kind}", daemon=True)
        _started.set()
        self._thread.start()

    def put(self, item: dict[str, Any]) -> None:
        """Queue a row, which must not change afterwards. Never blocks or raises."""
        called = self._called
        if called is not None and time.monotonic() - called > _SILENT:
            self._report(f"no response for {_SILENT:.0f} seconds")
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
        """Close within ``seconds``, else leave the thread behind. Warns if rows were not delivered."""
        self.begin_to_close()
        self._thread.join(seconds)
        lost = self._given - self._delivered
        if lost or self._thread.is_alive():
            subject = f"{lost} of {self._given} rows were" if lost else "the end of the run was"
            self._warn(f"trackers: {subject} not delivered to {self.kind}; metrics.jsonl has all rows")

    # -- the thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        # Processes that a package starts inherit it: schedulers signal all processes of a job.
        signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, *WARNINGS))
        # Opened at once, to report problems before the first row.
        tracker = self._try(self._open, chain(_START_WAITS, repeat(_START_WAITS[-1])))
        texts = ResponseTexts(self._model, _LONGEST)
        while tracker is not None and (row := self._next()) is not None:
            done = self._try(partial(_log, tracker, row, texts), _WAITS)
            with self._changed:
                self._delivered += bool(done)
                self._dropped += not done
            if not done and self._closing.is_set():
                return
        if tracker is not None and hasattr(tracker, "close"):
            self._try(tracker.close, ())

    def _next(self) -> dict[str, Any] | None:
        """Wait for the oldest row; None when closing and the queue is empty."""
        with self._changed:
            while not self._waiting and not self._closing.is_set():
                self._changed.wait()
            return self._waiting.popleft() if self._waiting else None

    def _try[T](self, call: Callable[[], T], waits: Iterable[float]) -> T | None:
        """The result of a call, with a retry after each wait; None if all fail or the run ends meanwhile."""
        for wait in chain(waits, [None]):
            self._called = time.monotonic()
            try:
                return call()
            except UserError as e:
                self._report(str(e))
            except BaseException as e:  # SystemExit, asyncio.CancelledError: else the thread would end
                self._report(f"{type(e).__name__}: {' '.join(str(e).split())}", traceback.format_exc())
            finally:
                self._called = None
            if wait is None or self._closing.wait(wait):
                break
        return None

    def _report(self, problem: str, details: str = "") -> None:
        if self._warned or self._closing.is_set():
            return
        self._warned = True
        print(details, file=sys.stderr, end="", flush=True)
        hint = _HINTS.get(self.kind, f"fix {self.kind}")
        self._warn(
            f"trackers: {self.kind}: {problem}; {hint}. Training continues, and the tracker is retried; "
            "details: logs/rank_0.log"
        )


def _log(tracker: Tracker, row: dict[str, Any], texts: ResponseTexts) -> bool:
    tracker.log(row["step"], dict(row["metrics"]), [texts.readable(each) for each in row["responses"]])
    return True


class Trackers:
    """The trackers of a run besides TensorBoard."""

    def __init__(self, settings: Settings, run_dir: Path, warn: Callable[[str], None]) -> None:
        """Start them, without waiting. warn: see ``TrackerClient``."""
        chosen = [(i, t) for i, t in enumerate(settings.trackers) if not isinstance(t, TensorBoardSettings)]
        self._clients = [TrackerClient(settings, index, run_dir, warn) for index, _ in chosen]
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


def exit_past_trackers() -> None:
    """End the process, whatever else would happen at its exit, if it has had a tracker.

    Its thread may still be at work, and exit handlers of its package may wait for the server, closed or not.
    The exit code is that of the exception in flight.
    """
    if not _started.is_set():
        return
    error = sys.exception()
    if error is not None and not isinstance(error, SystemExit):
        traceback.print_exception(error)
    sys.stdout.flush()
    sys.stderr.flush()
    code = (error.code or 0) if isinstance(error, SystemExit) else error is not None
    os._exit(code if isinstance(code, int) else 1)


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
