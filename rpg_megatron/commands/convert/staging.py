"""The staging folder of a conversion, and its progress."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import IO

from rpg_megatron.config.errors import UserError
from rpg_megatron.config.files import make_private, remove, rename, sync_folder
from rpg_megatron.launcher.progress import Progress
from rpg_megatron.launcher.run_lock import LOCK, hold_folder
from rpg_megatron.launcher.supervisor import StopSignals
from rpg_megatron.system.console import PlainTextConsole

_LINE_SECONDS = 10.0
"""Interval of progress lines without a terminal."""


class StagingDir:
    """``.NAME.incomplete`` beside the target folder: empty on entry, removed on exit in any case.

    ``keep`` first moves the result to its place. A killed conversion leaves it behind, and the next one of
    the same name removes it; a lock in it shows whether a conversion is still running.
    """

    def __init__(self, out: Path, needed: int) -> None:
        """out: the target folder. needed: bytes of the result."""
        self._out, self._needed = out.absolute(), needed
        self.work = self._out.parent / f".{self._out.name}.incomplete"
        self.result = self.work / "result"
        self._lock: IO[str] | None = None

    def __enter__(self) -> StagingDir:
        if self._out.exists() or self._out.is_symlink():
            raise UserError(f"{self._out}: already exists; choose another folder or remove it")
        try:
            self.work.parent.mkdir(parents=True, exist_ok=True)
            make_private(self.work)
            self._lock = hold_folder(self.work)
            if self._lock is None:
                raise UserError(
                    f"{self._out}: another conversion is writing it; wait or choose another folder"
                )
            for entry in self.work.iterdir():
                if entry.name != LOCK:
                    remove(entry)
            free = shutil.disk_usage(self.work).free
        except OSError as e:
            raise UserError(f"{self.work}: {e.strerror or e}; choose a writable folder") from None
        if free < self._needed:
            self.__exit__()
            raise UserError(
                f"{self._out.parent}: {free / 1e9:.1f} GB free, the checkpoint needs "
                f"{self._needed / 1e9:.1f} GB"
            )
        return self

    def keep(self) -> None:
        """Move the complete result to its place."""
        try:
            rename(self.result, self._out)
        except OSError as e:
            raise UserError(f"{self._out}: cannot be created ({e.strerror})") from None
        sync_folder(self._out.parent)

    def __exit__(self, *_: object) -> None:
        remove(self.work, ignore_errors=True)
        if self._lock is not None:
            self._lock.close()


class Phases:
    """The progress of a conversion, as a context. Signals are only noted, and raise Interrupted from it.

    A handler that raises anywhere would leave locks held.
    """

    def __init__(self, signals: StopSignals) -> None:
        self._signals, self._counting = signals, threading.Lock()
        console = PlainTextConsole(stderr=True)
        self._progress = Progress(None, steps=0, console=console, line_seconds=_LINE_SECONDS)
        self._name, self._done, self._total = "", 0, 0

    def __enter__(self) -> Phases:
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.close()

    def begin(self, name: str, total: int = 0) -> None:
        """Begin a phase of ``total`` bytes; 0 if unknown."""
        self._name, self._done, self._total = name, 0, total
        self.count(0)

    def count(self, size: int) -> None:
        """Add bytes to those done in this phase. Any thread may call it. Raises Interrupted."""
        with self._counting:
            self._signals.check()
            self._done += size
            percent = min(100, 100 * self._done // self._total) if self._total else 0
            size_text = f" {self._total / 1e6:,.1f} MB" if self._total else ""
            self._progress.show_phase(self._name + size_text, percent, 100 if self._total else 0)
            self._progress.pump(0)
