"""Probe of the network between the nodes of a job step: an all-reduce over one task of each.

The tasks meet at an address that the first one writes into the folder of the runs. NCCL on the nodes' first
GPUs, gloo with ``device: cpu``; in a process of its own, which can be ended.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

from rpg_megatron.commands.doctor.gather import JobStep, find_job_step, report_dir
from rpg_megatron.commands.doctor.machine import runs_folder
from rpg_megatron.commands.doctor.probe import Check, Subject, failed, not_applicable, ok
from rpg_megatron.config import UserError
from rpg_megatron.config.files import atomic_write_text, read_json
from rpg_megatron.launcher.nodes import address_towards, free_port, interface_of, own_address

NAME = "between nodes"
SECONDS = 120.0
"""Timeout of the probe; importing torch from a network file system takes most of it."""
_MEET_SECONDS = 60.0
_BYTES = 64 << 20
_TIMES = 3


def probe_network(subject: Subject) -> Iterator[Check]:
    """All-reduce over the nodes, and the bandwidth that it reached."""
    step = find_job_step()
    if step.tasks == 1:
        yield not_applicable(NAME, "a single task; srun with a task on each node tries it")
        return
    interface = subject.settings.cluster.interface if subject.settings else None
    place = str(runs_folder(subject))
    command = [sys.executable, "-P", "-m", __name__, place, subject.device, interface or ""]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=SECONDS - 5,
            check=False,
            stdin=subprocess.DEVNULL,
        )
        result = json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        result = {"error": f"no answer within {SECONDS - 5:.0f} s"}
    except (IndexError, ValueError):
        result = {"error": (done.stderr.strip().splitlines() or ["its process ended"])[-1][:300]}
    if "error" in result:
        fix = (
            "allow TCP between the nodes, and set cluster.interface (and NCCL_SOCKET_IFNAME) to their network"
        )
        yield failed(NAME, f"all-reduce over {step.tasks} tasks: {result['error']}", fix)
        return
    # Each of n tasks sends and receives 2 (n - 1) / n of the data (as NCCL's tests count).
    rate = 2 * (step.tasks - 1) / step.tasks * _BYTES / result["seconds"] / 1e9
    yield ok(NAME, f"all-reduce over {step.tasks} tasks, {result['backend']}: {rate:.1f} GB/s each")


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


def _reduce(step: JobStep, device: str, address: str, port: int) -> float:
    """Seconds of the fastest all-reduce of ``_BYTES``."""
    import torch
    import torch.distributed as dist

    name = interface_of(address_towards(address, port))
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(variable, name)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        init_method=f"tcp://{address}:{port}",
        rank=step.task,
        world_size=step.tasks,
        timeout=timedelta(seconds=_MEET_SECONDS),
    )
    data = torch.ones(_BYTES // 4, device=device)
    seconds = []
    for _ in range(1 + _TIMES):  # the first one connects
        data.fill_(1.0)
        dist.all_reduce(data[:1])
        began = time.perf_counter()
        dist.all_reduce(data)
        total = float(data[-1])  # waits for a GPU
        seconds.append(time.perf_counter() - began)
        if total != step.tasks:
            raise UserError(f"the sum of {step.tasks} ones is {total}")
    dist.destroy_process_group()
    return min(seconds[1:])


def main() -> None:
    """``python -m`` this FOLDER DEVICE INTERFACE: prints a JSON object."""
    folder, device, interface = sys.argv[1:]
    step = find_job_step()
    try:
        seconds = _reduce(step, device, *_rendezvous(step, Path(folder), interface or None))
        print(json.dumps({"seconds": seconds, "backend": "NCCL" if device == "cuda" else "gloo"}))
    except (UserError, RuntimeError, OSError) as e:
        print(json.dumps({"error": str(e).splitlines()[0][:300]}))


if __name__ == "__main__":
    main()
