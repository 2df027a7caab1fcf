"""The output folder of an evaluation: can be resumed with the same settings only."""

from __future__ import annotations

import hashlib
import json
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import yaml

from rpg_megatron.config import Settings, UserError
from rpg_megatron.config.affects import tag_of_setting
from rpg_megatron.config.files import atomic_write_text, flatten, is_ours, open_own, read_json, remove
from rpg_megatron.config.parsing import read_yaml
from rpg_megatron.launcher.resume import list_changes
from rpg_megatron.launcher.run_dir import CONFIG, LOCK, LOGS, SUMMARY, hold_folder, resolved_yaml
from rpg_megatron.launcher.summary import display_path

_MODEL = "model.json"
_WEIGHTS = (".safetensors", ".json", ".jinja", ".model", ".txt")


@dataclass
class OutputDir:
    """An evaluation's folder, locked by this process."""

    path: Path
    lock: IO[str]
    made: bool
    """Whether this process created it."""
    discard: bool = False
    """Whether ``close`` removes it if it is new and holds no results."""

    def summary(self) -> dict[str, Any] | None:
        """The summary of the results; None until all are there. Raises UserError if it cannot be read."""
        file = self.path / SUMMARY
        try:
            return dict(read_json(file))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError) as e:
            raise UserError(f"{file}: cannot be read ({e}); delete it and start again") from None

    def graded(self) -> int:
        """Number of graded problems."""
        total = 0
        for results in self.path.glob("*.jsonl"):
            with open_own(results) as file:
                total += sum(line.endswith(b"\n") for line in file)
        return total

    def close(self) -> None:
        """Release the lock."""
        if self.discard and self.made and not self.graded():
            remove(self.path, ignore_errors=True)
        self.lock.close()


def open_output_dir(out: Path | None, settings: Settings, label: str) -> OutputDir:
    """Open the folder ``out``, or one in ``evals`` named after the model and a hash of the settings.

    Raises UserError if it contains other files, or an evaluation with other settings or other weights.
    """
    now, weights = _comparable(yaml.safe_load(resolved_yaml(settings))), _weights(settings.model.path)
    digest = hashlib.sha256(json.dumps([now, weights], sort_keys=True).encode()).hexdigest()[:8]
    path = (out or Path("evals", f"{label}-{digest}")).absolute()
    made = not path.exists()
    if not made and not is_ours(path):
        raise _refused(path, " belongs to another user; choose another folder")
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = hold_folder(path)
        if lock is None:
            raise _refused(path, ": another evaluation is running there; wait, or choose another folder")
        with ExitStack() as undo:
            undo.callback(lock.close)
            _take(path, settings, now, weights)
            undo.pop_all()
    except OSError as e:
        raise UserError(f"--out: {e.filename or path}: {e.strerror}; choose another folder") from None
    return OutputDir(path, lock, made)


def _take(path: Path, settings: Settings, now: dict[str, Any], weights: dict[str, Any]) -> None:
    """Check the settings and weights against those of an earlier start, and write them."""
    if (path / CONFIG).is_file():
        try:
            then = _comparable(read_yaml(path / CONFIG))
            files = read_json(path / _MODEL)
        except (ValueError, TypeError, KeyError, AttributeError, yaml.YAMLError, FileNotFoundError):
            raise _refused(path, f": {CONFIG} or {_MODEL} is damaged; choose another folder") from None
        lines = list_changes(then, now)
        if not lines and files != weights:
            changed = sorted(k for k in files.keys() | weights.keys() if files.get(k) != weights.get(k))
            lines = [f"the model's files have changed: {', '.join(changed)}"]
        if lines:
            listed = "\n  ".join([" contains an evaluation with other settings", *lines])
            raise _refused(path, f"{listed}\nrestore them to resume it, or choose another folder")
    elif others := [entry.name for entry in path.iterdir() if entry.name not in (LOCK, _MODEL)]:
        raise _refused(path, f" contains {others[0]} and no evaluation; choose a new or an empty folder")
    (path / LOGS).mkdir(exist_ok=True)
    atomic_write_text(path / _MODEL, json.dumps(weights, indent=2))
    atomic_write_text(path / CONFIG, resolved_yaml(settings))


def _refused(path: Path, why: str) -> UserError:
    return UserError(f"--out: {display_path(path)}{why}")


def _comparable(raw: dict[str, Any]) -> dict[str, Any]:
    """The settings that must be equal to resume: all that affect the results, the sets by name. ``data`` is
    the first of the sets.
    """
    sets = {part["name"]: part for part in raw["evaluation"]["sets"]}
    plain = flatten(raw | {"data": None, "evaluation": raw["evaluation"] | {"sets": sets}})
    tags = {key: tag_of_setting(key) for key in plain}
    kinds = ("training", "results", "sums")
    return {key: plain[key] for key, tag in tags.items() if tag.evaluated and tag.what in kinds}


def _weights(model: Path) -> dict[str, list[int]]:
    """Size and modification time (ns) of the model's files."""
    stats = {file.name: file.stat() for file in sorted(model.iterdir()) if file.suffix in _WEIGHTS}
    return {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()}
