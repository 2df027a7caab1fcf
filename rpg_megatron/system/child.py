"""Child processes: start one, watch it, explain why it ended, end it with all that it has started.

A child has a process group of its own, so that it and its own children are ended together and Ctrl-C on the
terminal reaches only its parent. It ends with its parent, even after kill -9 (``parent_death.py``).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

from rpg_megatron.config.files import open_own, open_regular
from rpg_megatron.system import process_groups
from rpg_megatron.system.limits import explain_limits
from rpg_megatron.system.parent_death import with_parent_death_signal

USER_ERROR = 2
"""Exit code of a process that raised a UserError; the message is the last "error: ..." line of its log."""


class ProcessStatus(Protocol):
    """The state of a process on this or another node."""

    name: str
    log: Path
    log_start: int
    """Bytes that the log had when the process started: those of earlier starts."""

    @property
    def opened(self) -> IO[bytes] | None:
        """Its log file, which can be read here also after it was deleted."""
        ...

    def exit_code(self) -> int | None:
        """None while it runs."""
        ...


@dataclass
class Child:
    """A process that this one started."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    opened: IO[bytes] | None
    """Its log file, which can be read here also after it was deleted."""
    log_start: int = 0

    @property
    def pid(self) -> int:
        """Process id, also of its group."""
        return self.process.pid

    def warn(self) -> None:
        """Send SIGTERM to the process alone, not to its group: it saves, or ends its own children."""
        os.kill(self.pid, signal.SIGTERM)

    @property
    def is_reaped(self) -> bool:
        """Whether its pid may be that of another process by now."""
        return self.process.returncode is not None

    def exit_code(self) -> int | None:
        """None while it runs; negative after a signal. Before ``reap`` the pid still identifies its group."""
        if self.process.returncode is not None:
            return self.process.returncode
        try:
            state = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # reaped by others
            return self.process.poll()
        if state is None:
            return None
        return state.si_status if state.si_code == os.CLD_EXITED else -state.si_status

    def kill(self) -> None:
        """End it and all that it has started. Any thread may call it."""
        if not self.is_reaped:
            process_groups.end_groups([self.pid])
        self.process.wait()

    def reap(self) -> None:
        """Wait for its end."""
        self.process.wait()


def module_command(module: str, *arguments: object) -> list[str]:
    """Command line that runs a module of this package."""
    return [sys.executable, "-P", "-m", module, *map(str, arguments)]


def start_program(
    command: Sequence[str], at_parent_death: signal.Signals | None = signal.SIGKILL, **options: Any
) -> subprocess.Popen[Any]:
    """Start a program without input and in a process group of its own, which Ctrl-C does not reach.

    options: of ``subprocess.Popen``. at_parent_death: see ``start_child``; None: any thread may start it, it
    sees itself that it ends with this process (``end_with_parent``, or its pipe), and gets no ``WARNINGS``.
    """
    options = {"stdin": subprocess.DEVNULL, "process_group": 0} | options
    if at_parent_death is not None:
        return subprocess.Popen(with_parent_death_signal([*command], at_parent_death), **options)
    with process_groups.holding_warnings():
        return subprocess.Popen(command, **options)


def start_child(
    name: str,
    command: Sequence[str],
    environment: dict[str, str],
    log: Path,
    *,
    at_parent_death: signal.Signals = signal.SIGKILL,
    private: bool = False,
) -> Child:
    """Start a process, in a session of its own, that appends to ``log``, and has no input.

    The folder of the log is created again if it was deleted. Call it from a thread that outlives the child:
    the kernel sends ``at_parent_death`` when the thread ends. private: the files that it creates, and its
    log, are for their owner only. Raises OSError.
    """
    log.parent.mkdir(exist_ok=True)
    with open_own(log, "ab", permissions=0o600 if private else 0o666) as file:
        start = os.fstat(file.fileno()).st_size
        process = start_program(
            command,
            at_parent_death,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
            process_group=None,
            umask=0o077 if private else -1,
        )
    return Child(name, process, log, open_own(log), start)


# -- logs ----------------------------------------------------------------------------------------------------


def tail_of(log: Path, lines: int = 25, opened: IO[bytes] | None = None, start: int = 0) -> str:
    """Last lines of a log file; a note if it is missing or empty.

    opened: the file as it was when its process started, to be read if it was deleted. start: bytes to leave
    out at its beginning.
    """
    try:
        with open_log(log, opened) as file:
            file.seek(max(start, os.fstat(file.fileno()).st_size - 64 * 1024))
            text = file.read().decode("utf-8", errors="replace")
    except OSError as e:
        return f"(no log: {e})"
    deleted = "" if log.exists() else "(the file was deleted during the run)\n"
    return deleted + ("\n".join(text.splitlines()[-lines:]) or "(the log is empty)")


def open_log(log: Path, opened: IO[bytes] | None) -> IO[bytes]:
    """The log file or, if it was deleted, what the kernel keeps of it while it is open."""
    if opened is None or log.exists():
        return open_own(log)
    return open_regular(Path(f"/proc/self/fd/{opened.fileno()}"))


def user_error(child: ProcessStatus) -> str | None:
    """The message of a child that exited because of a UserError, else None."""
    if child.exit_code() != USER_ERROR:
        return None
    lines = tail_of(child.log, 200, child.opened).splitlines()
    starts = [i for i, line in enumerate(lines) if line.startswith("error: ")]
    # Another thread's traceback may stand before it in its line.
    starts = starts or [i for i, line in enumerate(lines) if "error: " in line]
    return "\n".join(lines[starts[-1] :]).partition("error: ")[2] if starts else None


def explain(child: ProcessStatus) -> str:
    """Why a child died: its name, exit code, the last lines of its log."""
    tail = tail_of(child.log, opened=child.opened)
    return f"{child.name} {describe_end(child)}; the end of {child.log}:\n{tail}{explain_limits(tail)}"


def describe_end(child: ProcessStatus) -> str:
    """How a process that has ended did so, for a message that begins with its name."""
    code = child.exit_code() or 0
    if code == -signal.SIGKILL:
        return "was killed (SIGKILL; often the machine ran out of memory)"
    if code < 0:
        return f"died of {signal.Signals(-code).name}"
    return f"ended with exit code {code}" if code else "ended before the run did (exit code 0)"
