"""The last steps of a run on its timeline: phases of the trainer, and requests in the engines."""

from __future__ import annotations

import json
import math
from typing import Any

from rpg_megatron.commands.report.run_files import RunFiles
from rpg_megatron.system.timeline import EARLIER, TIMELINE

_STEPS = 6
"""Steps shown."""
_READ = 4_000_000
"""Maximum bytes to read: hours, even with many engines."""
_POLLS = 600
"""Maximum polls on a page; if there are more, only every n-th is shown."""
_LANES = 16
"""Maximum engines shown separately; with more, the page shows sums."""


def last_steps(run: RunFiles) -> dict[str, Any] | None:
    """The last steps since the newest start, for JSON; None without a finished phase.

    Times are in seconds since the start of the first of these steps. ``shares``: fraction of time that the
    trainer spent in ``collect`` and ``sync``; fraction of polls in which an engine had no running request.
    """
    rows = _read_rows(run)
    starts = [i for i, row in enumerate(rows) if "start" in row]
    rows = rows[starts[-1] :] if starts else rows
    phases = [row for row in rows if "phase" in row]
    steps = sorted({row["step"] for row in phases if row["step"]})[-_STEPS:]
    shown = sorted((row for row in phases if row["step"] in steps), key=lambda row: row["begin"])
    if not shown:
        return None
    begin, end = shown[0]["begin"], max(row["end"] for row in shown)
    polls = [row for row in rows if "running" in row and begin <= row["time"] <= end]
    polls = polls[:: -(-len(polls) // _POLLS) or 1]
    engines = max((len(row["running"]) for row in polls), default=0)
    seen = [n for row in polls for n in row["running"] if n is not None]

    def share(name: str) -> float:
        spent = math.fsum(row["end"] - row["begin"] for row in shown if row["phase"] == name)
        return spent / (end - begin) if end > begin else 0.0

    return {
        "seconds": round(end - begin, 3),
        "steps": steps,
        "phases": [
            [row["phase"], row["step"], round(row["begin"] - begin, 3), round(row["end"] - begin, 3)]
            for row in shown
            if row["phase"] != "step"
        ],
        "polls": [round(row["time"] - begin, 2) for row in polls],
        "engines": engines,
        "lanes": _lanes(polls, engines),
        "shares": {
            "collect": share("collect"),
            "sync": share("sync"),
            "engines": sum(n == 0 for n in seen) / len(seen) if seen else None,
        },
    }


def _lanes(polls: list[dict[str, Any]], engines: int) -> list[dict[str, Any]]:
    """The lanes of the engines: name; for each poll a number or None; maximum of the scale."""
    known = [[n for n in row["running"] if n is not None] for row in polls]
    if engines <= _LANES:
        most = max((n for some in known for n in some), default=0)
        values = [[row["running"][i] for row in polls] for i in range(engines)]
        return [{"name": f"engine {i}", "values": values[i], "most": most} for i in range(engines)]
    busy = [sum(n > 0 for n in some) if some else None for some in known]
    requests = [sum(some) if some else None for some in known]
    return [
        {"name": "engines busy", "values": busy, "most": engines},
        {"name": "requests", "values": requests, "most": max(map(sum, known))},
    ]


def _read_rows(run: RunFiles) -> list[dict[str, Any]]:
    room, data = _READ, b""
    for name in (TIMELINE, EARLIER):
        try:
            with (run.folder / name).open("rb") as file:
                size = file.seek(0, 2)
                file.seek(max(0, size - room))
                data = file.read(room) + data
        except FileNotFoundError:
            continue
        except OSError as e:
            run.notes.append(f"{name} cannot be read ({e.strerror})")
        room = _READ - len(data)
    rows = []
    for line in data.split(b"\n"):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue  # the first line may be truncated, the last one incomplete
        if _is_row(row):
            rows.append(row)
    return rows


def _is_row(row: Any) -> bool:
    """Whether a row has the expected types; another version may have written other rows."""
    if not isinstance(row, dict):
        return False
    if "phase" in row:
        return (
            isinstance(row["phase"], str)
            and isinstance(row.get("step"), int)
            and all(_is_time(row.get(key)) for key in ("begin", "end"))
        )
    if "running" in row:
        counts = row["running"]
        return (
            _is_time(row.get("time"))
            and isinstance(counts, list)
            and all(n is None or (isinstance(n, int) and 0 <= n < 10**9) for n in counts)
        )
    return "start" in row


def _is_time(value: Any) -> bool:
    return isinstance(value, int | float) and 0 <= value < 1e12  # not NaN
