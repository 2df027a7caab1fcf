"""Runs whose phases can be followed while they run, and what they leave behind."""

from __future__ import annotations

import os
import re
import signal
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import psutil

from rpg_megatron.system import process_groups
from rpg_megatron.system.events import EVENTS
from tests.support.commands import Command
from tests.support.moments import EXPORT, SAVE, START, EventTap, Moment, read_moment
from tests.support.ranks import ROOT
from tests.support.runs import QUICKSTART, TrainCommand
from tests.support.same_runs import read_rows

STEPS = 6
EVERY = 2
"""Steps between evaluations."""
SETTINGS = [
    "rollout.prompts_per_step=8",
    "rollout.samples_per_prompt=4",
    "reward.type=tests.support.kill_reward:is_correct",  # in a worker; plain numbers never get there
    "training.minibatches=2",
    "training.tokens_per_microbatch=512",
    f"training.steps={STEPS}",
    "engine.max_sequences=32",
    "engine.kv_cache_gib=0.25",
    "engine.restarts=9",
    "evaluation.data.limit=8",
    f"evaluation.every={EVERY}",
    "anchor={type: every, updates: 6}",
    "checkpoint={every: 1, keep: 2}",
]
WORKERS = "rollout.workers=2"
AHEAD = "ahead 2, two engines"
"""The layout whose contents depend on timing (``ahead_runs``)."""
EPISODES = "two turns, two engines"
VERIFIERS = "a tool by verifiers, two engines"
"""Needs ``make .venv-verifiers``."""
ADAPTERS = "adapters, tensor 2, two engines"
NODES = "data 2, two nodes"
"""Two launchers, each with a rank and an engine."""
_VENV = ROOT / ".venv-verifiers"


def _products(seed: int) -> str:
    taskset = f"{{id: calculator_products, count: 100, seed: {seed}}}"
    return f"{{type: rpg_megatron.environments.verifiers:problems, venv: {_VENV}, taskset: {taskset}}}"


LAYOUTS = {
    "tensor 2, one engine": ["parallel.tensor=2"],
    "data 2, two engines": [
        *("parallel.tensor=1", "parallel.data=2", "engine.replicas=2", "bridge.transport=process_group"),
        WORKERS,
        "rollout.dynamic={oversample: 1.5}",  # groups that wait for the next step are state of the sampler
    ],
    AHEAD: [
        *("parallel.tensor=1", "parallel.data=2", "engine.replicas=2", WORKERS),
        *("rollout.ahead=2", "correction.type=truncate"),
        # The engines are slower than the trainer, so that updates interrupt responses.
        *("engine.max_sequences=1", "rollout.samples_per_prompt=8"),
    ],
    EPISODES: [
        *("parallel.tensor=1", "parallel.data=2", "engine.replicas=2", WORKERS),
        "rollout.episode={type: tests.support.kill_reward:two_turns, workers: 4}",
    ],
    NODES: [
        *("parallel.tensor=1", "parallel.data=2", "engine.replicas=2", "bridge.transport=process_group"),
        *(WORKERS, "cluster={interface: lo, join_timeout: 300, min_bandwidth: 0}"),
    ],
    ADAPTERS: [
        *("parallel.tensor=2", "engine.replicas=2", WORKERS),
        *("lora={rank: 8, alpha: 16}", "optimizer.lr=1e-3"),
    ],
    VERIFIERS: [
        *("parallel.tensor=1", "parallel.data=2", "engine.replicas=2", WORKERS),
        *(f"model.path={ROOT}/examples/calculator/model", "rollout.tool_call_parser=hermes"),
        *("data.path=null", f"data.source={_products(1)}"),
        *("evaluation.data.path=null", f"evaluation.data.source={_products(2)}"),
        "rollout.max_response_tokens=160",
        f"rollout.episode={{type: rpg_megatron.environments.verifiers:play, venv: {_VENV}, workers: 2}}",
    ],
}
LIMIT = 1800.0
"""Seconds without progress after which a run counts as hanging, on a busy machine."""


@dataclass
class Reference:
    """An undisturbed run of the same settings."""

    folder: Path
    seconds: dict[str, float]
    """The shortest duration of each phase."""


@contextmanager
def private_tmp() -> Iterator[Path]:
    """A new $TMPDIR, with a short path: sockets are in it."""
    with tempfile.TemporaryDirectory(prefix="kills-", dir="/tmp") as folder:
        before = os.environ.get("TMPDIR")
        os.environ["TMPDIR"] = folder
        try:
            yield Path(folder)
        finally:
            os.environ.pop("TMPDIR") if before is None else os.environ.update(TMPDIR=before)


@dataclass
class Traces:
    """Resources that a run's processes used outside of its folder."""

    commands: list[TrainCommand] = field(default_factory=list)
    memory: set[Path] = field(default_factory=set)
    """Files in /dev/shm that were mapped at some time."""

    def processes(self) -> list[str]:
        """Processes that still run."""
        return [f"process {pid} is left: {name_of(pid)}" for c in self.commands for pid in c.processes()]

    def left(self, tmp: Path) -> list[str]:
        """Processes, folders, sockets and shared memory that are still there."""
        problems = self.processes()
        problems += [f"{folder} is left" for c in self.commands for folder in c.folders()]
        problems += [f"{file} is left" for file in sorted(self.memory) if file.exists()]
        # torch makes an empty folder for its compiler's cache.
        files = (f for f in tmp.rglob("*") if not f.name.startswith("torchinductor_"))
        return problems + [f"{file} is left" for file in sorted(files)]


class NodesCommand(TrainCommand):
    """A run on two nodes: the first one's launcher is the command, the second one's is beside it."""

    def __init__(self, folder: Path, run: Path, *arguments: str):
        job = uuid.uuid4().hex[:8]

        def options(rank: int) -> list[str]:
            return ["--nodes", "2", "--node-rank", str(rank), "--job", job]

        super().__init__(folder, run, *arguments, *options(0))
        self.second = Command(folder, "train", str(QUICKSTART), *arguments, *options(1))

    def processes(self) -> list[int]:
        pids = {*super().processes(), *self.second.processes()}
        self.sessions |= self.second.sessions
        return sorted(pids)

    def folders(self) -> list[Path]:
        return [*super().folders(), *self.second.folders()]

    def search(self, *words: str) -> int | None:
        """As for one node; the second engine has no socket file, but is the second launcher's only one."""
        if "engine-1.sock" not in words:
            return super().search(*words)
        servers = (pid for pid in self.second.processes() if "engine.server" in name_of(pid))
        return next(servers, None)

    def finish(self, timeout: float = 60) -> tuple[int, str]:
        """Of the first node, which says why a run ends."""
        code, err = super().finish(timeout)
        others, its_err = self.second.finish()
        assert code != 0 or others == 0, its_err
        return code, err


class WatchedRun:
    """One command, started again until the run is over."""

    def __init__(self, folder: Path, layout: str, tmp: Path):
        self.folder, self.layout, self.tmp = folder, layout, tmp
        self.settings = [*SETTINGS, *LAYOUTS[layout], f"runs={folder / 'runs'}", "name=killed"]
        self.engines = 2 if "engine.replicas=2" in self.settings else 1
        self.traces = Traces()
        self.seconds: dict[str, list[float]] = {}
        self.tap: EventTap | None = None
        self.bridge = Path()
        folder.mkdir(parents=True)

    @property
    def run(self) -> Path:
        """The newest folder: a run that is killed before its first checkpoint begins again in another."""
        return max((self.folder / "runs").glob("killed-*"), default=self.folder / "none")

    def launch(self) -> None:
        """Start the command; returns when its launcher listens for events, or has ended."""
        self.since = time.time()
        make = NodesCommand if self.layout == NODES else TrainCommand
        self.command = make(self.folder, self.folder / "runs", *self.settings)
        self.traces.commands.append(self.command)
        self.tap, end = None, time.monotonic() + LIMIT
        while self.tap is None and self.command.process.poll() is None:
            assert time.monotonic() < end, self.output()
            folders = self.command.folders()
            for work in folders:
                if (work / EVENTS).exists():
                    self.tap = EventTap(work)
                    self.bridge = next(f for f in folders if f.is_relative_to("/dev/shm"))
            time.sleep(0.02)

    def output(self) -> str:
        return self.command.out.read_text()

    def pump(self, seconds: float = 0.005) -> bool:
        """Pass events on for a while; returns whether the command runs."""
        if self.tap is None:
            time.sleep(seconds)
        else:
            self.tap.pump(seconds)
        return self.command.process.poll() is None

    def pump_for(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while (remaining := end - time.monotonic()) > 0 and self.pump(min(remaining, 0.05)):
            pass

    def look(self) -> Moment:
        assert self.tap is not None
        self.tap.pump(0.001)
        published = None
        if "bridge.transport=process_group" not in self.settings:
            with suppress(OSError), (self.bridge / "shard-00000.bin").open("rb") as shard:
                published = int.from_bytes(shard.read(8), "little", signed=True) >= 0
        return read_moment(self.tap, self.run, self.since, published)

    def finish(self) -> tuple[int, str]:
        """Wait for the command's end; its exit code and what it wrote to stderr."""
        end = time.monotonic() + LIMIT
        while self.pump(0.1):
            assert time.monotonic() < end, f"the command does not end\n{self.output()}"
        if self.tap is not None:
            self.tap.close()
            for phase, seconds in self.tap.seconds.items():
                self.seconds.setdefault(phase, []).extend(seconds)
            self.tap = None
        return self.command.finish()

    def wait_nothing_left(self, seconds: float, *, processes: bool = False) -> list[str]:
        """What is left after at most that time. processes: count processes only."""
        end = time.monotonic() + seconds
        look = self.traces.processes if processes else partial(self.traces.left, self.tmp)
        while (remaining := look()) and time.monotonic() < end:
            time.sleep(0.1)
        return remaining

    def end_all(self) -> None:
        """Kill the processes that are left, after a failed test."""
        for command in self.traces.commands:
            process_groups.send(command.sessions if command.processes() else [], signal.SIGKILL)
            command.process.wait()


def leave_alone(folder: Path, layout: str) -> Reference:
    """Run to the end, undisturbed."""
    with private_tmp() as tmp:
        run = WatchedRun(folder, layout, tmp)
        try:
            run.launch()
            code, err = run.finish()
            assert code == 0, run.output() + err
            assert (left := run.wait_nothing_left(0)) == [], left
        finally:
            run.end_all()
        shortest = {phase: min(seconds) for phase, seconds in run.seconds.items()}
        saves = [row["checkpoint/seconds"] for row in read_rows(run.run) if "checkpoint/seconds" in row]
        # A start has other moments (has_started_so_far); an export is short.
        return Reference(run.run, shortest | {SAVE: min(saves), START: 0.0, EXPORT: 0.1})


def name_of(pid: int) -> str:
    """A short description of a process."""
    try:
        words = psutil.Process(pid).cmdline()
    except psutil.Error:
        return "ended"
    line = " ".join(words)
    # With what a fork server imports.
    module = re.search(r"-m (rpg_megatron\.system\.fork_server [\w.]+|[\w.]+)", line)
    return module[1] if module else line[:60].strip()
