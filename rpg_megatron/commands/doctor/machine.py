"""Probes of this node: memory, foreign input, sandboxes, temporary files, clock, time left."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from rpg_megatron.commands.doctor.gpu import gpu_memory
from rpg_megatron.commands.doctor.probe import Check, Subject, failed, not_applicable, ok, warning
from rpg_megatron.commands.plan.plan import make_plan
from rpg_megatron.config import UserError
from rpg_megatron.config.errors import gib
from rpg_megatron.environments.sandbox_limits import SandboxLimits, find_problem
from rpg_megatron.launcher.input_checks import nearest_folder
from rpg_megatron.launcher.nodes import end_of_job
from rpg_megatron.system.foreign_input import ForeignInputError, read_foreign
from rpg_megatron.system.sandbox import means

SMALLEST_TEMPORARY = 64 * 1024**2
SKEW_SECONDS = 5.0
"""A larger clock skew breaks time stamps, file caches and expiring tokens."""


def probe_memory(subject: Subject) -> Iterator[Check]:
    """The estimate of ``plan`` for this run on this machine."""
    settings = subject.settings
    if settings is None or subject.shape is None:
        yield not_applicable("memory", "no config, or the model cannot be read")
        return
    try:
        plan = make_plan(settings, gpu_memory() if settings.device == "cuda" else None)
    except UserError:
        yield not_applicable("memory", "a check of the settings fails, see its row")
        return
    if plan.problems:
        fix = "run rpg-megatron plan: it lists the parts, and a layout that fits"
        yield failed("memory", "; ".join(plan.problems), fix)
    elif plan.target.device == "cpu":
        yield ok("memory", f"{gib(plan.need)} planned of {gib(plan.target.nbytes)}")
    else:
        yield ok("memory", f"{gib(plan.need)} planned on a GPU, {plan.target.name}")


def probe_foreign_input(_subject: Subject) -> Iterator[Check]:
    """The process that reads checkpoints, Arrow files and templates of others can reach nothing."""
    name, fix = (
        "foreign input",
        "use a newer kernel, or read models and data of unknown origin in a container",
    )
    try:
        (reachable,) = read_foreign(
            "rpg_megatron.system.sandbox:find_reachable", [], os.getpid(), list[str], values=1
        )
    except (ForeignInputError, OSError) as e:
        yield failed(name, f"its process does not start: {e}", "allow seccomp and Landlock in the container")
        return
    if reachable:
        available = ", ".join(means()) or "neither seccomp nor Landlock"
        yield warning(name, f"the kernel has {available}: hostile files might {', '.join(reachable)}", fix)
    else:
        yield ok(name, f"read by a process that can reach nothing ({', '.join(means())})")


def probe_sandboxes(_subject: Subject) -> Iterator[Check]:
    """Whether an environment can run programs that a model writes (``environments/sandbox.py``)."""
    problem, apptainer = find_problem(), shutil.which("apptainer")
    in_images = f"others by {apptainer}" if apptainer else "not by apptainer, which is not on the PATH"
    if problem and not apptainer:
        yield not_applicable("sandboxes", f"{problem}; {in_images}")
    else:
        spaces = f"not by bwrap ({problem})" if problem else "by bwrap"
        layer = problem or find_problem(SandboxLimits(root="images"))
        tasks = f"tasks with images cannot ({layer})" if layer else "tasks with images can"
        yield ok("sandboxes", f"programs that a model writes can run {spaces}; {tasks}; {in_images}")


def probe_temporary(subject: Subject) -> Iterator[Check]:
    """The folder of sockets and scratch files."""
    folder = Path(tempfile.gettempdir())
    free = shutil.disk_usage(folder).free
    fix = "set TMPDIR to a folder with free space on a local disk"
    if not os.access(folder, os.W_OK | os.X_OK):
        yield failed("temporary files", f"{folder} is not writable", fix)
    elif free < SMALLEST_TEMPORARY:
        yield failed("temporary files", f"{folder} has {gib(free)} free", fix)
    else:
        yield ok("temporary files", f"{folder}: {gib(free)} free")


def probe_clock(subject: Subject) -> Iterator[Check]:
    """This node's clock against that of the file system, on a cluster the file server's."""
    folder = runs_folder(subject)
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            before = time.time()
            file.write(b"x")
            file.flush()
            os.fsync(file.fileno())
            stamp, after = os.fstat(file.fileno()).st_mtime, time.time()
    except OSError:
        yield not_applicable("clock", f"{folder} cannot be written to")
        return
    skew = max(before - stamp, stamp - after, 0.0)
    if skew > SKEW_SECONDS:
        fix = "start the time service on this node and on the file server (chronyc tracking shows its state)"
        yield failed("clock", f"{skew:.0f} s off the file system's clock", fix)
    else:
        yield ok("clock", f"within {max(skew, 0.1):.1f} s of the file system's")


def probe_walltime(_subject: Subject) -> Iterator[Check]:
    """Time left in a Slurm job. A run saves before its end, so that none is too little."""
    if (end := end_of_job()) is None:
        yield not_applicable("walltime", "not in a Slurm job, or no limit known")
    else:
        yield ok("walltime", f"{(end - time.time()) / 60:,.0f} min left")


def runs_folder(subject: Subject) -> Path:
    """The folder of the runs, or its nearest existing parent."""
    return nearest_folder(subject.settings.runs if subject.settings else Path("runs"))
