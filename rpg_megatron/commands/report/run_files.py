"""Reads a run's folder for a report; the run may be finished, running or damaged, and made by others.

What does not have the form that training writes is left out with a note, so that the other modules of the
report can calculate with what is read. More users may be able to read the report than a file to which a link
in the folder leads, so such a file is refused.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import msgspec
import yaml

from rpg_megatron.config import UserError
from rpg_megatron.config.files import flatten, parse_json, read_text, real_path
from rpg_megatron.config.parsing import read_yaml
from rpg_megatron.launcher.environment import ENVIRONMENT
from rpg_megatron.launcher.run_dir import CONFIG, SUMMARY, is_held
from rpg_megatron.system.metrics_file import METRICS, Row, read_metrics

_JSON = 10_000_000  # maximum bytes of other JSON files


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
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "no such folder"
        raise UserError(f"{folder}: {what}; give the folder of a run, such as runs/quickstart-001")
    if not is_run(folder):
        inner = sorted(f.parent.name for f in folder.glob(f"*/{METRICS}"))
        hint = f"; the runs in it are {', '.join(inner[:5])}" if inner else ""
        raise UserError(f"{folder}: not the folder of a run: it has neither {CONFIG} nor {METRICS}{hint}")
    notes: list[str] = []
    inside = real_path(folder)

    def read[T](name: str, default: T, parse: Callable[[Path], T]) -> T:
        try:
            return parse(folder / name)
        except FileNotFoundError:
            return default
        except (OSError, ValueError, TypeError, RecursionError, msgspec.MsgspecError, yaml.YAMLError) as e:
            notes.append(f"{name} cannot be read ({reason(e)})")
            return default

    def read_json[T](file: Path, kind: type[T]) -> T:
        return msgspec.convert(parse_json(read_text(file, inside, limit=_JSON)), kind)

    def read_starts(file: Path) -> list[dict[str, str]]:
        return [_start_text(start) for start in read_json(file, list[dict[str, Any]])]

    summary = read(SUMMARY, None, lambda file: read_json(file, _Summary))
    return RunFiles(
        folder=folder,
        rows=read_metrics(folder / METRICS, notes),
        config=read(CONFIG, {}, lambda file: _flat_config(read_yaml(file, inside))),
        finished=summary is not None,
        seconds=summary.seconds if summary else None,
        starts=read(ENVIRONMENT, [], read_starts),
        running=is_held(folder),
        notes=notes,
    )


def is_run(folder: Path) -> bool:
    """Whether it is the folder of a run."""
    return (folder / CONFIG).is_file() or (folder / METRICS).is_file()


def run_ends[T](values: Sequence[T]) -> tuple[Sequence[T], Sequence[T]]:
    """The first and the last tenth, at least one value and at most ten."""
    few = max(1, min(10, len(values) // 10))
    return values[:few], values[-few:]


def name_runs(folders: Sequence[Path]) -> list[str]:
    """A unique name for each run: its folder's, below the folder that has all of them."""
    absolute = [folder.absolute() for folder in folders]
    common = os.path.commonpath([folder.parent for folder in absolute])
    return [str(folder.relative_to(common)) for folder in absolute]


def thin_rows(runs: Sequence[list[Row]], most: int) -> tuple[list[list[Row]], int]:
    """The rows of each run, at most ``most`` of them, and the number of steps per row.

    The same steps make a row in all runs. A row of several steps holds means, the maximum of keys that end in
    ``max``, and the last of evaluations. Numbers that are not finite are kept.
    """
    width = 1
    while any(len({row["step"] // width for row in rows}) > most for rows in runs):
        width += max(1, width // 4)
    if width == 1:
        return list(runs), width
    merged = [
        [_merge([*part]) for _, part in groupby(rows, lambda row: row["step"] // width)] for rows in runs
    ]
    return merged, width


def _merge(rows: list[Row]) -> Row:
    merged: Row = {}
    for key in dict.fromkeys(key for row in rows for key in row):
        values = [row[key] for row in rows if key in row]
        odd = [value for value in values if not math.isfinite(value)]
        if odd or key == "step" or key.startswith("eval/"):
            merged[key] = (odd or values[-1:])[0]
        else:
            merged[key] = max(values) if key.endswith("max") else fmean(values)
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


def _flat_config(config: Any) -> dict[str, Any]:
    # Not load_settings, so that runs of earlier versions with other keys can be read.
    flat = flatten(config) if isinstance(config, dict) and config else {}
    flat = {key: str(v) if isinstance(v, int) and abs(v) > 2**53 else v for key, v in flat.items()}
    json.dumps(flat, default=str)  # raises if the page could not hold it
    return flat


def as_text(value: Any) -> str:
    """A value of a JSON or YAML file as text."""
    return value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)


def _start_text(start: dict[str, Any]) -> dict[str, str]:
    return {
        key: "; ".join(map(str, value)) or "none" if isinstance(value, list) else as_text(value)
        for key, value in flatten(start).items()
        if value != {}
    }
