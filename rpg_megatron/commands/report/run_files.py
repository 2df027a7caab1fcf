"""Reads a run's folder for a report; the run may be finished, running or damaged, and made by others.

What does not have the form that training writes is left out with a note, so that the other modules of the
report can calculate with what is read. More users may be able to read the report than a file to which a link
in the folder leads, so such a file is refused.
"""

from __future__ import annotations

import fcntl
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import msgspec
import yaml

from rpg_megatron.config import UserError
from rpg_megatron.config.files import flatten, open_regular, parse_json, read_text, real_path
from rpg_megatron.config.parsing import read_yaml
from rpg_megatron.launcher.environment import ENVIRONMENT
from rpg_megatron.launcher.run_dir import CONFIG, SUMMARY
from rpg_megatron.launcher.run_lock import LOCK
from rpg_megatron.system.metrics_file import METRICS, Row, read_metrics

_JSON = 10_000_000
"""Maximum bytes of other JSON files."""


@dataclass
class RunFiles:
    """The files of one run."""

    folder: Path
    rows: list[Row]
    """Metrics of each step by key, in the order of steps; includes ``step``. NaN and inf are kept, other
    numbers are at most ``LARGEST``."""
    config: dict[str, Any]
    """Every setting by its dotted key, integers beyond 2**53 as text; empty if the file cannot be read."""
    finished: bool
    """Whether there is a summary, which the trainer writes at the end."""
    seconds: float | None
    """Duration of a finished run, if known."""
    starts: list[dict[str, str]]
    """``environment.json``: a description of each start by dotted keys, the first one first."""
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
        return steps if isinstance(steps, int) and steps >= 0 else None

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
    summary = _read_json(folder / SUMMARY, _Summary, notes)
    starts = _read_json(folder / ENVIRONMENT, list[dict[str, Any]], notes) or []
    return RunFiles(
        folder=folder,
        rows=read_metrics(folder / METRICS, notes),
        config=_read_config(folder / CONFIG, notes),
        finished=summary is not None,
        seconds=summary.seconds if summary else None,
        starts=[_start_text(start) for start in starts],
        running=is_held(folder),
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


def common_width(runs: Sequence[list[Row]], most: int) -> int:
    """Steps per row with which each run has at most ``most`` rows, and the same steps make a row in all."""
    width = max(1, *(-(-len(rows) // most) for rows in runs))
    while any(len({row["step"] // width for row in rows}) > most for rows in runs):
        width += max(1, width // 4)
    return width


def merge_steps(rows: list[Row], width: int) -> list[Row]:
    """Rows of ``width`` steps each, as of ``thin_rows``."""
    return [_merge([*part]) for _, part in groupby(rows, lambda row: row["step"] // width)]


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


class _Summary(msgspec.Struct):
    seconds: Annotated[float, msgspec.Meta(ge=0, le=1e12)] | None = None


def note_skipped(notes: list[str], name: str, broken: int, lines: int) -> None:
    """Note that lines do not have the form that they should, if any."""
    if broken:
        notes.append(f"{name}: {broken} of {lines} lines could not be read and are skipped")


def step_in_name(file: Path) -> int | None:
    """The step of ``step_N.*``; None for other files."""
    match = re.match(r"step_([0-9]{1,15})\.", file.name)
    return int(match[1]) if match else None


def reason(error: Exception) -> str:
    """Why a file cannot be read, in a few words."""
    return getattr(error, "strerror", None) or type(error).__name__


def _read_config(file: Path, notes: list[str]) -> dict[str, Any]:
    # Not load_settings, so that runs of earlier versions with other keys can be read.
    try:
        config = read_yaml(file, real_path(file.parent))
        flat = flatten(config) if isinstance(config, dict) and config else {}
        flat = {key: str(v) if isinstance(v, int) and abs(v) > 2**53 else v for key, v in flat.items()}
        json.dumps(flat, default=str)  # raises if the page could not hold it
    except (OSError, ValueError, TypeError, RecursionError, yaml.YAMLError) as e:
        notes.append(f"{file.name} cannot be read ({reason(e)})")
        return {}
    return flat


def _read_json[T](file: Path, kind: type[T], notes: list[str]) -> T | None:
    """The value in a file; None, with a note, if it does not have this form."""
    try:
        value = parse_json(read_text(file, real_path(file.parent), limit=_JSON))
        _check_depth(value)
        return msgspec.convert(value, kind)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, msgspec.MsgspecError):
        notes.append(f"{file.name} cannot be read")
        return None


def _check_depth(value: Any, left: int = 100) -> None:
    if not left:
        raise ValueError("nested too deeply")
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _check_depth(inner, left - 1)


def as_text(value: Any) -> str:
    """A value of a JSON or YAML file as text."""
    return value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)


def _start_text(start: dict[str, Any]) -> dict[str, str]:
    return {
        key: "; ".join(map(str, value)) or "none" if isinstance(value, list) else as_text(value)
        for key, value in flatten(start).items()
        if value != {}
    }


def is_held(folder: Path) -> bool:
    """Whether a launcher has locked the run. Takes a shared lock briefly, and never waits."""
    try:
        with open_regular(folder / LOCK, real_path(folder)) as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False
