"""Command lines and environments of the processes of a run on one node."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rpg_megatron.config import Settings
from rpg_megatron.config.cluster import (
    ADDRESS_VARIABLE,
    RANK_LOGS_VARIABLE,
    RENDEZVOUS_VARIABLE,
    TOKEN_VARIABLE,
)
from rpg_megatron.engine.command import CONNECTIONS_VARIABLE, engine_threads
from rpg_megatron.launcher.nodes import NodeAssignment, interface_of
from rpg_megatron.system.child import module_command

RANK = "rpg_megatron.training.rank"
"""Module that the ranks of a training run execute; audit and replay have modules of their own."""
SAMPLER = "rpg_megatron.rollout.sampler"
CONVERSATION_SAMPLER = "rpg_megatron.rollout.fine_tuning"


@dataclass(frozen=True)
class RankLaunchSpec:
    """Arguments of the trainer ranks on all nodes."""

    folder: str
    """The run's folder."""
    checkpoint: str | None
    address: str
    """torch.distributed's MASTER_ADDR, the node of trainer rank 0; it and the port are used on several nodes.
    """
    port: int


def cluster_environment(address: str | None) -> dict[str, str]:
    """Variables that bind sockets to the cluster's interface. address: this node's; None: a single node."""
    if address is None:
        return {"GLOO_SOCKET_IFNAME": "lo"}  # gloo's default is by host name
    interface = interface_of(address)
    variables = {ADDRESS_VARIABLE: address, "GLOO_SOCKET_IFNAME": interface}
    if "NCCL_SOCKET_IFNAME" not in os.environ:
        variables["NCCL_SOCKET_IFNAME"] = f"={interface}"
    return variables


def base_environment(settings: Settings, token: str) -> dict[str, str]:
    """Environment of the sampler; of the ranks together with ``_device_environment``.

    The token is passed here and not on the command line, which all users can read.
    """
    environment = os.environ | {TOKEN_VARIABLE: token}
    if settings.device == "cpu":
        # Ranks share the cores, also with engines that work at the same time: threads that wait for a core
        # stall every matrix product.
        cores = len(os.sched_getaffinity(0))
        if settings.rollout.ahead:
            cores -= engine_threads(settings) * settings.engine.replicas * settings.engine.tensor
        environment["OMP_NUM_THREADS"] = str(max(1, cores // settings.parallel.world))
    return environment


def sampler_command(settings: Settings, folder: Path, work: Path, bridge: Path) -> list[str]:
    """Command line of the sampler. folder: the run's. work, bridge: the first node's private folders."""
    module = SAMPLER if settings.sft is None else CONVERSATION_SAMPLER
    return module_command(module, folder, work, bridge)


def rank_starts(
    settings: Settings,
    assignment: NodeAssignment,
    spec: RankLaunchSpec,
    work: Path,
    bridge: Path,
    token: str,
    address: str | None,
    module: str,
) -> Iterator[tuple[str, list[str], dict[str, str]]]:
    """Name, command line and environment of each of this node's trainer ranks.

    work, bridge: this node's private folders. address: as for ``cluster_environment``. module: what the ranks
    execute.
    """
    checkpoint = [] if spec.checkpoint is None else [spec.checkpoint]
    command, local = module_command(module, spec.folder, work, bridge, *checkpoint), len(assignment.ranks)
    shared = base_environment(settings, token) | cluster_environment(address)
    shared |= _device_environment(settings, local)
    shared |= {"WORLD_SIZE": str(settings.parallel.world), "LOCAL_WORLD_SIZE": str(local)}
    if address is None:
        shared[RENDEZVOUS_VARIABLE] = str(work / "rendezvous")
    else:
        shared |= {"MASTER_ADDR": spec.address, "MASTER_PORT": str(spec.port)}
    for place, rank in enumerate(assignment.ranks):
        yield f"rank_{rank}", command, shared | {"RANK": str(rank), "LOCAL_RANK": str(place)}


def forked_start(
    starts: Sequence[tuple[str, list[str], dict[str, str]]], logs: Path
) -> tuple[list[str], dict[str, str]]:
    """Command line and environment of a process that forks these ranks, all of a single node with CPUs."""
    _, command, environment = starts[0]
    own = {name: value for name, value in environment.items() if name not in ("RANK", "LOCAL_RANK")}
    return command, own | {RANK_LOGS_VARIABLE: str(logs)}


def _device_environment(settings: Settings, local: int) -> dict[str, str]:
    """Variables that a rank on a GPU needs; empty on a CPU. local: number of ranks on this node."""
    if settings.device != "cuda":
        return {}
    # One thread is enough to drive the GPU. Only an offloaded optimizer computes on the CPU.
    threads = len(os.sched_getaffinity(0)) // local if settings.memory.offload_optimizer else 1
    variables = {"OMP_NUM_THREADS": str(max(1, threads))}
    sharded = settings.parallel.tensor > 1 or settings.parallel.context > 1
    if sharded and CONNECTIONS_VARIABLE not in os.environ:
        # Megatron launches the communication of tensor and context parallelism before the GEMMs that it
        # overlaps with. One hardware queue keeps that order; with several, GEMMs may occupy the GPU first.
        # Megatron's argument check requires the same.
        variables[CONNECTIONS_VARIABLE] = "1"
    return variables
