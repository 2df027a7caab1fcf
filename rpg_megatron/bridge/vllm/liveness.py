"""Evidence that an engine works and does not hang: an answer of its core, or a mark of one of its workers.

The core handles calls between two steps. It answers none during a long weight update or, on a CPU, a long
prefill; meanwhile the workers mark progress, in a file that the server reads while it waits for an answer.
"""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

CORE_HEALTH = "/health/core"
"""Route that is answered when there is such evidence."""
_MARK_SECONDS = 1.0
_POLL_SECONDS = 0.5


class ProgressMark:
    """The mark of one engine, in the folder that its weights are published in. All of its processes belong to
    one session, after which the file is named.
    """

    def __init__(self, folder: Path):
        self._file = folder / f"progress-{os.getsid(0)}"
        self._marked = 0.0

    def mark(self, *_: Any) -> None:
        """Worker: note progress. Cheap: touches the file at most once a second. Also a forward hook."""
        now = time.monotonic()
        if now - self._marked >= _MARK_SECONDS:
            self._marked = now
            with suppress(OSError):  # without a mark, only an answer of the core counts
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
    call = asyncio.ensure_future(core.is_paused())  # changes nothing, and passes through the core's main loop
    try:
        while progress.last() == before:
            if (await asyncio.wait([call], timeout=_POLL_SECONDS))[0]:
                call.result()
                return
    finally:
        call.cancel()
