"""Probes of a run's inputs: model, layout, data, reward, own code, folder of the runs, secrets, walltime."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path

from rpg_megatron.checkpoints.hf_hub import with_local_model
from rpg_megatron.commands.doctor.machine import runs_folder
from rpg_megatron.commands.doctor.probe import Check, Subject, failed, not_applicable, of_error, ok, warning
from rpg_megatron.commands.plan.engine_memory import worker_parameters
from rpg_megatron.commands.plan.plan import count
from rpg_megatron.config import Settings, UserError
from rpg_megatron.config.errors import gib
from rpg_megatron.config.files import read_text
from rpg_megatron.engine.arguments import check_engine_arguments
from rpg_megatron.launcher.input_checks import (
    check_custom_code,
    check_data,
    check_trackers,
    disk_bytes,
    list_custom_code,
)
from rpg_megatron.launcher.preflight import (
    check_batch,
    check_head_dim,
    check_kv_cache,
    check_model,
    check_parallel,
    check_routers,
)
from rpg_megatron.launcher.reward_trial import try_reward
from rpg_megatron.launcher.run_dir import METRICS, list_runs

SPEED_BYTES = 32 * 1024**2
SPEED_SECONDS = 3.0
"""Time limit of the write test."""
SLOW = 50 * 1024**2
"""Bytes per second below which checkpoints delay training."""
ONLY_WITH_CONFIG = "no config"


def probe_model(subject: Subject) -> Iterator[Check]:
    """The checkpoint is complete and fits the parallel layout."""
    settings = subject.settings
    if settings is None:
        yield not_applicable("model", ONLY_WITH_CONFIG)
        return
    try:
        settings = with_local_model(settings)
        shape = check_model(settings.model.path)
    except UserError as e:
        yield of_error("model", e)
        return
    yield ok(
        "model", f"{settings.model.path}: {shape.family}, {count(worker_parameters(shape, 1))}, complete"
    )
    for name, check in (
        ("layout", check_parallel),
        ("routers", check_routers),
        ("head size", check_head_dim),
        ("batch", check_batch),
        ("KV cache", check_kv_cache),
    ):
        try:
            check(settings, shape)
            yield ok(name, "fits the model")
        except UserError as e:
            yield of_error(name, e)
    try:
        check_engine_arguments(settings)
        yield ok("engine options", " ".join(settings.engine.arguments) or "none")
    except UserError as e:
        yield of_error("engine options", e)


def probe_data(subject: Subject) -> Iterator[Check]:
    """All rows of the data can be read, and prompts are short enough."""
    if subject.settings is None:
        yield not_applicable("data", ONLY_WITH_CONFIG)
        return
    try:
        warnings = check_data(subject.settings)
    except UserError as e:
        yield of_error("data", e)
        return
    sources = subject.settings.data.sources
    own = [s.source.type if s.source is not None else s.preset for s in sources]
    yield ok("data", ", ".join(str(s.path or s.hub or name) for s, name in zip(sources, own, strict=True)))
    for text in warnings:
        yield warning("prompts", text, "")


def probe_reward(subject: Subject) -> Iterator[Check]:
    """The reward functions can be imported and do not fail on a row of each data set; judges answer."""
    if subject.settings is None:
        yield not_applicable("reward", ONLY_WITH_CONFIG)
        return
    try:
        warnings = try_reward(subject.settings)
        terms = subject.settings.reward.all_terms.values()
        yield ok("reward", ", ".join(term.type for term in terms))
        for text in warnings:
            yield warning("reward", text, "")
    except UserError as e:  # a line for each problem
        yield from (of_error("reward", UserError(line)) for line in str(e).splitlines())


def probe_custom_code(subject: Subject) -> Iterator[Check]:
    """Your own code can be imported, and accepts the settings that it is given."""
    if subject.settings is None:
        yield not_applicable("own code", ONLY_WITH_CONFIG)
        return
    try:
        check_custom_code(subject.settings)
        yield ok("own code", ", ".join(item.path for item in list_custom_code(subject.settings)) or "none")
    except UserError as e:
        yield of_error("own code", e)


def probe_trackers(subject: Subject) -> Iterator[Check]:
    """The packages of the trackers are installed, and API keys are set."""
    if subject.settings is None:
        yield not_applicable("trackers", ONLY_WITH_CONFIG)
        return
    try:
        for text in check_trackers(subject.settings):
            yield warning("trackers", text, "")
        yield ok("trackers", ", ".join(tracker.type for tracker in subject.settings.trackers) or "none")
    except UserError as e:
        yield of_error("trackers", e)


def probe_run_folder(subject: Subject) -> Iterator[Check]:
    """The folder of the runs is writable, fast enough, and has room for the checkpoints."""
    folder = runs_folder(subject)
    settings = subject.settings
    free = shutil.disk_usage(folder).free
    wanted = disk_bytes(settings, subject.shape) if settings is not None and subject.shape is not None else 0
    try:
        speed = _write_speed(folder, min(SPEED_BYTES, free // 4))
    except OSError as e:
        fix = "choose another folder with runs=..., or fix its permissions"
        if e.errno in (errno.ENOSPC, errno.EDQUOT):
            fix = "remove old runs, or choose a larger disk with runs=..."
        yield failed("run folder", f"{folder}: {e.strerror or e}", fix)
        return
    yield ok("run folder", f"{folder} is writable")
    if free < wanted:
        fix = "remove old runs, lower checkpoint.keep, or choose a larger disk with runs=..."
        yield failed("disk space", f"{gib(free)} free, checkpoints and export need {gib(wanted)}", fix)
    else:
        yield ok("disk space", f"{gib(free)} free" + (f", {gib(wanted)} needed" if wanted else ""))
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
    private: list[tuple[Path, int]] = []
    readable: list[tuple[Path, int]] = []
    for file in files:
        try:
            mode = stat.S_IMODE(file.stat().st_mode)
        except OSError:
            continue
        (readable if mode & 0o077 else private).append((file, mode))
    for file, mode in readable:
        yield failed("secrets", f"{file} has mode {mode:04o}: other users can read it", f"chmod 600 {file}")
    if not readable:
        names = ", ".join(str(file) for file, _ in private)
        yield ok("secrets", f"private: {names}" if names else "no token files found")


def probe_walltime(subject: Subject, environment: Mapping[str, str] = os.environ) -> Iterator[Check]:
    """The time left in the job is longer than the checkpoint interval."""
    if "SLURM_JOB_ID" not in environment:
        yield not_applicable("walltime", "not in a Slurm job")
        return
    end = _end_of_job(environment)
    if end is None:
        yield ok("walltime", "no limit known")
        return
    left = end - time.time()
    settings = subject.settings
    if settings is None or settings.checkpoint.every is None:
        yield ok("walltime", f"{left / 60:,.0f} min left")
        return
    step = _step_seconds(settings)
    if step is None:
        yield ok("walltime", f"{left / 60:,.0f} min left; seconds per step unknown before the first run")
        return
    interval = step * min(settings.checkpoint.every, settings.training.steps)
    found = (
        f"{left / 60:,.0f} min left, a checkpoint every {interval / 60:,.1f} min "
        f"({step:.0f} s per step in the last run)"
    )
    if left < interval:
        every = max(1, int(left / 2 / step))
        yield failed("walltime", found, f"set checkpoint.every={every}, or raise the job's --time")
    else:
        yield ok("walltime", found)


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


def _end_of_job(environment: Mapping[str, str]) -> float | None:
    """Unix time at which Slurm ends the job, None if unknown."""
    try:
        return float(environment["SLURM_JOB_END_TIME"])
    except (KeyError, ValueError):
        pass
    command = ["scontrol", "show", "job", environment["SLURM_JOB_ID"]]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = re.search(r"EndTime=(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)", done.stdout)
    return datetime.fromisoformat(match[1]).timestamp() if match else None


def _step_seconds(settings: Settings) -> float | None:
    """Median seconds per step in the newest run of this name that has any."""
    for run in list_runs(settings):
        try:
            rows = [json.loads(line) for line in read_text(run / METRICS).splitlines()]
        except (OSError, ValueError):
            continue
        seconds = sorted(row["time/step"] for row in rows if "time/step" in row)
        if seconds:
            return float(seconds[len(seconds) // 2])
    return None
