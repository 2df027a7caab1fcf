"""What a tracker is, and what it is told of a run. Without torch: it runs in a process of its own."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rpg_megatron.system.files import atomic_write_text

FOLDER = "trackers"
"""In the run's folder: ids, and what trackers write themselves."""


def file_name(kind: str) -> str:
    """Name of a tracker's files, from its ``type``."""
    return kind.replace(":", ".")


@dataclass(frozen=True)
class TrackedRun:
    """The run, as a tracker is told of it when it starts."""

    name: str
    """Name of the run's folder, such as math-001."""
    folder: Path
    """The run's folder. A tracker writes to ``folder / "trackers"`` only."""
    config: dict[str, Any]
    """All settings, as nested plain values."""
    kind: str
    """``type`` of the tracker."""

    def known_id(self, where: str = "") -> str | None:
        """The id that an earlier start of this run kept for ``where``; None: it is the first."""
        try:
            found = json.loads(self._file.read_text(encoding="utf-8")).get(where)
        except (OSError, ValueError, AttributeError):
            return None
        return None if found is None else str(found)

    def keep_id(self, number: str, where: str = "") -> None:
        """Keep the tracker's id of this run, for ``known_id`` of later starts. Raises OSError.

        where: server or project that the id belongs to.
        """
        self._file.parent.mkdir(exist_ok=True)
        try:
            kept = dict(json.loads(self._file.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            kept = {}
        atomic_write_text(self._file, json.dumps(kept | {where: number}) + "\n")

    @property
    def _file(self) -> Path:
        return self.folder / FOLDER / f"{file_name(self.kind)}.json"


class Tracker(Protocol):
    """Logs a run somewhere. Called by one thread; it may block and raise, training does not notice."""

    def log(self, step: int, metrics: dict[str, float], responses: list[dict[str, Any]]) -> None:
        """Log a step; called again with the same values if it raises.

        metrics: a row of metrics.jsonl, without ``step``. A resumed run repeats the steps after its
        checkpoint. responses: some of the step's responses, or none; the keys are those of ``COLUMNS``.
        """
        ...

    def close(self) -> None:
        """Deliver what is left; killed if it takes too long."""
        ...


COLUMNS = (
    *("prompt", "response", "reward", "correct", "advantage", "tokens", "finish", "answer", "extracted"),
    *("prompt_id", "sample"),
)
"""Columns of the table of responses."""
