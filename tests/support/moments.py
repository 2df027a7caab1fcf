"""The current phase of a run: by its progress events, which are forwarded to the launcher, and its files."""

from __future__ import annotations

import json
import socket
import time
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rpg_megatron.data.rollout_files import rollouts_complete, rollouts_file
from rpg_megatron.system.events import EVENTS

START, ROLLOUT, UPDATE, SAVE = "start", "rollout", "update", "save"
SYNC, EVALUATION, EXPORT = "sync", "evaluation", "export"
PHASES = (START, ROLLOUT, UPDATE, SAVE, SYNC, EVALUATION, EXPORT)
_FIRST_SYNC = "waiting for engines"
_PASSED_ON = "launcher.sock"


@dataclass(frozen=True)
class Moment:
    """Where a run is. Exact while its processes are stopped."""

    phase: str
    """By the last event: the name of a phase, "step" after a row of metrics; "start" until the first sync
    is over.
    """
    rows: int
    """Rows of metrics so far: the step whose row comes next."""
    proven: tuple[str, ...]
    """Phases that the run's files show it to be in."""


class EventTap:
    """Takes a run's progress events on their way to the launcher, and passes them on.

    A process sends one when a phase begins. Events are datagrams and may be lost, so a moment is also read
    from the run's files.
    """

    def __init__(self, work: Path):
        """work: the run's work folder, in which the launcher's socket exists."""
        self._passed_on = str(work / _PASSED_ON)
        (work / EVENTS).rename(work / _PASSED_ON)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(work / EVENTS))
        self._begun = time.monotonic()
        self.phase = START
        self.ranks_ready = False
        """Whether the ranks are ready: they wait for the engines, or are past that."""
        self.seconds: dict[str, list[float]] = defaultdict(list)
        """Durations of the phases that are over, by name."""

    def pump(self, seconds: float) -> None:
        """Wait at most this long for events, and forward all that have arrived."""
        self._socket.settimeout(seconds)
        try:
            while True:
                data = self._socket.recv(1 << 20)
                self._socket.settimeout(0)
                with suppress(OSError):  # the launcher is gone, or slow
                    self._socket.sendto(data, self._passed_on)
                self._take(json.loads(data))
        except (TimeoutError, BlockingIOError):
            return

    def close(self) -> None:
        self._socket.close()

    def _take(self, event: dict) -> None:
        name = "step" if event["kind"] == "step" else event.get("name")
        if name is None or name == self.phase:
            return
        self.ranks_ready |= name == _FIRST_SYNC
        # A start is over when its sync is: until then the engines start.
        if self.phase == START and name in (_FIRST_SYNC, "checkpoint"):
            return
        now = time.monotonic()
        self.seconds[self.phase].append(now - self._begun)
        self.phase, self._begun = name, now


def count_rows(run: Path) -> int:
    """Complete rows of metrics."""
    file = run / "metrics.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


def read_moment(tap: EventTap, run: Path, since: float, published: bool | None) -> Moment:
    """since: when the run was started last (wall clock). published: whether weights are published just now;
    None if that cannot be seen.
    """
    rows, phase = count_rows(run), tap.phase
    proven = []
    rollouts = rollouts_complete(rollouts_file(run, rows))
    if phase == START:
        proven.append(START)
    elif any(part.stat().st_mtime > since for part in (run / "checkpoints").glob(".step_*.part")):
        proven.append(SAVE)  # one that a kill left is older
    if phase == ROLLOUT and not rollouts:
        proven.append(ROLLOUT)
    if phase in ("logprobs", "update") and rollouts:
        proven.append(UPDATE)  # rollouts are written after the log-probs
    if phase == SYNC and rollouts and published is not False:
        proven.append(SYNC)
    if phase == EVALUATION and not (run / "evaluation" / f"step_{rows:06d}.jsonl").exists():
        proven.append(EVALUATION)
    if phase == EXPORT and not (run / "summary.json").exists():
        proven.append(EXPORT)
    return Moment(phase, rows, tuple(proven))
