"""The launcher of any node but the first: it runs this node's engines and ranks as the first one says.

What ends here is reported there; what to do about it is decided there. If the line to the first launcher
breaks, everything here is ended.
"""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from rpg_megatron.config import Settings, UserError
from rpg_megatron.engine.process import EngineProcess, engine_socket
from rpg_megatron.launcher.control_channel import ControlChannel, Endpoint, join
from rpg_megatron.launcher.nodes import (
    NodeAssignment,
    Nodes,
    address_towards,
    free_port,
    own_address,
    share_of,
)
from rpg_megatron.launcher.preflight import check
from rpg_megatron.launcher.rank_env import RANK, RankLaunchSpec, cluster_environment, rank_starts
from rpg_megatron.launcher.reaper import Reaper
from rpg_megatron.launcher.run_dir import LOGS, resolved_yaml
from rpg_megatron.launcher.scratch_dirs import create_workspace
from rpg_megatron.launcher.supervisor import Child, StopSignals, Supervisor
from rpg_megatron.system import process_groups

GRACE = 15.0
"""Seconds that children have to leave after SIGTERM."""
_TURN_SECONDS = 0.1
_PROBE_SECONDS = 2.0


class Ended(Exception):
    """The first launcher ended the run, and not because it was done; or it is gone."""


def follow(settings: Settings, nodes: Nodes, signals: StopSignals) -> None:
    """Do this node's part of the run; returns when the first launcher says that it is over.

    Raises UserError for what the user can mend here, Ended if the run ended badly elsewhere, Interrupted
    after a signal that came before there was a line to the first launcher: later ones are passed on to it.
    """
    share = share_of(settings, nodes.rank, nodes.count)
    signals.raising = False
    line, place = join(settings, nodes, signals.check)
    try:
        try:
            seat = _join(settings, nodes, share, line, place)
            first = _wait(line, signals)
            if first["kind"] == "check":
                check(settings, share)
                line.tell("ready")
                first = _wait(line, signals)
        except UserError as e:
            line.tell("refused", message=str(e))
            raise
        except BaseException as e:
            line.tell("failed", message=f"its launcher failed: {e!r}")
            raise
        if first["kind"] == "open":
            with NodeAgent(settings, share, seat, Path(first["folder"]), place.token, line, signals) as node:
                node.work()
        elif first["reason"]:
            raise Ended(f"ended by {nodes.name(0)}: {first['reason']}")
    except _LineLost as e:
        raise Ended(f"{nodes.name(0)}, which leads the run, is lost: {e}") from None
    except _RunOver as e:
        if str(e):
            raise Ended(f"ended by {nodes.name(0)}: {e}") from None
    finally:
        line.close()


class _LineLost(Exception):
    """The first launcher is gone; the message says how that was noticed."""


class _RunOver(Exception):
    """The first launcher says that the run is over; the message says why, if all is not well."""


@dataclass(frozen=True)
class NodeEndpoint:
    """Where this node is reached."""

    address: str
    ports: dict[int, int]
    """Of its engines, by index."""


def _join(
    settings: Settings, nodes: Nodes, share: NodeAssignment, line: ControlChannel, place: Endpoint
) -> NodeEndpoint:
    """Tell the first launcher who is here."""
    interface = settings.cluster.interface
    address = own_address(interface) if interface else address_towards(place.address, place.port)
    ports = _free_ports(address, len(share.engines))
    line.tell(
        "join",
        node=nodes.rank,
        host=nodes.hosts[nodes.rank] if nodes.hosts else socket.gethostname(),
        address=address,
        ports=ports,
        settings=resolved_yaml(settings),
    )
    return NodeEndpoint(address, dict(zip(share.engines, ports, strict=True)))


def _free_ports(address: str, count: int) -> list[int]:
    found: list[int] = []
    while len(found) < count:
        port = free_port(address)
        if port not in found:
            found.append(port)
    return found


def _wait(line: ControlChannel, signals: StopSignals) -> dict[str, Any]:
    """The next message; signals are passed on meanwhile. Raises _LineLost."""
    told = 0
    while True:
        told = _pass_on(line, signals, told)
        # One at a time: the messages behind it are for who comes next.
        if (message := line.take_one()) is not None:
            return message
        if line.lost:
            raise _LineLost(line.lost)
        time.sleep(_TURN_SECONDS)


def _pass_on(line: ControlChannel, signals: StopSignals, told: int) -> int:
    """Tell the first launcher of signals that have come here; what to do about them is its business."""
    if signals.count > told:
        line.tell("signal", number=int(signals.number), count=signals.count)
    return signals.count


class NodeAgent:
    """Everything this node holds while the run is under way; leaving the context gives it all back."""

    def __init__(
        self,
        settings: Settings,
        share: NodeAssignment,
        seat: NodeEndpoint,
        folder: Path,
        token: str,
        line: ControlChannel,
        signals: StopSignals,
    ):
        self._settings, self._share, self._seat, self._token = settings, share, seat, token
        self._line, self._signals = line, signals
        self._logs = folder / LOGS
        self._ranks: dict[int, Child] = {}
        self._engines: dict[int, EngineProcess] = {}
        self._starts: dict[int, int] = {}
        self._reported: set[object] = set()
        self._healthy: set[int] = set()
        self._probed = 0.0
        self._guardian = Reaper()
        try:
            self._workspace = create_workspace()
        except BaseException:
            self._guardian.dismiss()
            raise
        self._guardian.guard_path(self._workspace.work)
        self._guardian.guard_path(self._workspace.bridge)
        self._supervisor = Supervisor(self._guardian, self._logs)

    def __enter__(self) -> NodeAgent:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if error is not None and not isinstance(error, _RunOver | _LineLost):
            self._line.tell("failed", message=f"its launcher failed: {error!r}")
        seen = self._signals.count
        self._supervisor.stop(GRACE, hurry=lambda: self._signals.count > seen)
        self._workspace.remove()
        self._guardian.dismiss()

    def work(self) -> None:
        """Do what comes over the line, and report what ends, until the run is over: raises _RunOver."""
        told = 0
        while True:
            told = _pass_on(self._line, self._signals, told)
            for message in self._line.take():
                self._obey(message)
            if self._line.lost:
                raise _LineLost(self._line.lost)
            self._report()
            time.sleep(_TURN_SECONDS)

    def _obey(self, message: dict[str, Any]) -> None:
        kind = message.pop("kind")
        if kind == "start_engine":
            self._start_engine(message["index"], message["starts"])
        elif kind == "stop_engine":
            self._engines[message["index"]].stop(message["grace"])
        elif kind == "start_ranks":
            work, bridge = self._workspace.work, self._workspace.bridge
            places = (work, bridge, self._token, self._seat.address, RANK)
            for name, command, environment in rank_starts(
                self._settings, self._share, RankLaunchSpec(**message), *places
            ):
                child = self._supervisor.start(name, command, environment)
                self._ranks[int(environment["RANK"])] = child
        elif kind == "warn":
            self._ranks[message["rank"]].warn()
        elif kind == "end":
            raise _RunOver(message["reason"])

    def _start_engine(self, index: int, starts: int) -> None:
        if index not in self._engines:
            self._engines[index] = EngineProcess(
                self._settings,
                index,
                socket=engine_socket(self._workspace.work, index),
                log=self._logs / f"engine_{index}.log",
                bridge_dir=self._workspace.bridge,
                token=self._token,
                listen=(self._seat.address, self._seat.ports[index]),
                gpus=self._share.gpus(self._settings, index),
                extra=cluster_environment(self._seat.address),
            )
        engine = self._engines[index]
        engine.stop(grace=0)  # of a process that died, its group
        self._healthy.discard(index)
        engine.start()
        self._supervisor.adopt(engine)
        self._starts[index] = starts

    def _report(self) -> None:
        for rank, child in self._ranks.items():
            code = child.exit_code()
            if code is not None and rank not in self._reported:
                self._reported.add(rank)
                self._line.tell("rank", rank=rank, code=code)
        for index, engine in self._engines.items():
            incarnation = f"engine {index}, {self._starts[index]}"
            if incarnation not in self._reported and not engine.alive():
                self._reported.add(incarnation)
                self._line.tell("engine", index=index, starts=self._starts[index], alive=False)
        if len(self._healthy) < len(self._engines) and time.monotonic() - self._probed > _PROBE_SECONDS:
            self._probe()

    def _probe(self) -> None:
        """Let the guardian know what vLLM has in shared memory, as soon as it is all there."""
        self._probed = time.monotonic()
        for index, engine in self._engines.items():
            if index not in self._healthy and engine.alive() and engine.healthy(timeout=2.0):
                self._healthy.add(index)
                for segment in process_groups.leftover_segments([engine.pid] if engine.pid else []):
                    self._guardian.guard_path(segment)
