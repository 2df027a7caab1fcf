"""The nodes of a run as its first launcher sees them: an agent on each, engines, ranks and sampler.

Every node, this one too, has an agent (``node_agent.py``) that starts and ends its processes. Requests go to
the agents, and ends of processes are reported back: by calls on this node, else over a control channel.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any

import yaml

from rpg_megatron.config import Settings, UserError
from rpg_megatron.config.affects import settings_that_differ
from rpg_megatron.engine.process import engine_socket, health, tells_of_killed_worker, write_addresses
from rpg_megatron.launcher.failures import Failure
from rpg_megatron.launcher.node_agent import NodeAgent
from rpg_megatron.launcher.nodes import Nodes, assign_node, free_ports, own_host
from rpg_megatron.launcher.run_dir import LOGS, resolved_yaml
from rpg_megatron.launcher.stopping import Interrupted, RunFailed, StopSignals
from rpg_megatron.system.child import user_error

if TYPE_CHECKING:
    from rpg_megatron.launcher.control_channel import NodeChannel

type Agent = NodeAgent | NodeChannel
"""A node's agent: that of this node, or a control channel to another."""
_LEAVE_SECONDS = 30.0
"""How long to wait for other nodes to end their processes; they send SIGKILL after a grace period."""


class Process:
    """A process of the run: its node, and its log in the run's folder, which all nodes share."""

    def __init__(self, name: str, folder: Path, agent: Agent, node: str, host: str):
        """name: that of its log. node: for messages, empty for this one. host: the node's name."""
        self.name = f"{name} on {node}" if node else name
        self.log, self.agent, self.node, self.host = folder / LOGS / f"{name}.log", agent, node, host
        self.log_start = log_size(self.log)
        """Bytes that the log had before the process started; of an engine that is up, before its work."""
        self.is_rank = name.startswith("rank_")
        self.code: int | None = None
        self._key, self._opened = name, agent.opened if isinstance(agent, NodeAgent) else {}

    @property
    def opened(self) -> IO[bytes] | None:
        """The log as it was when the process started; only on this node."""
        return self._opened.get(self._key)

    def exit_code(self) -> int | None:
        """None while it runs, as far as is known."""
        return self.code

    def warn(self) -> None:
        """Ask it to save and exit, if it runs."""
        if self.code is None:
            self.agent.send("warn", name=self._key)


@dataclass(eq=False)
class Engine:
    """An engine, and what the launcher knows of it."""

    index: int
    process: Process
    """Its server, and its workers on that node."""
    address: Path | str
    token: str
    master: tuple[str, int] | None = None
    """Where its workers find each other, if they are on several nodes."""
    others: list[Process] = field(default_factory=list)
    """Its workers on other nodes."""
    incarnation: int = 0
    """How often it was restarted."""
    ended: list[Process] = field(default_factory=list)
    """Its processes that do not run, as far as is known, in the order in which they ended."""
    is_up: bool = False
    """Whether it has answered since its start."""
    is_deferred: bool = False
    """Whether it is restarted when the ranks release the shared GPUs."""
    runner_v1: bool = False
    """Whether it uses vLLM's model runner V1, because it did not start with V2."""
    death: tuple[str, int] | None = None
    """How and after which step it died last, if its log tells how."""
    started: float = 0.0
    """When it was started last, by the monotonic clock."""

    def start(self) -> None:
        """Start it; does not wait."""
        self.started, self.is_up, self.is_deferred = time.monotonic(), False, False
        self.ended.clear()
        for process in self.processes:
            process.log_start = log_size(process.log)
            process.agent.send("start_engine", index=self.index, runner_v1=self.runner_v1, master=self.master)

    @property
    def processes(self) -> list[Process]:
        """One on each of its nodes."""
        return [self.process, *self.others]

    @property
    def runs(self) -> bool:
        """Whether it can work: all of its processes run, as far as is known."""
        return not self.ended

    @property
    def failed(self) -> list[Process]:
        """Its processes that failed, the most likely cause first."""
        told = [process for process in self.processes if self.others and tells_of_killed_worker(process)]
        return [*told, *self.ended]

    @property
    def suspect(self) -> Process:
        """The process whose log tells best why it failed."""
        return [*self.failed, self.process][0]

    @property
    def seconds(self) -> float:
        """Seconds since its last start."""
        return time.monotonic() - self.started

    def healthy(self, timeout: float = 5.0) -> bool:
        """Whether it answers requests of this node."""
        return health(self.address, self.token, timeout) == 200


class Cluster:
    """All nodes of a run. Call its methods from the main thread only.

    Entering the context waits until all nodes have joined and passed their checks; raises RunFailed and
    UserError if they do not. Leaving it ends the processes of the other nodes.
    """

    def __init__(self, settings: Settings, nodes: Nodes, signals: StopSignals):
        """Raises UserError if the other nodes cannot reach this one."""
        self.nodes = nodes
        self.address: str | None = None
        """This node's; None on a single node."""
        self.token = secrets.token_urlsafe(32)
        """The run's secret, shared by all of its processes."""
        self.engines: dict[int, Engine] = {}
        self.processes: dict[str, Process] = {}
        """By the names of their logs; those that were started."""
        self._settings, self._signals = settings, signals
        self._folder = Path()
        self._agents: dict[int, Agent] = {}
        self._joined: Mapping[int, dict[str, Any]] = {}
        self._ready: set[int] = set()
        self._server = None
        if nodes.count > 1:
            from rpg_megatron.launcher.control_channel import RendezvousServer  # imports ZeroMQ

            self._server = RendezvousServer(settings, nodes)
            self.address, self.token = self._server.address, self._server.token
            self._agents |= self._server.channels
            self._joined = self._server.joined

    def __enter__(self) -> Cluster:
        try:
            if self._server:
                self._wait_ready()
        except BaseException as e:
            self.__exit__(type(e), e, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.dismiss(error)
        if self._server:
            self._wait_left()
            self._server.close()

    def open(self, folder: Path, agent: NodeAgent) -> None:
        """Let all nodes open the run's folder. agent: this node's."""
        self._folder = folder
        self._send_others("open", folder=str(folder))
        self._agents[0] = agent
        urls = {}
        for node in range(self.nodes.count):
            share = assign_node(self._settings, node, self.nodes.count)
            for i, index in enumerate(share.engines):
                address: Path | str = engine_socket(agent.workspace.work, index)
                if node and not share.part:
                    facts = self._joined[node]
                    address = urls[index] = f"http://{facts['address']}:{facts['ports'][i]}"
                process = self._process(share.log_name(index), node)
                if share.part:
                    self.engines[index].others.append(process)
                else:
                    self.engines[index] = Engine(index, process, address, self.token)
                    if share.parts > 1:
                        self.engines[index].master = self._free_address(node)
                self.engines[index].ended.append(process)
        write_addresses(agent.workspace.work, urls)

    def start_here(self, name: str, command: list[str], environment: dict[str, str]) -> Process:
        """Start a process on this node that logs to ``NAME.log``."""
        process = self.processes[name] = self._process(name, 0)
        process.agent.send("start", name=name, command=command, environment=environment)
        return process

    def start_ranks(self, checkpoint: Path | None) -> None:
        """Start the trainer ranks of all nodes. On the CPUs of a single node, they are forked."""
        fork = self._settings.device == "cpu" and self.nodes.count == 1 and self._settings.parallel.world > 1
        if fork:
            self.processes["ranks"] = self._process("ranks", 0)
        for node in range(self.nodes.count):
            for rank in assign_node(self._settings, node, self.nodes.count).ranks:
                self.processes[f"rank_{rank}"] = self._process(f"rank_{rank}", node)
        port = free_ports(self.address, 1)[0] if self.address else 0
        start = str(checkpoint) if checkpoint else None
        for agent in self._agents.values():
            agent.send("start_ranks", fork=fork, checkpoint=start, address=self.address or "", port=port)

    @property
    def ranks(self) -> list[Process]:
        """The trainer ranks, once they are started."""
        return [process for process in self.processes.values() if process.is_rank]

    def failed(self) -> list[Process]:
        """Processes that exited with a code other than 0, the most likely cause first."""
        dead = [p for p in self.processes.values() if p.code not in (None, 0)]
        # One failure causes others: user errors first, then signals, then the oldest log.
        return sorted(dead, key=lambda p: (user_error(p) is None, (p.code or 0) > 0, _modified(p.log)))

    def pump(self) -> None:
        """Take reports. Raises RunFailed or UserError if a node is lost or has failed."""
        lost = {}
        for node, agent in self._agents.items():
            for message in agent.receive():
                self._handle(node, message)
            if agent.lost:  # now: what ``receive`` of another reads may be the last words of this one
                lost[node] = agent.lost
        for node, why in lost.items():
            problem = f"{self.name(node)} is lost: {why}"
            raise RunFailed(problem, Failure(problem, machine=True, nodes=(self._host(node),)))

    def dismiss(self, error: BaseException | None) -> None:
        """Ask the other nodes to end their processes. error: the reason; None after success."""
        expected = error is None or (isinstance(error, Interrupted) and error.requeue)
        reason = "" if expected else (str(error).splitlines() or [repr(error)])[0]
        self._send_others("end", reason=reason)

    def name(self, node: int) -> str:
        """A node's number and host name, for messages."""
        return (
            f"node {node} ({self._joined[node]['host']})" if node in self._joined else self.nodes.name(node)
        )

    def _host(self, node: int) -> str:
        """A node's host name: Slurm's, if it is known."""
        if self.nodes.hosts:
            return self.nodes.hosts[node]
        return str(self._joined[node]["host"]) if node else own_host()

    def _process(self, name: str, node: int) -> Process:
        node_name = self.name(node) if node else ""
        return Process(name, self._folder, self._agents[node], node_name, self._host(node))

    def _free_address(self, node: int) -> tuple[str, int]:
        """Address and a free port of a node of several."""
        if node:
            return self._joined[node]["address"], self._joined[node]["ports"][-1]
        assert self.address is not None
        return self.address, free_ports(self.address, 1)[0]

    def _send_others(self, kind: str, **facts: Any) -> None:
        for node, agent in self._agents.items():
            if node:
                agent.send(kind, **facts)

    def _handle(self, node: int, message: dict[str, Any]) -> None:
        kind = message["kind"]
        if kind == "ready":
            self._ready.add(node)
        elif kind == "engine":
            engine, agent = self.engines[message["index"]], self._agents[node]
            engine.ended += [process for process in engine.processes if process.agent is agent]
        elif kind == "process":
            self.processes[message["name"]].code = message["code"]
        elif kind == "signal":
            # Slurm signals all nodes at once, so do not count the same signal twice.
            if self._signals.count < message["count"]:
                self._signals.receive(message["number"])
        elif kind == "refused":
            raise UserError(f"{self.name(node)}: {message['message']}")
        elif kind == "failed":
            raise RunFailed(f"{self.name(node)}: {message['message']}")

    def _wait_ready(self) -> None:
        assert self._server is not None
        self._server.wait(self._signals.check)
        expected = resolved_yaml(self._settings)
        for node, facts in sorted(self._joined.items()):
            if facts["settings"] != expected:
                both = map(yaml.safe_load, (expected, facts["settings"]))
                key, (here, there) = next(iter(settings_that_differ(*both).items()))
                raise UserError(
                    f"{self.name(node)} was started with other settings: {key} is {there!r} there and "
                    f"{here!r} here; give all nodes the same config, overrides and working directory"
                )
        self._send_others("check")
        while len(self._ready) < self.nodes.count - 1:
            self._signals.check()
            self.pump()
            time.sleep(0.1)

    def _wait_left(self) -> None:
        """Wait until the other launchers have exited: this one exits last, so its exit code is the job's."""
        end = time.monotonic() + _LEAVE_SECONDS
        others = [self._agents[node] for node in self._joined]
        while time.monotonic() < end and not all(agent.lost for agent in others):
            for agent in others:
                list(agent.receive())
            time.sleep(0.1)


def log_size(log: Path) -> int:
    """Bytes of a log; 0 without one."""
    with suppress(OSError):
        return log.stat().st_size
    return 0


def _modified(path: Path) -> float:
    with suppress(OSError):
        return path.stat().st_mtime
    return 0.0
