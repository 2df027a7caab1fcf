"""Runs of the quickstart that are started, disturbed and compared, by the command line."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import psutil
import torch
from safetensors.torch import load_file

from rpg_megatron.bridge.manifest import HEADER_BYTES, MANIFEST
from rpg_megatron.data.rollout_files import read_rollouts, rollouts_complete, rollouts_file
from rpg_megatron.system import process_groups
from tests.support.commands import Command, read_proc_file

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart.yaml"
QUICKSTART_MOE = QUICKSTART.with_name("quickstart_moe.yaml")
SERVED = [
    "rollout.prompts_per_step=8",
    "rollout.samples_per_prompt=4",
    "training.minibatches=2",
    "training.tokens_per_microbatch=512",
    "training.steps=2",
    "parallel.tensor=1",
    "engine.max_sequences=32",
    "engine.kv_cache_gib=0.25",
    "evaluation=null",
]
"""Two steps without evaluation: settings of the fixture ``service``."""

STEPS = 10
SETTINGS = [
    "rollout.prompts_per_step=8",
    "rollout.samples_per_prompt=4",
    "training.minibatches=2",
    "training.tokens_per_microbatch=512",
    f"training.steps={STEPS}",
    "engine.max_sequences=32",
    "engine.kv_cache_gib=0.25",
    "evaluation.data.limit=8",
    "evaluation.every=3",
    "anchor={type: every, updates: 6}",
    "checkpoint={every: 2, keep: 1}",
]
SAME = (
    "policy/",
    "kl/",
    "ratio/",
    "reward/",
    "response/",
    "eval/",
    "lr",
    "step",
    "sync/version",
    "sync/bytes",
)
"""Metrics that depend neither on time nor on how the engine batched requests."""


class TrainCommand(Command):
    """``rpg-megatron train`` under way: finds its processes, waits for moments or holds them."""

    def __init__(self, folder: Path, run: Path, *arguments: str):
        """run: the folder that the run has or will have."""
        super().__init__(folder, "train", str(QUICKSTART), *arguments)
        self.run = run

    def wait(self, condition: Callable[[], bool], seconds: float = 600) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None, self.out.read_text() + self.process.communicate()[1]
            assert time.monotonic() < end, self.out.read_text()
            time.sleep(0.005)

    def wait_for_rollouts(self, step: int) -> None:
        """Wait until the step's rollouts are written: scoring is done, the update begins."""
        self.wait(lambda: rollouts_complete(rollouts_file(self.run, step)))

    def wait_for_engine(self, index: int = 0) -> int:
        """Wait for the process of an engine, whose start takes most of a minute; returns its number."""
        pids: list[int | None] = [None]

        def begun() -> bool:
            pids[0] = self.search("engine.server", f"engine-{index}.sock")
            return pids[0] is not None

        self.wait(begun)
        self.bridge = next(f for f in self.folders() if f.is_relative_to("/dev/shm"))
        assert pids[0] is not None
        return pids[0]

    def wait_for_first_rollout(self) -> None:
        """Wait until the weights were published and retracted: every engine has been synced."""

        def begun() -> bool:
            with (self.bridge / "shard-00000.bin").open("rb") as file:
                return int.from_bytes(file.read(8), "little", signed=True) < 0

        self.wait(lambda: self.published() == 0)
        self.wait(begun)

    def published(self) -> int:
        """The last published version, by the manifest."""
        try:
            return int(json.loads((self.bridge / MANIFEST).read_text())["version"])
        except OSError:
            return -1

    def search(self, *words: str) -> int | None:
        """The process whose command line has all the words, if there is one."""
        for pid in self.processes():
            line = read_proc_file(pid, "cmdline").decode()
            if all(word in line for word in words) and "reaper" not in line:
                return pid
        return None

    def find(self, *words: str) -> int:
        """Wait for the process: one that was killed may not have been started again yet."""
        self.wait(lambda: self.search(*words) is not None)
        pid = self.search(*words)
        assert pid is not None, f"no process {words}\n{self.out.read_text()}"
        return pid

    def engine(self, index: int = 0) -> int:
        return self.find("engine.server", f"engine-{index}.sock")

    def core(self, index: int = 0) -> int:
        """The core of an engine that is up, by its title."""
        return find_core(self.engine(index))

    def sampler(self) -> int:
        return self.find("rpg_megatron.rollout.sampler")

    def rank(self, rank: int) -> int:
        named = [p for p in self.processes() if read_proc_file(p, "comm") == f"rank_{rank}\n".encode()]
        for pid in named:
            if psutil.Process(pid).ppid() not in named:  # no fork of it
                return pid
        raise AssertionError(f"no rank {rank}")

    def wait_for_sync(self, version: int) -> None:
        """Hold the sampler just before it begins the sync of a version; wake it with SIGCONT."""
        sampler = self.sampler()  # the search may take longer than the update, which ends in the sync
        self.wait_for_rollouts(version)
        os.kill(sampler, signal.SIGSTOP)
        assert self.published() < version, "the sync began before the sampler was held"
        self.wait(lambda: self.published() == version)

    def wait_for_sync_of(self, engine: int, version: int) -> None:
        """Wait until the sampler has begun the sync of an engine, and waits for its answers."""
        log = self.run / "logs" / "sampler.log"
        self.wait(lambda: f"engine {engine}: sync of version {version} begins\n" in log.read_text())

    def hold_rollout(self, engine: int, steps: Iterable[int] = (1, 3)) -> int:
        """Stop an engine in the rollout of the first of the steps in which that succeeds; returns that step.

        Whether it succeeded is read when nothing moves any more: ranks and sampler wait for the engine.
        """
        stopped = process_groups.members(engine)  # the search may take as long as a rollout
        waiting = [self.rank(0), self.rank(1), self.sampler()]
        metrics = self.run / "metrics.jsonl"
        for step in steps:
            self.wait(lambda n=step: metrics.exists() and metrics.read_bytes().count(b"\n") >= n)
            signal_all(stopped, signal.SIGSTOP)
            quiet = 0
            while quiet < 20:
                quiet = quiet + 1 if all(is_asleep(pid) for pid in waiting) else 0
                time.sleep(0.05)
            if not rollouts_complete(rollouts_file(self.run, step)):
                return step
            signal_all(stopped, signal.SIGCONT)
        raise AssertionError(f"the rollouts of steps {steps} were over before the engine was stopped")

    def wait_for_restart(self, number: int, of: int = 3) -> None:
        self.wait(lambda: f"restart {number} of {of}" in self.out.read_text())

    def lose_rank_in_a_sync(self) -> None:
        """After ``wait_for_sync``: kill rank 1. The run must end with one message and leave nothing."""
        with (self.run / "logs" / "rank_1.log").open("a") as log:
            log.write("last words of rank 1\n")
        files, sampler = self.shared_memory(), self.sampler()
        kill(self.rank(1))
        signal_all([sampler], signal.SIGCONT)  # the launcher may have ended it by now
        code, err = self.finish()
        assert code == 1, f"exit code {code}: {err}\n{self.out.read_text()}"
        assert "rank_1 was killed (SIGKILL" in err
        assert "last words of rank 1" in err
        self.assert_nothing_left()
        assert [file for file in files if file.exists()] == []


def find_core(engine: int) -> int:
    """The engine core (here with its only worker) of a server that is up."""
    (core,) = cores_of(engine)
    return core


def cores_of(engine: int) -> list[int]:
    """The engine core, once it exists."""
    titles = {pid: read_proc_file(pid, "cmdline") for pid in process_groups.members(engine)}
    return [pid for pid, title in titles.items() if b"EngineCore" in title]


def is_asleep(pid: int) -> bool:
    """Whether no thread of a process runs or waits for a disk."""
    states = []
    for thread in os.listdir(f"/proc/{pid}/task"):
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended meanwhile
            states.append(psutil.Process(int(thread)).status())
    return psutil.STATUS_RUNNING not in states and psutil.STATUS_DISK_SLEEP not in states


def signal_all(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def kill(leader: int) -> None:
    process_groups.send([leader], signal.SIGKILL)


def kill_at_work(leader: int) -> None:
    """Stop an engine, so that its requests stay unanswered, then kill it."""
    process_groups.send([leader], signal.SIGSTOP)
    time.sleep(1.0)
    kill(leader)


def flip(file: Path) -> None:
    """Flip one bit, far from the start."""
    with file.open("r+b") as shard:
        at = HEADER_BYTES + (file.stat().st_size - HEADER_BYTES) // 2
        shard.seek(at)
        byte = shard.read(1)[0]
        shard.seek(at)
        shard.write(bytes([byte ^ 0x10]))


class Run:
    """One run, whose command is started several times."""

    def __init__(self, folder: Path, name: str):
        self.parent, self.name, self.folder = folder, name, folder / f"{name}-001"
        self.now: TrainCommand | None = None

    def start(self, *more: str) -> TrainCommand:
        places = [f"runs={self.parent}", f"name={self.name}", *more]
        self.now = TrainCommand(self.parent, self.folder, *SETTINGS, *places)
        return self.now

    def rows(self) -> list[dict]:
        file = self.folder / "metrics.jsonl"
        whole = file.read_text().rpartition("\n")[0] if file.exists() else ""
        return [json.loads(row) for row in whole.splitlines()]

    def wait_in_step(self, step: int, most: float = 1.0) -> None:
        """Wait until a random moment of that step, or of the next if ``most`` is 2."""
        assert self.now is not None
        end = time.monotonic() + 900
        while len(rows := self.rows()) < step:
            assert self.now.process.poll() is None, self.output()
            assert time.monotonic() < end, self.output()
            time.sleep(0.02)
        time.sleep(random.uniform(0, most * rows[-1].get("time/step", 1.0)))
        assert self.now.process.poll() is None, "the run was over before it could be stopped"

    def output(self) -> str:
        assert self.now is not None
        return self.now.out.read_text()

    def warn(self, number: signal.Signals, everyone: bool) -> None:
        """Signal it as a scheduler does; it must exit with code 75 and leave nothing."""
        command = self.now
        assert command is not None
        files = command.shared_memory()
        if everyone:
            tree = [p.pid for p in psutil.Process(command.process.pid).children(recursive=True)]
            tree.append(command.process.pid)
            random.shuffle(tree)
            for pid in tree:
                try:
                    os.kill(pid, number)
                except ProcessLookupError:
                    continue
        else:
            command.process.send_signal(number)
        code, err = command.finish()
        assert code == 75, self.output() + err
        assert err.startswith(f"stopped: {number.name}; "), err
        command.assert_nothing_left(60)
        assert [file for file in files if file.exists()] == []

    def kill(self) -> None:
        """SIGKILL the launcher and all its descendants at once."""
        assert self.now is not None
        launcher = psutil.Process(self.now.process.pid)
        tree = [*launcher.children(recursive=True), launcher]
        for process in tree:
            process.suspend()
        for process in tree:
            process.kill()
        self.now.finish()
        assert not (self.folder / "summary.json").exists()

    def finish(self) -> None:
        assert self.now is not None
        code, err = self.now.finish(1800)
        assert code == 0, self.output() + err
        self.now.assert_nothing_left()

    def assert_like(self, other: Run, lost_sync: int | None = None) -> None:
        """lost_sync: the step in whose sync the only engine died, so that it took no bytes."""
        actual, expected = self.rows(), other.rows()
        assert [row["step"] for row in actual] == [row["step"] for row in expected] == list(range(STEPS + 1))
        for row, other_row in zip(actual, expected, strict=True):
            if row["step"] == lost_sync:
                assert row["sync/bytes"] == 0
                row = row | {"sync/bytes": other_row["sync/bytes"]}
            row, other_row = ({k: v for k, v in r.items() if k.startswith(SAME)} for r in (row, other_row))
            assert row == other_row
        name = f"hf/step_{STEPS:06d}/model.safetensors"
        weights, other_weights = load_file(self.folder / name), load_file(other.folder / name)
        assert weights.keys() == other_weights.keys()
        assert all(torch.equal(weight, other_weights[key]) for key, weight in weights.items())
        for step in range(1, STEPS + 1):
            name = f"rollouts/step_{step:06d}.parquet"
            batch, other_batch = read_rollouts(self.folder / name), read_rollouts(other.folder / name)
            assert [t.response.tolist() for t in batch] == [t.response.tolist() for t in other_batch]
            assert [t.seed for t in batch] == [t.seed for t in other_batch]
        summaries = [json.loads((run.folder / "summary.json").read_text()) for run in (self, other)]
        assert summaries[0]["accuracy_before"] == summaries[1]["accuracy_before"]
        assert [p.name for p in self.parent.glob(f"{self.name}-*")] == [self.folder.name]
        checkpoints = sorted(p.name for p in (self.folder / "checkpoints").iterdir())
        assert checkpoints == ["latest.json", f"step_{STEPS:06d}"]


def results(run: Run, steps: int) -> tuple[list[dict], dict[str, torch.Tensor], list[list[int]]]:
    rows = [{k: v for k, v in row.items() if k.startswith(SAME)} for row in run.rows()]
    weights = load_file(run.folder / f"hf/step_{steps:06d}/model.safetensors")
    files = [run.folder / f"rollouts/step_{step:06d}.parquet" for step in range(1, steps + 1)]
    return rows, weights, [t.response.tolist() for file in files for t in read_rollouts(file)]


def assert_same(run: Run, other: Run, steps: int) -> None:
    """Both sampled the same tokens, wrote the same metrics and ended with the same weights, bit for bit."""
    (rows, weights, rollouts), (other_rows, other_weights, other_rollouts) = (
        results(run, steps),
        results(other, steps),
    )
    assert rollouts == other_rollouts
    differing = [
        (row.get("step"), key, row.get(key), other_row.get(key))
        for row, other_row in zip(rows, other_rows, strict=True)
        for key in sorted(row.keys() | other_row.keys())
        if row.get(key) != other_row.get(key)
    ]
    assert not differing, differing
    assert weights.keys() == other_weights.keys()
    assert all(torch.equal(weight, other_weights[key]) for key, weight in weights.items())
