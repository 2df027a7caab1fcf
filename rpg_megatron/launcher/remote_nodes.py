"""The other nodes of a run, as the first node's launcher sees them.

Engines and ranks there are objects here that look like its own: what they are asked to do goes over the line
to their node (see ``node_agent.py``), what happens to them comes back the same way.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import yaml

from rpg_megatron.config import Settings, UserError
from rpg_megatron.engine.process import health, put_to_sleep, tail_of
from rpg_megatron.launcher.control_channel import RendezvousServer
from rpg_megatron.launcher.nodes import Nodes, share_of
from rpg_megatron.launcher.rank_env import RankLaunchSpec
from rpg_megatron.launcher.run_dir import LOGS, resolved_yaml
from rpg_megatron.launcher.supervisor import Interrupted, RunFailed, StopSignals

_LEAVE_SECONDS = 30.0
"""How long other nodes have to end what they run; they hurry by themselves after their own grace."""


class RemoteNodes:
    """The lines to all other nodes. Its methods belong to the main thread.

    Entering the context waits until all nodes have come and have found themselves fit: UserError if they do
    not. Leaving it ends what they run.
    """

    def __init__(self, settings: Settings, nodes: Nodes, signals: StopSignals):
        """Raises UserError if this node cannot be reached by the others."""
        self.nodes = nodes
        self.share = share_of(settings, 0, nodes.count)
        self.engines: dict[int, RemoteEngine] = {}
        self.ranks: dict[int, RemoteRank] = {}
        self._settings, self._signals = settings, signals
        self._host = RendezvousServer(settings, nodes)
        self._ready: set[int] = set()
        self._said = ""

    def __enter__(self) -> RemoteNodes:
        try:
            self._gather()
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
        """This node's, in the cluster."""
        return self._host.address

    @property
    def token(self) -> str:
        """What all processes of the run know."""
        return self._host.token

    def _say(self, text: str) -> None:
        if text != self._said:
            self._said = text
            print(text, flush=True)

    def _gather(self) -> None:
        self._host.wait(self._signals.check, self._say)
        ours = resolved_yaml(self._settings)
        for node in sorted(self._host.joined):
            facts = self._host.joined[node]
            if facts["settings"] != ours:
                raise UserError(
                    f"{self.name(node)} was started with other settings: "
                    f"{_difference(yaml.safe_load(ours), yaml.safe_load(facts['settings']))}; give all nodes "
                    "the same config, overrides and working directory"
                )
        for line in self._host.lines.values():
            line.tell("check")
        while len(self._ready) < self.nodes.count - 1:
            self._signals.check()
            self.pump()
            time.sleep(0.1)

    def prepare(self, folder: Path) -> dict[int, str]:
        """Make the nodes ready for the run in that folder; returns the URLs of their engines, by index."""
        logs = folder / LOGS
        for node, line in self._host.lines.items():
            line.tell("open", folder=str(folder))
            share = share_of(self._settings, node, self.nodes.count)
            facts = self._host.joined[node]
            for index, port in zip(share.engines, facts["ports"], strict=True):
                url = f"http://{facts['address']}:{port}"
                log = logs / f"engine_{index}.log"
                self.engines[index] = RemoteEngine(self, node, index, log, url)
            for rank in share.ranks:
                name = f"rank_{rank} on {self.name(node)}"
                log = logs / f"rank_{rank}.log"
                self.ranks[rank] = RemoteRank(name, log, partial(line.tell, "warn", rank=rank))
        return {index: engine.url for index, engine in self.engines.items()}

    def start_ranks(self, start: RankLaunchSpec) -> None:
        """Have the nodes start their trainer ranks."""
        for line in self._host.lines.values():
            line.tell("start_ranks", **asdict(start))

    def name(self, node: int) -> str:
        """A node in words: its number, and the name it goes by."""
        if node in self._host.joined:
            return f"node {node} ({self._host.joined[node]['host']})"
        return self.nodes.name(node)

    def tell(self, node: int, kind: str, **facts: Any) -> None:
        """Say something to one node."""
        self._host.lines[node].tell(kind, **facts)

    def pump(self) -> None:
        """Take in what has come. Raises RunFailed or UserError if a node is gone, or cannot go on."""
        for node, line in self._host.lines.items():
            for message in line.take():
                self._take(node, message)
        for node, line in self._host.lines.items():
            if line.lost:
                raise RunFailed(f"{self.name(node)} is lost: {line.lost}")

    def dismiss(self, error: BaseException | None) -> None:
        """Have everyone end what they run; error: why, None if all is well."""
        well = error is None or (isinstance(error, Interrupted) and error.requeue)
        reason = "" if well else (str(error).splitlines() or [repr(error)])[0]
        for line in self._host.lines.values():
            line.tell("end", reason=reason)

    def close(self) -> None:
        """Wait until the others have left, then hang up. This launcher ends last: its exit code counts."""
        end = time.monotonic() + _LEAVE_SECONDS
        while time.monotonic() < end and not all(line.lost for line in self._host.lines.values()):
            for line in self._host.lines.values():
                line.take()
            time.sleep(0.1)
        self._host.close()

    def _take(self, node: int, message: dict[str, Any]) -> None:
        kind = message["kind"]
        if kind == "ready":
            self._ready.add(node)
        elif kind == "engine":
            self.engines[message["index"]].seen(message["starts"], message["alive"])
        elif kind == "rank":
            self.ranks[message["rank"]].code = message["code"]
        elif kind == "signal":
            # Slurm sends a signal to all nodes at once: it is the same one that came here.
            if self._signals.count < message["count"]:
                self._signals.receive(message["number"])
        elif kind == "refused":
            raise UserError(f"{self.name(node)}: {message['message']}")
        elif kind == "failed":
            raise RunFailed(f"{self.name(node)}: {message['message']}")


class RemoteEngine:
    """An engine on another node; see ``rollout.engine.EngineProcess``, whose part it plays."""

    pid = None
    """It has one, but not on this machine."""

    def __init__(self, team: RemoteNodes, node: int, index: int, log: Path, url: str):
        self.index, self.log, self.url = index, log, url
        self._team, self._node = team, node
        self._starts = 0
        self._alive = False
        self._started = 0.0

    def start(self) -> None:
        """Have it started; does not wait."""
        self._starts += 1
        self._alive = True
        self._started = time.monotonic()
        self._team.tell(self._node, "start_engine", index=self.index, starts=self._starts)

    def seen(self, starts: int, alive: bool) -> None:
        """What its node says of its process number ``starts``."""
        if starts == self._starts:
            self._alive = alive

    def alive(self) -> bool:
        """Whether its process runs, as far as was heard."""
        return self._alive

    def healthy(self, timeout: float = 5.0) -> bool:
        """Whether it answers, to this node."""
        return health(self.url, self._team.token, timeout) == 200

    def sleep(self) -> None:
        """See ``rollout.engine.put_to_sleep``."""
        put_to_sleep(self.url, self._team.token)

    def wait_healthy(self) -> None:
        """Called when it is not: raises UserError with the end of its log."""
        seconds = time.monotonic() - self._started
        problem = f"did not answer within {seconds:.0f} s" if self._alive else "ended while starting"
        raise UserError(
            f"engine {self.index} on {self._team.name(self._node)} {problem}; the end of {self.log}:\n"
            f"{tail_of(self.log)}"
        )

    def stop(self, grace: float = 20.0) -> None:
        """Have it ended, and wait until it is. Raises RunFailed if its node is lost."""
        self._team.tell(self._node, "stop_engine", index=self.index, grace=grace)
        while self._alive:
            self._team.pump()
            time.sleep(0.05)


@dataclass
class RemoteRank:
    """A trainer rank on another node."""

    name: str
    log: Path
    """In the run's folder, which all nodes share."""
    warn: Callable[[], None]
    """Tells it to save and leave."""
    code: int | None = None

    def exit_code(self) -> int | None:
        """None while it runs."""
        return self.code


def _difference(ours: Any, theirs: Any, key: str = "") -> str:
    """The first value in which two settings differ, in words."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for name in [*ours, *(theirs.keys() - ours.keys())]:
            if ours.get(name) != theirs.get(name):
                return _difference(ours.get(name), theirs.get(name), f"{key}.{name}" if key else name)
    return f"{key} is {theirs!r} there and {ours!r} here"
