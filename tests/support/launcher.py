"""A whole launcher in a process of its own, with stand-ins for engine, sampler and ranks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import psutil

from rpg_megatron.config import Settings
from rpg_megatron.launcher.cluster import Cluster
from rpg_megatron.launcher.node_agent import NodeAgent
from rpg_megatron.launcher.nodes import NodeAssignment, Nodes
from rpg_megatron.launcher.rank_env import NodeSpec
from rpg_megatron.launcher.stopping import StopSignals
from rpg_megatron.system import process_groups
from tests.support.commands import without_notice

WAITS = """
import json, os, pathlib, signal, subprocess, sys, time
here = pathlib.Path(__file__).parent
def until(condition):
    while not condition():
        time.sleep(0.02)
def gone(name):
    try:
        return "zombie" in pathlib.Path("/proc", (here / f"pid_{name}").read_text(), "status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
"""
"""What a stand-in's plan may wait for: a condition; the end of a stand-in that has begun."""

# Each stand-in has a grandchild that ignores SIGTERM, as a vLLM worker in the middle of a step does.
STAND_IN = (
    WAITS
    + """
def grandchild():
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    return subprocess.Popen([sys.executable, "-I", "-S", "-c", code]).pid
def act(name):
    (here / f"pid_{name}").write_text(str(os.getpid()))
    with open(here / "pids", "a") as f:
        f.write(" ".join(map(str, [os.getpid(), grandchild()])) + "\\n")
    plan = json.loads((here / "plan.json").read_text()).get(name, "sleep")
    if plan != "sleep":
        until(lambda: len((here / "pids").read_text().split()) >= 8)  # all are up
        exec(plan)
    time.sleep(600)
"""
)

STAND_IN_RANK = """
import json, os, sys, time
from pathlib import Path
from rpg_megatron.system.forked_ranks import STATUS, fork_ranks
if (logs := os.environ.get("RPG_RANK_LOGS")) is not None:
    exec(json.loads(Path(__file__).with_name("plan.json").read_text()).get("ranks", ""))
    world, status = int(os.environ["WORLD_SIZE"]), Path(sys.argv[2]) / STATUS
    os.environ["RANK"] = str(fork_ranks(Path(logs), world, status))
import stand_in
stand_in.act("rank_" + os.environ["RANK"])
"""
"""The parent of the ranks does what the plan says of ``ranks``, then forks them."""

LIMIT = 300.0
"""Seconds that something may take on a busy machine before a test fails."""


DRIVER = """
import os, sys
from rpg_megatron import cli
from rpg_megatron.system.terminal import exit_on_interrupt
with exit_on_interrupt():
    from rpg_megatron.launcher import cluster, node_agent, rank_env, run as launcher
    from rpg_megatron.commands import rank_job

class Engine(node_agent.EngineProcess):
    def __init__(self, settings, index, *, bridge_dir, **rest):
        super().__init__(settings, index, bridge_dir=bridge_dir, **rest)
        self._command = [sys.executable, os.path.join(os.path.dirname(__file__), "stand_in_engine.py")]
        (bridge_dir / "weights").write_text("x")

node_agent.EngineProcess, launcher.RANK, rank_env.SAMPLER = Engine, "stand_in_rank", "stand_in_sampler"
cluster.Engine.healthy = lambda self, timeout=5.0: self.runs
rank_job.RANK = "stand_in_rank"
launcher.GRACE = node_agent.GRACE = 0.3
cli.main()
"""


class Launch:
    """A launcher in a process of its own, with stand-ins that follow a plan."""

    def __init__(
        self,
        folder: Path,
        config: Path,
        *options: str,
        command: str = "train",
        streams: dict[str, Any] | None = None,
        prefix: tuple[str, ...] = (),
        **plan: str,
    ):
        """streams: standard streams other than pipes. prefix: a command that starts the launcher."""
        self.folder = folder
        (folder / "stand_in.py").write_text(STAND_IN)
        for name in ("engine", "sampler"):
            (folder / f"stand_in_{name}.py").write_text(f"import stand_in; stand_in.act({name!r})")
        (folder / "stand_in_rank.py").write_text(STAND_IN_RANK)
        (folder / "driver.py").write_text(DRIVER)
        (folder / "plan.json").write_text(json.dumps(plan))
        temporary = folder / "t"
        temporary.mkdir()
        path = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(path),
            "TMPDIR": "/tmp",
            "PYTHONFAULTHANDLER": "1",
        }
        words = (str(folder / "driver.py"), command, str(config), "parallel.tensor=2", *options)
        self.process = subprocess.Popen(
            [*prefix, sys.executable, *words],
            **({"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | (streams or {})),
            text=True,
            env=environment,
            cwd=folder,
        )

    def stand_ins(self) -> list[int]:
        """Process numbers of all stand-ins and their grandchildren so far."""
        file = self.folder / "pids"
        return [int(pid) for pid in file.read_text().split()] if file.exists() else []

    def wait_until_up(self) -> None:
        """Wait until all stand-ins run and the launcher, which opens their logs, knows the ranks."""
        wait_for(lambda: len(self.stand_ins()) == 8)
        launcher = psutil.Process(self.process.pid)
        wait_for(lambda: any(file.path.endswith("/rank_1.log") for file in launcher.open_files()))

    def wait_until_told(self, text: str) -> None:
        """Wait until the run's log has it."""
        log = self.folder / "runs" / "tiny-001" / "logs" / "launcher.log"
        wait_for(lambda: log.exists() and text in log.read_text())

    def folders(self) -> list[Path]:
        """Work and bridge folder of this launcher."""
        private_folders = []
        for owner in [*Path("/tmp").glob("rpg-*/owner.json"), *Path("/dev/shm").glob("rpg-*/owner.json")]:
            try:
                if json.loads(owner.read_text())["pid"] == self.process.pid:
                    private_folders.append(owner.parent)
            except (OSError, ValueError):
                continue
        return private_folders

    def wait(self) -> int:
        """Its exit code; if it does not end in time, the error has the stack of each thread."""
        try:
            return self.process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGABRT)
            assert self.process.stderr is not None
            raise AssertionError(f"not ended after {LIMIT} s:\n{self.process.stderr.read()}") from None

    def finish(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=LIMIT)
        return self.process.returncode, out, without_notice(err)


@contextmanager
def single_node(settings: Settings, folder: Path) -> Iterator[tuple[Cluster, NodeAgent]]:
    """A run's nodes, which is this one with all engines, and its agent. folder: the run's."""
    cluster = Cluster(settings, Nodes(), StopSignals())
    assignment = NodeAssignment(range(0), range(settings.engine.replicas))
    (folder / "logs").mkdir(exist_ok=True)
    with closing(NodeAgent(NodeSpec(settings, folder, cluster.token, assignment), StopSignals())) as agent:
        cluster.open(folder, agent)
        yield cluster, agent


def wait_for(
    condition: Callable[[], object],
    seconds: float = LIMIT,
    message: Callable[[], str] = lambda: "waited in vain",
) -> None:
    """``message``: of the error if it does not become true in time."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, message()
        time.sleep(0.05)


def living(pids: list[int]) -> list[int]:
    return [pid for pid in pids if process_groups.start_time(pid) is not None]


def assert_nothing_left(launcher: Launch) -> None:
    assert len(launcher.stand_ins()) == 8, launcher.stand_ins()
    assert living(launcher.stand_ins()) == []
    assert launcher.folders() == []
