"""The agent of a node: starts and ends its processes as the first launcher asks, and reports their ends.

On the first node it is a part of the launcher, elsewhere it is the launcher: the first one decides how to
react. If the connection to that is lost, it ends all processes of its node. If the launcher is killed, the
reaper does.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from rpg_megatron.config import Settings, UserError
from rpg_megatron.engine.process import EngineProcess, engine_socket, note_segments, stop_engines
from rpg_megatron.launcher.checks import ALL, CheckedRun, check_start
from rpg_megatron.launcher.nodes import (
    Nodes,
    address_towards,
    assign_node,
    free_ports,
    own_address,
    own_host,
)
from rpg_megatron.launcher.progress import append_to_log
from rpg_megatron.launcher.rank_env import (
    RANK,
    NodeSpec,
    cluster_environment,
    forked_start,
    rank_starts,
)
from rpg_megatron.launcher.reaper import Reaper
from rpg_megatron.launcher.run_dir import LOGS, resolved_yaml
from rpg_megatron.launcher.scratch_dirs import create_workspace
from rpg_megatron.launcher.stopping import RunFailed, StopSignals
from rpg_megatron.system import process_groups
from rpg_megatron.system.child import Child, describe_end, start_child
from rpg_megatron.system.forked_ranks import STATUS, ForkedRank

if TYPE_CHECKING:
    from rpg_megatron.launcher.control_channel import ControlChannel

GRACE = 15.0
"""Seconds from SIGTERM to SIGKILL."""
_POLL_SECONDS = 0.1
_SEGMENTS_SECONDS = 0.5


class NodeAgent:
    """The processes and private folders of a node; ``close`` ends and removes them.

    ``send`` and ``receive`` are those of a channel from the first launcher, which calls them on its own node.
    Call them from the main thread only.
    """

    lost = ""

    def __init__(self, spec: NodeSpec, signals: StopSignals):
        """Raises UserError if the private folders cannot be created."""
        self._spec, self._logs, self._signals = spec, spec.folder / LOGS, signals
        self.opened: dict[str, IO[bytes] | None] = {}
        """Logs as they were when their processes started, by name without ``.log``."""
        self._processes: dict[str, Child | ForkedRank] = {}
        self._engines: dict[int, EngineProcess] = {}
        self._reported: set[str] = set()
        self._starting: set[int] = set()
        """Engines that have not answered yet."""
        self._looked = 0.0
        self.forking = 0
        """Number of ranks that are still to be forked."""
        self._reaper = Reaper()
        try:
            self.workspace = create_workspace()
        except BaseException:
            self._reaper.dismiss()
            raise
        for folder in (self.workspace.work, self.workspace.bridge):
            self._reaper.guard_path(folder)

    def close(self) -> None:
        """End all processes and remove the private folders.

        Engines get SIGTERM and, after ``GRACE`` seconds or another signal to this process, SIGKILL. Other
        children get SIGKILL at once: they hold no resources, and SIGTERM asks ranks to save.
        """
        count, engines = self._signals.count, list(self._engines.values())
        children = [process for process in self._processes.values() if isinstance(process, Child)]
        pids = [child.pid for child in children]
        groups = pids + [engine.pid for engine in engines if engine.pid is not None]
        with ThreadPoolExecutor(max_workers=2) as pool:
            work = [pool.submit(process_groups.end_groups, pids)]
            work += [pool.submit(stop_engines, engines, GRACE)]
            while not all(future.done() for future in work):
                if self._signals.count > count:
                    process_groups.send(groups, signal.SIGKILL)
                time.sleep(0.05)
        for child in children:
            child.reap()
        for group in groups:
            self._reaper.drop_group(group)
        for future in work:
            future.result()
        self.workspace.remove()
        self._reaper.dismiss()

    def send(self, kind: str, **facts: Any) -> None:
        """Do what a message asks. Raises UserError if an engine cannot be started."""
        requests: dict[str, Callable[..., None]] = {
            "start": self._start,
            "start_engine": self._start_engine,
            "engine_is_up": self._engine_is_up,
            "stop_engines": self._stop_engines,
            "start_ranks": self._start_ranks,
            "warn": lambda name: self._processes[name].warn(),
        }
        requests[kind](**facts)

    def receive(self) -> Iterator[dict[str, Any]]:
        """The ends of processes since the last call."""
        if self.forking and (status := self.workspace.work / STATUS).exists():
            parent = self._processes["ranks"]
            assert isinstance(parent, Child)
            for rank in range(self.forking):
                forked = ForkedRank(rank, self._logs, status, parent)
                self._processes[forked.name], self.opened[forked.name] = forked, forked.opened
            self.forking = 0
        for name, process in self._processes.items():
            if name not in self._reported and (code := process.exit_code()) is not None:
                self._reported.add(name)
                self.note(f"{name} {describe_end(process) if code else 'has ended'}")
                yield {"kind": "process", "name": name, "code": code}
        for index, engine in self._engines.items():
            if f"engine_{index}" not in self._reported and not engine.alive():
                self._reported.add(f"engine_{index}")
                self.note(f"engine {index} has ended")
                yield {"kind": "engine", "index": index}
        if self._starting and time.monotonic() > self._looked + _SEGMENTS_SECONDS:
            self._looked = time.monotonic()
            note_segments(self._engines[index] for index in self._starting)

    def note(self, line: str) -> None:
        """Log what happens. The first node's launcher logs what it shows."""
        if self._spec.rank:
            append_to_log(self._logs / f"launcher_{self._spec.rank}.log", line)

    def _start(self, name: str, command: list[str], environment: dict[str, str]) -> None:
        log, environment = self._logs / f"{name}.log", environment | {"PYTHONUNBUFFERED": "1"}
        child = start_child(name, command, environment, log)
        self._reaper.guard_group(child.pid)
        self._processes[name], self.opened[name] = child, child.opened

    def _start_ranks(self, fork: bool, **facts: Any) -> None:
        starts = list(rank_starts(self._spec, self.workspace, **facts))
        if fork:
            self._start("ranks", *forked_start(starts, self._logs))
            self.forking = len(starts)
        else:
            for start in starts:
                self._start(*start)

    def _start_engine(self, index: int, runner_v1: bool, master: tuple[str, int] | None) -> None:
        spec, place = self._spec, self._spec.assignment
        name = place.log_name(index)
        if index not in self._engines:
            self._engines[index] = EngineProcess(
                spec.engine_settings or spec.settings,
                index,
                socket=engine_socket(self.workspace.work, index),
                log=self._logs / f"{name}.log",
                bridge_dir=self.workspace.bridge,
                token=spec.token,
                weights=spec.weights,
                listen=(spec.address, spec.ports[index]) if spec.address and spec.ports else None,
                gpus=place.gpus(spec.settings, index),
                extra=cluster_environment(spec.address) if spec.address else None,
            )
            if master is not None:
                self._engines[index].span(place.parts, place.part, master)
        engine = self._engines[index]
        if runner_v1:
            engine.use_runner_v1()
        engine.start()
        self.note(f"engine {index} starts, process {engine.pid}")
        if engine.pid is not None:
            self._reaper.guard_group(engine.pid)
        self._starting.add(index)
        self._reported.discard(f"engine_{index}")
        self.opened[name] = engine.opened

    def _engine_is_up(self, index: int) -> None:
        """It has answered. From now on its shared memory is removed also if this launcher is killed: then the
        memory maps of its workers may be gone.
        """
        engine = self._engines[index]
        engine.note_answer()
        self._starting.discard(index)
        note_segments([engine])
        for segment in engine.segments:
            self._reaper.guard_path(segment)
        if engine.segments:  # the next job removes them if the reaper is killed too
            self.workspace.note_segments(engine.segments)

    def _stop_engines(self, indices: Sequence[int], grace: float) -> None:
        """End engines with all their processes, also those that a dead engine has left."""
        engines = [self._engines[index] for index in indices if index in self._engines]
        groups = [engine.pid for engine in engines if engine.pid is not None]
        stop_engines(engines, grace)
        for group in groups:
            self._reaper.drop_group(group)


# -- the launcher of a node that is not the first ------------------------------------------------------------


class _ChannelLost(Exception):
    """The connection to the first launcher is lost; the message says why."""


class _RunEnded(Exception):
    """The first launcher has ended the run; the message is the reason, empty after success."""


def run_node(settings: Settings, nodes: Nodes, signals: StopSignals) -> None:
    """Run this node's processes; returns when the first launcher reports that the run has finished.

    Raises UserError for user errors on this node, RunFailed if the run failed elsewhere, and Interrupted
    after a signal before it is connected to the first launcher; later signals are forwarded to that.
    """
    from rpg_megatron.launcher.control_channel import join  # imports ZeroMQ

    signals.raising = False
    channel, endpoint = join(settings, nodes, signals.check)
    requests = _requests(channel, signals)
    with contextlib.ExitStack() as stack:
        stack.callback(channel.close)
        try:
            interface, assignment = settings.cluster.interface, assign_node(settings, nodes.rank, nodes.count)
            towards = (endpoint.address, endpoint.port)
            address = own_address(interface) if interface else address_towards(*towards)
            ports = free_ports(address, len(assignment.engines) + 1)  # one more for workers on other nodes
            host = nodes.hosts[nodes.rank] if nodes.hosts else socket.gethostname()
            place = {"nodes": nodes.count, "host": host, "address": address, "ports": ports}
            channel.send("join", **place, settings=resolved_yaml(settings))
            _next("check", requests)
            # Data and rewards are the sampler's, on the first node.
            check_start(CheckedRun(settings, ALL - {"data"}, nodes.rank, nodes.count))
            channel.send("ready")
            folder = Path(_next("open", requests)["folder"])
            by_index = dict(zip(assignment.engines, ports, strict=False))
            spec = NodeSpec(
                settings, folder, endpoint.token, assignment, nodes.rank, address, by_index, rank_module=RANK
            )
            agent = stack.enter_context(contextlib.closing(NodeAgent(spec, signals)))
            agent.note(f"node {nodes.rank} ({own_host()}) starts")
            _serve(agent, channel, requests)
        except _ChannelLost as e:
            raise RunFailed(f"{nodes.name(0)}, which leads the run, is lost: {e}") from None
        except _RunEnded as e:
            if str(e):
                raise RunFailed(f"stopped by {nodes.name(0)}: {e}") from None
        except UserError as e:
            channel.send("refused", message=str(e))
            raise
        except BaseException as e:
            channel.send("failed", message=f"its launcher failed: {e!r}")
            raise


def _requests(channel: ControlChannel, signals: StopSignals) -> Iterator[dict[str, Any] | None]:
    """The first launcher's messages, and None whenever there are no more. Forwards signals to it, which
    decides how to react. Raises _ChannelLost and _RunEnded.
    """
    while True:
        if signals.count > signals.forwarded:
            signals.forwarded = signals.count
            channel.send("signal", number=int(signals.number), count=signals.count)
        for message in channel.receive():
            if message["kind"] == "end":
                raise _RunEnded(message["reason"])
            yield message
        if channel.lost:
            raise _ChannelLost(channel.lost)
        yield None
        time.sleep(_POLL_SECONDS)


def _next(kind: str, requests: Iterator[dict[str, Any] | None]) -> dict[str, Any]:
    """Wait for the message of this kind; later ones stay."""
    return next(message for message in requests if message and message["kind"] == kind)


def _serve(agent: NodeAgent, channel: ControlChannel, requests: Iterator[dict[str, Any] | None]) -> None:
    """Do what the first launcher asks until the run ends, which raises _RunEnded."""
    try:
        for message in requests:
            if message is not None:
                agent.send(**message)
                continue
            for report in agent.receive():
                channel.send(**report)
    except BaseException as e:
        agent.note(f"the run has ended: {e}" if str(e) else "the run has ended")
        raise
