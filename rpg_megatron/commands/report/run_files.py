"""Reads a run's folder for a report; the run may be finished, running or damaged."""

from __future__ import annotations

import fcntl
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from rpg_megatron.config import UserError
from rpg_megatron.config.files import read_json, read_yaml
from rpg_megatron.launcher.environment import ENVIRONMENT
from rpg_megatron.launcher.resume import LOCK
from rpg_megatron.launcher.run_dir import CONFIG, METRICS, SUMMARY

Row = dict[str, float]


@dataclass
class RunFiles:
    """The files of one run."""

    folder: Path
    rows: list[Row]
    """Metrics of each step by key, in the order of steps; includes ``step``. NaN and inf are kept."""
    config: dict[str, Any]
    """Every setting by its dotted key; empty if the file cannot be read."""
    summary: dict[str, Any]
    """The trainer's summary; empty before the end."""
    starts: list[dict[str, Any]]
    """``environment.json``: a description of each start, the first one first."""
    running: bool
    """Whether a launcher has locked the folder."""
    notes: list[str] = field(default_factory=list)
    """Messages about files that could not be read."""

    @property
    def steps(self) -> int:
        """Number of completed training steps."""
        return int(self.rows[-1]["step"]) if self.rows else 0

    @property
    def planned(self) -> int | None:
        """Number of training steps in the settings, if any."""
        steps = self.config.get("training.steps")
        return steps if isinstance(steps, int) else None

    def series(self, key: str) -> list[tuple[int, float]]:
        """(step, value) of one metric, finite values only."""
        return [(int(r["step"]), r[key]) for r in self.rows if key in r and math.isfinite(r[key])]


def read_run(folder: Path) -> RunFiles:
    """Read settings, metrics, summary and environment of a run.

    Raises UserError if it is not the folder of a run. Other missing or damaged files become notes.
    """
    if not folder.exists():
        raise UserError(f"{folder}: no such folder; give the folder of a run, such as runs/quickstart-001")
    if not folder.is_dir():
        raise UserError(f"{folder}: is a file; give the folder of a run, such as runs/quickstart-001")
    if not (folder / CONFIG).is_file() and not (folder / METRICS).is_file():
        inner = sorted(f.parent.name for f in folder.glob(f"*/{METRICS}"))
        hint = f"; the runs in it are {', '.join(inner[:5])}" if inner else ""
        raise UserError(f"{folder}: not the folder of a run: it has neither {CONFIG} nor {METRICS}{hint}")
    notes: list[str] = []
    return RunFiles(
        folder=folder,
        rows=_read_metrics(folder / METRICS, notes),
        config=_read_config(folder / CONFIG, notes),
        summary=_read_json(folder / SUMMARY, dict, notes),
        starts=[s for s in _read_json(folder / ENVIRONMENT, list, notes) if isinstance(s, dict)],
        running=_is_held(folder),
        notes=notes,
    )


_FEW = 10
"""Steps averaged at the start and at the end of a run; fewer in a short run."""


def run_ends[T](values: Sequence[T]) -> tuple[Sequence[T], Sequence[T]]:
    """The first and the last tenth, at least one value and at most ten."""
    few = max(1, min(_FEW, len(values) // 10))
    return values[:few], values[-few:]


def mean(values: Sequence[float]) -> float:
    """Mean of at least one number."""
    return math.fsum(values) / len(values)


def name_runs(folders: Sequence[Path]) -> list[str]:
    """A unique name for each run: its folder's, with parent folders if needed."""
    parts = [folder.absolute().parts[1:] or ("/",) for folder in folders]
    for depth in range(1, max(map(len, parts)) + 1):
        names = ["/".join(p[-depth:]) for p in parts]
        if len(set(names)) == len(names):
            return names
    return ["/".join(p) for p in parts]


def thin_rows(rows: list[Row], most: int) -> tuple[list[Row], int]:
    """At most ``most`` rows, and the number of steps per row.

    A row of several steps holds means, the maximum of keys that end in ``max``, and the last of evaluations.
    Numbers that are not finite are kept.
    """
    width = -(-len(rows) // most)
    if width <= 1:
        return rows, 1
    return [_merge(rows[i : i + width]) for i in range(0, len(rows), width)], width


def _merge(rows: list[Row]) -> Row:
    merged: Row = {}
    for key in dict.fromkeys(key for row in rows for key in row):
        values = [row[key] for row in rows if key in row]
        odd = [v for v in values if not math.isfinite(v)]
        if odd:
            merged[key] = odd[0]
        elif key == "step" or key.startswith("eval/"):
            merged[key] = values[-1]
        else:
            merged[key] = max(values) if key.endswith("max") else math.fsum(values) / len(values)
    return merged


def _read_metrics(file: Path, notes: list[str]) -> list[Row]:
    """Rows by step. If a step has several rows, the values of later rows replace those of earlier ones."""
    try:
        lines = file.read_bytes().splitlines()
    except FileNotFoundError:
        return []
    except OSError as e:
        notes.append(f"{file.name} cannot be read ({e.strerror})")
        return []
    rows: dict[int, Row] = {}
    broken = 0
    for line in lines:
        try:
            row = json.loads(line)
            step = int(row["step"])
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            broken += bool(line.strip())
            continue
        numbers = {k: float(v) for k, v in row.items() if _is_number(v)}
        rows[step] = rows.get(step, {}) | numbers | {"step": step}
    if broken:
        notes.append(f"{file.name}: {broken} of {len(lines)} lines could not be read and are skipped")
    return [rows[step] for step in sorted(rows)]


def _is_number(value: Any) -> bool:
    # Integers beyond the range of floats are not metrics.
    return isinstance(value, float | int) and not (isinstance(value, int) and abs(value) > 2**1000)


def _read_config(file: Path, notes: list[str]) -> dict[str, Any]:
    # Not load_settings, so that runs of earlier versions with other keys can be read.
    try:
        found = read_yaml(file)
    except (OSError, ValueError, yaml.YAMLError) as e:
        notes.append(f"{file.name} cannot be read ({type(e).__name__})")
        return {}
    return _flatten(found) if isinstance(found, dict) else {}


def _flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(value, dict) or not value:
        return {prefix: value}
    found: dict[str, Any] = {}
    for key, inner in value.items():
        found |= _flatten(inner, f"{prefix}.{key}" if prefix else str(key))
    return found


def _read_json(file: Path, kind: type, notes: list[str]) -> Any:
    try:
        found = read_json(file)
    except FileNotFoundError:
        return kind()
    except (OSError, ValueError):
        found = None
    if not isinstance(found, kind):
        notes.append(f"{file.name} cannot be read")
        return kind()
    return found


def _is_held(folder: Path) -> bool:
    """Whether a launcher has locked the run. Takes a shared lock briefly, and never waits."""
    try:
        with (folder / LOCK).open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False
