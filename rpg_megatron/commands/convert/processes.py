"""The processes of a conversion, their progress, and its staging folder. Imports no torch."""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import rpg_megatron
from rpg_megatron.config.cluster import RENDEZVOUS_VARIABLE
from rpg_megatron.config.errors import UserError
from rpg_megatron.config.files import make_private, remove, rename, sync_folder
from rpg_megatron.launcher.progress import Progress
from rpg_megatron.launcher.run_lock import LOCK, hold_folder
from rpg_megatron.launcher.supervisor import RunFailed, StopSignals
from rpg_megatron.system.child import Child, describe_end, end_children, start_child, tail_of, user_error
from rpg_megatron.system.console import PlainTextConsole
from rpg_megatron.system.limits import explain_limits

_POLL_SECONDS = 0.1
_LINE_SECONDS = 10.0
"""Interval of progress lines without a terminal."""
_GRACE_SECONDS = 10
"""Seconds for the other processes to report errors after one has failed."""
LOGITS = "logits.safetensors"
"""In the work folder: Megatron's logits, one tensor per sequence, named by its number."""


@dataclass(frozen=True)
class Job:
    """The work of the ranks. Paths are absolute."""

    direction: str
    """hf_to_megatron, megatron_to_hf or megatron_to_peft."""
    source: str
    """HF folder, or Megatron's checkpoint folder (release, iter_...)."""
    config: str
    """Folder with config.json and, for megatron_to_hf, the other files to copy and adapters' base weights."""
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
    ends: list[int]
    """Tokens that end a response, which an HF folder is to name besides its own."""
    lora: dict[str, Any] | None = None
    """Settings of the adapters that the Megatron checkpoint has instead of whole weights."""


class StagingDir:
    """``.NAME.incomplete`` beside the target folder: empty on entry, removed on exit in any case.

    ``keep`` first moves the result to its place. A killed conversion leaves it behind, and the next one of
    the same name removes it; a lock in it shows whether a conversion is still running.
    """

    def __init__(self, out: Path, needed: int) -> None:
        """out: the target folder. needed: bytes of the result."""
        self._out, self._needed = out.absolute(), needed
        self.work = self._out.parent / f".{self._out.name}.incomplete"
        self.result = self.work / "result"
        self._lock: IO[str] | None = None

    def __enter__(self) -> StagingDir:
        if self._out.exists() or self._out.is_symlink():
            raise UserError(f"{self._out}: already exists; choose another folder or remove it")
        try:
            self.work.parent.mkdir(parents=True, exist_ok=True)
            make_private(self.work)  # the ranks meet in a file there
            self._lock = hold_folder(self.work)
            if self._lock is None:
                raise UserError(
                    f"{self._out}: another conversion is writing it; wait or choose another folder"
                )
            for entry in self.work.iterdir():
                if entry.name != LOCK:
                    remove(entry)
            free = shutil.disk_usage(self.work).free
        except OSError as e:
            raise UserError(f"{self.work}: {e.strerror or e}; choose a writable folder") from None
        if free < self._needed:
            self.__exit__()
            raise UserError(
                f"{self._out.parent}: {free / 1e9:.1f} GB free, the checkpoint needs "
                f"{self._needed / 1e9:.1f} GB"
            )
        return self

    def keep(self) -> None:
        """Move the complete result to its place."""
        try:
            rename(self.result, self._out)
        except OSError as e:
            raise UserError(f"{self._out}: cannot be created ({e.strerror})") from None
        sync_folder(self._out.parent)

    def __exit__(self, *_: object) -> None:
        remove(self.work, ignore_errors=True)
        if self._lock is not None:
            self._lock.close()


class ConvertProcesses:
    """The processes of a conversion, and its progress. They end with the context, or with this process.

    Signals are only noted, and raise Interrupted from ``run`` and ``count``: a handler that raises within
    ``Popen`` leaks a child, and within ``Popen.poll`` it leaves a lock held.
    """

    def __init__(self, work: Path, signals: StopSignals) -> None:
        self._work, self._signals = work, signals
        self._progress = Progress(
            None, steps=0, console=PlainTextConsole(stderr=True), line_seconds=_LINE_SECONDS
        )
        self._children: list[Child] = []
        self._counting = threading.Lock()
        self._phase, self._done, self._total = "", 0, 0

    def __enter__(self) -> ConvertProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        end_children(self._children)
        self._progress.close()

    def phase(self, name: str, total: int = 0) -> None:
        """Begin a phase of ``total`` bytes; 0 if unknown."""
        self._phase, self._done, self._total = name, 0, total
        self.count(0)

    def count(self, size: int) -> None:
        """Add bytes to those done in this phase. Any thread may call it. Raises Interrupted."""
        with self._counting:
            self._signals.check()
            self._done += size
            if self._total:
                percent = min(100, 100 * self._done // self._total)
                self._progress.show_phase(f"{self._phase} {self._total / 1e6:,.1f} MB", percent, 100)
            else:
                self._progress.show_phase(self._phase, 0, 0)
            self._progress.pump(0)

    def run(self, module: str, name: str, request: dict[str, Any], world: int) -> list[Any]:
        """Run ``world`` processes of a module on a request, and return what they report, besides progress.

        name: of their logs and in messages. Raises UserError with the processes' message, RunFailed with the
        log of the one that failed, or Interrupted.
        """
        children = []
        for rank in range(world):
            self._signals.check()
            log = self._work / f"{name}{f'_{rank}' if world > 1 else ''}.log"
            environment = self._environment(rank, world)
            child = start_child(log.stem, [sys.executable, "-P", "-m", module], environment, log, pipes=True)
            children.append(child)
            self._children.append(child)
            child.pipes[0].write(json.dumps(request).encode() + b"\n")
            os.set_blocking(child.pipes[1].fileno(), False)
        output = {child.pid: b"" for child in children}
        reports: list[Any] = []
        deadline = math.inf
        while True:
            self._signals.check()
            running = any(child.exit_code() is None for child in children)
            if deadline == math.inf and any(child.exit_code() for child in children):
                deadline = time.monotonic() + _GRACE_SECONDS
            for child in children:
                data = output[child.pid] + (child.pipes[1].read() or b"")
                *lines, output[child.pid] = data.split(b"\n")
                reports += [report for line in lines if (report := self._take(line)) is not None]
            if not running or time.monotonic() >= deadline:
                break
            self._progress.pump(_POLL_SECONDS)
        if failed := [child for child in children if child.exit_code()]:
            raise _failure(failed, world)
        return reports

    def _environment(self, rank: int, world: int) -> dict[str, str]:
        threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, (os.cpu_count() or 1) // world))
        root = str(Path(rpg_megatron.__file__).parents[1])
        return os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")])),
            "OMP_NUM_THREADS": threads,
            "RANK": str(rank),
            "WORLD_SIZE": str(world),
            RENDEZVOUS_VARIABLE: str(self._work / "rendezvous"),
            # Convert on the CPU; torch and Megatron would use a visible GPU.
            "CUDA_VISIBLE_DEVICES": "",
            "GLOO_SOCKET_IFNAME": "lo",
            # Otherwise glibc raises this threshold as tensors are freed, and keeps their memory.
            "MALLOC_MMAP_THRESHOLD_": str(1 << 20),
        }

    def _take(self, line: bytes) -> Any:
        """Show a line of progress; return a report. None for the former, and for output of libraries."""
        try:
            report = json.loads(line)
        except ValueError:
            return None
        if not isinstance(report, dict) or "phase" not in report:
            return report if isinstance(report, dict) else None
        if report["phase"] != self._phase:
            self.phase(report["phase"], report["total"])
        self.count(report["done"] - self._done)
        return None


def _failure(failed: Sequence[Child], world: int) -> Exception:
    """The error to raise for processes that failed."""
    if messages := [message for child in failed if (message := user_error(child))]:
        # The failing rank's message is the shortest; the others repeat it after "rank N: ".
        return UserError(min(messages, key=len))
    first, tail = failed[0], tail_of(failed[0].log)
    name = f"{first.name} of {world}" if world > 1 else first.name
    return RunFailed(f"{name} {describe_end(first)}\n{tail}{explain_limits(tail)}")
