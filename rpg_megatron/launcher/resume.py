"""Selects the run that a command resumes: the newest one of its name, if it is unfinished or has fewer steps
than requested. Otherwise a new run is created.

A launcher locks a file in the run's folder, so that no second launcher writes into it: with the same settings
that is an error, with other settings it creates a new run.
"""

from __future__ import annotations

import errno
import json
import re
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, BinaryIO

import yaml

from rpg_megatron.checkpoints.checkpoint_path import kind_of, list_exports, whole_step
from rpg_megatron.checkpoints.hf_hub import with_local_model
from rpg_megatron.checkpoints.run_folder import (
    ADAPTERS,
    CONFIG,
    RunState,
    find_problems,
    list_folders,
    read_state,
    remove_parts,
)
from rpg_megatron.config import Settings, UserError, load_settings
from rpg_megatron.config.affects import settings_that_differ
from rpg_megatron.config.base import What
from rpg_megatron.config.files import (
    atomic_write_text,
    copy_file,
    folder_size,
    is_ours,
    open_own,
    open_regular,
    read_text,
    real_path,
    remove,
    rename,
)
from rpg_megatron.config.parsing import read_yaml
from rpg_megatron.config.policy import is_hub_id
from rpg_megatron.launcher.run_dir import (
    LOCK,
    LOGS,
    SUMMARY,
    create_run,
    finished_steps,
    hold_folder,
    list_runs,
    next_folder,
    replace_settings,
    resolved_yaml,
)
from rpg_megatron.launcher.summary import display_path
from rpg_megatron.system.metrics_file import METRICS, parse_row

ORIGIN = ".origin"
"""File in runs created with --fresh or --from: path of the checkpoint that they start from; else empty."""
_CHECK_SECONDS = 2.0
"""How long to wait for another process that locks a folder only to read it."""
_LARGE = 10**9
"""Size of a checkpoint, in bytes, above which a message is printed while it is checked."""
_STEP = re.compile(r"step_(\d{6,})")
_MOST_METRICS = 1 << 30
"""Bytes that are copied of another run: a sparse file would fill the disk."""


@dataclass
class OpenRun:
    """The folder of a run that this process has locked, and where the run starts."""

    folder: Path
    lock: IO[str] | None
    """None: nothing is locked, in a dry run."""
    checkpoint: Path | None = None
    """The checkpoint to resume from; None: start from the beginning."""
    notes: list[str] = field(default_factory=list)
    """Messages for the user."""
    is_new: bool = True
    """Whether the folder is new, and may be removed if the run fails early."""

    def close(self) -> None:
        """Release the lock."""
        if self.lock is not None:
            self.lock.close()


def open_run(
    settings: Settings, *, fresh: bool = False, source: Path | None = None, dry: bool = False
) -> OpenRun:
    """Open the run that these settings resume, or a new one.

    fresh: always create a new run. source: create a new run that starts from this checkpoint, or from the
    newest one of this run. dry: only say which run it would be; no file is created or changed. Raises
    UserError if settings that affect the training have changed, if another process is working on the run, or
    if its folder cannot be written.
    """
    try:
        return _open(settings, fresh, source, dry)
    except OSError as e:
        raise UserError(
            f"{e.filename or settings.runs}: {e.strerror}; make the run's folder writable, or choose another "
            "with runs=..."
        ) from None


def take_weights(settings: Settings, source: Path | None) -> tuple[Settings, Path | None]:
    """Settings and source of ``train --from``: weights without the state of a run become ``model.path``.

    Raises UserError if ``source`` is no checkpoint.
    """
    if source is None or kind_of(source, "--from") not in ("hf", "megatron"):
        return settings, source
    return settings.changed(model={"path": source.absolute(), "revision": None}), None


def _open(settings: Settings, fresh: bool, source: Path | None, dry: bool) -> OpenRun:
    if source is not None:
        return _start_from(settings, source.absolute(), dry)
    if fresh:
        return _create(settings, dry, origin="")
    notes: list[str] = []
    for folder in list_runs(settings):
        if not is_ours(folder):  # others can write to the folder of the runs
            notes = notes or [f"{display_path(folder)} belongs to another user: not resumed"]
            continue
        try:
            lock = hold_folder(folder, seconds=_CHECK_SECONDS)
        except PermissionError:
            continue  # another user's
        if lock is None:
            if finished_steps(folder) is None:
                _check_not_running(settings, folder)
                notes.append(f"{display_path(folder)} is running with other settings")
            continue
        with ExitStack() as unlock:
            unlock.enter_context(lock)
            done = finished_steps(folder)
            if done is not None and done >= settings.training.steps:
                break  # it is finished, and older runs are not resumed
            run = _resume(settings, folder, lock, notes, dry, finished=done is not None)
            if run is not None:
                unlock.pop_all()
                return run
        if done is not None:
            notes.append(f"{display_path(folder)} is finished and cannot be continued; starting a new run")
            break
        if (folder / ORIGIN).exists():  # created with --fresh or --from, without a checkpoint yet
            origin = read_text(folder / ORIGIN, real_path(folder))
            run = _start_from(settings, Path(origin), dry) if origin else _create(settings, dry, origin="")
            run.notes = [*notes, *(run.notes or [f"run {display_path(run.folder)}"])]
            return run
        notes.append(f"{display_path(folder)} is unfinished, without a complete checkpoint: not resumed")
    run = _create(settings, dry)
    if notes:
        run.notes = [*notes, f"run {display_path(run.folder)}, from step 0"]
    return run


def find_finished(settings: Settings) -> Path | None:
    """The newest run of this name, if it has done all of its steps, with settings that train the same."""
    folder = next(iter(list_runs(settings)), None)
    if folder is None or not is_ours(folder) or (done := finished_steps(folder)) is None:
        return None
    try:
        recorded = _read_settings(folder / CONFIG)
    except UserError:
        return None
    # A run records the folder of a model from the hub, and the steps that its epochs have.
    place = {"path": recorded.model.path} if is_hub_id(settings.model.path) else {}
    update: dict[str, Any] = {"model": settings.model.model_copy(update=place)}
    if settings.sft is not None:
        update["training"] = recorded.training
    settings = with_local_model(settings.model_copy(update=update), hub=False)
    if done < settings.training.steps or _changes(settings, folder / CONFIG)[0]:
        return None
    return folder


def _create(settings: Settings, dry: bool, origin: str | None = None) -> OpenRun:
    if dry:
        return OpenRun(next_folder(settings), None)
    folder = create_run(settings)
    lock = hold_folder(folder, seconds=_CHECK_SECONDS)
    if lock is None:
        raise UserError(
            f"{display_path(folder)} was just created, and is locked by another process; start again"
        )
    if origin is not None:
        atomic_write_text(folder / ORIGIN, origin)
    return OpenRun(folder, lock)


def _resume(
    settings: Settings, folder: Path, lock: IO[str], notes: list[str], dry: bool, *, finished: bool
) -> OpenRun | None:
    """Resume a run from its newest checkpoint. Returns None if it has none, or if it is ``finished`` and was
    trained with other settings: the command then means a new run of the same name.
    """
    checkpoint = _newest_complete(folder, notes)
    if checkpoint is None:
        return None
    try:
        state, changes = _read_start(settings, checkpoint)
    except UserError as e:
        if not finished:
            raise
        notes.append(str(e).rpartition("\n")[0])
        return None
    if not dry:
        if not (folder / CONFIG).exists():
            with open_regular(checkpoint / CONFIG) as file:
                copy_file(file, folder, CONFIG)
        (folder / LOGS).mkdir(exist_ok=True)
        _rewind(folder, state, notes)
        remove(folder / SUMMARY)
        replace_settings(folder, settings, state["step"])
    notes.append(f"resuming {display_path(folder)} from step {state['step']}; --fresh starts over{changes}")
    return OpenRun(folder, lock, checkpoint, notes, is_new=False)


def _start_from(settings: Settings, source: Path, dry: bool) -> OpenRun:
    notes: list[str] = []
    is_run = kind_of(source, "--from") == "run"
    source = whole_step(source)
    checkpoint = _newest_complete(source, notes, root=source) if is_run else source
    if checkpoint is None:
        raise UserError(f"--from {source}: the run has no complete checkpoint; {'; '.join(notes)}")
    if not is_run and (problems := find_problems(source, root=source)):
        raise UserError(f"--from {source}: not a complete checkpoint of a run: {'; '.join(problems[:3])}")
    _check_kind(settings, source, checkpoint)
    state, changes = _read_start(settings, checkpoint)
    rows = (source if is_run else source.parent.parent) / METRICS
    metrics: BinaryIO | None = None
    with ExitStack() as stack:
        try:
            metrics = stack.enter_context(open_regular(rows, real_path(rows.parent)))
        except OSError as e:  # most often, they do not exist any more
            if e.errno == errno.EXDEV:
                raise UserError(
                    f"--from {source}: {display_path(rows)} {e.strerror}; replace the link by a copy"
                ) from None
        run = _create(settings, dry, origin=str(checkpoint))
        if metrics is not None and not dry:
            with suppress(OSError):
                copy_file(metrics, run.folder, METRICS, limit=_MOST_METRICS)
                _cut_metrics(run.folder / METRICS, state, notes)
    run.checkpoint = checkpoint
    run.notes = [*notes, f"starting {display_path(run.folder)} from {display_path(checkpoint)}{changes}"]
    return run


def _newest_complete(folder: Path, notes: list[str], root: Path | None = None) -> Path | None:
    """The newest complete checkpoint of a run; adds a note for each newer, incomplete one.

    root: see ``find_problems``.
    """
    for checkpoint in list_folders(folder).values():
        elsewhere = root is not None and not real_path(checkpoint).is_relative_to(real_path(root))
        size = 0 if elsewhere else folder_size(checkpoint)
        if size > _LARGE:
            print(f"checking {display_path(checkpoint)}, {size / 1e9:,.1f} GB", flush=True)
        problems = find_problems(checkpoint, root)
        if not problems:
            return checkpoint
        notes.append(
            f"warning: {display_path(checkpoint)} is damaged and not used: {'; '.join(problems[:3])}"
        )
    return None


def list_changes(then: dict[str, Any], now: dict[str, Any], *what: What) -> list[str]:
    """A line for each difference between two nested dicts of plain values. what: only settings with one of
    these tags.
    """
    return [
        f"{key}: {json.dumps(old)} -> {json.dumps(new)}"
        for key, (old, new) in settings_that_differ(then, now, *what).items()
    ]


def _changes(settings: Settings, file: Path) -> tuple[list[str], list[str]]:
    """Lines for settings that differ from those in a file: those that affect the training, and all."""
    recorded = _read_settings(file)
    then, now = (yaml.safe_load(resolved_yaml(each)) for each in (recorded, settings))
    return list_changes(then, now, "training"), list_changes(then, now)


def _read_settings(file: Path) -> Settings:
    """The settings of a run, in one file. Others that it names may not be this user's to show."""
    with suppress(OSError, UnicodeDecodeError, yaml.YAMLError):  # ``load_settings`` says what is wrong
        if isinstance(whole := read_yaml(file), dict) and "extends" in whole:
            raise UserError(f"{file}: not the settings of a run, which extend no other file")
    return load_settings(file)


def _read_start(settings: Settings, checkpoint: Path) -> tuple[dict[str, Any], str]:
    """The state of a checkpoint that these settings go on from, and the changed settings in words.

    Raises UserError if one of them affects the training, or if the checkpoint is beyond the last step.
    """
    bad, lines = _changes(settings, checkpoint / CONFIG)
    if bad:
        raise UserError(
            f"{display_path(checkpoint)} was written with other settings, which affect the training\n  "
            + "\n  ".join(bad)
            + "\nset them back to resume from it, or start a new run with --fresh"
        )
    state = read_state(checkpoint, RunState)
    if settings.training.steps < state["step"]:
        raise UserError(
            f"{display_path(checkpoint)} is at step {state['step']}, beyond training.steps "
            f"({settings.training.steps}); raise that, or start a new run with --fresh"
        )
    return state, "; changed: " + ", ".join(lines) if lines else ""


def _check_kind(settings: Settings, source: Path, checkpoint: Path) -> None:
    """Raise UserError if one of the two runs is a fine-tuning, and the other is not."""
    was = _read_settings(checkpoint / CONFIG).sft is not None
    if was != (settings.sft is not None):
        exports = list_exports(checkpoint.parent.parent)
        model = display_path(exports[-1]) if exports else "DIR of rpg-megatron convert megatron-to-hf"
        raise UserError(
            f"--from {source}: is a run of {'fine-tuning' if was else 'RL'}, and these settings are not; its "
            f"export is the model: leave out --from, and set model.path={model}"
        )


def _check_not_running(settings: Settings, folder: Path) -> None:
    """Raise UserError if the run in ``folder``, which another process has locked, has these settings."""
    with suppress(UserError):  # settings that cannot be read
        if _changes(settings, folder / CONFIG)[0]:
            return
    holder = read_text(folder / LOCK).strip() or "another process"
    raise UserError(
        f"{display_path(folder)} is running ({holder}); wait until it ends, or start another run with --fresh"
    )


def _rewind(folder: Path, state: dict[str, Any], notes: list[str]) -> None:
    """Remove the files of steps after the checkpoint, which will be repeated. Keeps damaged checkpoints."""
    _cut_metrics(folder / METRICS, state, notes)
    for part in ("rollouts", "evaluation", "hf", ADAPTERS):
        for file in (folder / part).glob("step_*"):
            match = _STEP.match(file.name)
            if match and int(match[1]) > state["step"]:
                remove(file)
        for file in (folder / part).glob(".*.part"):  # left by a process that was killed while it wrote
            remove(file)
    remove_parts(folder)
    for step, damaged in list_folders(folder).items():
        if step > state["step"]:
            aside = damaged.with_name(f"damaged_{damaged.name}")
            remove(aside, ignore_errors=True)
            rename(damaged, aside)
            notes.append(f"warning: renamed it to {display_path(aside)}; delete it if you do not need it")


def _cut_metrics(file: Path, state: dict[str, Any], notes: list[str]) -> None:
    """Remove rows after the checkpoint, and an incomplete row. Adds a note if rows before it are lost."""
    last = state["step"] - (state.get("row") is not None)  # the last row is written when the run resumes
    end, newest = 0, -1
    if file.exists():
        with open_own(file, "rb+") as rows:
            for row in rows:
                step = (parse_row(row) or {"step": newest})["step"]  # a damaged row stays as it is
                if step > last or not row.endswith(b"\n"):
                    break
                end, newest = end + len(row), step
            rows.truncate(end)
    if end < state["metrics_bytes"] and newest < last:
        notes.append(
            f"warning: {display_path(file)} was shortened; the rows of steps {newest + 1} to {last} are lost"
        )
