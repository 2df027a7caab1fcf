"""Detects that an engine does not hang: its core answers, or one of its workers marks progress.

The core handles calls between steps. It does not answer during a long weight update or, on a CPU, a long
prefill. Meanwhile the workers mark progress in a file, which the server reads while it waits for an answer.
"""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

CORE_HEALTH = "/health/core"
"""HTTP route that answers when the engine makes progress."""
_MARK_SECONDS = 1.0
_POLL_SECONDS = 0.5


class ProgressMark:
    """The progress mark of one engine: a file in the folder in which weights are published. Its name has the
    session id, which all processes of the engine share.
    """

    def __init__(self, folder: Path):
        self._file = folder / f"progress-{os.getsid(0)}"
        self._marked = 0.0

    def mark(self, *_: Any) -> None:
        """Worker: mark progress; touches the file at most once a second. Can be used as a forward hook."""
        now = time.monotonic()
        if now - self._marked >= _MARK_SECONDS:
            self._marked = now
            with suppress(OSError):  # then only an answer of the core counts
                self._file.touch(mode=0o600)

    def last(self) -> int:
        """Server: time of the last mark, in nanoseconds; 0 if there is none."""
        try:
            return self._file.stat().st_mtime_ns
        except OSError:
            return 0


async def wait_for_progress(core: Any, progress: ProgressMark) -> None:
    """Wait until the core answers or a worker makes progress; forever if the engine hangs.

    core: vLLM's engine client. Raises its error if the core is dead.
    """
    before = progress.last()
    call = asyncio.ensure_future(core.is_paused())  # has no effect, and passes through the core's main loop
    try:
        while progress.last() == before:
            if (await asyncio.wait([call], timeout=_POLL_SECONDS))[0]:
                call.result()
                return
    finally:
        call.cancel()
