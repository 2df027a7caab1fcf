"""Probe of the network between the nodes of a job step: an all-reduce over one task of each.

The tasks meet at an address that the first one writes into the folder of the runs.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from rpg_megatron.commands.doctor.gather import JobStep, find_job_step, report_dir
from rpg_megatron.commands.doctor.machine import runs_folder
from rpg_megatron.commands.doctor.probe import Check, Subject, failed, not_applicable, ok, warning
from rpg_megatron.config import UserError
from rpg_megatron.config.files import atomic_write_text, read_json
from rpg_megatron.launcher.bandwidth import DEAD_FIX, SECONDS, SLOW_FIX, probe_command, read_bandwidth
from rpg_megatron.launcher.nodes import address_towards, free_port, own_address
from rpg_megatron.launcher.rank_env import cluster_environment

NAME = "between nodes"
_MEET_SECONDS = 60.0


def probe_network(subject: Subject) -> Iterator[Check]:
    """All-reduce over the nodes, and the bandwidth that it reached."""
    step = find_job_step()
    cluster = subject.settings.cluster if subject.settings else None
    norm = cluster.min_bandwidth if cluster else None
    if step.tasks == 1:
        yield not_applicable(NAME, "a single task; srun with a task on each node tries it")
        return
    if norm == 0:
        yield not_applicable(NAME, "cluster.min_bandwidth is 0")
        return
    try:
        result = read_bandwidth(_run(step, subject, cluster.interface if cluster else None))
    except (UserError, OSError) as e:
        yield failed(NAME, f"all-reduce over {step.tasks} tasks: {e}", DEAD_FIX)
        return
    found = result.describe(f"{step.tasks} tasks")
    if shortfall := result.shortfall(norm):
        yield warning(NAME, f"{found}, {shortfall}", SLOW_FIX)
    else:
        yield ok(NAME, found)


def _run(step: JobStep, subject: Subject, interface: str | None) -> list[str]:
    """What this task's process printed. Raises UserError."""
    end = time.monotonic() + SECONDS - 5
    address, port = _rendezvous(step, runs_folder(subject), interface)
    own = own_address(interface) if interface else address_towards(address, port)
    try:
        done = subprocess.run(
            probe_command(step.task, step.tasks, subject.device, address, port),
            capture_output=True,
            text=True,
            timeout=end - time.monotonic(),
            check=False,
            stdin=subprocess.DEVNULL,
            env=os.environ | cluster_environment(own),
        )
    except subprocess.TimeoutExpired:
        raise UserError(f"no answer within {SECONDS - 5:.0f} s") from None
    return done.stdout.splitlines() or done.stderr.splitlines()


def _rendezvous(step: JobStep, folder: Path, interface: str | None) -> tuple[str, int]:
    """Address and port at which the first task listens. Raises UserError."""
    place = report_dir(step, folder)
    file = place / "address.json"
    if step.first:
        address = own_address(interface)
        port = free_port(address)
        place.mkdir(mode=0o700, exist_ok=True)
        atomic_write_text(file, json.dumps([address, port]), private=True)
        return address, port
    end = time.monotonic() + _MEET_SECONDS
    while time.monotonic() < end:
        with suppress(OSError, ValueError):
            address, port = read_json(file)
            return str(address), int(port)
        time.sleep(0.1)
    raise UserError(f"the first task wrote no address into {place} within {_MEET_SECONDS:.0f} s")
