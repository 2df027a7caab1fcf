"""Preemption: stop signals of a scheduler (SIGTERM, SIGUSR1), and the exit code after the state is saved.

Between two steps the state of a run is weights, optimizer, anchor and position in the data. A run that gets a
stop signal abandons the current step, unless the step's updates have started: then it completes them and
saves without the sync and the evaluation that follow; these are done when the run is resumed. Imports no
torch.
"""

from __future__ import annotations

import signal
import time
from types import FrameType

from rpg_megatron.system.process_groups import WARNINGS

REQUEUE = 75
"""Exit code of a run that saved its state after a stop signal: the same command resumes it. EX_TEMPFAIL of
sysexits.h.
"""


class Stopped(Exception):
    """The run stops here, to be saved and resumed. Raised on every rank."""


class StopRequest:
    """Whether this process has received a stop signal. Before ``listen`` such a signal ends the process."""

    def __init__(self) -> None:
        self.received = False

    def listen(self) -> None:
        """Handle stop signals from now on. Call it from the main thread; it may be repeated."""
        for number in WARNINGS:
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.received = True

    def check(self) -> None:
        """Raise Stopped after a stop signal: for a wait that only this rank is in."""
        if self.received:
            raise Stopped

    def explains_failure(self) -> bool:
        """Whether another process failed because the whole job got a stop signal. May take a second."""
        end = time.monotonic() + 1.0  # processes get the signal in any order
        while not self.received and time.monotonic() < end:
            time.sleep(0.05)
        return self.received
