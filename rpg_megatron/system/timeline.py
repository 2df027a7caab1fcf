"""``timeline.jsonl`` in the run's folder: phases of the trainer and load of the engines, in wall-clock time.

Rank 0 and the sampler append to it. Rows:

- ``{"start"}``: a trainer starts;
- ``{"phase", "step", "begin", "end"}``: a phase of the trainer. Phase ``step`` contains the others, except
  ``evaluation`` and ``checkpoint``, which follow it;
- ``{"time", "running", "waiting"}``: number of requests in each engine; null: it did not answer.

Times are seconds since 1970.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rpg_megatron.config.files import open_own, rename

TIMELINE = "timeline.jsonl"
EARLIER = "timeline_earlier.jsonl"
"""The previous ``TIMELINE``, renamed when it reached its size limit."""
_LIMIT = 32_000_000
"""Bytes after which a new file is started: more than a day with 64 engines. Two files are kept."""


class Timeline:
    """Appends rows to a run's timeline. An OSError is reported once, until a row can be written again."""

    def __init__(self, file: Path | None, warn: Callable[[OSError], None], *, rotates: bool = False):
        """file: None to write nothing. warn: called with an OSError. rotates: whether this process enforces
        the size limit; only one process of a run does.
        """
        self._file, self._warn, self._rotates = file, warn, rotates
        self._failed = False

    def write(self, row: dict[str, Any]) -> None:
        """Append a row. Never raises OSError."""
        if self._file is None:
            return
        try:
            # Opened for each row: the other process may have started a new file.
            with open_own(self._file, "ab+") as file:
                if file.tell() and file.seek(-1, 2) and file.read(1) != b"\n":
                    file.write(b"\n")  # a process was killed while writing a row
                file.write(json.dumps(row, separators=(",", ":")).encode() + b"\n")
                size = file.tell()
            if self._rotates and size > _LIMIT:
                rename(self._file, self._file.with_name(EARLIER))
            self._failed = False
        except OSError as e:
            if not self._failed:
                self._warn(e)
            self._failed = True

    @contextmanager
    def phase(self, name: str, step: int) -> Iterator[None]:
        """Append a row for a phase of the trainer, at the end of the block."""
        begin = time.time()
        try:
            yield
        finally:
            self.write({"phase": name, "step": step, "begin": round(begin, 3), "end": round(time.time(), 3)})
