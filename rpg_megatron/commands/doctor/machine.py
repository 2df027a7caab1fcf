"""Probes of this node: shared memory, memory, limits, ports, temporary files, clock."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from rpg_megatron.commands.doctor.gpu import gpu_memory
from rpg_megatron.commands.doctor.probe import Check, Subject, failed, not_applicable, of_error, ok, warning
from rpg_megatron.commands.plan.plan import make_plan
from rpg_megatron.config import UserError
from rpg_megatron.config.errors import gib
from rpg_megatron.launcher.input_checks import nearest_folder
from rpg_megatron.launcher.preflight import check_port, check_shared_memory
from rpg_megatron.system.foreign_input import ForeignInputError, read_foreign
from rpg_megatron.system.limits import check_address_space, check_files
from rpg_megatron.system.process_groups import SHARED_MEMORY
from rpg_megatron.system.sandbox import means

_OPEN_FILES = "open files are "
"""Start of messages that the name of the check says already."""
SMALLEST_TEMPORARY = 64 * 1024**2
SKEW_SECONDS = 5.0
"""A larger clock skew breaks time stamps, file caches and expiring tokens."""


def probe_shared_memory(subject: Subject) -> Iterator[Check]:
    """/dev/shm has room for the published weights."""
    settings, shape = subject.settings, subject.shape
    if settings is not None and settings.bridge.transport != "shared_memory":
        yield not_applicable("shared memory", f"bridge.transport is {settings.bridge.transport}")
        return
    if settings is not None and shape is not None:
        try:
            check_shared_memory(settings, shape)
        except UserError as e:
            yield of_error("shared memory", e)
            return
    elif not os.access(SHARED_MEMORY, os.W_OK):
        fix = "mount a tmpfs there: weights are transferred from trainers to engines through it"
        yield failed("shared memory", f"{SHARED_MEMORY} is missing or not writable", fix)
        return
    yield ok("shared memory", f"{SHARED_MEMORY}: {gib(shutil.disk_usage(SHARED_MEMORY).free)} free")


def probe_memory(subject: Subject) -> Iterator[Check]:
    """The estimate of ``plan`` for this run on this machine."""
    settings = subject.settings
    if settings is None or subject.shape is None:
        yield not_applicable("memory", "no config, or the model cannot be read")
        return
    plan = make_plan(settings, gpu_memory() if settings.device == "cuda" else None)
    if plan.problems:
        fix = "run rpg-megatron plan: it lists the parts, and a layout that fits"
        yield failed("memory", "; ".join(plan.problems), fix)
    elif plan.target.device == "cpu":
        yield ok("memory", f"{gib(plan.machine_total)} planned of {gib(plan.target.nbytes)}")
    else:
        what = "rank" if plan.shared_gpu is None else "GPU"
        yield ok("memory", f"{gib(plan.need)} per {what} planned, for {plan.target.name}")


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
        found = ", ".join(means()) or "neither seccomp nor Landlock"
        yield warning(name, f"the kernel has {found}: hostile files might {', '.join(reachable)}", fix)
    else:
        yield ok(name, f"read by a process that can reach nothing ({', '.join(means())})")


def probe_limits(subject: Subject) -> Iterator[Check]:
    """The limits of open files, of which the commands raise the soft one, and of the address space."""
    settings = subject.settings
    ranks, requests = 0, 0
    if settings is not None:
        ranks = settings.parallel.world
        requests = settings.engine.replicas * settings.engine.max_sequences
    try:
        found, problem = check_files(ranks, requests)
        what, _, fix = problem.removeprefix(_OPEN_FILES).rpartition("; ")
        yield warning("open files", what, fix) if problem else ok("open files", found)
    except UserError as e:
        yield of_error("open files", UserError(str(e).removeprefix(_OPEN_FILES)))
    try:
        yield ok("address space", check_address_space())
    except UserError as e:
        yield of_error("address space", e)


def probe_ports(subject: Subject) -> Iterator[Check]:
    """The rendezvous port of the ranks, and the address that weights are sent from."""
    settings = subject.settings
    if settings is None:
        yield not_applicable("rendezvous port", "no config")
        return
    try:
        check_port(settings.rendezvous_port)
        port = settings.rendezvous_port
        yield ok("rendezvous port", f"{port} is free" if port else "chosen at start")
    except UserError as e:
        yield of_error("rendezvous port", e)
    if settings.bridge.transport == "process_group":
        address = settings.bridge.address
        if address is None:
            yield ok("bridge address", "chosen at start")
            return
        try:
            with socket.create_server((address, 0)):
                yield ok("bridge address", f"{address} belongs to this node")
        except OSError as e:
            fix = "set bridge.address to a host name or IP of this node: ip -brief address"
            yield failed("bridge address", f"cannot listen at {address} ({e.strerror or e})", fix)


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


def runs_folder(subject: Subject) -> Path:
    """The folder of the runs, or its nearest existing parent."""
    return nearest_folder(subject.settings.runs if subject.settings else Path("runs"))
