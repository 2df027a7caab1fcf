"""The other nodes of a run, as seen by the first node's launcher.

Their engines and ranks are proxy objects with the interface of local ones. Requests are sent to the node over
the control channel (see ``node_agent.py``), and status is received the same way.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import yaml

from rpg_megatron.config import Settings, UserError
from rpg_megatron.engine.process import health, put_to_sleep
from rpg_megatron.launcher.control_channel import RendezvousServer
from rpg_megatron.launcher.failures import Failure
from rpg_megatron.launcher.nodes import Nodes, assign_node
from rpg_megatron.launcher.rank_env import RankLaunchSpec
from rpg_megatron.launcher.run_dir import LOGS, resolved_yaml
from rpg_megatron.launcher.supervisor import Interrupted, RunFailed, StopSignals
from rpg_megatron.system.child import tail_of

_LEAVE_SECONDS = 30.0
"""How long to wait for other nodes to end their processes; they send SIGKILL after a grace period."""


class RemoteNodes:
    """The control channels to all other nodes. Call its methods from the main thread only.

    Entering the context waits until all nodes have joined and passed their checks; raises RunFailed and
    UserError if they do not. Leaving it ends their processes.
    """

    def __init__(self, settings: Settings, nodes: Nodes, signals: StopSignals):
        """Raises UserError if the other nodes cannot reach this one."""
        self.nodes = nodes
        self.assignment = assign_node(settings, 0, nodes.count)
        self.engines: dict[int, RemoteEngine] = {}
        self.ranks: dict[int, RemoteRank] = {}
        self._settings, self._signals = settings, signals
        self._server = RendezvousServer(settings, nodes)
        self._ready: set[int] = set()
        self._last_line = ""

    def __enter__(self) -> RemoteNodes:
        try:
            self._wait_ready()
        except BaseException as e:
            self.__exit__(type(e), e, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.dismiss(error)
        self.close()

    @property
    def address(self) -> str:
        """Address of this node in the cluster."""
        return self._server.address

    @property
    def token(self) -> str:
        """The run's secret, shared by all of its processes."""
        return self._server.token

    def _print_once(self, text: str) -> None:
        if text != self._last_line:
            self._last_line = text
            print(text, flush=True)

    def _wait_ready(self) -> None:
        self._server.wait(self._signals.check, self._print_once)
        expected = resolved_yaml(self._settings)
        for node in sorted(self._server.joined):
            actual = self._server.joined[node]["settings"]
            if actual != expected:
                raise UserError(
                    f"{self.name(node)} was started with other settings: "
                    f"{_difference(yaml.safe_load(expected), yaml.safe_load(actual))}; give all nodes "
                    "the same config, overrides and working directory"
                )
        self.send_all("check")
        while len(self._ready) < self.nodes.count - 1:
            self._signals.check()
            self.pump()
            time.sleep(0.1)

    def prepare(self, folder: Path) -> dict[int, str]:
        """Let the nodes open the run's folder; returns index of an engine -> its URL."""
        logs = folder / LOGS
        for node, channel in self._server.channels.items():
            channel.send("open", folder=str(folder))
            assignment = assign_node(self._settings, node, self.nodes.count)
            facts = self._server.joined[node]
            for index, port in zip(assignment.engines, facts["ports"], strict=True):
                url = f"http://{facts['address']}:{port}"
                log = logs / f"engine_{index}.log"
                self.engines[index] = RemoteEngine(self, node, index, log, url)
            for rank in assignment.ranks:
                name = f"rank_{rank} on {self.name(node)}"
                log = logs / f"rank_{rank}.log"
                warn = partial(channel.send, "warn", rank=rank)
                start = log.stat().st_size if log.exists() else 0
                self.ranks[rank] = RemoteRank(name, log, warn, host=self.host(node), log_start=start)
        return {index: engine.url for index, engine in self.engines.items()}

    def start_ranks(self, spec: RankLaunchSpec) -> None:
        """Ask the nodes to start their trainer ranks."""
        self.send_all("start_ranks", **asdict(spec))

    def send_stop(self, engines: Sequence[RemoteEngine], grace: float) -> None:
        """Ask the nodes to stop engines. grace: seconds from SIGTERM to SIGKILL."""
        for node in {engine.node for engine in engines}:
            indices = [engine.index for engine in engines if engine.node == node]
            self.send(node, "stop_engines", indices=indices, grace=grace)

    def wait_stopped(self, engines: Sequence[RemoteEngine]) -> None:
        """Wait until engines have ended. Raises RunFailed if a node is lost."""
        while any(engine.alive() for engine in engines):
            self.pump()
            time.sleep(0.05)

    def name(self, node: int) -> str:
        """A node's number and host name, for messages."""
        if node in self._server.joined:
            return f"node {node} ({self._server.joined[node]['host']})"
        return self.nodes.name(node)

    def host(self, node: int) -> str:
        """A node's host name: Slurm's, if it is known."""
        return self.nodes.hosts[node] if self.nodes.hosts else str(self._server.joined[node]["host"])

    def send(self, node: int, kind: str, **facts: Any) -> None:
        """Send a message to one node."""
        self._server.channels[node].send(kind, **facts)

    def send_all(self, kind: str, **facts: Any) -> None:
        """Send a message to every other node."""
        for node in self._server.channels:
            self.send(node, kind, **facts)

    def pump(self) -> None:
        """Process received messages. Raises RunFailed or UserError if a node is lost or has failed."""
        for node, channel in self._server.channels.items():
            for message in channel.receive():
                self._handle(node, message)
        for node, channel in self._server.channels.items():
            if channel.lost:
                problem = f"{self.name(node)} is lost: {channel.lost}"
                raise RunFailed(problem, Failure(problem, machine=True, nodes=(self.host(node),)))

    def dismiss(self, error: BaseException | None) -> None:
        """Ask all nodes to end their processes. error: the reason; None after success."""
        expected = error is None or (isinstance(error, Interrupted) and error.requeue)
        reason = "" if expected else (str(error).splitlines() or [repr(error)])[0]
        self.send_all("end", reason=reason)

    def close(self) -> None:
        """Wait until the other launchers have exited, then close. This launcher exits last, so its exit code
        is the job's.
        """
        end = time.monotonic() + _LEAVE_SECONDS
        while time.monotonic() < end and not all(channel.lost for channel in self._server.channels.values()):
            for channel in self._server.channels.values():
                channel.receive()
            time.sleep(0.1)
        self._server.close()

    def _handle(self, node: int, message: dict[str, Any]) -> None:
        kind = message["kind"]
        if kind == "ready":
            self._ready.add(node)
        elif kind == "engine":
            self.engines[message["index"]].update(message["starts"], message["alive"])
        elif kind == "rank":
            self.ranks[message["rank"]].code = message["code"]
        elif kind == "signal":
            # Slurm signals all nodes at once, so do not count the same signal twice.
            if self._signals.count < message["count"]:
                self._signals.receive(message["number"])
        elif kind == "refused":
            raise UserError(f"{self.name(node)}: {message['message']}")
        elif kind == "failed":
            raise RunFailed(f"{self.name(node)}: {message['message']}")


class RemoteEngine:
    """An engine on another node. Methods have the meaning of those of ``engine.process.EngineProcess``."""

    def __init__(self, nodes: RemoteNodes, node: int, index: int, log: Path, url: str):
        self.index, self.log, self.url = index, log, url
        self.opened: IO[bytes] | None = None
        self._nodes, self.node = nodes, node
        self._starts = 0
        self._runner_v1 = False
        self._alive = False
        self._started = 0.0

    @property
    def host(self) -> str:
        """Name of its node."""
        return self._nodes.host(self.node)

    def use_runner_v1(self) -> None:
        """See ``EngineProcess.use_runner_v1``."""
        self._runner_v1 = True

    def start(self) -> None:
        """Ask the node to start it; does not wait."""
        self._starts += 1
        self._alive = True
        self._started = time.monotonic()
        facts = {"index": self.index, "starts": self._starts, "runner_v1": self._runner_v1}
        self._nodes.send(self.node, "start_engine", **facts)

    def update(self, starts: int, alive: bool) -> None:
        """Record what the node reported about process number ``starts`` of this engine."""
        if starts == self._starts:
            self._alive = alive

    def alive(self) -> bool:
        """Whether its process runs, according to the last report."""
        return self._alive

    def healthy(self, timeout: float = 5.0) -> bool:
        """Whether it answers requests from this node."""
        return health(self.url, self._nodes.token, timeout) == 200

    def sleep(self) -> None:
        """See ``engine.process.put_to_sleep``."""
        put_to_sleep(self.url, self._nodes.token)

    def wait_healthy(self) -> None:
        """Called when it is unhealthy; raises UserError with the end of its log."""
        seconds = time.monotonic() - self._started
        problem = f"did not answer within {seconds:.0f} s" if self._alive else "ended while starting"
        raise UserError(
            f"engine {self.index} on {self._nodes.name(self.node)} {problem}; the end of {self.log}:\n"
            f"{tail_of(self.log)}"
        )


@dataclass
class RemoteRank:
    """A trainer rank on another node."""

    name: str
    log: Path
    """In the run's folder, which is shared by all nodes."""
    warn: Callable[[], None]
    """Asks the rank to save and exit."""
    code: int | None = None
    opened: IO[bytes] | None = None
    host: str = ""
    """Name of its node."""
    log_start: int = 0

    def exit_code(self) -> int | None:
        """None while it runs."""
        return self.code


def _difference(here: Any, there: Any, key: str = "") -> str:
    """Describes the first value in which two settings differ."""
    if isinstance(here, dict) and isinstance(there, dict):
        for name in [*here, *(there.keys() - here.keys())]:
            if here.get(name) != there.get(name):
                return _difference(here.get(name), there.get(name), f"{key}.{name}" if key else name)
    return f"{key} is {there!r} there and {here!r} here"
