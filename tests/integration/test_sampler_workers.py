"""Sampler workers in processes of their own: the batch is the same for any number of them, and if one dies.

Engines are stand-ins whose answers follow from prompt and seed, behind real sockets; sampler, workers and the
leaders' fetch are the product's. One of the rewards is async, which may give another result each time.
Not covered: real engines (test_rollout_engine), real ranks (test_training).
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rpg_megatron.bridge.manifest import EMPTY, Manifest
from rpg_megatron.config import load_settings
from rpg_megatron.config.cluster import TOKEN_VARIABLE
from rpg_megatron.data.trajectory import Trajectory
from rpg_megatron.engine.process import engine_socket
from rpg_megatron.launcher.run_dir import resolved_yaml
from rpg_megatron.rollout.sampler_client import SOCKET, RolloutBatch, SamplerClient, TrajectoryClient
from tests.support.forking import fresh_starts
from tests.support.same_runs import to_row
from tests.support.sockets import listening_ports
from tests.support.stand_in_engines import StandIns, stand_in_engines

pytestmark = pytest.mark.usefixtures("forked_starts")

REWARD = """
def odd(response, answer): return len(response) % 2 == 1

async def noted(response, row, token_ids, *, file: str):
    with open(file, "a") as asked:
        asked.write(f"{row['answer']} {token_ids}\\n")
    return len(row["prompt"]) + len(token_ids) / 8
"""
TOKEN = "a token"


@contextmanager
def sampler(
    config: Path,
    workers: int,
    changes: Sequence[str] = (),
    fresh: bool = False,
) -> Iterator[tuple[Sampling, StandIns]]:
    """A sampler process over two stand-in engines. fresh: not forked (``tests/support/forking``)."""
    overrides = [
        f"rollout.workers={workers}",
        "engine.replicas=2",
        "reward.terms={odd: {type: 'odd_reward:odd'}, noted: {type: 'odd_reward:noted', weight: 0.5}}",
        f"reward.terms.noted.file={request_log(config, workers)}",
        "rollout.dynamic={}",
        *changes,
    ]
    settings = load_settings(config, overrides)
    (config.parent / "odd_reward.py").write_text(REWARD)
    with tempfile.TemporaryDirectory() as name:
        work, run = Path(name), config.parent / f"run-{workers}"
        shutil.rmtree(run, ignore_errors=True)
        run.mkdir()
        (run / "config.yaml").write_text(resolved_yaml(settings))
        sockets = [engine_socket(work, i) for i in range(2)]
        with stand_in_engines(sockets) as engines, (run / "log").open("w") as log:
            with fresh_starts() if fresh else nullcontext():
                process = subprocess.Popen(
                    [sys.executable, "-m", "rpg_megatron.rollout.sampler", str(run), str(work)],
                    env=os.environ | {TOKEN_VARIABLE: TOKEN, "PYTHONPATH": f"{Path.cwd()}:{config.parent}"},
                    stdout=log,
                    stderr=log,
                )
            try:
                with SamplerClient(work / SOCKET, TOKEN) as client:
                    source = TrajectoryClient(client.addresses(), TOKEN)
                    yield Sampling(client, source, process.pid, work), engines
                    source.close()
                process.terminate()
                assert process.wait(30) == 0, (run / "log").read_text()
            finally:
                process.kill()
                process.wait()


def request_log(config: Path, workers: int) -> Path:
    """The file with a line for each response that the async reward scored."""
    return config.parent / f"asked-{workers}"


class Sampling:
    """The clients of a sampler process."""

    def __init__(self, client: SamplerClient, source: TrajectoryClient, pid: int, work: Path):
        self.client, self.source, self.pid, self.work = client, source, pid, work

    def rollout(self, step: int) -> RolloutBatch:
        batch = self.client.rollout(step, 0)
        assert isinstance(batch, RolloutBatch)
        return batch

    def fetch(self, batch: RolloutBatch) -> list[Trajectory]:
        i = batch.index
        return self.source.fetch(i.worker.tolist(), i.ticket.tolist(), i.sample.tolist())

    def step(self, step: int) -> list[dict[str, Any]]:
        """A step's trajectories as rows, and its metrics but for times."""
        batch = self.rollout(step)
        result = rows(batch, self.fetch(batch))
        self.client.release()
        return result

    def workers(self) -> list[int]:
        """Processes of the workers, by number."""
        out = subprocess.run(
            ["pgrep", "-P", str(self.pid), "-f", "rpg_megatron.rollout.worker"],
            capture_output=True,
            text=True,
        )
        return [int(pid) for pid in out.stdout.split()]


def rows(batch: RolloutBatch, trajectories: list[Trajectory]) -> list[dict[str, Any]]:
    groups = batch.index.group.tolist()
    metrics = {k: v for k, v in batch.metrics.items() if not k.startswith("time/")}
    return [metrics] + [to_row(replace(t, group=g)) for t, g in zip(trajectories, groups, strict=True)]


@pytest.fixture
def expected(config_file: Path) -> list[list[dict[str, Any]]]:
    """Three steps of a sampler without worker processes."""
    with sampler(config_file, 1) as (single, _):
        return [single.step(number) for number in (1, 2, 3)]


def test_the_batch_does_not_depend_on_workers(
    config_file: Path, expected: list[list[dict[str, Any]]]
) -> None:
    with sampler(config_file, 1) as (single, _):
        assert single.step(1) == expected[0]
        state = single.client.state()
    with sampler(config_file, 2, fresh=True) as (pair, engines):
        assert len(pair.workers()) == 2
        assert [listening_ports(pid) for pid in (pair.pid, *pair.workers())] == [[]] * 3
        for pid in (pair.pid, *pair.workers()):
            assert "libtorch" not in Path(f"/proc/{pid}/maps").read_text()
        assert pair.step(1) == expected[0]
        # Both die before the leaders have their trajectories, among them groups of the step before.
        batch = pair.rollout(2)
        requests = request_log(config_file, 2).read_text()
        assert set(batch.index.worker.tolist()) == {0, 1}
        for pid in pair.workers():
            os.kill(pid, signal.SIGKILL)
        assert rows(batch, pair.fetch(batch)) == expected[1]
        assert request_log(config_file, 2).read_text() == requests, "a judge is not asked again"
        pair.client.release()
        # One dies while it waits for engines.
        engines.delay, engines.requests = 0.5, 0
        killed = threading.Thread(target=kill_on_request, args=(pair.workers()[0], engines))
        killed.start()
        assert pair.step(3) == expected[2]
        killed.join()
        # A run of one worker is resumed with two.
        engines.delay = 0
        pair.client.restore(state)
        assert pair.step(2) == expected[1]


AHEAD = ("rollout.ahead=1", "rollout.inflight=drain", "correction.type=truncate", "training.steps=4")


def test_groups_that_are_sampled_ahead_survive_their_worker(config_file: Path) -> None:
    """Generated again, they would be of other weights than the scores of their batch."""
    with sampler(config_file, 1, changes=AHEAD) as (single, _):
        expected = [ahead(single, step) for step in range(1, 5)]
    with sampler(config_file, 2, changes=AHEAD) as (pair, engines):
        engines.delay = 0.2
        actual = [ahead(pair, step, kill=step % 3) for step in range(1, 5)]
        assert not list(pair.work.glob("group_*"))  # of which none is left
    assert actual == expected


def ahead(sampling: Sampling, step: int, kill: int = 0) -> list[dict[str, Any]]:
    """A step's rows. kill: both workers die while they wait for probes (2), or before the fetch (1)."""
    sampling.client.sync(Manifest("shared_memory", {}, 0, EMPTY, ()), step - 1)
    if kill == 2:
        for pid in sampling.workers():
            os.kill(pid, signal.SIGKILL)
    batch = sampling.client.rollout(step, step - 1)
    assert isinstance(batch, RolloutBatch)
    assert batch.probes is not None
    if kill == 1:
        for pid in sampling.workers():
            os.kill(pid, signal.SIGKILL)
    trajectories, probes = sampling.fetch(batch), batch.probes
    places = probes.worker.tolist(), probes.ticket.tolist(), probes.sample.tolist()
    assert {v for t in sampling.source.fetch(*places) for v in t.versions.tolist()} == {step - 1}
    assert {v for t in trajectories for v in t.versions.tolist()} == {max(step - 2, 0)}
    sampling.client.release()
    return [to_row(t) for t in trajectories]


def kill_on_request(pid: int, engines: StandIns) -> None:
    while not engines.requests:
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)


@pytest.mark.long  # two more samplers with processes; the default tier has one and two workers
@pytest.mark.parametrize("workers", [4, 8])
def test_any_number_of_workers(config_file: Path, expected: list[list[dict[str, Any]]], workers: int) -> None:
    with sampler(config_file, workers) as (many, _):
        assert [many.step(number) for number in (1, 2, 3)] == expected
