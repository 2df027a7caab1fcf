"""Interface of a tracker, and the run as a tracker sees it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rpg_megatron.config.files import atomic_write_text, read_text

FOLDER = "trackers"
"""Subfolder of the run's folder for the ids of runs, and for files of the trackers."""


@dataclass(frozen=True)
class TrackedRun:
    """The run, passed to a tracker when it starts."""

    name: str
    """Name of the run and its folder, such as math-001."""
    folder: Path
    """The run's folder. A tracker writes to ``folder / "trackers"`` only."""
    config: dict[str, Any]
    """All settings, as nested dicts of plain values."""
    kind: str
    """``type`` of the tracker."""

    def known_id(self, where: str = "") -> str | None:
        """The id that an earlier start of this run saved for ``where``; None: this is the first start."""
        try:
            saved = json.loads(read_text(self._file)).get(where)
        except (OSError, ValueError, AttributeError):
            return None
        return None if saved is None else str(saved)

    def keep_id(self, number: str, where: str = "") -> None:
        """Save the tracker's id of this run, for ``known_id`` in later starts. Raises OSError.

        where: server or project that the id belongs to.
        """
        self._file.parent.mkdir(exist_ok=True)
        try:
            ids = dict(json.loads(read_text(self._file)))
        except (OSError, ValueError, TypeError):
            ids = {}
        atomic_write_text(self._file, json.dumps(ids | {where: number}) + "\n")

    @property
    def _file(self) -> Path:
        return self.folder / FOLDER / f"{self.kind.replace(':', '.')}.json"


class Tracker(Protocol):
    """Logs a run. Called by one thread; it may block or raise without affecting the training."""

    def log(self, step: int, metrics: dict[str, float], responses: list[dict[str, Any]]) -> None:
        """Log a step; called again with the same values if it raises.

        metrics: a row of metrics.jsonl, without ``step``. A resumed run repeats the steps after its
        checkpoint. responses: some of the step's responses, or none, with the keys ``COLUMNS``.
        """
        ...

    def close(self) -> None:
        """Send the remaining data; the run ends without it if this takes too long."""
        ...


COLUMNS = (
    *("prompt", "response", "reward", "correct", "advantage", "tokens", "finish", "answer", "extracted"),
    *("prompt_id", "sample"),
)
"""Columns of the table of responses."""
