"""Worker processes of episodes: what one does to its process costs no other response anything.

Why: an environment that hangs or crashes must not stop a run, lose turns or change what others sample. Real
processes; the engine is a stand-in. Not covered: kills in a whole run (test_kills).
"""

import asyncio
import os
import random
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rpg_megatron.data.prompts import codec_of
from rpg_megatron.engine.client import Sample
from rpg_megatron.rollout.batch_metrics import batch_metrics
from rpg_megatron.rollout.conversation import Conversation
from rpg_megatron.rollout.dynamic_sampling import Group
from rpg_megatron.rollout.episode_pool import EpisodePool, _Turns
from rpg_megatron.rollout.worker import Worker
from rpg_megatron.rollout.worker_files import CODEC
from tests.support.episode_rig import Engine, contents, make_settings, make_task, sample
from tests.support.ranks import ROOT
from tests.support.stand_in_engines import ByteTokenizer, write_byte_codec

UNRULY = "tests.support.episodes:unruly"


def engine() -> Engine:
    return Engine(random.Random(1))


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("fault", "kind", "detail"),
    [
        ("crash", "crash", "the process died"),
        ("block", "timeout", "ended after 3 s"),
        ("wait", "timeout", "ended after 3 s"),
        ("wait, deaf", "timeout", "ended after 3 s"),
        ("memory", "memory", "out of memory"),
        ("lost", "crash", "a server"),
    ],
)
def test_only_the_faulty_episode_fails(
    config_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, kind: str, detail: str
) -> None:
    monkeypatch.setattr("rpg_megatron.rollout.episode_pool.GRACE_SECONDS", 0.5)
    whole, _ = sample(
        make_settings(config_file, UNRULY, fault="none", seeds=[]), [engine()], tmp_path, make_task(samples=6)
    )
    settings = make_settings(
        config_file, UNRULY, fault=f"'{fault}'", seeds=[1001, 1004], deadline=3, failed=-2
    )
    group, scores = sample(settings, [engine()], tmp_path, make_task(samples=6))
    assert (scores.failures.failed, scores.failures.graded) == (2, 6)
    (first,) = scores.failures.first
    assert (first.kind, first.detail) == (kind, detail)
    for number, (t, undisturbed) in enumerate(zip(group, whole, strict=True)):
        if number in (1, 4):  # the turn that it has is kept
            assert t.reward == -2
            assert t.response.tolist() == undisturbed.response[: len(t.response)].tolist()
            assert 1 <= len(t.response) <= 5
        else:
            assert contents([t]) == contents([undisturbed])


def test_a_killed_process_costs_nothing(config_file: Path, tmp_path: Path) -> None:
    whole, _ = sample(make_settings(config_file, UNRULY, fault="none", seeds=[]), [engine()], tmp_path)
    settings = make_settings(config_file, UNRULY, fault="'kill once'", seeds=[1000, 1001, 1002])
    group, scores = sample(settings, [engine()], tmp_path)
    assert (tmp_path / "killed").exists()
    assert scores.failures.failed == 0
    assert contents(group) == contents(whole)


def test_an_episode_that_lost_its_server_runs_again(config_file: Path, tmp_path: Path) -> None:
    whole, _ = sample(make_settings(config_file, UNRULY, fault="none", seeds=[]), [engine()], tmp_path)
    settings = make_settings(config_file, UNRULY, fault="'lost once'", seeds=[1001])
    group, scores = sample(settings, [engine()], tmp_path)
    assert (tmp_path / "lost").exists()
    assert scores.failures.failed == 0
    assert contents(group) == contents(whole)


class HeldEngine(Engine):
    """Answers when it is let go."""

    def __init__(self) -> None:
        super().__init__(random.Random(1))
        self.free, self.asked = asyncio.Event(), asyncio.Event()

    async def generate(self, prompt: np.ndarray, *, n: int, **request: Any) -> list[Sample]:
        self.asked.set()
        await self.free.wait()
        return await super().generate(prompt, n=n, **request)


@pytest.mark.parametrize("killed", [False, True])
def test_time_and_death_while_a_turn_is_sampled(config_file: Path, tmp_path: Path, killed: bool) -> None:
    """Waiting for a turn takes nothing of the deadline; a process that dies meanwhile loses nothing."""
    settings = make_settings(config_file, UNRULY, fault="none", seeds=[], deadline=2)
    write_byte_codec(tmp_path / CODEC)

    async def run() -> tuple[Any, Any]:
        held = HeldEngine()
        worker = Worker(settings, codec_of(ByteTokenizer()), [held], tmp_path, [0])  # type: ignore[list-item]
        working = asyncio.create_task(worker.generate(make_task(), 0, 0))
        await held.asked.wait()
        pool = worker._episode
        assert isinstance(pool, EpisodePool)
        if killed:
            (pid,) = pool._server.workers
            os.kill(pid, signal.SIGKILL)
            while pid in pool._server.workers:
                await asyncio.sleep(0.001)
        else:
            await asyncio.sleep(3)
        held.free.set()
        assert (await working).complete
        scores = await worker.score(7)
        group = await worker.fetch([7] * 3, [0, 1, 2])
        worker.close()
        assert not pool._server.workers
        return group, scores

    group, scores = asyncio.run(run())
    assert scores.failures.failed == 0
    whole, _ = sample(make_settings(config_file, UNRULY, fault="none", seeds=[]), [engine()], tmp_path)
    assert contents(group) == contents(whole)


@pytest.mark.parametrize("then", ["read", "drop", "ends"])
def test_an_answer_that_no_episode_got_is_not_in_the_response(then: str) -> None:
    """It was under way when the episode gave it up, or ended."""
    sent: list[Any] = []
    process: Any = SimpleNamespace(send=lambda number, value: sent.append(value))

    async def run() -> list[int]:
        task = make_task()
        prompt = tuple(task.prompt.tolist())
        conversation = Conversation(task, 0, prompt, 256, codec_of(ByteTokenizer()), lambda: None)
        attempt: Any = SimpleNamespace(conversation=conversation, score=None)
        turns = _Turns(attempt, process)
        turns.number, turns.outcome = 0, asyncio.get_running_loop().create_future()
        turns.on_request({"ask": 5, "method": "generate", "arguments": [list(prompt), None, False]})
        while conversation.turn is None:
            await asyncio.sleep(0)
        conversation.add(Sample(np.array([50, 0], np.int32), np.zeros(2, np.float32), "stop"))
        while not sent:
            await asyncio.sleep(0)
        if then != "ends":
            turns.on_request({"ask": 5, then: True})
        turns.end()
        conversation.discard()  # as when an episode has ended
        return [int(token) for token in conversation.row.tokens]

    assert asyncio.run(run()) == ([50, 0] if then == "read" else [])


def test_a_limit_of_turns(config_file: Path, tmp_path: Path) -> None:
    settings = make_settings(config_file, "tests.support.episodes:three_turns", longest=5, max_turns=2)
    group, scores = sample(settings, [engine()], tmp_path)
    assert scores.truncated == [True] * 3
    assert scores.turns == [2] * 3
    assert all(t.finish == "length" for t in group)


def test_metrics_and_both_rewards(config_file: Path, tmp_path: Path) -> None:
    plain = make_settings(config_file, UNRULY, fault="none", seeds=[])
    both = make_settings(config_file, UNRULY, fault="none", seeds=[], weight=0.5)
    group, scores = sample(plain, [engine()], tmp_path)
    metrics = batch_metrics([Group(make_task(), scores)])
    first = [np.flatnonzero(~t.mask)[0] for t in group]
    assert metrics["env/first"] == np.mean(first)
    assert metrics["env/turns"] == metrics["env/turns_max"] == 2
    assert metrics["env/turn_length"] == np.mean(scores.lengths) / 2
    assert metrics["env/given_length"] == 3
    assert metrics["env/branches"] == 0
    assert [t.reward for t in group] == first
    added, _ = sample(both, [engine()], tmp_path)
    for t, alone in zip(added, group, strict=True):
        assert t.parts["episode"] == alone.reward
        assert t.reward == t.parts["correctness"] + 0.5 * alone.reward
        assert t.correct == (t.parts["correctness"] > 0)
