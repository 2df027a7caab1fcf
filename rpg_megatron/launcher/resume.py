"""Selects the run that a command resumes: the newest one of its name, if it is unfinished or has fewer steps
than requested. Otherwise a new run is created.

A launcher locks a file in the run's folder, so that no second launcher writes into it: with the same settings
that is an error, with other settings it creates a new run.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import socket
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import yaml

from rpg_megatron.checkpoints.run_folder import (
    CHECKPOINTS,
    CONFIG,
    ROLLOUTS,
    carried_files,
    find_problems,
    list_folders,
    read_state,
    remove_parts,
)
from rpg_megatron.config import Settings, UserError, load_settings
from rpg_megatron.launcher.run_dir import (
    LOGS,
    METRICS,
    SUMMARY,
    create_run,
    is_finished,
    list_runs,
    replace_settings,
    resolved_yaml,
)
from rpg_megatron.launcher.summary import display_path

LOCK = ".lock"
ORIGIN = ".origin"
"""File in runs created with --fresh or --from: path of the checkpoint that they start from; else empty."""
_CHECK_SECONDS = 2.0
"""How long to wait for another process that locks a folder only to read it."""
_LARGE = 10**9
"""Size of a checkpoint, in bytes, above which a message is printed while it is checked."""
_STEP = re.compile(r"step_(\d{6,})")
_MAY_CHANGE = (
    *("name", "runs", "device", "rendezvous_port", "parallel", "memory", "engine", "bridge", "cluster"),
    *("evaluation", "guards", "export", "checkpoint", "model.vocab_multiple", "optimizer.overlap"),
    *("training.steps", "training.tokens_per_microbatch", "training.logprob_chunk"),
    *("profile", "rollout.workers", "reward.workers", "reward.concurrency", "trackers"),
)
"""Keys and sections that may change when a run is resumed: they affect placement, length and logging, and
results only by rounding. All others affect the training."""


@dataclass
class OpenRun:
    """The folder of a run that this process has locked, and where the run starts."""

    folder: Path
    lock: IO[str]
    checkpoint: Path | None = None
    """The checkpoint to resume from; None: start from the beginning."""
    notes: list[str] = field(default_factory=list)
    """Messages for the user."""
    is_new: bool = True
    """Whether the folder is new, and may be removed if the run fails early."""

    def close(self) -> None:
        """Release the lock."""
        self.lock.close()


def open_run(settings: Settings, *, fresh: bool = False, source: Path | None = None) -> OpenRun:
    """Open the run that these settings resume, or a new one.

    fresh: always create a new run. source: create a new run that starts from this checkpoint, or from the
    newest one of this run. Raises UserError if settings that affect the training have changed, if another
    process is working on the run, or if its folder cannot be written.
    """
    try:
        return _open(settings, fresh, source)
    except OSError as e:
        raise UserError(
            f"{e.filename or settings.runs}: {e.strerror}; make the run's folder writable, or choose another "
            "with runs=..."
        ) from None


def _open(settings: Settings, fresh: bool, source: Path | None) -> OpenRun:
    if source is not None:
        return _start_from(settings, source.absolute())
    if fresh:
        return _create(settings, origin="")
    notes: list[str] = []
    for folder in list_runs(settings):
        try:
            lock = hold_folder(folder, seconds=_CHECK_SECONDS)
        except PermissionError:
            continue  # another user's
        if lock is None:
            if not is_finished(folder):
                _check_not_running(settings, folder)
                notes.append(f"{display_path(folder)} is running with other settings")
            continue
        done = _finished_steps(folder)
        if done is not None and done >= settings.training.steps:
            lock.close()
            break  # it is finished, and older runs are not resumed
        try:
            run = _resume(settings, folder, lock, notes, finished=done is not None)
        except BaseException:
            lock.close()
            raise
        if run is not None:
            return run
        lock.close()
        if done is not None:
            notes.append(f"{display_path(folder)} is finished and cannot be continued; starting a new run")
            break
        if (folder / ORIGIN).exists():  # created with --fresh or --from, without a checkpoint yet
            origin = (folder / ORIGIN).read_text(encoding="utf-8")
            run = _start_from(settings, Path(origin)) if origin else _create(settings, origin="")
            run.notes = [*notes, *(run.notes or [f"run {display_path(run.folder)}"])]
            return run
        notes.append(f"{display_path(folder)} is unfinished, without a complete checkpoint: not resumed")
    run = _create(settings)
    if notes:
        run.notes = [*notes, f"run {display_path(run.folder)}, from step 0"]
    return run


def _create(settings: Settings, origin: str | None = None) -> OpenRun:
    folder = create_run(settings)
    lock = hold_folder(folder, seconds=_CHECK_SECONDS)
    if lock is None:
        raise UserError(
            f"{display_path(folder)} was just created, and is locked by another process; start again"
        )
    if origin is not None:
        (folder / ORIGIN).write_text(origin, encoding="utf-8")
    return OpenRun(folder, lock)


def _finished_steps(folder: Path) -> int | None:
    """Number of steps of a finished run; None if it is not finished."""
    if not is_finished(folder):
        return None
    try:
        return int(json.loads((folder / SUMMARY).read_text(encoding="utf-8"))["steps"])
    except (OSError, ValueError, KeyError, TypeError):
        return sys.maxsize  # unknown, so it is not resumed


def _resume(
    settings: Settings, folder: Path, lock: IO[str], notes: list[str], *, finished: bool
) -> OpenRun | None:
    """Resume a run from its newest checkpoint. Returns None if it has none, or if it is ``finished`` and was
    trained with other settings: the command then means a new run of the same name.
    """
    checkpoint = _newest_complete(folder, notes)
    if checkpoint is None:
        return None
    try:
        changes = _describe_changes(settings, checkpoint)
    except UserError as e:
        if not finished:
            raise
        notes.append(str(e).rpartition("\n")[0])
        return None
    state = read_state(checkpoint)
    _check_length(settings, checkpoint, state["step"])
    if not (folder / CONFIG).exists():
        shutil.copyfile(checkpoint / CONFIG, folder / CONFIG)
    (folder / LOGS).mkdir(exist_ok=True)
    _rewind(folder, state, notes)
    (folder / SUMMARY).unlink(missing_ok=True)
    replace_settings(folder, settings, state["step"])
    notes.append(f"resuming {display_path(folder)} from step {state['step']}; --fresh starts over{changes}")
    return OpenRun(folder, lock, checkpoint, notes, is_new=False)


def _start_from(settings: Settings, source: Path) -> OpenRun:
    notes: list[str] = []
    checkpoint: Path | None = source
    if not source.is_dir():
        raise UserError(
            f"--from {source}: no such folder; give a run's, or one of its checkpoints/step_NNNNNN"
        )
    if (source / CHECKPOINTS).is_dir():
        checkpoint = _newest_complete(source, notes)
    elif problems := find_problems(source):
        raise UserError(f"--from {source}: not a complete checkpoint of a run: {'; '.join(problems[:3])}")
    if checkpoint is None:
        raise UserError(f"--from {source}: the run has no complete checkpoint; {'; '.join(notes)}")
    changes = _describe_changes(settings, checkpoint)
    state = read_state(checkpoint)
    _check_length(settings, checkpoint, state["step"])
    carried = carried_files(checkpoint)
    if missing := [file for file in sorted(carried) if not file.is_file()]:
        raise UserError(
            f"--from {source}: {display_path(checkpoint)} needs {display_path(missing[0])} (groups that its "
            "step carried over), which is missing; copy it too, or choose another checkpoint"
        )
    run = _create(settings, origin=str(checkpoint))
    for file in carried:
        (run.folder / ROLLOUTS).mkdir(exist_ok=True)
        shutil.copyfile(file, run.folder / ROLLOUTS / file.name)
    with suppress(OSError):  # the metrics before the checkpoint, if they still exist
        shutil.copyfile(checkpoint.parents[1] / METRICS, run.folder / METRICS)
        _cut_metrics(run.folder / METRICS, state, notes)
    run.checkpoint = checkpoint
    run.notes = [*notes, f"starting {display_path(run.folder)} from {display_path(checkpoint)}{changes}"]
    return run


def _newest_complete(folder: Path, notes: list[str]) -> Path | None:
    """The newest complete checkpoint of a run; adds a note for each newer, incomplete one."""
    for checkpoint in list_folders(folder).values():
        size = sum(f.stat().st_size for f in checkpoint.rglob("*") if f.is_file())
        if size > _LARGE:
            print(f"checking {display_path(checkpoint)}, {size / 1e9:,.1f} GB", flush=True)
        problems = find_problems(checkpoint)
        if not problems:
            return checkpoint
        notes.append(
            f"warning: {display_path(checkpoint)} is damaged and not used: {'; '.join(problems[:3])}"
        )
    return None


def list_changes(then: dict[str, Any], now: dict[str, Any]) -> dict[str, str]:
    """Differences between two nested dicts of plain values: dotted key -> a line with both values."""
    old, new = _flat(then), _flat(now)
    return {
        key: f"{key}: {_text(old.get(key))} -> {_text(new.get(key))}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key)
    }


def _changes(settings: Settings, file: Path) -> tuple[list[str], list[str]]:
    """Lines for settings that differ from those in a file: those that affect the training, and all."""
    plain = [yaml.safe_load(resolved_yaml(each)) for each in (load_settings(file), settings)]
    lines = list_changes(plain[0], plain[1])
    bad = [
        line
        for key, line in lines.items()
        if not any(key == f or key.startswith(f"{f}.") for f in _MAY_CHANGE)
    ]
    return bad, list(lines.values())


def _describe_changes(settings: Settings, checkpoint: Path) -> str:
    """Describe the changed settings. Raises UserError if one of them affects the training."""
    bad, lines = _changes(settings, checkpoint / CONFIG)
    if bad:
        raise UserError(
            f"{display_path(checkpoint)} was written with other settings, which affect the training\n  "
            + "\n  ".join(bad)
            + "\nset them back to resume from it, or start a new run with --fresh"
        )
    return "; changed: " + ", ".join(lines) if lines else ""


def _check_not_running(settings: Settings, folder: Path) -> None:
    """Raise UserError if the run in ``folder``, which another process has locked, has these settings."""
    with suppress(UserError):  # settings that cannot be read
        if _changes(settings, folder / CONFIG)[0]:
            return
    holder = (folder / LOCK).read_text(encoding="utf-8").strip() or "another process"
    raise UserError(
        f"{display_path(folder)} is running ({holder}); wait until it ends, or start another run with --fresh"
    )


def _check_length(settings: Settings, checkpoint: Path, step: int) -> None:
    if settings.training.steps < step:
        raise UserError(
            f"{display_path(checkpoint)} is at step {step}, beyond training.steps "
            f"({settings.training.steps}); raise that, or start a new run with --fresh"
        )


def _rewind(folder: Path, state: dict[str, Any], notes: list[str]) -> None:
    """Remove the files of steps after the checkpoint, which will be repeated. Keeps damaged checkpoints."""
    _cut_metrics(folder / METRICS, state, notes)
    for part in ("rollouts", "evaluation", "hf"):
        for file in (folder / part).glob("step_*"):
            match = _STEP.match(file.name)
            if match and int(match[1]) > state["step"]:
                shutil.rmtree(file) if file.is_dir() else file.unlink()
    remove_parts(folder)
    for step, damaged in list_folders(folder).items():
        if step > state["step"]:
            aside = damaged.with_name(f"damaged_{damaged.name}")
            shutil.rmtree(aside, ignore_errors=True)
            damaged.rename(aside)
            notes.append(f"warning: renamed it to {display_path(aside)}; delete it if you do not need it")


def _cut_metrics(file: Path, state: dict[str, Any], notes: list[str]) -> None:
    """Remove rows after the checkpoint, and an incomplete row. Adds a note if rows before it are lost."""
    last = state["step"] - (state.get("row") is not None)  # the last row is written when the run resumes
    end, kept = 0, -1
    if file.exists():
        with file.open("rb+") as rows:
            for row in rows:
                step = kept
                with suppress(ValueError, KeyError, TypeError):  # a damaged row stays as it is
                    step = int(json.loads(row)["step"])
                if step > last or not row.endswith(b"\n"):
                    break
                end, kept = end + len(row), step
            rows.truncate(end)
    if end < state["metrics_bytes"] and kept < last:
        notes.append(
            f"warning: {display_path(file)} was shortened; the rows of steps {kept + 1} to {last} are lost"
        )


def hold_folder(folder: Path, seconds: float = 0.0) -> IO[str] | None:
    """Lock a folder and write this process's id into the lock file; None if another process has locked it.

    seconds: how long to wait, since other launchers and reports lock it briefly to read the folder.
    Raises OSError if the lock file cannot be written.
    """
    # Mode 0600, also for files of earlier versions: anyone who can open it can lock it and block a resume.
    lock = os.fdopen(os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "w")
    with suppress(OSError):  # another user's, in a shared folder
        os.fchmod(lock.fileno(), 0o600)
    end = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() >= end:
                lock.close()
                return None
            time.sleep(0.05)
        except OSError:
            break  # a file system without locks: the user must avoid two launchers per run
    with suppress(OSError):  # a full disk
        lock.truncate()
        lock.write(f"process {os.getpid()} on {socket.gethostname()}")
        lock.flush()
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
