"""Engines lost during work: others sample their unfinished requests, and none serves old weights.

Why: a response drawn with the random weights of an engine that has just come back would look like any other.
Engines are stand-ins that answer from the seed; the test plays the launcher through its files. Not covered:
real deaths (tests/integration/test_resume.py, test_engine_recovery.py).
"""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rpg_megatron.bridge import controller
from rpg_megatron.bridge.controller import ApplyFailed, CheckFailed, SyncReport
from rpg_megatron.bridge.manifest import EMPTY, Manifest
from rpg_megatron.config import Settings, UserError
from rpg_megatron.config.reward import RewardSettings
from rpg_megatron.config.rollout import EngineSettings, RolloutSettings
from rpg_megatron.data.prompts import TextCodec
from rpg_megatron.engine.client import EngineError, EngineUnavailable, Sample
from rpg_megatron.engine.restarts import (
    begin_incarnation,
    has_answered,
    incarnation_of,
    is_trainers_turn,
    take_request,
)
from rpg_megatron.rollout import engine_pool as pool_module
from rpg_megatron.rollout.dispatcher import Dispatcher
from rpg_megatron.rollout.engine_pool import EnginePool
from rpg_megatron.rollout.groups import Generated, GroupScores, GroupTask
from rpg_megatron.rollout.worker import Worker

NOTHING = Manifest("shared_memory", {}, 0, EMPTY, ())
SETTINGS = Settings.model_construct(
    engine=EngineSettings(max_sequences=4), reward=RewardSettings(), rollout=RolloutSettings()
)


class Engine:
    """Answers with its weights' number and the seed; each process of it begins with weights -1."""

    def __init__(self, index: int, work: Path):
        self.index, self.work = index, work
        self.weights, self.up, self.slow = -1, True, 0.0
        self.core_answers = True
        self.asked = self.probes = 0
        self.fail: Callable[[int], str | None] = lambda request: None
        self.sync_error: Exception | None = None
        self.posted: list[str] = []
        self.status = 200

    async def generate(self, prompt: np.ndarray, *, n: int, seed: int, **_: Any) -> list[Sample]:
        self.asked += 1
        weights = self.weights
        await asyncio.sleep(random.random() * 0.01 + self.slow)
        if not self.up or self.fail(self.asked):
            raise EngineUnavailable(f"engine {self.index} is gone")
        answers = [np.array([weights, (seed + i) % 1000], np.int32) for i in range(n)]
        return [Sample(tokens, np.zeros(2, np.float32), "stop") for tokens in answers]

    async def post(self, path: str, body: Any = None, timeout: float | None = None) -> tuple[int, str]:
        if not self.up:
            raise EngineUnavailable(f"engine {self.index} is gone")
        self.posted.append(path)
        return self.status, "no"

    async def health(self, timeout: float = 5.0) -> bool:
        return self.up

    async def is_progressing(self, timeout: float) -> bool:
        self.probes += 1
        if self.up and self.core_answers:
            return True
        await asyncio.sleep(timeout if self.up else 0)  # nobody listens, or nobody answers
        return False

    async def metrics(self, timeout: float) -> dict[str, float]:
        raise EngineError("there are none")

    async def wait_ready(self, timeout: float) -> None:
        assert self.up

    def restart(self) -> None:
        """What the launcher does."""
        self.weights, self.up, self.fail = -1, True, lambda request: None
        begin_incarnation(self.work, self.index, incarnation_of(self.work, self.index) + 1)


@pytest.fixture(autouse=True)
def _syncs(monkeypatch: pytest.MonkeyPatch) -> None:
    async def sync_engine(post: Any, manifest: Manifest, *, version: int, **_: Any) -> SyncReport:
        engine = post.__self__
        await asyncio.sleep(0.01)
        if not engine.up:
            raise controller.EngineLost("engine cannot start a weight update")
        if engine.sync_error is not None:
            error, engine.sync_error = engine.sync_error, None
            raise error
        engine.weights = version
        return SyncReport(version)

    monkeypatch.setattr(pool_module, "sync_engine", sync_engine)
    monkeypatch.setattr(pool_module, "_POLL_SECONDS", 0.01)
    monkeypatch.setattr(pool_module, "_RESTART_WAIT_SECONDS", 0.05)


def build(work: Path, count: int, restarts: int = 3) -> tuple[EnginePool, list[Engine]]:
    engines = [Engine(i, work) for i in range(count)]
    return EnginePool(EngineSettings(restarts=restarts), engines, work), engines


def draws(count: int = 12) -> list[GroupTask]:
    return [GroupTask(i, i, np.zeros(3, np.int32), "", 6, 100 * i, 9, version=0) for i in range(count)]


async def sample(pool: EnginePool) -> list[list[list[int]]]:
    """Sample a dozen groups; their tokens. Fails if a group is finished twice."""
    clients: Any = [engine.client for engine in pool.engines]
    worker = Worker(SETTINGS, TextCodec(str, str.split, str), clients, pool._work, [0])
    dispatcher = Dispatcher(pool, [worker], SETTINGS.engine.max_sequences)
    finished: list[int] = []
    tasks = draws()
    try:
        await asyncio.gather(*(dispatcher.submit(t, partial(finished.append, t.ticket)) for t in tasks))
    finally:
        dispatcher.close()
        worker.close()
    assert sorted(finished) == [task.ticket for task in tasks]
    return [
        [t.response.tolist() for t in await worker.fetch([task.ticket] * 6, list(range(6)))] for task in tasks
    ]


def expected(version: int) -> list[list[list[int]]]:
    return [[[version, (100 * i + j) % 1000] for j in range(6)] for i in range(12)]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


def play(scene: Callable[[], Awaitable[None]]) -> None:
    async def within() -> None:
        async with asyncio.timeout(20):
            await scene()

    asyncio.run(within())


def test_the_others_finish_what_a_lost_engine_began(tmp_path: Path) -> None:
    async def scene() -> None:
        pool, engines = build(tmp_path, 2)
        assert len((await pool.sync(NOTHING, 5, resync=False)).reports) == 2
        engines[1].fail = lambda request: "gone" if request > 3 else None
        assert await sample(pool) == expected(5)
        assert take_request(tmp_path, 1, 0) == "engine 1 is gone"
        assert take_request(tmp_path, 1, 0) is None
        assert take_request(tmp_path, 0, 0) is None
        assert engines[1].asked <= 3 + 4  # at most the requests under way: two of each group
        counts = pool.pop_counts()
        assert 1 <= counts["engine/requests_resent"] <= 4
        assert counts["engine/restarts"] == 0
        engines[1].restart()
        await until(lambda: pool.engines[1].needs_weights)
        assert pool.pop_counts() == {"engine/restarts": 1, "engine/requests_resent": 0}

    play(scene)


def test_engines_that_share_gpus_are_put_to_sleep_or_lost(tmp_path: Path) -> None:
    """An engine that stays awake holds memory that the trainer counts on."""

    async def scene() -> None:
        pool, engines = build(tmp_path, 3)
        await pool.sync(NOTHING, 5, resync=False)
        await pool.sleep(1)
        await pool.wake()
        assert [e.posted for e in engines] == [["/sleep?level=1&mode=abort", "/wake_up"]] * 3
        assert await sample(pool) == expected(5)
        engines[1].status, engines[2].up = 500, False
        await pool.sleep(2)
        assert [e.posted[2:] for e in engines] == [["/sleep?level=2&mode=abort"]] * 2 + [[]]
        assert [take_request(tmp_path, i, 0) for i in range(3)] == [
            None,
            "engine 1 answered /sleep?level=2&mode=abort with 500: no",
            "engine 2 is gone",
        ]
        assert [r.version for r in pool.engines] == [None] * 3
        assert len((await pool.sync(NOTHING, 6, resync=False)).reports) == 1

    play(scene)


def test_trainers_get_the_gpus_after_a_starting_engine_is_up(tmp_path: Path) -> None:
    """It takes all of its memory while it starts; and while the trainers have theirs, none is started."""

    async def scene() -> None:
        pool, engines = build(tmp_path, 3)
        await pool.sync(NOTHING, 5, resync=False)
        assert not is_trainers_turn(tmp_path)
        for engine in engines[1:]:
            engine.up = False
            pool.mark_failed(pool.engines[engine.index], 0, "died")
        engines[1].restart()
        engines[1].up = False  # its process runs and does not answer yet; nobody has started engine 2
        sleeping = asyncio.create_task(pool.sleep(2))
        await until(lambda: is_trainers_turn(tmp_path))
        await asyncio.sleep(0.1)
        assert not sleeping.done()
        assert engines[0].posted == []
        engines[1].up = True
        await sleeping
        assert [len(e.posted) for e in engines] == [1, 1, 0]
        await pool.sync(NOTHING, 6, resync=False)
        assert not is_trainers_turn(tmp_path)

    play(scene)


def test_requests_wait_until_the_only_engine_is_back_and_synced(tmp_path: Path) -> None:
    async def scene() -> None:
        pool, engines = build(tmp_path, 1)
        await pool.sync(NOTHING, 5, resync=False)
        engines[0].fail = lambda request: "gone" if request > 3 else None
        sampling = asyncio.create_task(sample(pool))
        await until(lambda: take_request(tmp_path, 0, 0) is not None)
        engines[0].restart()
        await until(lambda: pool.restarted.is_set())
        asked = engines[0].asked
        await asyncio.sleep(0.1)
        assert engines[0].asked == asked, "an engine without weights was asked for samples"
        assert len((await pool.sync(NOTHING, 5, resync=True)).reports) == 1
        assert await sampling == expected(5)

    play(scene)


def test_an_answer_of_the_next_life_is_not_taken(tmp_path: Path) -> None:
    """The process is replaced while a request is on its way, and nothing seems to have failed."""

    async def scene() -> None:
        pool, engines = build(tmp_path, 1)
        await pool.sync(NOTHING, 5, resync=False)
        engines[0].slow = 0.1
        sampling = asyncio.create_task(sample(pool))
        await until(lambda: engines[0].asked > 0)
        engines[0].restart()
        await until(lambda: pool.engines[0].needs_weights)
        engines[0].slow = 0.0
        await pool.sync(NOTHING, 5, resync=True)
        assert await sampling == expected(5)

    play(scene)


def test_engines_that_do_not_take_weights(tmp_path: Path) -> None:
    async def scene() -> None:
        pool, engines = build(tmp_path, 3)
        await pool.sync(NOTHING, 5, resync=False)
        engines[0].sync_error = CheckFailed("version 6 refused: norm.weight")
        engines[1].sync_error = ApplyFailed("version 6: out of memory; restart the engine")
        result = await pool.sync(NOTHING, 6, resync=False)
        assert result.refused == ["engine 0: version 6 refused: norm.weight"]
        assert [r.version for r in result.reports] == [6]
        assert [r.version for r in pool.engines] == [5, None, 6]
        assert "out of memory" in (take_request(tmp_path, 1, 0) or "")
        assert await sample(pool) == expected(6)  # by the one that is left
        # Published once more: the first takes them now, the second is still away.
        result = await pool.sync(NOTHING, 6, resync=True)
        assert (len(result.reports), result.refused) == (1, [])
        assert [r.version for r in pool.engines] == [6, None, 6]

    play(scene)


def test_an_engine_that_was_restarted_between_steps(tmp_path: Path) -> None:
    """The launcher saw it die; the sampler finds the next life at its next sync, or before it asks."""

    async def scene() -> None:
        pool, engines = build(tmp_path, 1)
        await pool.sync(NOTHING, 5, resync=False)
        engines[0].restart()
        assert len((await pool.sync(NOTHING, 6, resync=False)).reports) == 1
        assert await sample(pool) == expected(6)
        engines[0].restart()
        pool.require_version(6)
        sampling = asyncio.create_task(sample(pool))
        await until(lambda: pool.engines[0].needs_weights)
        await pool.sync(NOTHING, 6, resync=True)
        assert await sampling == expected(6)
        assert pool.pop_counts()["engine/restarts"] == 2

    play(scene)


def test_without_restarts_the_first_loss_is_an_error(tmp_path: Path) -> None:
    async def scene() -> None:
        pool, engines = build(tmp_path, 2, restarts=0)
        await pool.sync(NOTHING, 5, resync=False)
        engines[1].up = False
        with pytest.raises(EngineError, match="engine 1 is gone"):
            await sample(pool)
        with pytest.raises(EngineError, match="cannot start a weight update"):
            await pool.sync(NOTHING, 6, resync=False)
        with pytest.raises(EngineError, match="weights 4"):
            pool.require_version(4)

    play(scene)


def test_a_silent_engine_is_lost(tmp_path: Path) -> None:
    async def scene() -> None:
        engines = [Engine(0, tmp_path)]
        pool = EnginePool(EngineSettings(health_timeout=0.05), engines, tmp_path)
        await pool.sync(NOTHING, 5, resync=False)
        await until(lambda: engines[0].probes >= 4)
        assert take_request(tmp_path, 0, 0) is None
        engines[0].up = False
        await until(lambda: pool.engines[0].is_restarting)
        assert "engine.health_timeout" in (take_request(tmp_path, 0, 0) or "")

    play(scene)


@pytest.mark.parametrize("restarts", [3, 0])
def test_an_engine_that_hangs_is_lost_though_its_server_answers(tmp_path: Path, restarts: int) -> None:
    """With ``engine.restarts`` 0 the request ends the run: the launcher refuses it. Also one never synced."""

    async def scene() -> None:
        for synced in (True, False):
            engines = [Engine(int(synced), tmp_path)]
            pool = EnginePool(EngineSettings(health_timeout=0.05, restarts=restarts), engines, tmp_path)
            if synced:
                await pool.sync(NOTHING, 5, resync=False)
            else:
                pool.require_version(None)
            await until(lambda engine=engines[0]: engine.probes >= 4)
            assert not pool.engines[0].is_restarting
            engines[0].core_answers = False
            await until(lambda pool=pool: pool.engines[0].is_restarting)
            reason = take_request(tmp_path, int(synced), 0) or ""
            assert reason.startswith(f"engine {int(synced)} hangs: its core did not answer for 0 s")
            engines[0].core_answers = True
            engines[0].restart()
            await until(lambda pool=pool: not pool.engines[0].is_restarting)

    play(scene)


def test_a_worker_may_wait_for_a_trainer_up_to_the_timeout(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(pool_module, "_MIN_PROBE_SECONDS", 0.01)
    links = Manifest("process_group", {"timeout": 1.0}, 0, EMPTY, ())

    async def sync_engine(post: Any, manifest: Manifest, **_: Any) -> SyncReport:
        post.__self__.core_answers = False
        await asyncio.sleep(0.5)
        post.__self__.core_answers = manifest is links
        await asyncio.sleep(600 * (manifest is not links))
        return SyncReport(5)

    monkeypatch.setattr(pool_module, "sync_engine", sync_engine)

    async def scene() -> None:
        engines = [Engine(0, tmp_path)]
        pool = EnginePool(EngineSettings(health_timeout=0.05), engines, tmp_path)
        assert len((await pool.sync(links, 5, resync=False)).reports) == 1
        assert take_request(tmp_path, 0, 0) is None
        syncing = asyncio.create_task(pool.sync(NOTHING, 6, resync=False))  # weights in shared memory
        await until(lambda: pool.engines[0].is_restarting)
        syncing.cancel()

    play(scene)


def test_a_sampler_that_was_stopped_itself_asks_again(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(pool_module, "_LATE_SECONDS", 0.2)

    class Stopped(Engine):
        async def is_progressing(self, timeout: float) -> bool:
            self.asked += 1
            if self.asked == 1:
                time.sleep(timeout + 0.3)  # the whole process; its time is up before it sees the answer
                return False
            return True

    async def scene() -> None:
        engines = [Stopped(0, tmp_path)]
        pool = EnginePool(EngineSettings(health_timeout=0.1), engines, tmp_path)
        await pool.sync(NOTHING, 5, resync=False)
        await until(lambda: engines[0].asked > 2)
        assert take_request(tmp_path, 0, 0) is None

    play(scene)


def test_a_request_for_a_life_that_is_over_is_dropped(tmp_path: Path) -> None:
    pool_module.ask_restart(tmp_path, 0, 0, "died")
    begin_incarnation(tmp_path, 0, 1)
    assert take_request(tmp_path, 0, incarnation_of(tmp_path, 0)) is None
    assert list(tmp_path.glob("*.restart")) == []


def test_each_life_that_came_up_is_noted(tmp_path: Path) -> None:
    async def scene() -> None:
        pool, engines = build(tmp_path, 1)
        assert not has_answered(tmp_path, 0, 0)
        await pool.sync(NOTHING, 1, resync=False)
        assert has_answered(tmp_path, 0, 0)
        engines[0].restart()
        pool.refresh()
        assert not has_answered(tmp_path, 0, 1)
        await until(lambda: not pool.engines[0].is_restarting)
        assert has_answered(tmp_path, 0, 1)

    play(scene)


def test_a_copy_of_a_group_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    """A leader may wait for a group that a dead worker held: it must not wait for ever."""

    class Damaged:
        async def generate(self, *_: object) -> Generated:
            return Generated(True)

        async def score(self, ticket: int) -> GroupScores:
            return GroupScores([1], [1.0], [True], [False], {})

        async def save(self, tickets: list[int], file: Path) -> None:
            assert file == tmp_path / f"group_{tickets[0]}.parquet"

        async def load(self, tickets: list[int], file: Path) -> list[GroupScores]:
            raise UserError(f"{file.name} is damaged")

    async def scene() -> None:
        pool, _ = build(tmp_path, 1)
        await pool.sync(NOTHING, 1, resync=False)
        worker: Any = Damaged()
        dispatcher, lost = Dispatcher(pool, [worker], 4, backup_dir=tmp_path), []
        dispatcher.on_lost = lost.append
        tasks = draws(2)
        await asyncio.gather(*(dispatcher.submit(task) for task in tasks))
        dispatcher.restore_worker(0)
        await until(lambda: len(lost) == 2)
        assert [str(e) for e in lost] == [f"group_{task.ticket}.parquet is damaged" for task in tasks]
        dispatcher.close()

    play(scene)
