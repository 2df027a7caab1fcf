"""Before a run on several nodes begins: the network between them is measured, and a slow or dead one named.

A network that is slow without an error, such as TCP in place of InfiniBand, costs a part of every step. The
launchers start a process on each node (``bandwidth.py``); whatever becomes of it, the run goes on.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from rpg_megatron.config import Settings, UserError
from rpg_megatron.launcher import bandwidth
from rpg_megatron.launcher.bandwidth import DEAD_FIX, SLOW_FIX, Bandwidth, read_bandwidth
from rpg_megatron.launcher.nodes import free_port
from rpg_megatron.launcher.rank_env import cluster_environment
from rpg_megatron.launcher.remote_nodes import RemoteNodes
from rpg_megatron.launcher.supervisor import Supervisor
from rpg_megatron.system.child import Child, describe_end, tail_of, user_error


class NodeProbe:
    """This node's process; its log is ``network_RANK.log``.

    own: this node's address. address, port: where the first node listens.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        device: str,
        own: str,
        *,
        rank: int,
        nodes: int,
        address: str,
        port: int,
    ):
        command = bandwidth.probe_command(rank, nodes, device, address, port)
        environment = os.environ | cluster_environment(own)
        self._supervisor = supervisor
        self._child: Child | None = supervisor.start(f"network_{rank}", command, environment)

    def result(self) -> dict[str, Any] | None:
        """None while it runs; then the fields of ``Bandwidth``, or ``error``."""
        child = self._child
        if child is None or (code := child.exit_code()) is None:
            return None
        if code:
            return {"error": user_error(child) or f"its process {describe_end(child)}, see {child.log}"}
        try:
            return asdict(read_bandwidth(tail_of(child.log, opened=child.opened).splitlines()))
        except UserError as e:
            return {"error": str(e)}

    def end(self) -> None:
        """End the process, if it runs; returns when it has ended."""
        if self._child is not None:
            self._supervisor.end(self._child)
            self._child = None


def measure_network(
    settings: Settings, remote: RemoteNodes, supervisor: Supervisor, poll: Callable[[], None]
) -> list[str]:
    """Measure the bandwidth between all nodes; returns the lines to print, warnings among them.

    poll: called while waiting, receives the other nodes' messages, and may raise. On return the processes
    have ended, on other nodes before these start anything else; after an exception they end with all others.
    """
    place: dict[str, Any] = {
        "nodes": remote.nodes.count,
        "address": remote.address,
        "port": free_port(remote.address),
    }
    own = NodeProbe(supervisor, settings.device, remote.address, rank=0, **place)
    remote.send_all("start_probe", **place)
    end = time.monotonic() + bandwidth.SECONDS
    results: dict[int, dict[str, Any]] = {}
    while len(results) < remote.nodes.count and time.monotonic() < end:
        poll()
        results |= remote.probes
        if (result := own.result()) is not None:
            results[0] = result
        if any("error" in result for result in results.values()):
            break  # the others would wait for that node
    remote.send_all("end_probe")
    own.end()
    errors = [
        f"{remote.name(node)}: {result['error']}" for node, result in results.items() if "error" in result
    ]
    silent = sorted(set(range(remote.nodes.count)) - results.keys())
    if not errors and silent:
        names = ", ".join(remote.name(node) for node in silent)
        errors = [f"no answer within {bandwidth.SECONDS:.0f} s from {names}"]
    if errors:
        return [
            f"warning: the all-reduce between the nodes failed, and the run may hang: {errors[0]}; {DEAD_FIX}"
        ]
    measured = Bandwidth(**results[0])
    lines = [f"network: {measured.describe(f'{remote.nodes.count} nodes')}"]
    if shortfall := measured.shortfall(settings.cluster.min_bandwidth):
        lines.append(f"warning: the network is slow: {measured.rate:.1f} GB/s is {shortfall}; {SLOW_FIX}")
    return lines
