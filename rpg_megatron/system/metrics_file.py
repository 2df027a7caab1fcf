"""Reads ``metrics.jsonl``, the metrics of a run's steps: of this user or of others, whole or damaged."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any

import msgspec

from rpg_megatron.config.files import open_regular, parse_json, real_path

METRICS = "metrics.jsonl"
"""Its name in the folder of a run."""
Row = dict[str, float]
"""Metrics of a step by key; includes ``step``."""
Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
"""A step, or another whole number, that JavaScript and floats hold exactly."""
LARGEST = 1e100
"""Larger numbers count as infinite: squares of others, and their sums, are finite."""
_KEYS, _KEY = 1000, 200
"""Maximum number of metrics of a run, and characters of a name."""
_BYTES, _LINE = 200_000_000, 1_000_000
"""Maximum bytes to read (50,000 steps), and of a line."""


def parse_row(line: bytes) -> dict[str, Any] | None:
    """The values of a line, with a whole number as ``step``; None if it is damaged."""
    try:
        values: dict[str, Any] = parse_json(line)
        return values | {"step": msgspec.convert(values["step"], Count)}
    except (ValueError, LookupError, TypeError, msgspec.MsgspecError):
        return None


def read_metrics(file: Path, notes: list[str] | None = None) -> list[Row]:
    """Rows in the order of steps; none if there is no file.

    If a step has several rows, as the last one may have for its checkpoint, later values count. NaN and
    inf are kept, other numbers are at most ``LARGEST``. notes: gets what could not be read.
    """
    notes = [] if notes is None else notes
    rows: dict[int, Row] = {}
    keys: dict[str, str] = {}  # of all rows, which share these strings
    more: set[str] = set()
    lines = broken = 0
    try:
        with open_regular(file, real_path(file.parent)) as opened:
            while line := opened.readline(_LINE):
                if opened.tell() > _BYTES:
                    notes.append(f"only the first {_BYTES / 1e6:.0f} MB of {file.name} were read")
                    break
                lines += 1
                if (values := parse_row(line)) is None:
                    broken += bool(line.strip())
                    continue
                step = values.pop("step")
                row = rows.setdefault(step, {"step": step})
                for key, value in values.items():
                    if not isinstance(value, float | int):
                        continue
                    if len(key) > _KEY or (key not in keys and len(keys) == _KEYS):
                        more.add(key[:_KEY])
                    else:
                        row[keys.setdefault(key, key)] = _bounded(value)
    except FileNotFoundError:
        return []
    except OSError as e:
        notes.append(f"{file.name} cannot be read ({e.strerror})")
    if broken:
        notes.append(f"{file.name}: {broken} of {lines} lines could not be read and are skipped")
    if more:
        notes.append(f"{file.name}: {len(more)} metrics are left out (more than {_KEYS}, or long names)")
    return [rows[step] for step in sorted(rows)]


def _bounded(value: float) -> float:
    """As a float; numbers beyond ``LARGEST``, also integers that no float holds, as infinite."""
    known = abs(value) <= LARGEST or value != value
    return float(value) if known else math.inf if value > 0 else -math.inf
