"""The processes of a conversion, their progress, and their staging folder. Unix only; no torch."""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import shutil
import signal
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import IO, Any

import rich.progress

import rpg_megatron
from rpg_megatron.config.errors import UserError
from rpg_megatron.config.files import folder_size, make_private, open_own, remove, rename, sync_folder
from rpg_megatron.system.child import Child, describe_end, end_children, start_child, tail_of, user_error
from rpg_megatron.system.console import PlainTextConsole
from rpg_megatron.system.limits import explain_limits

RANK = "rpg_megatron.commands.convert.rank"
_LOOK_SECONDS = 0.1
_GRACE_SECONDS = 10
"""Seconds for the other ranks to report errors after one has failed."""


@dataclass(frozen=True)
class Job:
    """The work of the ranks. Paths are absolute."""

    direction: str
    """hf_to_megatron or megatron_to_hf."""
    source: str
    """HF folder, or Megatron's checkpoint folder (release, iter_...)."""
    config: str
    """Folder with config.json and, for megatron_to_hf, the other files to copy."""
    root: str
    """The folder that these files must lie in."""
    out: str
    """Output: Megatron's checkpoint folder, existing and empty, or an HF folder, not existing."""
    work: str
    """Scratch folder of this conversion."""
    tensor: int
    pipeline: int
    dtype: str
    """Of the HF weights; the Megatron checkpoint's own if empty."""
    max_shard_bytes: int
    """Largest size of an HF file."""
    sequences: list[list[int]]
    """Token ids whose logits to save in ``work`` for comparison; empty: none."""

    def line(self) -> bytes:
        """The line that a rank reads."""
        return json.dumps(asdict(self)).encode() + b"\n"


LOGITS = "logits.safetensors"
"""In the work folder: Megatron's logits, one tensor per sequence, named by its number."""


class ConversionFailed(Exception):
    """The conversion failed, not because of a user error."""


class StagingDir:
    """``.NAME.incomplete`` beside the target folder: empty on entry, removed on exit in any case.

    ``keep`` first moves the result to its place. A killed conversion leaves it behind, and the next one of
    the same name removes it; a lock in it shows whether a conversion is still running. SIGTERM and a closed
    terminal raise SystemExit, so that it is removed then too, unless the caller handles them.
    """

    def __init__(self, out: Path, needed: int) -> None:
        self._out, self._needed = out.absolute(), needed
        self.work = self._out.parent / f".{self._out.name}.incomplete"
        self.result = self.work / "result"
        self._lock: IO[str] | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StagingDir:
        if self._out.exists() or self._out.is_symlink():
            raise UserError(f"{self._out}: already exists; choose another folder or remove it")
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is signal.SIG_DFL:  # not ignored, as by nohup
                self._before[number] = signal.signal(number, _exit)
        try:
            self._take()
        except BaseException:
            self._release()
            raise
        return self

    def _take(self) -> None:
        try:
            self.work.parent.mkdir(parents=True, exist_ok=True)
            make_private(self.work)  # the ranks meet in a file there
            self._lock = open_own(self.work / "lock", "a", permissions=0o600)
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError(
                    f"{self._out}: another conversion is writing it; wait or choose another folder"
                ) from None
            except OSError:
                pass  # a file system without locks: the user must avoid two conversions of one name
            for entry in self.work.iterdir():
                if entry.name != "lock":
                    remove(entry)
            free = shutil.disk_usage(self.work).free
        except OSError as e:
            raise UserError(f"{self.work}: {e.strerror or e}; choose a writable folder") from None
        if free < self._needed:
            remove(self.work, ignore_errors=True)
            raise UserError(
                f"{self._out.parent}: {free / 1e9:.1f} GB free, the checkpoint needs "
                f"{self._needed / 1e9:.1f} GB"
            )

    def keep(self) -> None:
        """Move the complete result to its place."""
        try:
            rename(self.result, self._out)
        except OSError as e:
            raise UserError(f"{self._out}: cannot be created ({e.strerror})") from None
        sync_folder(self._out.parent)

    def __exit__(self, *_: object) -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            # A second Ctrl-C must not interrupt the removal.
            self._before.setdefault(number, signal.signal(number, signal.SIG_IGN))
        remove(self.work, ignore_errors=True)
        self._release()

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.close()
        for number, handler in self._before.items():
            signal.signal(number, handler)


def _exit(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


class ConvertProgress:
    """Progress on standard error: a bar on a terminal, elsewhere one line per phase."""

    def __init__(self) -> None:
        console = PlainTextConsole(stderr=True)
        self._bar: rich.progress.Progress | None = None
        if console.is_terminal:
            self._bar = rich.progress.Progress(
                rich.progress.TextColumn("{task.description:24}", markup=False),
                rich.progress.BarColumn(),
                rich.progress.DownloadColumn(),
                rich.progress.TransferSpeedColumn(),
                rich.progress.TimeElapsedColumn(),
                console=console,
                transient=True,
            )
        self._task: rich.progress.TaskID | None = None
        self._total = 0

    def __enter__(self) -> ConvertProgress:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar:
            self._bar.stop()

    def phase(self, name: str, total: int) -> None:
        """Begin a phase of ``total`` bytes; 0 if unknown."""
        self._total = total
        if self._bar:
            if self._task is not None:
                self._bar.remove_task(self._task)
            self._task = self._bar.add_task(name, total=total or None)
        else:
            size = f" {total / 1e6:,.1f} MB" if total else ""
            print(f"{name}{size}", file=sys.stderr, flush=True)

    def advance(self, done: int) -> None:
        """Add bytes. Any thread may call it."""
        if self._bar and self._task is not None:
            self._bar.advance(self._task, done)

    def reach(self, done: int) -> None:
        """Set the total of bytes done."""
        if self._bar and self._task is not None:
            self._bar.update(self._task, completed=min(done, self._total))


def start_converter(module: str, log: Path, share: int, **environment: str) -> Child:
    """Start ``python -m module``, which reads one line from its standard input.

    share: number of such processes that share the machine's cores.
    """
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, (os.cpu_count() or 1) // share))
    root = str(Path(rpg_megatron.__file__).parents[1])
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")])),
        "OMP_NUM_THREADS": threads,
        # Convert on the CPU; torch and Megatron would use a visible GPU.
        "CUDA_VISIBLE_DEVICES": "",
        "GLOO_SOCKET_IFNAME": "lo",
        # Otherwise glibc raises this threshold as tensors are freed, and keeps their memory.
        "MALLOC_MMAP_THRESHOLD_": str(1 << 20),
        **environment,
    }
    return start_child(log.stem, [sys.executable, "-P", "-m", module], env, log, pipes=True)


class _DeferredSignals:
    """Context that defers Ctrl-C, SIGTERM and SIGHUP until ``check`` or the exit.

    A signal handler may raise anywhere: within ``Popen.poll`` that leaves a lock held, so that the following
    ``wait`` never returns; within ``Popen`` it leaks a child.
    """

    def __init__(self) -> None:
        self._number = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> _DeferredSignals:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if callable(signal.getsignal(number)):
                self._before[number] = signal.signal(number, self._note)
        return self

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self._number = number

    def check(self) -> None:
        """Call the original handler of a signal that was received."""
        if number := self._number:
            self._number = 0
            self._before[number](number, None)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self.check()


class Ranks:
    """The ranks of a conversion. They end with the context, or with this process."""

    def __init__(self, job: Job, progress: ConvertProgress, watch: Path) -> None:
        self._job, self._progress, self._watch = job, progress, watch
        self._signals = _DeferredSignals()
        self._children: list[Child] = []
        self._unread: dict[int, bytes] = {}
        """By pid: the part of a report whose rest has not arrived."""
        self._memory: list[list[int]] = []
        self._measure = ""
        self._before = 0

    def __enter__(self) -> Ranks:
        job, world = self._job, self._job.tensor * self._job.pipeline
        self._progress.phase(f"starting {world} process{'es' if world > 1 else ''}", 0)
        self._signals.__enter__()
        try:
            for rank in range(world):
                self._signals.check()
                log = Path(job.work) / f"rank_{rank}.log"
                child = start_converter(RANK, log, world, RANK=str(rank), WORLD_SIZE=str(world))
                self._children.append(child)
                child.pipes[0].write(job.line())
                os.set_blocking(child.pipes[1].fileno(), False)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        end_children(self._children)
        self._signals.__exit__()

    def wait(self) -> list[list[int]]:
        """Wait until all ranks have exited; returns the memory of each: rank, shard, baseline, peak bytes.

        Raises UserError with the ranks' message, or ConversionFailed with the log of the one that failed.
        """
        deadline = math.inf
        while any(child.exit_code() is None for child in self._children) and time.monotonic() < deadline:
            self._signals.check()
            self._read_reports()
            self._look()
            if deadline == math.inf and any(child.exit_code() for child in self._children):
                deadline = time.monotonic() + _GRACE_SECONDS
            time.sleep(_LOOK_SECONDS)
        self._read_reports()
        if failed := [child for child in self._children if child.exit_code()]:
            self._explain(failed)
        return sorted(self._memory)

    def _read_reports(self) -> None:
        """Process what the ranks have reported; ignores other output of libraries."""
        for child in self._children:
            data = self._unread.get(child.pid, b"") + (child.pipes[1].read() or b"")
            *lines, self._unread[child.pid] = data.split(b"\n")
            for line in lines:
                with contextlib.suppress(ValueError):
                    self._take(*json.loads(line))

    def _take(self, kind: str, *facts: Any) -> None:
        if kind == "phase":
            name, total, self._measure = facts
            self._before = self._read_bytes()
            self._progress.phase(name, total)
        elif kind == "bytes":
            self._progress.advance(*facts)
        elif kind == "memory":
            self._memory.append([*facts])

    def _look(self) -> None:
        if self._measure == "files":
            self._progress.reach(folder_size(self._watch))
        elif self._measure == "read":
            self._progress.reach(self._read_bytes() - self._before)

    def _read_bytes(self) -> int:
        """Bytes that the ranks have read, by the kernel's counters."""
        total = 0
        for child in self._children:
            with contextlib.suppress(OSError, ValueError, IndexError):
                total += int(Path(f"/proc/{child.pid}/io").read_text().split()[1])
        return total

    def _explain(self, failed: list[Child]) -> None:
        if messages := [message for child in failed if (message := user_error(child))]:
            # The failing rank's message is the shortest; the others repeat it after "rank N: ".
            raise UserError(min(messages, key=len))
        first, tail = failed[0], tail_of(failed[0].log)
        raise ConversionFailed(
            f"{first.name} of {len(self._children)} {describe_end(first)}\n{tail}{explain_limits(tail)}"
        )
