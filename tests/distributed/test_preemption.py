"""A warned run stops where it waits, saves a complete state, and resumes from it bit-identically.

Why: a warning during a sync or an evaluation is rare, and nobody notices what is lost then (a row, an
evaluation, the position in the data). Proved with real ranks, whose sampler is a stand-in so that the moment
of the signal is exact: in a rollout, in a sync, in an evaluation and when the row is about to be written. The
saved state has its step and what is still due; rows, weights and rollouts at the end are those of ranks that
were not stopped; and each step trained again from the journal is the same bit for bit,
with one leader and with two. A warning before there is anything to save just ends the ranks. The best
checkpoints are kept and exported, also by a run that was stopped. Not covered: engines, the launcher, random
moments (tests/integration).
"""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file

from rpg_megatron.bridge.manifest import Manifest
from rpg_megatron.checkpoints.run_folder import list_steps, read_state
from rpg_megatron.commands.replay.command import plan_replay
from rpg_megatron.config import load_settings
from rpg_megatron.data.batch_index import index_of
from rpg_megatron.data.rollout_files import read_rollouts, rollouts_file
from rpg_megatron.data.trajectory import Trajectory
from rpg_megatron.evaluation.results import EvalResult
from rpg_megatron.rewards.failures import FailureCount
from rpg_megatron.rollout.sampler_client import SOCKET, EvaluatedSets, RolloutBatch, SyncResult
from rpg_megatron.system.messages import Server
from tests.distributed.preempted_rank import BATCH
from tests.support.ranks import free_port
from tests.support.same_runs import to_row

WORLD, STEPS = 2, 5
TOKEN = "token"


class StandIn:
    """A sampler with random responses, which warns the ranks instead of answering a chosen request."""

    METHODS = ("rollout", "release", "restore", "sync", "evaluate", "counts")

    def __init__(self, work: Path):
        self._batch, self._address = work / BATCH, f"ipc://{work / SOCKET}"
        self.place = 0
        self.warn_at = ("", 0)
        self.requests: Counter[str] = Counter()
        """Requests of the current ranks, by method."""
        self.ranks: list[subprocess.Popen[bytes]] = []
        threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True).start()

    async def _serve(self) -> None:
        server = Server(TOKEN, {name: self._handler(getattr(self, name)) for name in self.METHODS})
        server.listen(self._address)
        await server.serve()

    def _handler(self, method: Callable[..., Any]) -> Callable[..., Awaitable[Any]]:
        @wraps(method)
        async def handle(*arguments: Any) -> Any:
            self.requests[method.__name__] += 1
            if self.warn_at == (method.__name__, self.requests[method.__name__]):
                for rank in self.ranks:
                    rank.send_signal(signal.SIGTERM)
                await asyncio.Event().wait()
            return method(*arguments)

        return handle

    def rollout(self, step: int, version: int) -> RolloutBatch:
        random = np.random.default_rng(self.place)
        self.place += 1
        trajectories = []
        for i in range(16):
            response = random.integers(0, 256, random.integers(1, 12)).astype(np.int32)
            trajectories.append(
                Trajectory(
                    prompt_id=i // 4,
                    group=i // 4,
                    sample=i % 4,
                    prompt=random.integers(0, 256, 5).astype(np.int32),
                    response=response,
                    behaviour=np.zeros(len(response), np.float32),
                    versions=np.full(len(response), version, np.int32),
                    finish="stop",
                    text="",
                    reward=float(random.normal()),
                )
            )
        self._batch.write_bytes(pickle.dumps(trajectories))
        metrics, state = {"reward/mean": float(self.place)}, {"place": self.place}
        return RolloutBatch(index_of(trajectories), metrics, state=state)

    def release(self) -> None:
        self._batch.unlink()  # all leaders have read it

    def restore(self, state: dict[str, Any]) -> None:
        self.place = state["place"]

    def sync(self, manifest: Manifest, version: int, again: bool, trial: bool) -> SyncResult:
        return SyncResult()

    def evaluate(self) -> EvaluatedSets:
        score = [self.place % 2 == 0]
        result = EvalResult(0, "1", "1", ["1"], score, ["1"], [1], ["stop"], "heldout", classes=[0])
        return EvaluatedSets([result], [FailureCount("heldout", 0, 1)])

    def counts(self) -> dict[str, float]:
        return {}


class Ranks:
    """The ranks of one run, which is resumed several times."""

    def __init__(self, folder: Path, config: Path, layout: str, *more: str):
        self.run, self.work, self.bridge = folder / "run", folder / "work", folder / "bridge"
        for place in (self.run, self.work, self.bridge):
            place.mkdir(0o700, parents=True)
        evaluation = "evaluation={data: {path: %s, max_prompt_tokens: 64}, every: 1, samples: 1}"
        settings = load_settings(
            config,
            [
                f"training.steps={STEPS}",
                f"parallel.{layout}={WORLD}",
                evaluation % (config.parent / "train.jsonl"),
                "guards.mismatch=off",
                "anchor={type: every, updates: 4}",
                "checkpoint.every=100",
                "optimizer.lr=1e-3",
                *more,
            ],
        )
        (self.run / "config.yaml").write_text(yaml.safe_dump(settings.model_dump(mode="json")))
        self.sampler = StandIn(self.work)

    def go(self, warn_at: tuple[str, int] = ("", 0)) -> list[int]:
        """Resume from the newest checkpoint; returns exit codes. warn_at: (request, its number)."""
        newest = list(list_steps(self.run).values())[:1]
        if newest:  # as the launcher does
            size = read_state(newest[0])["metrics_bytes"]
            os.truncate(self.run / "metrics.jsonl", size)
        else:
            self.sampler.place = 0
            (self.run / "metrics.jsonl").unlink(missing_ok=True)
        self.sampler.warn_at = warn_at
        self.sampler.requests.clear()
        self.sampler.ranks = self.start("tests.distributed.preempted_rank", *map(str, newest))
        return [rank.wait(300) for rank in self.sampler.ranks]

    def start(self, module: str, *checkpoint: str) -> list[subprocess.Popen[bytes]]:
        shared = {
            "WORLD_SIZE": str(WORLD),
            "LOCAL_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "RPG_ENGINE_TOKEN": TOKEN,
            "GLOO_SOCKET_IFNAME": "lo",
        }
        places = [str(self.run), str(self.work), str(self.bridge)]
        ranks = []
        for rank in range(WORLD):
            with (self.run / f"rank_{rank}.log").open("ab") as log:
                command = [sys.executable, "-m", module, *places, *checkpoint]
                environment = os.environ | shared | {"RANK": str(rank)}
                ranks.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
        return ranks

    def saved(self) -> dict[str, Any]:
        return read_state(next(iter(list_steps(self.run).values())))

    def rows(self) -> list[dict[str, Any]]:
        lines = (self.run / "metrics.jsonl").read_text().splitlines()
        different = ("time/", "memory/", "throughput/", "sync/seconds")
        return [{k: v for k, v in json.loads(line).items() if not k.startswith(different)} for line in lines]

    def log(self) -> str:
        return (self.run / "rank_0.log").read_text()


@pytest.fixture(params=["tensor", "data"])
def pair(request: pytest.FixtureRequest, tmp_path: Path, config_file: Path) -> Iterator[tuple[Ranks, Ranks]]:
    """With one leader, and with two."""
    runs = [Ranks(tmp_path / name, config_file, request.param) for name in ("stopped", "straight")]
    yield runs[0], runs[1]
    for run in runs:
        for rank in run.sampler.ranks:
            rank.kill()
            rank.wait()


@pytest.mark.long
def test_a_warning_wherever_a_run_waits(pair: tuple[Ranks, Ranks]) -> None:
    stopped, straight = pair
    thread = threading.Thread(target=straight.go)
    thread.start()
    assert stopped.go(("rollout", 1)) == [-signal.SIGTERM] * WORLD
    assert not list_steps(stopped.run)

    assert stopped.go(("rollout", 2)) == [75] * WORLD, stopped.log()
    saved = stopped.saved()
    assert (saved["step"], saved["row"], saved["sampler"]) == (1, None, {"place": 1})

    assert stopped.go(("sync", 2)) == [75] * WORLD, stopped.log()
    saved = stopped.saved()
    assert (saved["step"], saved["sampler"]) == (2, {"place": 2})
    assert "policy/loss" in saved["row"]
    assert "sync/version" not in saved["row"]
    assert [row["step"] for row in stopped.rows()] == [0, 1]

    assert stopped.go(("evaluate", 2)) == [75] * WORLD, stopped.log()
    saved = stopped.saved()
    assert (saved["step"], saved["row"]["sync/version"]) == (3, 3)
    assert "eval/heldout/avg@1" not in saved["row"]

    assert stopped.go(("counts", 2)) == [75] * WORLD, stopped.log()
    saved = stopped.saved()
    assert saved["step"] == 4
    assert "eval/heldout/avg@1" in saved["row"]

    assert stopped.go() == [0] * WORLD, stopped.log()
    thread.join(300)
    assert (straight.run / "summary.json").exists(), straight.log()
    assert [row["step"] for row in stopped.rows()] == list(range(STEPS + 1))
    assert stopped.rows() == straight.rows()
    name = f"hf/step_{STEPS:06d}/model.safetensors"
    weights, expected = load_file(stopped.run / name), load_file(straight.run / name)
    assert all(torch.equal(weight, expected[key]) for key, weight in weights.items())
    for step in range(1, STEPS + 1):
        batch, expected_batch = (read_rollouts(rollouts_file(r.run, step)) for r in (stopped, straight))
        assert [to_row(t) for t in batch] == [to_row(t) for t in expected_batch]
    check_replay(straight)


def check_replay(ranks: Ranks) -> None:
    _, request = plan_replay(ranks.run, STEPS, None)
    assert (request["tolerance"], request["checkpoint"]) == (0.0, None)
    (ranks.run / "replay_request.json").write_text(json.dumps(request))
    assert [rank.wait(120) for rank in ranks.start("rpg_megatron.commands.rank")] == [0] * WORLD, ranks.log()
    report = json.loads((ranks.run / "replay.json").read_text())
    assert [(step["step"], step["exact"]) for step in report["steps"]] == [
        (s, True) for s in range(1, STEPS + 1)
    ]


@pytest.mark.long
def test_the_best_checkpoint_is_kept_and_exported(tmp_path: Path, config_file: Path) -> None:
    """The stand-in's accuracy is 1 in even steps; of equal values the earlier step, 2, is better."""
    best = "checkpoint={every: 100, keep: 1, keep_best: {k: 1}}"
    runs = {
        "stopped": Ranks(tmp_path / "stopped", config_file, "data", best),
        "short": Ranks(tmp_path / "short", config_file, "data", "training.steps=2"),
    }
    stopped, short = runs.values()
    try:
        assert stopped.go(("evaluate", 4)) == [75] * WORLD, stopped.log()
        assert list(list_steps(stopped.run)) == [3, 2]  # in the evaluation of step 3
        assert stopped.go() == [0] * WORLD, stopped.log()
        assert short.go() == [0] * WORLD, short.log()
    finally:
        for run in runs.values():
            for rank in run.sampler.ranks:
                rank.kill()
                rank.wait()
    assert list(list_steps(stopped.run)) == [5, 2]
    best_file = json.loads((stopped.run / "checkpoints" / "best.json").read_text())
    expected = {"step": 2, "folder": "step_000002", "value": 1.0}
    assert best_file == {"metric": "eval/heldout/avg@1", "mode": "max", "best": [expected]}
    assert sorted(folder.name for folder in (stopped.run / "hf").iterdir()) == ["step_000002", "step_000005"]
    exported, trained = (load_file(run.run / "hf/step_000002/model.safetensors") for run in (stopped, short))
    assert all(torch.equal(weight, trained[key]) for key, weight in exported.items())
    summary = json.loads((stopped.run / "summary.json").read_text())
    assert (summary["best"]["step"], summary["export"]) == (2, str(stopped.run / "hf" / "step_000005"))
