"""Bandwidth between nodes: an all-reduce over one process of each, and what a card's network should reach.

``python -m`` this RANK NODES DEVICE ADDRESS PORT is the process of one node, which ``doctor`` starts: NCCL on
its first GPU, or gloo. It can be ended, as a library that waits for the network cannot. It prints GB/s
and card as JSON, or ``error: ...``.
"""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from rpg_megatron.config import UserError
from rpg_megatron.system.child import module_command

MEASURE = (
    "srun --ntasks-per-node=1 rpg-megatron doctor CONFIG, in this job, measures the network between its nodes"
)
SECONDS = 120.0
"""Time limit of a measurement; importing torch from a network file system takes most of it."""
_MEET_SECONDS = 60.0
_TIMES = 3
_BYTES = {"cuda": 256 << 20, "cpu": 64 << 20}
"""On GPUs, large enough that many nodes reach their bandwidth too."""

_LEAST = {"A100": 12.5, "H100": 25.0, "H200": 25.0, "B200": 25.0}
"""Card -> GB/s, half of the port that usual servers have for each of them (200 Gb/s or 400 Gb/s): a working
network reaches more, TCP and a port shared by many cards less."""

SLOW_FIX = (
    "set NCCL_IB_HCA to the InfiniBand cards between the nodes or, without InfiniBand, cluster.interface (or "
    "NCCL_SOCKET_IFNAME) to the fast interface; NCCL_DEBUG=INFO tells what NCCL uses (slurm/README.md, The "
    "network between nodes)"
)
DEAD_FIX = "allow TCP between the nodes, and set cluster.interface (and NCCL_SOCKET_IFNAME) to their network"


def shortfall(rate: float, card: str | None, setting: float | None) -> str | None:
    """Which threshold a bandwidth misses, in words; None if it misses none.

    rate: GB/s. card: name of the GPU; None on a CPU. setting: ``cluster.min_bandwidth``; None: half of the
    card's port, no threshold for other cards and CPUs.
    """
    known = re.search(rf"\b({'|'.join(_LEAST)})\b", card or "")
    least = setting if setting is not None else known and _LEAST[known[1]]
    if least is None or rate >= least:
        return None
    whose = "" if setting is not None or not known else f", half of the usual port for {known[1]}"
    return f"below {least:g} GB/s{whose} (cluster.min_bandwidth)"


def measure(rank: int, nodes: int, device: str, address: str, port: int) -> tuple[float, str | None]:
    """The fastest of several all-reduces with the other nodes, and this node's card.

    address, port: of the first node, which listens there. Returns GB/s that each node sent and, at the same
    time, received, as NCCL's tests count (bus bandwidth). Raises RuntimeError or OSError.
    """
    # Torch's own store would listen on every network interface.
    listener = socket.create_server((address, port), backlog=4096).detach() if rank == 0 else None
    import torch
    import torch.distributed as dist

    limit, backend = timedelta(seconds=_MEET_SECONDS), "nccl" if device == "cuda" else "gloo"
    store = dist.TCPStore(address, port, None, rank == 0, limit, False, master_listen_fd=listener)
    store.set(f"node {rank}", "")
    end = time.monotonic() + _MEET_SECONDS
    while missing := [node for node in range(nodes) if not store.check([f"node {node}"])]:
        if time.monotonic() > end:
            names = ", ".join(f"node {node}" for node in missing)
            raise RuntimeError(f"{names} did not connect to {address}:{port} within {_MEET_SECONDS:.0f} s")
        time.sleep(0.1)
    dist.init_process_group(backend, store=store, rank=rank, world_size=nodes, timeout=limit)
    data = torch.ones(_BYTES[device] // 4, device=device)
    seconds = []
    for _ in range(1 + _TIMES):  # the first one connects
        data.fill_(1.0)
        dist.all_reduce(data[:1])
        data[:1].tolist()  # waits for a GPU, as below
        began = time.perf_counter()
        dist.all_reduce(data)
        total = float(data[-1])
        seconds.append(time.perf_counter() - began)
        if total != nodes:
            raise RuntimeError(f"the sum of {nodes} ones is {total}")
    dist.destroy_process_group()
    # Each of n nodes sends and receives 2 (n - 1) / n of the data.
    rate = 2 * (nodes - 1) / nodes * _BYTES[device] / min(seconds[1:]) / 1e9
    return rate, torch.cuda.get_device_name() if device == "cuda" else None


def start_measurement(arguments: Sequence[str], environment: Mapping[str, str]) -> tuple[float, str | None]:
    """The result of ``measure`` in a process of its own. Raises UserError."""
    command, limit = module_command(__name__, *arguments), SECONDS - 5
    options: dict[str, Any] = {"env": environment, "stdin": subprocess.DEVNULL}
    try:
        done = subprocess.run(command, **options, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        raise UserError(f"no answer within {limit:.0f} s") from None
    if done.returncode:
        told = done.stderr.splitlines() or [f"its process ended with code {done.returncode}"]
        error = next((line for line in reversed(told) if line.startswith("error: ")), told[-1])
        raise UserError(error.removeprefix("error: ")[:300])
    rate, card = json.loads(done.stdout.splitlines()[-1])
    return rate, card


if __name__ == "__main__":
    rank, nodes, device, address, port = sys.argv[1:]
    try:
        print(json.dumps(measure(int(rank), int(nodes), device, address, int(port))))
    except (RuntimeError, OSError) as e:
        sys.exit(f"error: {(str(e).splitlines() or [repr(e)])[0]}")
