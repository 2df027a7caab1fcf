"""Rows of the table of checks, and probes of the folder of the runs and of secrets."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from rpg_megatron.commands.doctor.machine import runs_folder
from rpg_megatron.commands.doctor.probe import (
    Check,
    Subject,
    failed,
    not_applicable,
    of_message,
    ok,
    warning,
)
from rpg_megatron.commands.plan.plan import count
from rpg_megatron.config import Settings, UserError
from rpg_megatron.config.errors import gib
from rpg_megatron.launcher.checks import CheckedRun, RunCheck, told_if_slow
from rpg_megatron.launcher.input_checks import disk_bytes, list_custom_code, nearest_folder
from rpg_megatron.launcher.nodes import Nodes, find_nodes
from rpg_megatron.models.registry import mapping_for
from rpg_megatron.system.process_groups import SHARED_MEMORY

SPEED_BYTES = 32 * 1024**2
SPEED_SECONDS = 3.0
"""Time limit of the write test."""
SLOW = 50 * 1024**2
"""Bytes per second below which checkpoints delay training."""


def probe_check(check: RunCheck, subject: Subject) -> Iterator[Check]:
    """The row of a check of ``launcher/checks.py``, or one for each of its warnings."""
    settings, nodes = subject.settings, Nodes()
    try:
        nodes = find_nodes(None, None, None)
    except UserError as e:
        if check.name == "placement":
            yield of_message(check.name, e)
            return
    if settings is None:
        bare = {"device": subject.device, "model": {"path": "."}, "data": {"path": "."}}
        run = CheckedRun(Settings.model_validate(bare), frozenset({"machine"}))
    else:
        run = CheckedRun(settings, node=nodes.rank, nodes=nodes.count, known=subject.shape)
    if not run.has.issuperset(check.needs):
        yield not_applicable(check.name, "no config")
        return
    if check.about_engines and not run.settings.engine.replicas:
        yield not_applicable(check.name, "no engines")
        return
    if "model" in check.needs and subject.shape is None:
        yield not_applicable(check.name, "the model cannot be read")
        return
    try:
        with told_if_slow(check, run.settings):
            warnings = check.run(run)
    except UserError as e:  # a row for each problem
        yield from (of_message(check.name, line) for line in str(e).splitlines())
        return
    yield from (of_message(check.name, text, warning) for text in warnings)
    if not warnings:
        yield ok(check.name, _checked(check, run))


def _checked(check: RunCheck, run: CheckedRun) -> str:
    """What a check that passed has looked at."""
    settings, transport = run.settings, run.settings.bridge.transport
    match check.name:
        case "model":
            size = count(mapping_for(run.shape).parameters)
            return f"{settings.model.path}: {run.shape.family}, {size}, complete"
        case "data":
            sft = settings.sft
            sources = settings.data.sources if sft is None else sft.data.sources
            if sft is not None and sft.data.rollouts is not None:
                return f"rollouts of {sft.data.rollouts}"
            names = [str(s.path or s.hub or (s.source.type if s.source else s.preset)) for s in sources]
        case "disk space":
            free = shutil.disk_usage(nearest_folder(settings.runs)).free
            return f"{gib(free)} free, {gib(disk_bytes(settings, run.shape))} needed"
        case "shared memory" if transport == "shared_memory":
            return f"{SHARED_MEMORY}: {gib(shutil.disk_usage(SHARED_MEMORY).free)} free"
        case "shared memory":
            return f"bridge.transport is {transport}"
        case "GPUs":
            return "enough" if settings.device == "cuda" else "device is cpu"
        case "engine options":
            names = list(settings.engine.arguments)
        case "reward":
            names = [term.type for term in settings.reward.all_terms.values()]
        case "own code":
            names = [item.path for item in list_custom_code(settings)]
        case "trackers":
            names = [tracker.type for tracker in settings.trackers]
        case _:
            return "fits the model" if "model" in check.needs else "fine"
    return ", ".join(names) or "none"


def probe_run_folder(subject: Subject) -> Iterator[Check]:
    """The folder of the runs is writable, and fast enough."""
    folder = runs_folder(subject)
    free = shutil.disk_usage(folder).free
    try:
        speed = _write_speed(folder, min(SPEED_BYTES, free // 4))
    except OSError as e:
        fix = "choose another folder with runs=..., or fix its permissions"
        if e.errno in (errno.ENOSPC, errno.EDQUOT):
            fix = "remove old runs, or choose a larger disk with runs=..."
        yield failed("run folder", f"{folder}: {e.strerror or e}", fix)
        return
    yield ok("run folder", f"{folder} is writable")
    if speed is None:
        yield failed("disk speed", f"{folder} has no room for a test file", "remove old runs")
    elif speed < SLOW:
        fix = "put runs on a parallel file system or a local disk: training waits for each save"
        yield warning("disk speed", f"{speed / 1e6:,.0f} MB/s", fix)
    else:
        yield ok("disk speed", f"{speed / 1e6:,.0f} MB/s with fsync")


def probe_secrets(subject: Subject, environment: Mapping[str, str] = os.environ) -> Iterator[Check]:
    """Files that hold tokens are readable by their owner only."""
    home = Path(environment.get("HOME", "/"))
    hub = Path(environment.get("HF_HOME", str(home / ".cache/huggingface")))
    files = [
        Path(environment.get("HF_TOKEN_PATH", str(hub / "token"))),
        Path(environment.get("NETRC", str(home / ".netrc"))),
        *sorted(runs_folder(subject).glob(".meeting-*.json")),
    ]
    modes: dict[Path, int] = {}
    for file in files:
        with suppress(OSError):
            modes[file] = stat.S_IMODE(file.stat().st_mode)
    readable = {file: mode for file, mode in modes.items() if mode & 0o077}
    for file, mode in readable.items():
        yield failed("secrets", f"{file} has mode {mode:04o}: other users can read it", f"chmod 600 {file}")
    if not readable:
        names = ", ".join(map(str, modes))
        yield ok("secrets", f"private: {names}" if names else "no token files found")


def _write_speed(folder: Path, nbytes: int) -> float | None:
    """Bytes per second of writing a new file with fsync; None without room for one block."""
    block = os.urandom(1 << 20)
    with tempfile.TemporaryFile(dir=folder) as file:
        start, written = time.monotonic(), 0
        while written + len(block) <= nbytes and time.monotonic() - start < SPEED_SECONDS:
            written += file.write(block)
        file.flush()
        os.fsync(file.fileno())
        return written / (time.monotonic() - start) if written else None
