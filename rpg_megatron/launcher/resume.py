"""Which run a command resumes: the newest unfinished one of its name; otherwise it creates a new one.

A launcher holds a lock on a file in the run's folder, so that a second launcher with the same settings
creates another run instead of writing into this one.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import yaml

from rpg_megatron.checkpoints.run_folder import CHECKPOINTS, CONFIG, find_problems, list_steps, read_state
from rpg_megatron.config import Settings, UserError, load_settings
from rpg_megatron.launcher.run_dir import (
    METRICS,
    SUMMARY,
    create_run,
    list_runs,
    replace_settings,
    resolved_yaml,
)
from rpg_megatron.launcher.summary import shown

LOCK = ".lock"
ORIGIN = ".origin"
"""File in runs created with --fresh or --from: the checkpoint they start from, or nothing."""
_LARGE = 10**9
"""Bytes of a checkpoint above which a message says that it is being checked."""
_STEP = re.compile(r"step_(\d{6,})")
_FREE = (
    *("name", "runs", "device", "rendezvous_port", "parallel", "memory", "engine", "bridge", "cluster"),
    *("evaluation", "guards", "export", "checkpoint", "model.vocab_multiple", "optimizer.overlap"),
    *("training.steps", "training.tokens_per_microbatch", "training.logprob_chunk"),
)
"""Keys and sections that may change when a run is resumed: they affect placement, length and logging, and
results by rounding at most. All others affect the training."""


@dataclass
class OpenRun:
    """The folder of a run that this process has locked, and where the run starts."""

    folder: Path
    lock: IO[str]
    checkpoint: Path | None = None
    """The checkpoint to resume from; None: start from the beginning."""
    notes: list[str] = field(default_factory=list)
    """Messages for the user."""
    made: bool = True
    """Whether the folder is new, and may be removed if the run fails early."""

    def close(self) -> None:
        """Release the lock."""
        self.lock.close()


def open_run(settings: Settings, *, fresh: bool = False, source: Path | None = None) -> OpenRun:
    """The run that these settings resume, or a new one.

    fresh: always a new one. source: a new one that starts from this checkpoint, or from the newest of this
    run. Raises UserError if settings have changed that affect the training.
    """
    if source is not None:
        return _start_from(settings, source.absolute())
    if fresh:
        return _make(settings, origin="")
    notes: list[str] = []
    for folder in list_runs(settings):
        lock = hold_folder(folder)
        if lock is None:
            continue  # in use by another process
        if (folder / SUMMARY).exists():
            lock.close()
            break  # finished; older runs are not resumed
        try:
            run = _continue(settings, folder, lock, notes)
        except BaseException:
            lock.close()
            raise
        if run is not None:
            return run
        lock.close()
        if (folder / ORIGIN).exists():  # created with --fresh or --from, without a checkpoint yet
            origin = (folder / ORIGIN).read_text(encoding="utf-8")
            run = _start_from(settings, Path(origin)) if origin else _make(settings, origin="")
            run.notes = [*notes, *(run.notes or [f"run {shown(run.folder)}"])]
            return run
    run = _make(settings)
    if notes:
        run.notes = [*notes, f"run {shown(run.folder)}"]
    return run


def _make(settings: Settings, origin: str | None = None) -> OpenRun:
    folder = create_run(settings)
    lock = hold_folder(folder)
    if lock is None:  # another launcher is checking it right now, and will release it
        lock = (folder / LOCK).open("w")
        fcntl.flock(lock, fcntl.LOCK_EX)
    if origin is not None:
        (folder / ORIGIN).write_text(origin, encoding="utf-8")
    return OpenRun(folder, lock)


def _continue(settings: Settings, folder: Path, lock: IO[str], notes: list[str]) -> OpenRun | None:
    checkpoint = _newest_whole(folder, notes)
    if checkpoint is None:
        return None
    changes = _compare(settings, checkpoint)
    state = read_state(checkpoint)
    _check_length(settings, checkpoint, state["step"])
    _rewind(folder, state)
    replace_settings(folder, settings, state["step"])
    notes.append(f"resuming {shown(folder)} from step {state['step']}; --fresh starts over{changes}")
    return OpenRun(folder, lock, checkpoint, notes, made=False)


def _start_from(settings: Settings, source: Path) -> OpenRun:
    notes: list[str] = []
    checkpoint: Path | None = source
    if not source.is_dir():
        raise UserError(
            f"--from {source}: no such folder; give a run's, or one of its checkpoints/step_NNNNNN"
        )
    if (source / CHECKPOINTS).is_dir():
        checkpoint = _newest_whole(source, notes)
    elif problems := find_problems(source):
        raise UserError(f"--from {source}: not a complete checkpoint of a run: {'; '.join(problems[:3])}")
    if checkpoint is None:
        raise UserError(f"--from {source}: the run has no complete checkpoint; {'; '.join(notes)}")
    changes = _compare(settings, checkpoint)
    state = read_state(checkpoint)
    _check_length(settings, checkpoint, state["step"])
    run = _make(settings, origin=str(checkpoint))
    with suppress(OSError):  # the metrics before the checkpoint, if they still exist
        rows = (checkpoint.parents[1] / METRICS).read_bytes()[: state["metrics_bytes"]]
        (run.folder / METRICS).write_bytes(rows)
    run.checkpoint = checkpoint
    run.notes = [*notes, f"starting {shown(run.folder)} from {shown(checkpoint)}{changes}"]
    return run


def _newest_whole(folder: Path, notes: list[str]) -> Path | None:
    for checkpoint in list_steps(folder).values():
        size = sum(f.stat().st_size for f in checkpoint.rglob("*") if f.is_file())
        if size > _LARGE:
            print(f"checking {shown(checkpoint)}, {size / 1e9:,.1f} GB", flush=True)
        problems = find_problems(checkpoint)
        if not problems:
            return checkpoint
        notes.append(f"warning: {shown(checkpoint)} is damaged and not used: {'; '.join(problems[:3])}")
    return None


def list_changes(then: dict[str, Any], now: dict[str, Any]) -> dict[str, str]:
    """Differences between two nested dicts of plain values: dotted key -> one line with both values."""
    old, new = _flat(then), _flat(now)
    return {
        key: f"{key}: {_text(old.get(key))} -> {_text(new.get(key))}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key)
    }


def _compare(settings: Settings, checkpoint: Path) -> str:
    """Describes the changed settings. Raises UserError if one of them affects the training."""
    then, now = load_settings(checkpoint / CONFIG), settings
    lines = list_changes(*(yaml.safe_load(resolved_yaml(each)) for each in (then, now)))
    bad = [line for key, line in lines.items() if not any(key == f or key.startswith(f"{f}.") for f in _FREE)]
    if bad:
        raise UserError(
            f"{shown(checkpoint)} was written with other settings, which affect the training\n  "
            + "\n  ".join(bad)
            + "\nset them back to resume from it, or start a new run with --fresh"
        )
    return "; changed: " + ", ".join(lines.values()) if lines else ""


def _check_length(settings: Settings, checkpoint: Path, step: int) -> None:
    if settings.training.steps < step:
        raise UserError(
            f"{shown(checkpoint)} is at step {step}, beyond training.steps "
            f"({settings.training.steps}); raise that, or start a new run with --fresh"
        )


def _rewind(folder: Path, state: dict[str, Any]) -> None:
    """Remove the files of steps after the checkpoint: they will be repeated."""
    metrics = folder / METRICS
    if metrics.exists() and metrics.stat().st_size > state["metrics_bytes"]:
        os.truncate(metrics, state["metrics_bytes"])
    for part in ("rollouts", "evaluation", "hf", CHECKPOINTS):
        for file in (folder / part).glob("step_*"):
            match = _STEP.match(file.name)
            if match and int(match[1]) > state["step"]:
                shutil.rmtree(file) if file.is_dir() else file.unlink()


def hold_folder(folder: Path) -> IO[str] | None:
    """Lock a folder; None if another process has locked it."""
    try:
        lock = (folder / LOCK).open("w")
    except OSError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        return None
    except OSError:
        pass  # a file system without locks: the user must avoid two launchers per run
    return lock


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(value, dict):
        return {prefix: value}
    found: dict[str, Any] = {}
    for key, inner in value.items():
        found |= _flat(inner, f"{prefix}.{key}" if prefix else key)
    return found


def _text(value: Any) -> str:
    return json.dumps(value)
