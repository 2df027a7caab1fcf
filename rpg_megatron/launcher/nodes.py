"""The nodes of a run, this node's rank, and the assignment of trainer ranks and engines to nodes. No torch.

Under Slurm, ``srun`` starts one launcher per node, whose environment has all of this. Elsewhere, options of
``rpg-megatron train`` set it.
"""

from __future__ import annotations

import errno
import os
import random
import re
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime

import psutil

from rpg_megatron.config import Settings, UserError
from rpg_megatron.config.base import NAME
from rpg_megatron.config.cluster import JOB_END_VARIABLE
from rpg_megatron.launcher.environment import output_of

_PORTS = range(15_000, 32_000)
_TRIES = 200
_GROUP = re.compile(r"([^,\[]*)\[([^\]]*)\]([^,\[]*)|([^,\[]+)")


@dataclass(frozen=True)
class Nodes:
    """The nodes of a run, as seen from one of them."""

    rank: int = 0
    count: int = 1
    job: str = ""
    """Unique to this start, and the same for all of its launchers."""
    hosts: tuple[str, ...] = ()
    """Host names by rank, empty if unknown."""

    def name(self, rank: int) -> str:
        """A node's rank and host name, for messages."""
        return f"node {rank} ({self.hosts[rank]})" if rank < len(self.hosts) else f"node {rank}"


@dataclass(frozen=True)
class NodeAssignment:
    """The processes of one node."""

    ranks: range
    """Its trainer ranks."""
    engines: range
    """Its engines, or the engine that it has a part of."""
    part: int = 0
    parts: int = 1
    """On how many nodes an engine is, and which of them this is. The first, 0, has its server."""

    def log_name(self, engine: int) -> str:
        """Name of the log of an engine, or of its part, on this node."""
        return f"engine_{engine}" + (f"_part_{self.part}" if self.part else "")

    def workers(self, settings: Settings) -> int:
        """Workers of one engine on this node."""
        return settings.engine.tensor // self.parts

    def gpus(self, settings: Settings, engine: int) -> list[int]:
        """The node's GPUs that one of its engines sees: its own, then those that it reads weights from.

        Trainer ranks use the first GPUs, engines those after them or, colocated, the same ones.
        """
        number, workers = engine - self.engines.start, self.workers(settings)
        first = (0 if settings.engine.colocated else len(self.ranks)) + number * workers
        own_gpus = range(first, first + workers)
        read = range(len(self.ranks)) if settings.bridge.transport == "cuda_ipc" else ()
        return [*own_gpus, *(gpu for gpu in read if gpu not in own_gpus)]


def find_nodes(
    rank: int | None, count: int | None, job: str | None, environment: Mapping[str, str] = os.environ
) -> Nodes:
    """The nodes given by the options or, without options, those of this process's Slurm step.

    Commands that were not started by ``srun`` run on one node, also within an allocation; so do commands in a
    shell of ``srun --pty``. Raises UserError if options are missing, or if Slurm started several launchers on
    a node.
    """
    if (rank, count, job) != (None, None, None):
        if rank is None or count is None:
            raise UserError(
                "--nodes and --node-rank go together: the number of nodes, and the index of this one"
            )
        if not 0 <= rank < count:
            raise UserError(f"--node-rank {rank} is not in 0 to {count - 1} (--nodes {count})")
        if job is not None and not re.fullmatch(NAME, job):
            raise UserError(
                f"--job {job!r}: use 1 to 128 letters, digits, dots, dashes and underscores, "
                "no dot or dash first"
            )
        return Nodes(rank, count, f"job-{job}" if job else "") if count > 1 else Nodes()
    in_shell = "SLURM_PTY_PORT" in environment and os.isatty(0)
    if "SLURM_STEP_ID" not in environment or in_shell:
        return Nodes()
    count, tasks = (int(environment.get(f"SLURM_STEP_NUM_{unit}", "1")) for unit in ("NODES", "TASKS"))
    if tasks != count:
        raise UserError(
            f"srun started {tasks} launchers on {count} nodes, but needs one per node; "
            "give it --ntasks-per-node=1"
        )
    if count == 1:
        return Nodes()
    hosts = tuple(expand_hosts(environment.get("SLURM_STEP_NODELIST", "")))
    job, step = environment["SLURM_JOB_ID"], environment["SLURM_STEP_ID"]
    start = f"slurm-{job}-{step}-{environment.get('SLURM_RESTART_COUNT', '0')}"
    return Nodes(int(environment["SLURM_NODEID"]), count, start, hosts if len(hosts) == count else ())


def exit_unless_first_node(command: str) -> None:
    """Exit with code 0 on all but the first node, if ``srun`` started a single-node command on several."""
    nodes = find_nodes(None, None, None)
    if nodes.rank > 0:
        print(f"{nodes.name(nodes.rank)}: {command} runs on {nodes.name(0)} only", file=sys.stderr)
        sys.exit(0)


def expand_hosts(listed: str) -> list[str]:
    """The host names in a Slurm host list such as ``a,n[1-3,07]-ib``, in order."""
    hosts: list[str] = []
    for head, inside, tail, plain in _GROUP.findall(listed):
        if plain:
            hosts.append(plain)
            continue
        for part in inside.split(","):
            first, _, last = part.partition("-")
            numbers = range(int(first), int(last or first) + 1)
            hosts += [f"{head}{number:0{len(first)}d}{tail}" for number in numbers]
    return hosts


def assign_node(settings: Settings, rank: int, count: int) -> NodeAssignment:
    """The assignment of node ``rank`` of ``count``. If there are fewer engines than nodes for them, each one
    is on several nodes.

    Raises UserError if ranks or engines cannot be spread evenly, or the transport cannot reach the engines.
    """
    world, replicas, cluster = settings.parallel.world, settings.engine.replicas, settings.cluster
    if count == 1:
        return NodeAssignment(range(world), range(replicas))
    trainers, engines = cluster.trainer_nodes or count, cluster.engine_nodes or count
    for key, part in (("trainer_nodes", trainers), ("engine_nodes", engines)):
        if part > count:
            raise UserError(f"cluster.{key} ({part}) is more than the job's {count} nodes")
    if trainers + engines < count:
        raise UserError(
            f"cluster.trainer_nodes ({trainers}) and cluster.engine_nodes ({engines}) leave "
            f"{count - trainers - engines} of the job's {count} nodes idle"
        )
    parts = _parts(settings, engines)
    for subject, whole, part in (
        ("trainer ranks (parallel: tensor x pipeline x data)", world, trainers),
        ("engines (engine.replicas)", replicas * parts, engines),
    ):
        if whole % part:
            raise UserError(
                f"{whole} {subject} cannot be spread evenly over {part} nodes; "
                f"{_other_nodes(settings, count)}"
            )
    ranks_per_node, engines_per_node = world // trainers, replicas * parts // engines
    if settings.engine.colocated:
        _check_colocated(settings, count, ranks_per_node, engines_per_node)
    elif replicas and settings.bridge.transport != "process_group":
        raise UserError(
            f"bridge.transport {settings.bridge.transport} works within one node only; on {count} "
            "nodes set it to process_group"
        )
    number = rank - (count - engines)  # the node's number among those with engines
    first = number // parts * engines_per_node
    return NodeAssignment(
        range(rank * ranks_per_node, (rank + 1) * ranks_per_node) if rank < trainers else range(0),
        range(first, first + engines_per_node) if number >= 0 else range(0),
        max(0, number) % parts,
        parts,
    )


def _parts(settings: Settings, nodes: int) -> int:
    """On how many nodes each engine is, if all are on ``nodes``, which may be too few or too many."""
    engine = settings.engine
    parts = nodes // engine.replicas if engine.replicas and not nodes % engine.replicas else 1
    return 1 if engine.colocated or engine.tensor % parts else parts


def refuse_idle_gpus(settings: Settings, assignment: NodeAssignment, gpus: int) -> None:
    """Check that engines on several nodes, each of which has ``gpus``, use all that ranks leave. Raises
    UserError.
    """
    workers, free = assignment.workers(settings), gpus - len(assignment.ranks)
    if assignment.engines and assignment.parts > 1 and workers < free:
        raise UserError(
            f"each engine is on {assignment.parts} nodes (cluster.engine_nodes / engine.replicas) and uses "
            f"{workers} of the {free} GPUs that a node has for it; set engine.tensor to "
            f"{free * assignment.parts}, or, as a network is slow, cluster.engine_nodes to fewer nodes"
        )


def _other_nodes(settings: Settings, count: int) -> str:
    """How to place ranks and engines on ``count`` nodes: on nodes of their own, as evenly as possible."""
    world, engine = settings.parallel.world, settings.engine
    splits = [
        (max(world / n, engine.replicas * engine.tensor / (count - n)), n)
        for n in range(1, count)
        if not world % n and not engine.replicas * _parts(settings, count - n) % (count - n)
    ]
    if engine.colocated or not engine.replicas or not splits:
        return "change their number, or the number of nodes"
    _, nodes = min(splits)
    return f"set both cluster.trainer_nodes={nodes} and cluster.engine_nodes={count - nodes}"


def _check_colocated(settings: Settings, count: int, ranks: int, engines: int) -> None:
    """Check that each node's engines fit onto the GPUs of its trainer ranks, and receive their weights.

    ranks, engines: numbers per node. Raises UserError.
    """
    parallel, engine, transport = settings.parallel, settings.engine, settings.bridge.transport
    for key in ("trainer_nodes", "engine_nodes"):
        if getattr(settings.cluster, key) not in (None, count):
            raise UserError(
                f"cluster.{key} ({getattr(settings.cluster, key)}) conflicts with engine.colocated, where "
                f"all {count} nodes of the job train and sample; remove it"
            )
    if engine.tensor > ranks:
        raise UserError(
            f"engine.tensor ({engine.tensor}) is more than the {ranks} trainer ranks of a node, whose GPUs "
            f"colocated engines use and cannot span; set it to {ranks} or less, or engine.colocated to false"
        )
    if engines * engine.tensor > ranks:
        raise UserError(
            f"engine.colocated: {engines} engines of {engine.tensor} workers per node (replicas / {count} "
            f"nodes, tensor) share the GPUs of its {ranks} trainer ranks; set engine.replicas to "
            f"{ranks // engine.tensor * count} or less"
        )
    node = _partial_node(settings, count)
    if transport != "process_group" and node is not None:
        raise UserError(
            f"bridge.transport {transport} works within one node only, and the {ranks} trainer ranks of node "
            f"{node} hold only a part of the model (parallel.tensor {parallel.tensor}, pipeline "
            f"{parallel.pipeline}, expert {parallel.expert}); set it to process_group, or lower one of them"
        )


def _partial_node(settings: Settings, count: int) -> int | None:
    """The first of ``count`` nodes whose trainer ranks do not hold the whole model; None if all do."""
    parallel = settings.parallel
    each = parallel.world // count
    # Megatron's rank order is tensor, context, data, pipeline, so the stages of one replica are far apart.
    # Within a stage, experts are distributed over the ranks in rank order.
    stage, parts = parallel.world // parallel.pipeline, parallel.expert * parallel.expert_tensor
    for node in range(count):
        ranks = range(node * each, (node + 1) * each)
        tensors = {(rank // stage, rank % stage % parallel.tensor) for rank in ranks}
        experts = {(rank // stage, rank % stage % parts) for rank in ranks}
        if len(tensors) < parallel.tensor * parallel.pipeline or len(experts) < parts * parallel.pipeline:
            return node
    return None


def span_note(parts: int) -> str:
    """What to know of engines on several nodes."""
    return (
        f"each engine is on {parts} nodes: its workers' all-reduces, two per layer and token, cross the "
        "network; engines that fit a node are faster"
    )


def end_of_job(environment: Mapping[str, str] = os.environ) -> float | None:
    """Unix time at which Slurm ends this job; None if unknown, or outside of a job."""
    with suppress(KeyError, ValueError):
        return float(environment[JOB_END_VARIABLE])
    if "SLURM_JOB_ID" not in environment:
        return None
    end = _ask_slurm("job", environment["SLURM_JOB_ID"], r"EndTime=(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)")
    return datetime.fromisoformat(end).timestamp() if end else None


def _ask_slurm(kind: str, name: str, pattern: str) -> str | None:
    """What the pattern's group matches in what ``scontrol`` shows of a job or node; None: unknown."""
    match = re.search(pattern, output_of("scontrol", "show", kind, name) or "")
    return match[1] if match else None


def transport_note(settings: Settings, count: int) -> str | None:
    """A hint for runs that send weights through host memory although each node has them on its GPUs."""
    slow = settings.engine.colocated and settings.bridge.transport == "process_group"
    if count == 1 or not slow or settings.device != "cuda" or _partial_node(settings, count) is not None:
        return None
    return "note: each node holds the whole model; bridge.transport=cuda_ipc reads it there, much faster"


def own_host(environment: Mapping[str, str] = os.environ) -> str:
    """The name by which Slurm knows this node; else its host name."""
    return environment.get("SLURMD_NODENAME") or socket.gethostname()


def own_address(interface: str | None, environment: Mapping[str, str] = os.environ) -> str:
    """This node's IPv4 address in the cluster: that of the interface, or the address of the node's name.

    Raises UserError if there is none.
    """
    if interface is not None:
        interfaces = _interfaces()
        for own, name in interfaces.items():
            if name == interface:
                return own
        raise UserError(
            f"cluster.interface: {socket.gethostname()} has no interface {interface!r} with an IPv4 "
            f"address; it has {', '.join(sorted(set(interfaces.values())))}"
        )
    name = own_host(environment)
    # A node's name may be unknown to the name service, but not to Slurm.
    if address := _resolve(name) or _resolve(_ask_slurm("node", name, r"\bNodeAddr=(\S+)")):
        return address
    raise UserError(
        f"the address of this node ({name}) is unknown; set cluster.interface to its network interface"
    )


def address_towards(address: str, port: int) -> str:
    """The local address of connections to another one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, port))  # a datagram socket: nothing is sent
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str:
    """Name of the network interface with this address; UserError if there is none."""
    if interface := _interfaces().get(address):
        return interface
    if address.startswith("127."):
        return "lo"
    raise UserError(f"{address} is not an address of {socket.gethostname()}; set cluster.interface")


def free_ports(address: str, count: int) -> list[int]:
    """TCP ports of a local address that are free now. UserError if there are not so many.

    They are below the kernel's ephemeral ports, which other sockets might use before the caller binds them.
    """
    ports: list[int] = []
    for port in random.sample(_PORTS, _TRIES):
        if len(ports) == count:
            return ports
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            try:
                probe.bind((address, port))
                ports.append(port)
            except OSError as e:
                if e.errno not in (errno.EADDRINUSE, errno.EACCES):
                    raise
    raise UserError(
        f"no free TCP port found at {address} among {_TRIES} from {_PORTS.start} to {_PORTS.stop - 1}; "
        "stop the processes that use them (ss -tlnp)"
    )


def _interfaces() -> dict[str, str]:
    """IPv4 address -> name of its interface."""
    return {
        entry.address: name
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family == socket.AF_INET
    }


def _resolve(name: str | None) -> str | None:
    with suppress(OSError):
        return socket.gethostbyname(name) if name else None
    return None
