"""The numbered folder of a run, created atomically, and its lock: one process writes into it."""

from __future__ import annotations

import fcntl
import os
import re
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import yaml

from rpg_megatron.config import Settings, UserError, load_settings
from rpg_megatron.config.base import NAME
from rpg_megatron.config.explanation import explained_yaml
from rpg_megatron.config.files import (
    atomic_write_text,
    is_ours,
    open_own,
    open_regular,
    read_json,
    read_text,
    real_path,
    remove,
)

CONFIG = "config.yaml"
"""The settings of the newest steps."""
_EARLIER = re.compile(r"config_until_(\d{6,})\.yaml")
"""Settings of the steps up to that one, if a run was resumed with other settings."""
LOGS = "logs"
LAUNCHER_LOG = "launcher.log"
"""In ``logs``: all lines that the launcher printed, also those that could not be written to stdout."""
SUMMARY = "summary.json"
"""Results of a run that has ended. ``unsaved``: why there is no checkpoint of the last step, if so."""
REPORT = "report.html"
LOCK = ".lock"


def create_run(settings: Settings) -> Path:
    """Create ``<runs>/<name>-NNN`` with the next free number, ``logs/`` in it, and the resolved settings.

    Two runs that start at the same time get two folders. Raises UserError if it cannot be created.
    """
    runs = settings.runs.absolute()
    folder: Path | None = None
    try:
        runs.mkdir(parents=True, exist_ok=True)
        while folder is None:
            candidate = next_folder(settings)
            with suppress(FileExistsError):  # another process has got it
                candidate.mkdir()
                folder = candidate
        (folder / LOGS).mkdir()
        atomic_write_text(folder / CONFIG, resolved_yaml(settings))
    except OSError as e:
        if folder is not None:
            remove(folder, ignore_errors=True)
        raise UserError(
            f"runs: {e.filename or runs}: {e.strerror}; choose another folder with runs=..."
        ) from None
    return folder


def finished_steps(run: Path) -> int | None:
    """Steps of a run that has ended and whose last checkpoint was written; None of any other."""
    try:
        facts = read_json(run / SUMMARY)
        return None if "unsaved" in facts else int(facts["steps"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, OverflowError, KeyError, TypeError):
        return sys.maxsize  # the file is damaged, but it is written at the end of a run, which is not resumed


def resolved_yaml(settings: Settings, *, explained: bool = False) -> str:
    """All settings as YAML with absolute paths, valid from any folder.

    explained: with the meaning of each key as a comment above it.
    """
    values = _absolute(settings.model_dump())
    return explained_yaml(settings, values) if explained else yaml.safe_dump(values, sort_keys=False)


def load_run_settings(file: Path, overrides: list[str] | None = None) -> Settings:
    """The settings of a run, for a command that runs the code that they name.

    file: in the run's folder. Raises UserError, also if one of the two belongs to neither this user nor root.
    """
    for path in (file.parent, file):
        if path.exists() and (owner := path.stat().st_uid) and not is_ours(path):
            raise UserError(
                f"{path} belongs to another user (uid {owner}), and this command would run the code that its "
                f"settings name; read {file.name}, then give a copy of the run, or for eval of a checkpoint"
            )
    return load_settings(file, overrides)


def settings_file(run: Path, step: int) -> Path:
    """The settings file that a step of a run used."""
    until = {int(m[1]): file for file in run.iterdir() if (m := _EARLIER.fullmatch(file.name))}
    return next((until[last] for last in sorted(until) if step <= last), run / CONFIG)


def replace_settings(run: Path, settings: Settings, done: int) -> None:
    """Use these settings for the steps after ``done``; earlier steps keep theirs."""
    text, new = read_text(settings_file(run, done)), resolved_yaml(settings)
    for file in list(run.iterdir()):
        if (m := _EARLIER.fullmatch(file.name)) and int(m[1]) >= done:
            remove(file)
    if text != new and done:
        atomic_write_text(run / f"config_until_{done:06d}.yaml", text)
    atomic_write_text(run / CONFIG, new)


def _absolute(value: Any) -> Any:
    """Plain YAML values with absolute paths; symbolic links are not resolved."""
    if isinstance(value, Path):
        return str(value.absolute())
    if isinstance(value, dict):
        return {key: _absolute(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_absolute(inner) for inner in value]
    return value


def list_runs(settings: Settings) -> list[Path]:
    """The folders of runs of this name, the newest first."""
    runs = settings.runs.absolute()
    try:
        numbers = _numbers(runs, settings.name)
    except OSError:
        return []
    return [runs / name for _, name in sorted(numbers, reverse=True)]


def newest_run(path: Path) -> Path:
    """The folder that a user has named: itself, or the newest run of this name, in ``runs`` or in its parent.

    ``path`` itself if there is none, for the message of the command.
    """
    if not path.exists() and re.fullmatch(NAME, path.name):
        parents = [path.parent] if path.parent != Path() else [Path("runs"), Path()]
        for parent in parents:
            with suppress(OSError):
                if numbers := _numbers(parent, path.name):
                    return parent / max(numbers)[1]
    return path


def next_folder(settings: Settings) -> Path:
    """The folder that ``create_run`` would create now."""
    runs = settings.runs.absolute()
    numbers = _numbers(runs, settings.name) if runs.is_dir() else []
    number = 1 + max((number for number, _ in numbers), default=0)
    return runs / f"{settings.name}-{number:03d}"


def _numbers(runs: Path, name: str) -> list[tuple[int, str]]:
    """Number and name of each run's folder."""
    pattern = re.compile(re.escape(name) + r"-(\d{3,})")
    matches = (pattern.fullmatch(entry.name) for entry in runs.iterdir())
    return [(int(match[1]), match[0]) for match in matches if match]


def hold_folder(folder: Path, seconds: float = 0.0) -> IO[str] | None:
    """Lock the folder of a run or an evaluation, and write this process's id into the lock file; None if
    another process has locked it.

    seconds: how long to wait, since other launchers and reports lock it briefly to read the folder.
    Raises OSError if the lock file cannot be written.
    """
    # Mode 0600, also for files of earlier versions: anyone who can open it can lock it and block a resume.
    lock: IO[str] = open_own(folder / LOCK, "a", permissions=0o600, encoding="utf-8")
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
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on {socket.gethostname()}")
        lock.flush()
    return lock


def is_held(folder: Path) -> bool:
    """Whether a launcher has locked the run. Takes a shared lock briefly, and never waits."""
    try:
        with open_regular(folder / LOCK, real_path(folder)) as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as e:
        return isinstance(e, BlockingIOError)
    return False
