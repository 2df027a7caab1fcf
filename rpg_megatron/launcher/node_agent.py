"""The launcher of every node but the first: starts and stops engines and ranks as the first one requests.

It reports processes that exit; the first launcher decides how to react. If the connection to the first
launcher is lost, it ends all processes of this node.
"""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from rpg_megatron.config import Settings, UserError
from rpg_megatron.engine.process import (
    EngineProcess,
    call_all,
    engine_socket,
    note_segments,
    stop_engines,
)
from rpg_megatron.launcher.checks import ALL, CheckedRun, check_start
from rpg_megatron.launcher.control_channel import ControlChannel, Endpoint, join
from rpg_megatron.launcher.failures import own_host
from rpg_megatron.launcher.nodes import (
    NodeAssignment,
    Nodes,
    address_towards,
    assign_node,
    free_port,
    own_address,
)
from rpg_megatron.launcher.progress import append_to_log
from rpg_megatron.launcher.rank_env import RANK, RankLaunchSpec, cluster_environment, rank_starts
from rpg_megatron.launcher.run_dir import LOGS, resolved_yaml
from rpg_megatron.launcher.supervisor import RunFailed, StopSignals, Supervisor
from rpg_megatron.system.child import Child, describe_end

GRACE = 15.0
"""Seconds from SIGTERM to SIGKILL."""
_POLL_SECONDS = 0.1
_PROBE_SECONDS = 2.0
_ANSWER_SECONDS = 2.0


def run_node(settings: Settings, nodes: Nodes, signals: StopSignals) -> None:
    """Run this node's processes; returns when the first launcher reports that the run has finished.

    Raises UserError for user errors on this node, RunFailed if the run failed elsewhere, and Interrupted
    after a signal before it is connected to the first launcher; later signals are forwarded to that.
    """
    assignment = assign_node(settings, nodes.rank, nodes.count)
    signals.raising = False
    channel, endpoint = join(settings, nodes, signals.check)
    try:
        try:
            node_endpoint = _join(settings, nodes, assignment, channel, endpoint)
            first = _wait(channel, signals)
            if first["kind"] == "check":
                # Data and rewards are the sampler's, on the first node.
                check_start(CheckedRun(settings, ALL - {"data"}, nodes.rank, nodes.count))
                channel.send("ready")
                first = _wait(channel, signals)
        except UserError as e:
            channel.send("refused", message=str(e))
            raise
        except BaseException as e:
            channel.send("failed", message=f"its launcher failed: {e!r}")
            raise
        if first["kind"] == "open":
            folder = Path(first["folder"])
            with NodeAgent(
                settings, nodes.rank, assignment, node_endpoint, folder, endpoint.token, channel, signals
            ) as agent:
                agent.work()
        elif first["reason"]:
            raise RunFailed(f"stopped by {nodes.name(0)}: {first['reason']}")
    except _ChannelLost as e:
        raise RunFailed(f"{nodes.name(0)}, which leads the run, is lost: {e}") from None
    except _RunEnded as e:
        if str(e):
            raise RunFailed(f"stopped by {nodes.name(0)}: {e}") from None
    finally:
        channel.close()


class _ChannelLost(Exception):
    """The connection to the first launcher is lost; the message says why."""


class _RunEnded(Exception):
    """The first launcher has ended the run; the message is the reason, empty after success."""


@dataclass(frozen=True)
class NodeEndpoint:
    """Addresses at which other nodes reach this one."""

    address: str
    ports: dict[int, int]
    """TCP ports of its engines, by index of the engine."""


def _join(
    settings: Settings, nodes: Nodes, assignment: NodeAssignment, channel: ControlChannel, endpoint: Endpoint
) -> NodeEndpoint:
    """Register with the first launcher."""
    interface = settings.cluster.interface
    address = own_address(interface) if interface else address_towards(endpoint.address, endpoint.port)
    ports = _free_ports(address, len(assignment.engines))
    channel.send(
        "join",
        node=nodes.rank,
        host=nodes.hosts[nodes.rank] if nodes.hosts else socket.gethostname(),
        address=address,
        ports=ports,
        settings=resolved_yaml(settings),
    )
    return NodeEndpoint(address, dict(zip(assignment.engines, ports, strict=True)))


def _free_ports(address: str, count: int) -> list[int]:
    ports: list[int] = []
    while len(ports) < count:
        port = free_port(address)
        if port not in ports:
            ports.append(port)
    return ports


def _wait(channel: ControlChannel, signals: StopSignals) -> dict[str, Any]:
    """Wait for the next message; forwards signals meanwhile. Raises _ChannelLost."""
    sent = 0
    while True:
        sent = _forward_signals(channel, signals, sent)
        # Only one message: later ones are for NodeAgent.
        if (message := channel.receive_one()) is not None:
            return message
        if channel.lost:
            raise _ChannelLost(channel.lost)
        time.sleep(_POLL_SECONDS)


def _forward_signals(channel: ControlChannel, signals: StopSignals, sent: int) -> int:
    """Forward new signals to the first launcher, which decides how to react. Returns their total number."""
    if signals.count > sent:
        channel.send("signal", number=int(signals.number), count=signals.count)
    return signals.count


class NodeAgent:
    """The processes and private folders of this node; leaving the context ends and removes them."""

    def __init__(
        self,
        settings: Settings,
        rank: int,
        assignment: NodeAssignment,
        node_endpoint: NodeEndpoint,
        folder: Path,
        token: str,
        channel: ControlChannel,
        signals: StopSignals,
    ):
        self._settings, self._assignment = settings, assignment
        self._endpoint, self._token = node_endpoint, token
        self._channel, self._signals = channel, signals
        self._logs = folder / LOGS
        self._log = self._logs / f"launcher_{rank}.log"
        append_to_log(self._log, f"node {rank} ({own_host()}) starts")
        self._ranks: dict[int, Child] = {}
        self._engines: dict[int, EngineProcess] = {}
        self._starts: dict[int, int] = {}
        self._reported: set[object] = set()
        self._healthy: set[int] = set()
        self._probed = 0.0
        self._supervisor = Supervisor(self._logs, signals)
        self._workspace = self._supervisor.workspace

    def __enter__(self) -> NodeAgent:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        append_to_log(self._log, f"the run has ended: {error}" if str(error or "") else "the run has ended")
        if error is not None and not isinstance(error, _RunEnded | _ChannelLost):
            self._channel.send("failed", message=f"its launcher failed: {error!r}")
        self._supervisor.close(GRACE)

    def work(self) -> None:
        """Handle messages and report exited processes until the run ends, which raises _RunEnded."""
        sent = 0
        while True:
            sent = _forward_signals(self._channel, self._signals, sent)
            for message in self._channel.receive():
                self._handle(message)
            if self._channel.lost:
                raise _ChannelLost(self._channel.lost)
            self._report()
            time.sleep(_POLL_SECONDS)

    def _handle(self, message: dict[str, Any]) -> None:
        kind = message.pop("kind")
        if kind == "start_engine":
            self._start_engine(message["index"], message["starts"], runner_v1=message["runner_v1"])
        elif kind == "stop_engines":
            stop_engines([self._engines[index] for index in message["indices"]], message["grace"])
        elif kind == "start_ranks":
            work, bridge = self._workspace.work, self._workspace.bridge
            arguments = (work, bridge, self._token, self._endpoint.address, RANK)
            for name, command, environment in rank_starts(
                self._settings, self._assignment, RankLaunchSpec(**message), *arguments
            ):
                child = self._supervisor.start(name, command, environment)
                self._ranks[int(environment["RANK"])] = child
        elif kind == "warn":
            self._ranks[message["rank"]].warn()
        elif kind == "end":
            raise _RunEnded(message["reason"])

    def _start_engine(self, index: int, starts: int, *, runner_v1: bool) -> None:
        if index not in self._engines:
            self._engines[index] = EngineProcess(
                self._settings,
                index,
                socket=engine_socket(self._workspace.work, index),
                log=self._logs / f"engine_{index}.log",
                bridge_dir=self._workspace.bridge,
                token=self._token,
                listen=(self._endpoint.address, self._endpoint.ports[index]),
                gpus=self._assignment.gpus(self._settings, index),
                extra=cluster_environment(self._endpoint.address),
            )
        engine = self._engines[index]
        engine.stop(grace=0)  # ends remaining processes of a dead engine
        self._healthy.discard(index)
        if runner_v1:
            engine.use_runner_v1()
        engine.start()
        append_to_log(self._log, f"engine {index} starts, process {engine.pid}")
        self._supervisor.adopt(engine)
        self._starts[index] = starts

    def _report(self) -> None:
        for rank, child in self._ranks.items():
            code = child.exit_code()
            if code is not None and rank not in self._reported:
                self._reported.add(rank)
                append_to_log(self._log, f"{child.name} {describe_end(child) if code else 'has ended'}")
                self._channel.send("rank", rank=rank, code=code)
        for index, engine in self._engines.items():
            incarnation = f"engine {index}, {self._starts[index]}"
            if incarnation not in self._reported and not engine.alive():
                self._reported.add(incarnation)
                append_to_log(self._log, f"engine {index} has ended")
                self._channel.send("engine", index=index, starts=self._starts[index], alive=False)
        if len(self._healthy) < len(self._engines) and time.monotonic() - self._probed > _PROBE_SECONDS:
            self._probe()

    def _probe(self) -> None:
        """Register the shared memory of engines that are up with the reaper."""
        self._probed = time.monotonic()
        probed = [e for index, e in self._engines.items() if index not in self._healthy and e.alive()]
        answers = call_all(probed, lambda engine: engine.healthy(_ANSWER_SECONDS))
        note_segments(probed)
        up = [engine for engine, ok in zip(probed, answers, strict=True) if ok]
        self._healthy |= {engine.index for engine in up}
        self._supervisor.guard_shared_memory(up)
