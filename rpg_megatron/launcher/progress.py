"""The progress display of a run: live on a terminal, plain lines elsewhere.

Sampler and trainer send events, one JSON object per datagram, to a socket in the work folder: ``{"kind":
"phase", "name": str, "done": int, "total": int}``, ``{"kind": "status", "text": str}``. Lost or invalid
events do not affect the run. Rows of metrics are read from their file, so that no step is missing.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rpg_megatron.config import UserError
from rpg_megatron.config.files import open_own
from rpg_megatron.system.console import PlainTextConsole
from rpg_megatron.system.events import EVENTS
from rpg_megatron.system.metrics_file import parse_row
from rpg_megatron.system.terminal import printable

_ROWS = 10
_REDRAW_SECONDS = 0.2
_COLUMNS = (
    ("reward", "reward/mean", "{:+.3f}"),
    ("accuracy", "reward/accuracy", "{:.1%}"),
    ("entropy", "policy/entropy", "{:.3f}"),
    ("no signal", "groups/equal_rewards", "{:.0%}"),
    ("mismatch", "mismatch/logp_max", "{:.1e}"),
    ("tokens/s", "throughput/tokens_per_second", "{:,.0f}"),
)
_FINE_TUNING = (
    ("epoch", "sft/epoch", "{:.2f}"),
    ("loss", "policy/loss", "{:.4f}"),
    ("held out", "sft/heldout_loss", "{:.4f}"),
    ("grad norm", "policy/grad_norm", "{:.3g}"),
    _COLUMNS[-1],
)


class Progress:
    """Receives and shows events, all in ``pump``; there is no thread."""

    def __init__(
        self,
        work: Path | None,
        *,
        steps: int,
        metrics: Path | None = None,
        log: Path | None = None,
        console: Console | None = None,
        line_seconds: float | None = None,
    ):
        """work: folder for the socket; None: no events, only ``show_phase``. steps: of the run. metrics: the
        run's metrics file. log: file for all lines, with the time, including those that a live display does
        not show. line_seconds: interval of progress lines without a terminal; None: one line at the start of
        each phase.
        """
        self._log = log
        self._line_seconds = line_seconds
        self._last_line = 0.0
        self._phase_start = (0.0, 0)
        self.console = console or PlainTextConsole()
        self.steps = steps
        self.step = -1
        self.started_training = False
        """Whether the first training step has ended."""
        self.text = "starting"
        """The current activity."""
        self._phase: tuple[str, int, int] | None = None
        self._rows: deque[dict[str, Any]] = deque(maxlen=_ROWS)
        self._evaluation = ""
        self._metrics, self._read = metrics, 0
        if metrics is not None:  # a resumed run: do not show its earlier steps again
            self.step = max((row["step"] for row in self._read_rows()), default=-1)
        self._drawn = 0.0
        self._socket = None if work is None else _bind(work / EVENTS)
        self._live: Live | None = None
        if self.console.is_terminal:
            self._live = Live(console=self.console, auto_refresh=False, transient=True)
            self._live.start()

    def pump(self, seconds: float) -> None:
        """Wait up to ``seconds`` for events, process them, and redraw."""
        if self._socket is None:
            time.sleep(seconds)
        else:
            self._receive(self._socket, seconds)
        for row in self._read_rows():
            self._handle_step(row)
        if self._live and time.monotonic() - self._drawn >= _REDRAW_SECONDS:
            self._drawn = time.monotonic()
            with contextlib.suppress(OSError):
                self._live.update(self._render(), refresh=True)

    def status(self, text: str) -> None:
        """Show the current activity. Warnings stay on the terminal."""
        if text != self.text:
            self.text, self._phase = text, None
            self._print_line(text, always=text.startswith("warning"))

    def close(self) -> None:
        """Restore the terminal; the last rows stay on it."""
        if self._socket is not None:
            self._socket.close()
        if self._live:
            with contextlib.suppress(OSError):
                self._live.update(Text(""), refresh=True)
                self._live.stop()
                if self._rows:
                    self.console.print(self._table())
            self._live = None

    # -- events --------------------------------------------------------------------------------------------

    def _receive(self, events: socket.socket, seconds: float) -> None:
        events.settimeout(seconds)
        with contextlib.suppress(TimeoutError, BlockingIOError):
            while True:
                self._handle_event(events.recv(1 << 20))
                events.settimeout(0)  # the rest of what has arrived, without waiting again

    def _handle_event(self, data: bytes) -> None:
        with contextlib.suppress(ValueError, KeyError, TypeError):
            event = json.loads(data)
            if event["kind"] == "status":
                self.status(str(event["text"]))
            elif event["kind"] == "phase":
                self.show_phase(str(event["name"]), int(event["done"]), int(event["total"]))

    def show_phase(self, name: str, done: int, total: int) -> None:
        """Show how much of a phase is done; a new name begins a phase. total: 0 if unknown."""
        new = self._phase is None or self._phase[0] != name
        self._phase = (name, done, total)
        self.text = name
        now = time.monotonic()
        if new:
            self._phase_start, self._last_line = (now, done), now
        if self.started_training:
            return
        if new:
            self._print_line(name)
        elif total and self._line_seconds is not None and now - self._last_line >= self._line_seconds:
            self._last_line = now
            pace = (now - self._phase_start[0]) / max(done - self._phase_start[1], 1)
            self._print_line(f"{name} {done}/{total}  left {clock(pace * (total - done))}")

    def _read_rows(self) -> Iterator[dict[str, Any]]:
        """New rows of the metrics file."""
        if self._metrics is None or not self._metrics.exists():
            return
        with open_own(self._metrics) as file:
            file.seek(self._read)
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]
        self._read += len(whole)
        yield from filter(None, map(parse_row, whole.splitlines()))

    def _handle_step(self, row: dict[str, Any]) -> None:
        if row["step"] <= self.step:
            return
        self.step = row["step"]
        scores = [
            f"{key.removeprefix('eval/')} {value:.1%}"
            for key, value in row.items()
            if key.startswith("eval/") and "/avg@" in key and isinstance(value, int | float)
        ]
        if scores:
            self._evaluation = "  ".join(scores)
            self._print_line(f"step {self.step}/{self.steps}  evaluation: {self._evaluation}")
        if self.step > 0:
            self.started_training = True
            self._rows.append(row)
            columns = [f"{name} {_format(row.get(key), form)}" for name, key, form in _columns(row)]
            parts = (f"step {self.step}/{self.steps}", *columns, self._left())
            self._print_line("  ".join(filter(None, parts)))

    # -- rendering -----------------------------------------------------------------------------------------

    def _print_line(self, text: str, *, always: bool = False) -> None:
        """Print and log a line. always: also print it above a live display."""
        if self._log is not None:
            append_to_log(self._log, text)
        if self._live is None or always:
            with contextlib.suppress(OSError):
                self.console.print(text, markup=False, highlight=False, soft_wrap=True)
                self.console.file.flush()

    def _left(self) -> str:
        """The time to the end at the pace of recent steps; empty before the first step."""
        paces = [row["time/step"] for row in self._rows if isinstance(row.get("time/step"), int | float)]
        if not paces:
            return ""
        return f"left {clock(sum(paces) / len(paces) * (self.steps - max(self.step, 0)))}"

    def _table(self) -> Table:
        table = Table(box=None, pad_edge=False)
        first = max(4, *(len(f"{row['step']}/{self.steps}") for row in self._rows))
        fitting = max((self.console.width - first - 1) // 10, 1)
        shown = _columns(self._rows[-1])[:fitting]
        table.add_column("step", justify="right", no_wrap=True)
        for name, _, _ in shown:
            table.add_column(name, justify="right", min_width=8)
        for row in self._rows:
            cells = [_format(row.get(key), form) for _, key, form in shown]
            table.add_row(f"{row['step']}/{self.steps}", *cells)
        return table

    def _render(self) -> Group:
        bars = Table.grid(padding=(0, 2))
        if self.steps:
            done, note = max(self.step, 0), f"{self._left()}   {self._evaluation}".strip()
            bar = ProgressBar(self.steps, done, width=30)
            bars.add_row(Text(f"step {done}/{self.steps}"), bar, Text(note))
        if self._phase:
            name, done, total = self._phase
            counted = (ProgressBar(total, done, width=30), Text(f"{done}/{total}")) if total > 1 else ()
            bars.add_row(Text(name), *counted)
        else:
            bars.add_row(Text(self.text))
        return Group(self._table(), Text(""), bars) if self._rows else Group(bars)


def _columns(row: dict[str, Any]) -> tuple[tuple[str, str, str], ...]:
    return _FINE_TUNING if "sft/epoch" in row else _COLUMNS


def _bind(path: Path) -> socket.socket:
    events = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        events.bind(str(path))
    except OSError as e:
        events.close()
        raise UserError(f"{path}: {e.strerror or e}; is another run using this folder?") from None
    return events


def append_to_log(log: Path, text: str) -> None:
    """Append a line to the launcher's log. Errors such as a full disk are ignored."""
    with contextlib.suppress(OSError):
        log.parent.mkdir(exist_ok=True)  # it may have been deleted during the run
        with open_own(log, "a", encoding="utf-8") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {printable(text)}\n")


def clock(seconds: float) -> str:
    """A duration as m:ss or h:mm:ss."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _format(value: Any, form: str) -> str:
    return form.format(value) if isinstance(value, int | float) else "-"
