"""The last steps of a run on its timeline: phases of the trainer, and requests in the engines."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Annotated, Any

import msgspec

from rpg_megatron.commands.report.run_files import RunFiles, note_skipped
from rpg_megatron.config.files import open_regular, real_path
from rpg_megatron.system.metrics_file import Count
from rpg_megatron.system.timeline import EARLIER, TIMELINE

_STEPS = 6  # that are shown
_READ = 4_000_000  # maximum bytes to read: hours, even with many engines
_POLLS = 600  # maximum on a page; of more, only every n-th is shown
_LANES = 16  # maximum engines shown separately; with more, the page shows sums

_Time = Annotated[float, msgspec.Meta(ge=0, lt=1e12)]


class _Start(msgspec.Struct):
    start: _Time


class _Phase(msgspec.Struct):
    phase: str
    step: Count
    begin: _Time
    end: _Time


class _Poll(msgspec.Struct):
    time: _Time
    running: list[Annotated[int, msgspec.Meta(ge=0, lt=10**9)] | None]


_Row = _Start | _Phase | _Poll
_DECODERS: list[msgspec.json.Decoder[_Row]] = [msgspec.json.Decoder(kind) for kind in (_Start, _Phase, _Poll)]


def last_steps(run: RunFiles) -> dict[str, Any] | None:
    """The last steps since the newest start, for JSON; None without a finished phase.

    Times are in seconds since the start of the first of these steps. ``shares``: fraction of time that the
    trainer spent in ``collect`` and ``sync``; fraction of polls in which an engine had no running request.
    """
    rows = _read_rows(run)
    start = max((i for i, row in enumerate(rows) if isinstance(row, _Start)), default=0)
    phases = [row for row in rows[start:] if isinstance(row, _Phase)]
    steps = sorted({row.step for row in phases if row.step})[-_STEPS:]
    shown = sorted((row for row in phases if row.step in steps), key=lambda row: row.begin)
    if not shown:
        return None
    begin, end = shown[0].begin, max(row.end for row in shown)
    inside = [row for row in shown if row.phase != "step"]
    polls = [row for row in rows[start:] if isinstance(row, _Poll) and begin <= row.time <= end]
    # The engines of a start stay the same.
    polls = [row for row in polls if len(row.running) == len(polls[-1].running)]
    polls = polls[:: -(-len(polls) // _POLLS) or 1]
    seen = [n for row in polls for n in row.running if n is not None]
    spent = {
        name: math.fsum(row.end - row.begin for row in shown if row.phase == name) / (end - begin or 1.0)
        for name in ("collect", "sync")
    }
    return {
        "seconds": round(end - begin, 3),
        "steps": steps,
        "phases": [[r.phase, r.step, round(r.begin - begin, 3), round(r.end - begin, 3)] for r in inside],
        "polls": [round(row.time - begin, 2) for row in polls],
        "engines": len(polls[0].running) if polls else 0,
        "lanes": _lanes(polls) if polls else [],
        "shares": spent | {"engines": sum(n == 0 for n in seen) / len(seen) if seen else None},
    }


def _lanes(polls: list[_Poll]) -> list[dict[str, Any]]:
    """The lanes of the engines: name; for each poll a number or None; maximum of the scale."""
    known = [[n for n in row.running if n is not None] for row in polls]
    engines = len(polls[0].running)
    if engines <= _LANES:
        most = max((n for counts in known for n in counts), default=0)
        values = zip(*(row.running for row in polls), strict=True)
        return [{"name": f"engine {i}", "values": list(of), "most": most} for i, of in enumerate(values)]
    busy = [sum(n > 0 for n in counts) if counts else None for counts in known]
    requests = [sum(counts) if counts else None for counts in known]
    return [
        {"name": "engines busy", "values": busy, "most": engines},
        {"name": "requests", "values": requests, "most": max(map(sum, known))},
    ]


def _read_rows(run: RunFiles) -> list[_Row]:
    data = b""
    for name in (TIMELINE, EARLIER):
        try:
            with open_regular(run.folder / name, real_path(run.folder)) as file:
                room = _READ - len(data)
                file.seek(max(0, file.seek(0, 2) - room))
                data = file.read(room) + data
        except FileNotFoundError:
            continue
        except OSError as e:
            run.notes.append(f"{name} cannot be read ({e.strerror})")
    *whole, last = data.split(b"\n")[len(data) == _READ :] or [
        b""
    ]  # the first and last line may be incomplete
    rows = [_parse(line) for line in whole if line.strip()]
    note_skipped(run.notes, TIMELINE, sum(row is None for row in rows), len(rows))
    return [row for row in [*rows, _parse(last)] if row is not None]


def _parse(line: bytes) -> _Row | None:
    """A row; None if it has another form, which another version may have written."""
    for decoder in _DECODERS:
        with suppress(msgspec.MsgspecError, ValueError, RecursionError):
            return decoder.decode(line)
    return None
