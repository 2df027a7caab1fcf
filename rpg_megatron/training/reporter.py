"""Progress and warnings of a rank for the user, from rank 0 only."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from rpg_megatron.system.events import EventSender


class Reporter(EventSender):
    """Sends progress to the launcher's display, and warnings to the display and the rank's log."""

    def __init__(self, path: Path, rank: int) -> None:
        super().__init__(path)
        self._rank = rank

    def phase(self, name: str, done: int = 0, total: int = 1) -> None:
        """Progress of a phase of the step (rank 0)."""
        if self._rank == 0:
            super().phase(name, done, total)

    def warn(self, text: str) -> None:
        """Show a warning and log it (rank 0)."""
        if self._rank == 0:
            self.send({"kind": "status", "text": f"warning: {text}"})
            with suppress(OSError):  # the log may be on the disk that is full
                print(f"warning: {text}", flush=True)

    def warn_unwritten(self, reason: object) -> None:
        """Warn that a file that training does not need cannot be written (rank 0)."""
        self.warn(f"not written: {reason}; training continues")

    def write_or_warn(self, write: Callable[[], None]) -> None:
        """Write such a file. write: may raise OSError."""
        try:
            write()
        except OSError as e:
            self.warn_unwritten(e)
