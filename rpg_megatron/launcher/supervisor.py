"""Starts, monitors and ends the launcher's child processes, each of which leads a session."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType

from rpg_megatron.engine.process import EngineProcess, stop_engines
from rpg_megatron.launcher.failures import Failure
from rpg_megatron.launcher.reaper import Reaper
from rpg_megatron.launcher.scratch_dirs import create_workspace
from rpg_megatron.system import process_groups
from rpg_megatron.system.child import Child, start_child
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


class Supervisor:
    """Starts the processes of this node and ends them all. Creates their private folders.

    If the launcher is killed, the reaper ends the processes and removes the folders.
    """

    def __init__(self, logs: Path, signals: StopSignals):
        """Raises UserError if the private folders cannot be created."""
        self._logs, self._signals = logs, signals
        self._reaper = Reaper()
        try:
            self.workspace = create_workspace()
        except BaseException:
            self._reaper.dismiss()
            raise
        for folder in (self.workspace.work, self.workspace.bridge):
            self._reaper.guard_path(folder)
        self.children: list[Child] = []
        self.engines: list[EngineProcess] = []
        self._groups: dict[int, int] = {}

    def start(self, name: str, command: Sequence[str], environment: dict[str, str]) -> Child:
        """Start a process that logs to ``logs/<name>.log``. Main thread only (``start_child``)."""
        log, environment = self._logs / f"{name}.log", environment | {"PYTHONUNBUFFERED": "1"}
        child = start_child(name, command, environment, log)
        self._reaper.guard_group(child.pid)
        self.children.append(child)
        return child

    def adopt(self, engine: EngineProcess) -> None:
        """Monitor an engine that was just started or restarted."""
        assert engine.pid is not None
        if engine in self.engines:
            self._reaper.drop_group(self._groups[engine.index])
        else:
            self.engines.append(engine)
        self._groups[engine.index] = engine.pid
        self._reaper.guard_group(engine.pid)

    def guard_shared_memory(self, engines: Sequence[EngineProcess]) -> None:
        """Have the reaper remove the engines' shared memory if this process is killed.

        Call once they are up: after a kill, the workers' memory maps may be gone.
        """
        segments = process_groups.leftover_segments(e.pid for e in engines if e.pid is not None)
        for segment in segments:
            self._reaper.guard_path(segment)
        if segments:  # the next job removes them if the reaper is killed too
            self.workspace.note_segments(segments)

    def close(self, grace: float) -> None:
        """End all processes and remove the private folders.

        Engines get SIGTERM and, after ``grace`` seconds or another signal to this process, SIGKILL. Other
        children get SIGKILL at once: they hold no resources, and SIGTERM asks ranks to save.
        """
        count = self._signals.count
        self._stop(grace, hurry=lambda: self._signals.count > count)
        self.workspace.remove()
        self._reaper.dismiss()

    def _stop(self, grace: float, hurry: Callable[[], bool]) -> None:
        pids = [child.pid for child in self.children]
        groups = pids + [engine.pid for engine in self.engines if engine.pid is not None]
        with ThreadPoolExecutor(max_workers=2) as pool:
            work = [pool.submit(process_groups.end_groups, pids)]
            work += [pool.submit(stop_engines, self.engines, grace)]
            while not all(future.done() for future in work):
                if hurry():
                    process_groups.send(groups, signal.SIGKILL)
                time.sleep(0.05)
        for child in self.children:
            child.reap()
        for group in groups:
            self._reaper.drop_group(group)
        self.children.clear()
        self.engines.clear()
        for future in work:
            future.result()
