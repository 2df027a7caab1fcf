"""Children of the launcher: each in a session of its own, watched, ended together, explained if they die."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Protocol

from rpg_megatron.launcher.reaper import Reaper
from rpg_megatron.system import process_groups
from rpg_megatron.system.parent_death import with_parent_death_signal
from rpg_megatron.training.preemption import REQUEUE, WARNINGS

USER_ERROR = 2
"""Exit code of a process that met a UserError; its message is the last "error: ..." line of its log."""


_ECHO_SECONDS = 1.0


class RunFailed(Exception):
    """A process ended before its time and not because of the user's input; the message explains it."""


class Interrupted(BaseException):
    """A signal asked the launcher to stop. Like KeyboardInterrupt no Exception: only the top catches it."""

    def __init__(self, number: int, *, requeue: bool = False):
        super().__init__(number)
        self.number = number
        self.requeue = requeue
        """Whether nothing is lost, and the same command goes on."""
        self.note = ""
        """What else the user should know: where the run's folder lies."""

    @property
    def exit_code(self) -> int:
        """REQUEUE, or what a shell reports for a process that this signal ended."""
        return REQUEUE if self.requeue else 128 + self.number

    def __str__(self) -> str:
        name = "Ctrl-C" if self.number == signal.SIGINT else signal.Signals(self.number).name
        return f"{name}; {self.note}" if self.note else name


class StopSignals:
    """Ctrl-C, a closed terminal, a scheduler's warning: a request to look at or, while ``raising``, an
    exception.

    resumable: whether what is running can be continued, so that a warning need not lose anything.
    """

    def __init__(self, *, resumable: bool = False) -> None:
        self.raising = True
        self.number = 0
        self.count = 0
        self._resumable = resumable
        self._first = 0.0
        self._before: dict[int, object] = {}

    def __enter__(self) -> StopSignals:
        for number in (signal.SIGINT, signal.SIGHUP, *WARNINGS):
            self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def receive(self, number: int) -> None:
        """A signal that came to the launcher of another node."""
        self._receive(number, None)

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self.number:
            self.number, self._first = number, now
        elif self.warned and number in WARNINGS and now - self._first < _ECHO_SECONDS:
            return  # srun passes on what the scheduler has sent to every process already
        self.count += 1
        if self.raising:
            self.check()

    @property
    def warned(self) -> bool:
        """Whether the first signal was a scheduler's warning of something that can be continued."""
        return self._resumable and self.number in WARNINGS

    def check(self) -> None:
        """Raise Interrupted if a signal has come."""
        if self.number:
            raise Interrupted(self.number, requeue=self.warned)


class Engine(Protocol):
    """What supervision needs of ``rollout.engine.EngineProcess``, which starts and ends its own processes."""

    log: Path
    index: int

    @property
    def pid(self) -> int | None:
        """Its process group."""
        ...

    def alive(self) -> bool:
        """Whether it runs."""
        ...

    def stop(self, grace: float) -> None:
        """End it and what it left."""
        ...


@dataclass
class Child:
    """A process that the launcher started, the leader of its session."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    ended: float | None = None

    @property
    def pid(self) -> int:
        """Process id, and that of its session and group."""
        return self.process.pid

    def warn(self) -> None:
        """Tell a trainer rank to save and leave."""
        os.kill(self.pid, signal.SIGTERM)

    def exit_code(self) -> int | None:
        """None while it runs. The process is not reaped, so that its number still names its group."""
        if self.process.returncode is not None:
            return self.process.returncode
        state = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if state is None:
            return None
        return state.si_status if state.si_code == os.CLD_EXITED else -state.si_status


class ProcessStatus(Protocol):
    """What is said of a process that may have ended, wherever it runs."""

    name: str
    log: Path

    def exit_code(self) -> int | None:
        """None while it runs."""
        ...


class Supervisor:
    """Starts children and ends them all. Everything it started is also known to the guardian."""

    def __init__(self, guardian: Reaper, logs: Path):
        self._guardian = guardian
        self._logs = logs
        self.children: list[Child] = []
        self.elsewhere: list[ProcessStatus] = []
        """Processes of other nodes, which are not this one's to end."""
        self.engines: list[Engine] = []
        self._groups: dict[int, int] = {}

    def start(self, name: str, command: Sequence[str], environment: dict[str, str]) -> Child:
        """Start a process that logs to ``logs/<name>.log``. Call from the main thread (see ``child.py``)."""
        log = self._logs / f"{name}.log"
        wrapped = with_parent_death_signal([*command], signal.SIGKILL)
        with log.open("ab") as file:
            process = subprocess.Popen(
                wrapped,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environment | {"PYTHONUNBUFFERED": "1"},
                start_new_session=True,
            )
        self._guardian.guard_group(process.pid)
        child = Child(name, process, log)
        self.children.append(child)
        return child

    def adopt(self, engine: Engine) -> None:
        """Take over an engine that has just been started, also if it was before and is known already."""
        assert engine.pid is not None
        if engine in self.engines:
            self._guardian.drop_group(self._groups[engine.index])
        else:
            self.engines.append(engine)
        self._groups[engine.index] = engine.pid
        self._guardian.guard_group(engine.pid)

    def failed(self) -> list[ProcessStatus]:
        """Processes that have ended with a code other than 0, the most telling first."""
        known: list[ProcessStatus] = [*self.children, *self.elsewhere]
        dead = [child for child in known if child.exit_code() not in (None, 0)]
        # One failure makes others fail: first who explains it, then who was killed, then who fell silent.
        return sorted(dead, key=lambda c: (user_error(c) is None, _code(c) >= 0, _modified(c.log)))

    def stop(self, grace: float, hurry: Callable[[], bool] = lambda: False) -> None:
        """End everything: engines by SIGTERM and, after ``grace`` seconds or when ``hurry`` is true, SIGKILL.

        The other children by SIGKILL: they have nothing to give back, and SIGTERM tells ranks to save.
        """
        pids = [child.pid for child in self.children]
        groups = pids + [engine.pid for engine in self.engines if engine.pid is not None]
        with ThreadPoolExecutor(max_workers=len(self.engines) + 1) as pool:
            work = [pool.submit(process_groups.end_groups, pids, 0)]
            work += [pool.submit(engine.stop, grace) for engine in self.engines]
            while not all(future.done() for future in work):
                if hurry():
                    process_groups.send(groups, signal.SIGKILL)
                time.sleep(0.05)
        for child in self.children:
            child.process.wait()
        for group in groups:
            self._guardian.drop_group(group)
        self.children.clear()
        self.engines.clear()
        for future in work:
            future.result()


def user_error(child: ProcessStatus) -> str | None:
    """The message of a child that ended because of a UserError, else None."""
    if child.exit_code() != USER_ERROR:
        return None
    lines = tail(child.log, 200).splitlines()
    starts = [i for i, line in enumerate(lines) if line.startswith("error: ")]
    return "\n".join(lines[starts[-1] :]).removeprefix("error: ") if starts else None


def explain(child: ProcessStatus) -> str:
    """Why a child died: its name, its end, the last lines of its log."""
    return f"{child.name} {_ending(_code(child))}; the end of {child.log}:\n{tail(child.log)}"


def tail(log: Path, lines: int = 20) -> str:
    """Last lines of a log; "(empty)" if there are none."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 65536))
            text = file.read().decode("utf-8", errors="replace")
    except OSError:
        text = ""
    return "\n".join(text.splitlines()[-lines:]) or "(empty)"


def _code(child: ProcessStatus) -> int:
    return child.exit_code() or 0


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _ending(code: int) -> str:
    if code == -signal.SIGKILL:
        return "was killed (SIGKILL; often the machine ran out of memory)"
    if code < 0:
        return f"died of {signal.Signals(-code).name}"
    return f"ended with exit code {code}" if code else "ended before the run did (exit code 0)"
