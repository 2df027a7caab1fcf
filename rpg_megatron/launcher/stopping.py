"""How a run stops before its end: it has failed, or a signal has stopped it."""

from __future__ import annotations

import signal
import time
from types import FrameType

from rpg_megatron.launcher.failures import Failure
from rpg_megatron.system.process_groups import WARNINGS
from rpg_megatron.training.preemption import REQUEUE

_ECHO_SECONDS = 1.0


class RunFailed(Exception):
    """A process ended unexpectedly, not because of the user's input; the message explains why."""

    def __init__(self, message: str, failure: Failure | None = None):
        super().__init__(message)
        self.failure = failure or Failure((message.splitlines() or [""])[0])
        """The cause in one line, and whether it is the machine's."""
        self.note = ""
        """What happens next: a restart by the job script."""


class Interrupted(BaseException):
    """A signal stopped the launcher. Not an Exception, so that only the command catches it."""

    def __init__(self, number: int, *, requeue: bool = False):
        super().__init__(number)
        self.number = number
        self.requeue = requeue
        """Whether no work is lost, so that the same command resumes."""
        self.note = ""
        """More information for the user, such as the run's folder."""

    @property
    def exit_code(self) -> int:
        """REQUEUE, or a shell's exit code for a process that this signal killed, as after any Ctrl-C."""
        return REQUEUE if self.requeue and self.number != signal.SIGINT else 128 + self.number

    def __str__(self) -> str:
        name = "Ctrl-C" if self.number == signal.SIGINT else signal.Signals(self.number).name
        return f"{name}; {self.note}" if self.note else name


class StopSignals:
    """Records Ctrl-C, a closed terminal or a scheduler's warning; while ``raising``, also raises Interrupted.

    resumable: whether the command can be resumed, so that a warning loses nothing.
    """

    def __init__(self, *, resumable: bool = False) -> None:
        self.raising = True
        self.number = 0
        self.count = self.forwarded = 0
        self._resumable = resumable
        self._first = 0.0
        self._relayed = False
        self._before: dict[int, object] = {}

    def __enter__(self) -> StopSignals:
        for number in (signal.SIGINT, signal.SIGHUP, *WARNINGS):
            if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                continue  # nohup
            self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def receive(self, number: int) -> None:
        """Record a signal that the launcher of another node received."""
        self._relayed |= not self.number
        self._receive(number, None)

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self.number:
            self.number, self._first = number, now
        elif self.saves and now - self._first < _ECHO_SECONDS and (number in WARNINGS or self._relayed):
            return  # srun forwards a signal that the scheduler has already sent to every process
        self.count += 1
        if self.raising:
            self.check()

    @property
    def warned(self) -> bool:
        """Whether the first signal was a scheduler's warning, and the command can be resumed."""
        return self._resumable and self.number in WARNINGS

    @property
    def saves(self) -> bool:
        """Whether the first signal asks a run to save before it ends: a scheduler's warning, or Ctrl-C."""
        return self.warned or (self._resumable and self.number == signal.SIGINT)

    def check(self) -> None:
        """Raise Interrupted if a signal was received."""
        if self.number:
            raise Interrupted(self.number, requeue=self.warned)
