"""The processes of a conversion, their progress, and their staging folder. Unix only; no torch."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import selectors
import shutil
import signal
import subprocess
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
from rpg_megatron.system.console import PlainTextConsole
from rpg_megatron.system.limits import explain_limits

_LOOK_SECONDS = 0.25
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

    def line(self) -> str:
        """The line sent through the pipe."""
        return json.dumps(asdict(self)) + "\n"


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


def start_child(module: str, log: Path, share: int, **environment: str) -> subprocess.Popen[str]:
    """Start ``python -m module`` with standard error in ``log``; it exits when its standard input closes.

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
    with open_own(log, "w") as errors:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=env,
            text=True,
            start_new_session=True,  # Ctrl-C reaches only the parent, which ends them
        )


def read_log(log: Path) -> str:
    """The text of a child's log."""
    with open_own(log, "r", encoding="utf-8", errors="replace") as file:
        return str(file.read())


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
        self._processes: list[subprocess.Popen[str]] = []
        self._logs: list[Path] = []
        self._memory: list[list[int]] = []
        self._measure = ""
        self._before = 0

    def __enter__(self) -> Ranks:
        world = self._job.tensor * self._job.pipeline
        self._progress.phase(f"starting {world} process{'es' if world > 1 else ''}", 0)
        self._signals.__enter__()
        try:
            for rank in range(world):
                self._signals.check()
                log = Path(self._job.work) / f"rank_{rank}.log"
                self._logs.append(log)
                child = start_child(
                    "rpg_megatron.commands.convert.rank", log, world, RANK=str(rank), WORLD_SIZE=str(world)
                )
                self._processes.append(child)
                assert child.stdin is not None
                child.stdin.write(self._job.line())
                child.stdin.flush()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for p in self._processes:
            p.kill()
        for p in self._processes:
            p.wait()
            for pipe in (p.stdin, p.stdout):
                if pipe is not None:
                    with contextlib.suppress(BrokenPipeError):
                        pipe.close()
        self._signals.__exit__()

    def wait(self) -> list[list[int]]:
        """Wait until all ranks have exited; returns the memory of each: rank, shard, baseline, peak bytes.

        Raises UserError with the ranks' message, or ConversionFailed with the log of the one that failed.
        """
        with selectors.DefaultSelector() as selector:
            for p in self._processes:
                assert p.stdout is not None
                os.set_blocking(p.stdout.fileno(), False)
                selector.register(p.stdout.fileno(), selectors.EVENT_READ, bytearray())
            deadline: float | None = None
            while selector.get_map():
                for key, _ in selector.select(_LOOK_SECONDS):
                    data = os.read(key.fd, 1 << 16)
                    if not data:
                        selector.unregister(key.fd)
                    key.data.extend(data)
                    while b"\n" in key.data:
                        line, _, rest = bytes(key.data).partition(b"\n")
                        key.data[:] = rest
                        self._take(line)
                self._look()
                self._signals.check()
                if deadline is None and any(p.poll() not in (None, 0) for p in self._processes):
                    deadline = time.monotonic() + _GRACE_SECONDS
                if deadline is not None and time.monotonic() > deadline:
                    break
        while deadline is None and any(p.poll() is None for p in self._processes):
            self._signals.check()
            time.sleep(_LOOK_SECONDS / 10)
        codes = [p.poll() for p in self._processes]
        if any(code != 0 for code in codes):
            self._explain(codes)
        return sorted(self._memory)

    def _take(self, line: bytes) -> None:
        """Process a report of a rank; ignores other output of libraries."""
        try:
            kind, *rest = json.loads(line)
        except ValueError:
            return
        if kind == "phase":
            name, total, self._measure = rest
            self._before = self._read_bytes()
            self._progress.phase(name, total)
        elif kind == "bytes":
            self._progress.advance(rest[0])
        elif kind == "memory":
            self._memory.append(rest)

    def _look(self) -> None:
        if self._measure == "files":
            self._progress.reach(folder_size(self._watch))
        elif self._measure == "read":
            self._progress.reach(self._read_bytes() - self._before)

    def _read_bytes(self) -> int:
        """Bytes that the ranks have read, by the kernel's counters."""
        total = 0
        for p in self._processes:
            try:
                total += int(Path(f"/proc/{p.pid}/io").read_text().split()[1])
            except (OSError, ValueError, IndexError):
                continue
        return total

    def _explain(self, codes: list[int | None]) -> None:
        logs = [read_log(log) for log in self._logs]
        mark = "\nerror: "
        said = {
            log.rpartition(mark)[2].strip()
            for log, code in zip(("\n" + log for log in logs), codes, strict=True)
            if code == 2 and mark in log
        }
        if said:
            # The failing rank's message is the shortest; the others repeat it after "rank N: ".
            raise UserError(min(said, key=len))
        rank = next(r for r, code in enumerate(codes) if code not in (0, None))
        killed = " (killed; possibly out of memory)" if codes[rank] == -signal.SIGKILL else ""
        raise ConversionFailed(
            f"rank {rank} of {len(codes)} ended with exit code {codes[rank]}{killed}\n"
            f"{logs[rank][-4000:].strip()}{explain_limits(logs[rank][-4000:])}"
        )
