"""Bandwidth between nodes: an all-reduce over one process of each, and what a card's network should reach.

``python -m`` this RANK NODES DEVICE ADDRESS PORT is the process of one node: NCCL on its first GPU, or gloo.
It can be ended, as a library that waits for the network cannot. It prints a JSON object, or ``error: ...``
and exits with the code of a user error.
"""

from __future__ import annotations

import json
import re
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta

from rpg_megatron.config import UserError
from rpg_megatron.system.child import USER_ERROR

SECONDS = 120.0
"""Time limit of a measurement; importing torch from a network file system takes most of it."""
_MEET_SECONDS = 60.0
_TIMES = 3
_BYTES = {"cuda": 256 << 20, "cpu": 64 << 20}
"""On GPUs, large enough that many nodes reach their bandwidth too."""

_PORTS = {"A100": 25.0, "H100": 50.0, "H200": 50.0, "B200": 50.0}
"""Card -> GB/s of the network port that usual servers have for each of them: 200 Gb/s or 400 Gb/s."""
_FRACTION = 0.5
"""Of the port: a working network reaches more, TCP and a port shared by many cards less."""

SLOW_FIX = (
    "set NCCL_IB_HCA to the InfiniBand cards between the nodes or, without InfiniBand, cluster.interface (or "
    "NCCL_SOCKET_IFNAME) to the fast interface; NCCL_DEBUG=INFO tells what NCCL uses (docs/running.md, The "
    "network between nodes)"
)
DEAD_FIX = "allow TCP between the nodes, and set cluster.interface (and NCCL_SOCKET_IFNAME) to their network"


@dataclass(frozen=True)
class Bandwidth:
    """The result of a measurement."""

    rate: float
    """GB/s that each node sent and, at the same time, received, as NCCL's tests count (bus bandwidth)."""
    backend: str
    card: str | None
    """Name of the GPU; None on a CPU."""

    def describe(self, nodes: str) -> str:
        """The result in words; nodes: such as ``4 nodes``."""
        return f"all-reduce over {nodes}, {self.backend}: {self.rate:.1f} GB/s each"

    def shortfall(self, setting: float | None) -> str | None:
        """By what norm it is too low, in words; None if it is not.

        setting: ``cluster.min_bandwidth``; None: half of the card's port, no norm for others and CPUs.
        """
        found = re.search(rf"\b({'|'.join(_PORTS)})\b", self.card or "")
        norm = setting if setting is not None else found and _FRACTION * _PORTS[found[1]]
        if norm is None or self.rate >= norm:
            return None
        whose = "" if setting is not None or not found else f", half of the usual port for {found[1]}"
        return f"below {norm:g} GB/s{whose} (cluster.min_bandwidth)"


def probe_command(rank: int, nodes: int, device: str, address: str, port: int) -> list[str]:
    """Command line of one node's process. address, port: of the first node, which listens there."""
    return [sys.executable, "-P", "-m", __name__, str(rank), str(nodes), device, address, str(port)]


def read_bandwidth(output: Sequence[str]) -> Bandwidth:
    """The result in lines that the process printed. Raises UserError with its error, if there is none."""
    for line in reversed(output):
        if line.startswith('{"rate"'):
            return Bandwidth(**json.loads(line))
        if line.startswith("error: "):
            raise UserError(line.removeprefix("error: "))
    raise UserError((output[-1] if output else "its process ended")[:300])


def _measure(rank: int, nodes: int, device: str, address: str, port: int) -> Bandwidth:
    """The fastest of several all-reduces with the other nodes. Raises UserError or RuntimeError."""
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
            raise UserError(f"{names} did not connect to {address}:{port} within {_MEET_SECONDS:.0f} s")
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
            raise UserError(f"the sum of {nodes} ones is {total}")
    dist.destroy_process_group()
    # Each of n nodes sends and receives 2 (n - 1) / n of the data.
    rate = 2 * (nodes - 1) / nodes * _BYTES[device] / min(seconds[1:]) / 1e9
    card = torch.cuda.get_device_name() if device == "cuda" else None
    return Bandwidth(rate, "NCCL" if device == "cuda" else "gloo", card)


def main() -> None:
    """The process of one node."""
    rank, nodes, device, address, port = sys.argv[1:]
    try:
        print(json.dumps(asdict(_measure(int(rank), int(nodes), device, address, int(port)))), flush=True)
    except (UserError, RuntimeError, OSError) as e:
        print(f"error: {(str(e).splitlines() or [repr(e)])[0][:300]}", flush=True)
        sys.exit(USER_ERROR)


if __name__ == "__main__":
    main()
