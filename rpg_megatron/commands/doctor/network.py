"""Probe of the network between the nodes of a job step: an all-reduce over one task of each.

``srun`` tells each task its number, how many there are, and the first one's host, where they meet.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator

from rpg_megatron.commands.doctor.probe import Check, Subject, failed, not_applicable, ok, warning
from rpg_megatron.config import UserError
from rpg_megatron.launcher.bandwidth import DEAD_FIX, SLOW_FIX, shortfall, start_measurement
from rpg_megatron.launcher.nodes import Nodes, address_towards, find_nodes, own_address
from rpg_megatron.launcher.rank_env import cluster_environment

NAME = "between nodes"
_FIRST_PORT, _PORTS = 15_000, 17_000
"""Below the kernel's ephemeral ports."""


def probe_network(subject: Subject) -> Iterator[Check]:
    """All-reduce over the nodes, and the bandwidth that it reached."""
    cluster = subject.settings.cluster if subject.settings else None
    least = cluster.min_bandwidth if cluster else None
    if least == 0:
        yield not_applicable(NAME, "cluster.min_bandwidth is 0")
        return
    nodes = find_nodes(None, None, None)
    if nodes.count == 1:
        yield not_applicable(NAME, "a single task; srun with a task on each node tries it")
        return
    try:
        rate, card = _measure(nodes, subject.device, cluster.interface if cluster else None)
    except (UserError, OSError) as e:
        yield failed(NAME, f"all-reduce over {nodes.count} nodes: {e}", DEAD_FIX)
        return
    backend = "NCCL" if subject.device == "cuda" else "gloo"
    found = f"all-reduce over {nodes.count} nodes, {backend}: {rate:.1f} GB/s each"
    if missed := shortfall(rate, card, least):
        yield warning(NAME, f"{found}, {missed}", SLOW_FIX)
    else:
        yield ok(NAME, found)


def _measure(nodes: Nodes, device: str, interface: str | None) -> tuple[float, str | None]:
    """GB/s of each node, and this node's card. Raises UserError."""
    if not nodes.hosts:
        raise UserError("srun did not list the nodes")
    # They meet at the address of the first node's name; the data go over the interface.
    address = own_address(None, {"SLURMD_NODENAME": nodes.hosts[0]})
    port = _FIRST_PORT + zlib.crc32(nodes.job.encode()) % _PORTS  # without a message the same on all nodes
    own = own_address(interface) if interface else address_towards(address, port)
    place = (str(nodes.rank), str(nodes.count), device, address, str(port))
    return start_measurement(place, os.environ | cluster_environment(own))
