"""Command lines and environments of the processes of a run on one node."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from rpg_megatron.config import Settings
from rpg_megatron.config.cluster import (
    ADDRESS_VARIABLE,
    RANK_LOGS_VARIABLE,
    RENDEZVOUS_VARIABLE,
    TOKEN_VARIABLE,
)
from rpg_megatron.engine.command import CONNECTIONS_VARIABLE, engine_threads
from rpg_megatron.launcher.nodes import NodeAssignment, interface_of
from rpg_megatron.launcher.scratch_dirs import Workspace
from rpg_megatron.system.child import module_command

RANK = "rpg_megatron.training.rank"
"""Module that the ranks of a training run execute; audit and replay have modules of their own."""
SAMPLER = "rpg_megatron.rollout.sampler"

COMPILER_VARIABLE = "TORCHINDUCTOR_COMPILE_THREADS"
"""Environment variable with the number of processes in which torch compiles kernels."""


@dataclass(frozen=True)
class NodeSpec:
    """What a node's agent starts."""

    settings: Settings
    folder: Path
    """The run's."""
    token: str
    assignment: NodeAssignment
    rank: int = 0
    """The node's number."""
    address: str | None = None
    """This node's in the cluster; None on a single node."""
    ports: dict[int, int] = field(default_factory=dict)
    """TCP ports of engines, by index. Those of the first node, without ports, listen on unix sockets."""
    rank_module: str = RANK
    """What ranks run with ``python -m``."""
    engine_settings: Settings | None = None
    """Of the engines, if not the run's."""
    weights: Literal["dummy", "checkpoint"] = "dummy"
    """What engines load."""


def cluster_environment(address: str | None) -> dict[str, str]:
    """Variables that bind sockets to the cluster's interface. address: this node's; None: a single node."""
    if address is None:
        return {"GLOO_SOCKET_IFNAME": "lo"}  # gloo's default is by host name
    interface = interface_of(address)
    variables = {ADDRESS_VARIABLE: address, "GLOO_SOCKET_IFNAME": interface, "VLLM_HOST_IP": address}
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


def sampler_command(folder: Path, space: Workspace) -> list[str]:
    """Command line of the sampler. folder: the run's. space: the first node's private folders."""
    return module_command(SAMPLER, folder, space.work)


def rank_starts(
    spec: NodeSpec, space: Workspace, checkpoint: str | None, address: str, port: int
) -> Iterator[tuple[str, list[str], dict[str, str]]]:
    """Name, command line and environment of each of a node's trainer ranks.

    space: the node's private folders. checkpoint: what they start from. address, port: torch.distributed's on
    several nodes, of the first one.
    """
    settings, assignment, local = spec.settings, spec.assignment, len(spec.assignment.ranks)
    more = [] if checkpoint is None else [checkpoint]
    command = module_command(spec.rank_module, spec.folder, space.work, space.bridge, *more)
    shared = base_environment(settings, spec.token) | cluster_environment(spec.address)
    shared |= _device_environment(settings, local)
    shared |= {"WORLD_SIZE": str(settings.parallel.world), "LOCAL_WORLD_SIZE": str(local)}
    if spec.address is None:
        shared[RENDEZVOUS_VARIABLE] = str(space.work / "rendezvous")
    else:
        shared |= {"MASTER_ADDR": address, "MASTER_PORT": str(port)}
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
    # Torch's compiler would start a process for each core, up to 32, in each rank. The head's few kernels are
    # compiled one after the other instead, as vLLM does with its own.
    variables = {"OMP_NUM_THREADS": str(max(1, threads))}
    variables[COMPILER_VARIABLE] = os.environ.get(COMPILER_VARIABLE, "1")
    sharded = settings.parallel.tensor > 1 or settings.parallel.context > 1
    if sharded and CONNECTIONS_VARIABLE not in os.environ:
        # Megatron launches the communication of tensor and context parallelism before the GEMMs that it
        # overlaps with. One hardware queue keeps that order; with several, GEMMs may occupy the GPU first.
        # Megatron's argument check requires the same.
        variables[CONNECTIONS_VARIABLE] = "1"
    return variables
