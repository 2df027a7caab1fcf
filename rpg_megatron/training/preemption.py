"""A scheduler's warning: how ranks learn of it, and the exit code that says that the state is saved.

Between two steps the whole state of a run is weights, optimizer, anchor and the place in the data. So a
warned run gives up the step that it is in, unless the step's updates have begun: then it ends them, and saves
without the sync and the evaluation that follow; they are made up for when the run goes on. Without torch.
"""

from __future__ import annotations

import signal
import time
from types import FrameType

WARNINGS = (signal.SIGTERM, signal.SIGUSR1)
"""Signals by which schedulers announce that a job is about to end."""
REQUEUE = 75
"""Exit code of a run that was warned and has saved all there was to save: the same command goes on from
there. EX_TEMPFAIL of sysexits.h.
"""


class Stopped(Exception):
    """The run stops here, to be saved and continued. Raised on all ranks alike."""


class StopRequest:
    """Whether this process has been warned; until it listens, a warning simply ends it."""

    def __init__(self) -> None:
        self.came = False

    def listen(self) -> None:
        """From now on there is something to save. Call it from the main thread, as often as you like."""
        for number in WARNINGS:
            signal.signal(number, self._take)

    def _take(self, number: int, frame: FrameType | None) -> None:
        self.came = True

    def check(self) -> None:
        """Raise Stopped if a warning has come: for a wait that this rank alone is in."""
        if self.came:
            raise Stopped

    def explains_failure(self) -> bool:
        """Whether something that fell away did so because the whole job was warned. May take a second."""
        end = time.monotonic() + 1.0  # whom a signal to all reaches first is chance
        while not self.came and time.monotonic() < end:
            time.sleep(0.05)
        return self.came
