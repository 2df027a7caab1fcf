"""Renders runs as one self-contained HTML file: data, style and scripts are embedded, nothing is fetched.

The charts are drawn by uPlot, whose released file is in ``vendor/`` as it is.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import re
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from typing import Any

import rpg_megatron
from rpg_megatron.commands.report import run_files
from rpg_megatron.commands.report.changes import change_as_plain, find_changes
from rpg_megatron.commands.report.health import check_health
from rpg_megatron.commands.report.run_files import RunFiles, as_text, read_run
from rpg_megatron.commands.report.samples import Item, choose_samples
from rpg_megatron.commands.report.study import describe_study, find_arms
from rpg_megatron.commands.report.timeline import last_steps
from rpg_megatron.config import UserError
from rpg_megatron.config.files import atomic_write, real_path
from rpg_megatron.launcher.run_dir import REPORT, is_held
from rpg_megatron.system.metrics_file import METRICS, Row

# Maxima for all runs together:
_ROWS = 8000  # of metrics on a page: about 3 MB
_ROOM = 4_000_000  # bytes of responses on a page
_READ = 400_000_000  # bytes of decompressed rollouts and evaluations to read
_CHARTS = ("series", "vendor/uPlot.iife.min", "numbers", "charts")
_PAGE = ("arms", "catalogue", "timeline", "responses", "page", "live")
_STYLES = ("vendor/uPlot.min", "page")

_POLL = 2.0  # seconds between two looks at the runs that are watched
_REFRESH = 10.0  # seconds after which the page of a watched run loads again


def write_report(folders: Sequence[Path], out: Path | None = None) -> Path:
    """Write the report of these runs to ``out``, by default ``report.html`` in the first one's folder.

    folders: of runs, or folders that hold runs. Returns the file, which is written atomically. Raises
    UserError if a folder is neither, or if the file cannot be written.
    """
    return _write(_read(folders), out or folders[0] / REPORT)


def watch_report(folders: Sequence[Path], out: Path | None, tell: Callable[[Path], None]) -> None:
    """Write the report again whenever one of the runs has a new row, until none of them is running.

    The page loads itself again meanwhile. tell: called with the file, once. Raises as ``write_report`` does.
    """
    told, file = False, out or folders[0] / REPORT
    try:
        while True:
            seen, runs = _state(folders), _read(folders)
            going = any(run.running for run in runs)
            _write(runs, file, _REFRESH if going else None)
            if not told:
                tell(file)
                told = True
            if not going:
                return
            while _state(folders) == seen:
                time.sleep(_POLL)
    except KeyboardInterrupt:
        _write(_read(folders), file)  # a page that does not load itself again
        raise


def _read(folders: Sequence[Path]) -> list[RunFiles]:
    unique = {real_path(folder): folder for folder in _expand(folders)}
    if not unique:
        raise UserError("give the folder of at least one run")
    return [read_run(folder) for folder in unique.values()]


def _expand(folders: Sequence[Path]) -> list[Path]:
    """With the runs in a folder in place of the folder, if it is not that of a run itself."""
    found: list[Path] = []
    for folder in folders:
        inner = [] if run_files.is_run(folder) else sorted(filter(run_files.is_run, folder.glob("*/")))
        # A link in somebody else's folder could lead to a private run, which a page of this user would show.
        found += [run for run in inner if not run.is_symlink()] or [folder]
    return found


def _write(runs: Sequence[RunFiles], file: Path, refresh: float | None = None) -> Path:
    page = render_page(runs, refresh)
    try:
        with atomic_write(file) as sink:
            sink.write(page)
    except OSError as e:
        raise UserError(f"{file}: cannot be written ({e.strerror}); choose another file with --out") from None
    return file


def _state(folders: Sequence[Path]) -> list[tuple[int, bool]]:
    """Of each run: the size of its metrics, and whether it is running."""
    metrics = [folder / METRICS for folder in _expand(folders)]
    return [(file.stat().st_size if file.is_file() else 0, is_held(file.parent)) for file in metrics]


def render_page(runs: Sequence[RunFiles], refresh: float | None = None) -> bytes:
    """The page as UTF-8. refresh: seconds after which it loads itself again; None: never."""
    names = run_files.name_runs([run.folder for run in runs])
    rows, width = run_files.thin_rows([run.rows for run in runs], max(80, _ROWS // len(runs)))
    if width > 1:
        for run in runs:
            run.notes.append(f"the charts show means over {width} steps (maxima of maxima)")
    data: dict[str, Any] = {
        "made": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "version": rpg_megatron.__version__,
        "refresh": refresh,
        "runs": [_describe(*each, len(runs)) for each in zip(runs, names, rows, strict=True)],
    }
    if arms := find_arms(runs, names):
        data["study"] = describe_study(runs, arms) | {"width": width}
    style = "\n".join(_file(f"{name}.css") for name in _STYLES)
    script = "\n".join(_file(f"{name}.js") for name in _CHARTS + _PAGE)
    digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (style, script)]
    others = f" and {len(names) - 3} more" if len(names) > 3 else ""
    parts = {
        "TITLE": html.escape(", ".join(names[:3]) + others),
        "POLICY": "default-src 'none'; style-src 'sha256-{}'; script-src 'sha256-{}'".format(*digests),
        "LICENSE": html.escape(_file("vendor/LICENSE")),
        "STYLE": style,
        "DATA": _embed(data),
        "SCRIPT": script,
    }
    # One pass: inserted text is not expanded.
    page = re.sub(r"\{\{([A-Z]+)\}\}", lambda name: parts[name[1]], _file("page.html"))
    return page.encode("utf-8", "replace")


def _file(name: str) -> str:
    return files("rpg_megatron.commands.report").joinpath(name).read_text(encoding="utf-8")


def _describe(run: RunFiles, name: str, rows: Sequence[Row], number: int) -> dict[str, Any]:
    """A run as a dict for JSON. rows: for the charts. number: of runs on the page."""
    samples = choose_samples(run, read=_READ // number, room=_ROOM // number)
    keys = sorted({key for row in rows for key in row} - {"step"})
    seconds = run.seconds
    if seconds is None and (steps := run.series("time/step")):  # before its end: the time of its steps
        seconds = math.fsum(value for _, value in steps)
    return {
        "name": name,
        "folder": str(run.folder.absolute()),
        "state": "finished" if run.finished else "running" if run.running else "not finished",
        "seconds": seconds,
        "changes": [change_as_plain(change) for change in find_changes(run, samples.sizes)],
        "checks": [vars(check) for check in check_health(run)],
        "step": [int(row["step"]) for row in rows],
        "metrics": {key: [_number(row.get(key)) for row in rows] for key in keys},
        "config": {key: as_text(value) for key, value in run.config.items()},
        "timeline": last_steps(run),
        "samples": vars(samples) | {"items": [_plain(item) for item in samples.items]},
        **{key: getattr(run, key) for key in ("steps", "planned", "starts", "notes")},
    }


def _plain(item: Item) -> Item:
    return {key: _number(value) if isinstance(value, float) else value for key, value in item.items()}


def _number(value: float | None) -> float | str | None:
    """Rounded to five digits, enough for a chart; text for numbers that are not finite, for JSON."""
    if value is None:
        return None
    if not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    short = float(f"{value:.5g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short


def _embed(data: dict[str, Any]) -> str:
    """JSON for a script element, escaped so that it cannot end the element or begin a comment."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
