"""Groups that were graded when a run was stopped are used when it resumes, and only where they are the same.

Why: a rollout takes most of a step, and a job's end comes in the middle of one. A group that is used for
another task, or with other weights than the batch may have, would train on the wrong samples without a word.
Stand-in engines that answer from the seed alone (test_sampler.py). Not covered: signals and processes
(tests/integration/test_kept_rollouts.py).
"""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from rpg_megatron.config import Settings, UserError
from rpg_megatron.data.prompts import codec_of
from rpg_megatron.rollout.engine_pool import EnginePool
from rpg_megatron.rollout.kept_groups import UNFINISHED, KeptGroup, read_kept
from rpg_megatron.rollout.sampler import Sampler
from rpg_megatron.rollout.sampler_client import RolloutBatch
from rpg_megatron.rollout.seeds import stop_tokens
from rpg_megatron.rollout.worker import Worker
from rpg_megatron.system.events import EventSender
from tests.support.sampler_rig import FakeEngine, dynamic, engines, sampler_settings, write_rewards
from tests.support.stand_in_engines import ByteTokenizer


@pytest.fixture
def settings(config_file: Path) -> Settings:
    return sampler_settings(config_file)


@pytest.fixture
def rewards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_rewards(tmp_path)
    monkeypatch.chdir(tmp_path)


class KeepingSampler(Sampler):
    """With a run's folder and one worker in this process."""

    def __init__(self, settings: Settings, fakes: list[FakeEngine], run: Path):
        tokenizer = ByteTokenizer()
        run.mkdir(exist_ok=True)
        pool = EnginePool(settings.engine, fakes, run)
        self.worker = Worker(
            settings, codec_of(tokenizer), fakes, run, stop_tokens(settings.model.path, tokenizer)
        )
        super().__init__(settings, tokenizer, pool, [self.worker], EventSender(run / "no"), run / "no", run)

    async def batch(self, step: int, version: int) -> list[tuple[Any, ...]]:
        rollout = await self.rollout(step, version)
        assert isinstance(rollout, RolloutBatch)
        rows = await self.worker.fetch(rollout.index.ticket.tolist(), rollout.index.sample.tolist())
        await self.release()
        columns = ("ticket", "sample", "prompt_id", "reward", "text", "finish", "seed")
        return [
            (*(getattr(t, c) for c in columns), t.behaviour.tobytes(), t.versions.tobytes()) for t in rows
        ]


class StoppedEngine(FakeEngine):
    """Answers a number of requests, then none."""

    def __init__(self, index: int, rng: Any, answers: int):
        super().__init__(index, rng)
        self.answers = answers

    async def generate(self, prompt_tokens: np.ndarray, **request: Any) -> list:
        if len(self.requests) >= self.answers:
            self.requests.append(request)
            await asyncio.sleep(60)
        return await super().generate(prompt_tokens, **request)


async def stop_in_rollout(settings: Settings, run: Path, answers: int, version: int = 1) -> dict[str, Any]:
    """Stops in step 2, when ``answers`` of its groups are graded; returns the state after step 1."""
    first = engines(1, 1)[0]
    sampler = KeepingSampler(settings, [StoppedEngine(0, first.rng, 10**9)], run)
    await sampler.batch(1, 0)
    state = await sampler.state()
    (engine,) = sampler.worker._engines
    engine.answers = len(engine.requests) + answers
    task = asyncio.create_task(sampler.rollout(2, version))
    while len(sampler._producer.graded()) < answers:
        await asyncio.sleep(0.01)
    await sampler.keep_groups()
    task.cancel()
    sampler.dispatcher.close()
    sampler.worker.close()
    return state


async def resume(settings: Settings, run: Path, state: dict[str, Any], version: int = 1) -> tuple[list, int]:
    """Step 2, and the number of responses that were sampled for it."""
    fakes = engines(2)
    sampler = KeepingSampler(settings, fakes, run)
    await sampler.restore(state)
    rows = await sampler.batch(2, version)
    sampler.worker.close()
    return rows, sum(request["n"] for fake in fakes for request in fake.requests)


def undisturbed(settings: Settings, run: Path) -> list[tuple[Any, ...]]:
    async def steps() -> list[tuple[Any, ...]]:
        sampler = KeepingSampler(settings, engines(3), run)
        await sampler.batch(1, 0)
        rows = await sampler.batch(2, 1)
        sampler.worker.close()
        return rows

    return asyncio.run(steps())


def test_only_the_rest_is_sampled_again(settings: Settings, tmp_path: Path) -> None:
    run = tmp_path / "run"
    state = asyncio.run(stop_in_rollout(settings, run, answers=4))
    kept = read_kept(run / UNFINISHED)
    assert len(kept) == 4
    rows, sampled = asyncio.run(resume(settings, run, state))
    assert sampled == 2 * 5
    assert rows == undisturbed(settings, tmp_path / "other")
    assert not (run / UNFINISHED).exists()
    # A second resume of the same state finds nothing, and samples everything.
    again, sampled = asyncio.run(resume(settings, run, state))
    assert (again, sampled) == (rows, 6 * 5)


def test_a_second_stop_keeps_what_the_first_kept(settings: Settings, tmp_path: Path) -> None:
    run = tmp_path / "run"
    state = asyncio.run(stop_in_rollout(settings, run, answers=2))

    async def stop_again() -> None:
        sampler = KeepingSampler(settings, [StoppedEngine(0, engines(4, 1)[0].rng, 1)], run)
        await sampler.restore(state)
        task = asyncio.create_task(sampler.rollout(2, 1))
        while len(sampler._producer.graded()) < 3:
            await asyncio.sleep(0.01)
        await sampler.keep_groups()
        task.cancel()
        sampler.dispatcher.close()
        sampler.worker.close()

    asyncio.run(stop_again())
    assert len(read_kept(run / UNFINISHED)) == 3
    rows, sampled = asyncio.run(resume(settings, run, state))
    assert sampled == 3 * 5
    assert rows == undisturbed(settings, tmp_path / "other")


@pytest.mark.usefixtures("rewards")
def test_rejected_groups_are_kept_too(settings: Settings, tmp_path: Path) -> None:
    settings, run = dynamic(settings, "mixed", oversample=1.5), tmp_path / "run"
    state = asyncio.run(stop_in_rollout(settings, run, answers=5))
    kept = read_kept(run / UNFINISHED)
    assert len(kept) == 5
    rejected = [group for group in kept if group.rejected]
    assert rejected
    files = list((run / UNFINISHED).glob("*.parquet"))
    assert len(files) == 5 - len(rejected)
    tickets = {group.task.ticket for group in kept}

    async def resumed() -> tuple[list, set[int]]:
        fakes = engines(2)
        sampler = KeepingSampler(settings, fakes, run)
        generated: set[int] = set()
        generate = sampler.worker.generate

        async def watched(task: Any, *rest: Any) -> Any:
            generated.add(task.ticket)
            return await generate(task, *rest)

        sampler.worker.generate = watched  # type: ignore[method-assign]
        await sampler.restore(state)
        rows = await sampler.batch(2, 1)
        sampler.worker.close()
        return rows, generated

    rows, generated = asyncio.run(resumed())
    assert not generated & tickets
    assert rows == undisturbed(settings, tmp_path / "other")


def test_other_weights_are_sampled_again(settings: Settings, tmp_path: Path) -> None:
    """The checkpoint of the stop could not be written, say, and an older one is resumed."""
    run = tmp_path / "run"
    state = asyncio.run(stop_in_rollout(settings, run, answers=4, version=3))
    rows, sampled = asyncio.run(resume(settings, run, state, version=1))
    assert sampled == 6 * 5
    assert rows == undisturbed(settings, tmp_path / "other")


def test_a_full_disk_keeps_nothing_and_leaves_nothing(settings: Settings, tmp_path, monkeypatch) -> None:
    def full(file: Path, _: object) -> None:
        raise OSError(28, "No space left on device", str(file))

    monkeypatch.setattr("rpg_megatron.rollout.worker.write_rollouts", full)
    with pytest.raises(UserError, match="No space left"):
        asyncio.run(stop_in_rollout(settings, tmp_path / "run", answers=2))
    assert not list((tmp_path / "run").glob("*unfinished*"))


def test_groups_of_lost_weights_are_not_used(settings: Settings, tmp_path: Path) -> None:
    """The weights that sampled them were not saved; when their number comes again, they are others."""
    run = tmp_path / "run"
    state = asyncio.run(stop_in_rollout(settings, run, answers=4, version=1))

    async def resumed() -> int:
        fakes = engines(2)
        sampler = KeepingSampler(settings, fakes, run)
        await sampler.restore(state)
        await sampler.batch(1, 0)  # a step that is done again
        before = sum(request["n"] for fake in fakes for request in fake.requests)
        await sampler.batch(2, 1)
        sampler.worker.close()
        return sum(request["n"] for fake in fakes for request in fake.requests) - before

    assert asyncio.run(resumed()) == 6 * 5


def test_a_stop_keeps_what_was_not_used_yet(settings: Settings, tmp_path: Path) -> None:
    run = tmp_path / "run"
    state = asyncio.run(stop_in_rollout(settings, run, answers=4))

    async def stop_at_once() -> None:
        sampler = KeepingSampler(settings, engines(4), run)
        await sampler.restore(state)
        await sampler.dispatcher.keep([], run / UNFINISHED)
        sampler.worker.close()

    asyncio.run(stop_at_once())
    assert len(read_kept(run / UNFINISHED)) == 4
    rows, sampled = asyncio.run(resume(settings, run, state))
    assert (rows, sampled) == (undisturbed(settings, tmp_path / "other"), 2 * 5)


@pytest.mark.parametrize("damage", ["a file", "the index", "a file is missing"])
def test_what_is_damaged_is_sampled_again(settings: Settings, tmp_path: Path, damage: str) -> None:
    run = tmp_path / "run"
    state = asyncio.run(stop_in_rollout(settings, run, answers=4))
    folder = run / UNFINISHED
    file = sorted(folder.glob("*.parquet"))[1]
    if damage == "a file":
        file.write_bytes(file.read_bytes()[:-40])
    elif damage == "the index":
        (folder / "groups.msgpack").write_bytes(b"\x93\x01")
    else:
        file.unlink()
    rows, sampled = asyncio.run(resume(settings, run, state))
    assert sampled == (6 if damage == "the index" else 3) * 5
    assert rows == undisturbed(settings, tmp_path / "other")


@pytest.mark.parametrize(
    ("changed", "older", "same"),
    [
        ({}, False, True),
        ({"version": 4}, False, False),
        ({"version": 4}, True, True),  # a later version asks: older weights may be in the batch
        ({"version": 2}, True, False),
        ({"seed": 1}, True, False),
        ({"temperature": 0.5}, True, False),
        ({"prompt": np.array([1, 2, 4], np.int32)}, True, False),
        ({"samples": 3}, True, False),
        ({"max_tokens": 9}, True, False),
        ({"answer": "5"}, True, False),
    ],
)
def test_a_group_is_for_its_own_task(
    settings: Settings, tmp_path: Path, changed: dict[str, Any], older: bool, same: bool
) -> None:
    run = tmp_path / "run"
    asyncio.run(stop_in_rollout(settings, run, answers=1, version=3))
    (group,) = read_kept(run / UNFINISHED)
    assert isinstance(group, KeptGroup)
    assert group.is_for(msgspec.structs.replace(group.task, **changed), older=older) == same
