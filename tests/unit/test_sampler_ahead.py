"""Rollouts sampled ahead of the trainer, with stand-in engines that sample token by token.

Why: a token whose version is wrong, a batch that is older than allowed, or a prompt that is lost or
trained on twice would only show as a run that learns worse. A stand-in's log-probs depend on its version and
all tokens before, so each can be checked. Not covered: real engines (tests/integration/test_async_rollouts),
the trainer's side.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rpg_megatron.bridge.controller import SyncReport
from rpg_megatron.bridge.manifest import EMPTY, Manifest
from rpg_megatron.config import Settings, UserError, load_settings
from rpg_megatron.config.data import DataSettings
from rpg_megatron.config.rollout import DynamicSamplingSettings, EpisodeSettings
from rpg_megatron.data.prompts import codec_of
from rpg_megatron.data.trajectory import Trajectory
from rpg_megatron.engine.client import EngineError, EngineUnavailable, Sample
from rpg_megatron.engine.restarts import begin_incarnation, incarnation_of
from rpg_megatron.rollout import engine_pool
from rpg_megatron.rollout.engine_pool import EnginePool
from rpg_megatron.rollout.sampler import Sampler
from rpg_megatron.rollout.sampler_client import ResyncRequired, RolloutBatch
from rpg_megatron.rollout.seeds import stop_tokens
from rpg_megatron.rollout.worker import Worker
from rpg_megatron.rollout.worker_files import CODEC
from rpg_megatron.system.events import EventSender
from tests.support.episodes import BETWEEN
from tests.support.ranks import ROOT
from tests.support.stand_in_engines import ByteTokenizer, write_byte_codec

NOTHING = Manifest("shared_memory", {}, 0, EMPTY, ())
STEPS = 8


def logprob(version: int | None, before: Sequence[int], token: int) -> float:
    return float(np.float32(-random.Random(f"{version} {tuple(before)} {token}").random()))


class Engine:
    """Samples token by token from the seed; a sync interrupts what runs."""

    def __init__(self, index: int, rng: random.Random, work: Path):
        self.index, self.rng, self.work = index, rng, work
        self.version: int | None = None
        self.closed, self.running, self.most, self.up = False, 0, 0, True
        self.requests: list[dict[str, Any]] = []

    async def generate(self, prompt: np.ndarray, *, n: int, **request: Any) -> list[Sample]:
        self.requests.append({"prompt": prompt.tolist(), "n": n, "version": self.version} | request)
        most, start = request["max_tokens"], request["routes_from"]
        tasks = [self._one(prompt.tolist(), request["seed"] + i, most, start) for i in range(n)]
        return list(await asyncio.gather(*tasks))

    async def _one(self, prompt: list[int], seed: int, most: int, routes_from: int) -> Sample:
        version, draw, tokens, values, finish = self.version, random.Random(seed), [], [], ""
        self.running += 1
        try:
            while not finish:
                await asyncio.sleep(0.0005 * self.rng.random())
                if not self.up:
                    raise EngineUnavailable(f"engine {self.index} is gone")
                if self.closed:
                    finish = "abort"
                    break
                token = 0 if draw.random() < 0.05 else draw.randrange(48, 58)
                values.append(logprob(version, [*prompt, *tokens], token))
                tokens.append(token)
                finish = "stop" if token == 0 else "length" if len(tokens) == most else ""
        finally:
            self.running -= 1
        # Each row names the version that computed it and its token's place.
        end = len(prompt) + len(tokens) - 1
        computed_by = -1 if version is None else version
        routes = np.array([[[computed_by, place]] for place in range(routes_from, end)], np.int16)
        sample = Sample(np.array(tokens, np.int32), np.array(values, np.float32), finish, version)
        return replace(sample, routes=routes) if tokens else sample

    async def post(self, *_: Any) -> tuple[int, str]:
        return 200, ""

    async def metrics(self, timeout: float) -> dict[str, float]:
        raise EngineError("there are none")

    async def wait_ready(self, timeout: float) -> None:
        assert self.up

    async def health(self, timeout: float = 5.0) -> bool:
        return self.up

    async def is_progressing(self, timeout: float) -> bool:
        return True

    def restart(self) -> None:
        """What the launcher does when the process has died."""
        self.version, self.up = None, True
        begin_incarnation(self.work, self.index, incarnation_of(self.work, self.index) + 1)


@pytest.fixture(autouse=True)
def _syncs(monkeypatch: pytest.MonkeyPatch) -> None:
    async def sync_engine(post: Any, _: Manifest, *, version: int, interrupt: bool, **__: Any) -> SyncReport:
        engine = post.__self__
        engine.closed = interrupt
        while engine.running:
            await asyncio.sleep(0.0005)
        await asyncio.sleep(0.002 * engine.rng.random())
        engine.version, engine.closed = version, False
        return SyncReport(version)

    monkeypatch.setattr(engine_pool, "sync_engine", sync_engine)
    monkeypatch.setattr(engine_pool, "_POLL_SECONDS", 0.01)
    monkeypatch.setattr(engine_pool, "_RESTART_WAIT_SECONDS", 0.05)


class Run:
    """Sampler, stand-in engines, and a trainer with random delays."""

    def __init__(self, settings: Settings, folder: Path, seed: int, engines: int = 2):
        self.settings, self.rng, self.folder = settings, random.Random(seed), folder
        folder.mkdir()
        self.engines = [Engine(i, random.Random(100 * seed + i), folder) for i in range(engines)]
        clients: list[Any] = list(self.engines)
        tokenizer = ByteTokenizer()
        pool = EnginePool(settings.engine, clients, folder, interrupt=True)
        stops = stop_tokens(settings.model.path, tokenizer)
        folder.mkdir(parents=True, exist_ok=True)
        write_byte_codec(folder / CODEC)
        self.worker = Worker(settings, codec_of(tokenizer), clients, folder, stops)
        events = EventSender(folder / "events")
        self.sampler = Sampler(settings, tokenizer, pool, [self.worker], events, folder)
        self.batches: list[RolloutBatch] = []
        self.trajectories: list[list[Trajectory]] = []
        self.probes: list[list[Trajectory]] = []

    async def go(self, first: int = 1, last: int = STEPS, state: dict[str, Any] | None = None) -> Run:
        async with asyncio.timeout(60):
            if state is not None:
                await self.sampler.restore(state)
            await self.sampler.sync(NOTHING, first - 1, False)
            for step in range(first, last + 1):
                await self.step(step)
                await asyncio.sleep(0.02 * self.rng.random())
                await self.sampler.sync(NOTHING, step, False)
        self.close()
        return self

    async def step(self, step: int) -> None:
        batch: Any = await self.sampler.rollout(step, step - 1)
        while isinstance(batch, ResyncRequired):
            await self.sampler.sync(NOTHING, step - 1, True)
            batch = await self.sampler.resume_request()
        self.batches.append(batch)
        index = batch.index
        self.trajectories.append(await self.worker.fetch(index.ticket.tolist(), index.sample.tolist()))
        self.probes.append([])
        if batch.probes is not None:
            tickets, samples = batch.probes.ticket.tolist(), batch.probes.sample.tolist()
            self.probes[-1] = await self.worker.fetch(tickets, samples)
        await self.sampler.release()

    def close(self) -> None:
        self.sampler.dispatcher.close()
        self.worker.close()

    def tickets(self) -> list[list[int]]:
        """Tickets of each batch, in its order."""
        samples = self.settings.rollout.samples_per_prompt
        return [batch.index.ticket.tolist()[::samples] for batch in self.batches]

    def contents(self) -> list[list[tuple[Any, ...]]]:
        return [
            [
                (t.ticket, t.sample, t.response.tolist(), t.behaviour.tolist(), t.versions.tolist())
                for t in batch
            ]
            for batch in self.trajectories
        ]


@pytest.fixture
def settings(config_file: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    (config_file.parent / "digit_reward.py").write_text(
        "def even(response, answer): return len(response) % 2 == 0\n"
        "def never(response, answer): return False\n"
        "def broken(scores): return scores.parts['right']\n"
    )
    monkeypatch.chdir(config_file.parent)
    monkeypatch.setattr("rpg_megatron.rollout.probes.PROBE_PROMPTS", 2)
    monkeypatch.setattr("rpg_megatron.rollout.probes.PROBE_TOKENS", 4)
    return load_settings(
        config_file,
        [
            "rollout.ahead=2",
            "correction.type=truncate",
            "rollout.max_response_tokens=64",
            "engine.replicas=2",
            "engine.max_sequences=8",
            f"training.steps={STEPS}",
            "reward.type=digit_reward:even",
        ],
    )


def changed(settings: Settings, **rollout: Any) -> Settings:
    return settings.model_copy(update={"rollout": settings.rollout.model_copy(update=rollout)})


def with_dynamic(settings: Settings, **rollout: Any) -> Settings:
    """Two responses a group: about half of the groups are rejected."""
    dynamic = type(settings.rollout).model_validate({"dynamic": {"rounds": 20}}).dynamic
    return changed(settings, samples_per_prompt=2, dynamic=dynamic, **rollout)


def check(run: Run) -> None:
    """Check what holds for any timing."""
    ahead, size = run.settings.rollout.ahead, run.settings.rollout.prompts_per_step
    seeds: Counter[tuple[int, int]] = Counter()
    for step, batch in enumerate(run.trajectories, 1):
        assert len({t.ticket for t in batch}) == size
        lags = np.concatenate([step - 1 - t.versions[t.mask] for t in batch])
        assert lags.min() >= 0
        assert lags.max() <= ahead
        for t in batch:
            before = [*t.prompt.tolist(), *t.response.tolist()]
            assert len(t.versions) == len(t.response) == len(t.behaviour)
            # A token that was not sampled was computed together with the next one that was.
            following = [int(t.versions[place:][t.mask[place:]][0]) for place in range(len(t.response))]
            sampled_by = [*[following[0]] * (len(t.prompt) - 1), *following]
            assert t.routes[:, 0].tolist() == [[v, place] for place, v in enumerate(sampled_by)]
            assert (np.diff(t.versions[t.mask]) >= 0).all()
            assert (t.versions[~t.mask] == -1).all()
            assert not t.behaviour[~t.mask].any()
            for place in np.flatnonzero(t.mask).tolist():
                end, version = len(t.prompt) + place, int(t.versions[place])
                assert t.behaviour[place] == np.float32(logprob(version, before[:end], before[end]))
            assert t.finish == ("stop" if t.response[-1] == 0 else "length")
            assert not (t.mask[1:] & (t.response[:-1] == 0)).any()  # an end of sequence ends the turn
            assert len(t.response) <= run.settings.rollout.max_response_tokens
            seeds[t.seed, t.sample] += 1
        metrics = run.batches[step - 1].metrics
        assert metrics["async/lag_max"] == lags.max()
        assert metrics["async/lag_mean"] == pytest.approx(lags.mean())
        assert metrics["async/stale_tokens"] == pytest.approx((lags > 0).mean())
        mixed = [len(set(t.versions[t.mask].tolist())) for t in batch]
        assert metrics["async/mixed_responses"] == pytest.approx(np.mean([n > 1 for n in mixed]))
        assert metrics["async/segments"] == pytest.approx(np.mean(mixed))
    assert max(seeds.values()) == 1
    tickets = [ticket for batch in run.tickets() for ticket in batch]
    assert tickets == sorted(set(tickets))


@pytest.mark.parametrize("ahead", [1, 4])
def test_tokens_have_their_version_and_none_is_too_old(settings: Settings, tmp_path, ahead: int) -> None:
    run = asyncio.run(Run(changed(settings, ahead=ahead), tmp_path / "run", ahead).go())
    check(run)
    size = settings.rollout.prompts_per_step
    assert run.tickets() == [list(range(n * size, (n + 1) * size)) for n in range(STEPS)]
    mixed = [batch.metrics["async/mixed_responses"] for batch in run.batches]
    assert max(mixed) > 0
    assert max(batch.metrics["async/lag_max"] for batch in run.batches) >= 1
    # No random numbers are drawn again for another place.
    prompts: dict[int, list[int]] = {}
    for request in (r for engine in run.engines for r in engine.requests):
        assert prompts.setdefault(request["seed"], request["prompt"]) == request["prompt"]
    # Nothing is sampled that no step would train on.
    assert run.sampler._stream._next_ticket == STEPS * size


def test_turns_have_exact_versions_when_updates_interrupt_them(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three turns with tokens between them: an episode sees whole turns, whatever an update interrupted."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
    episode = EpisodeSettings.model_validate({"type": "tests.support.episodes:three_turns"})
    run = asyncio.run(Run(changed(settings, episode=episode), tmp_path / "run", 3).go())
    check(run)
    everyone = [t for batch in run.trajectories for t in batch]
    assert {tuple(t.response[~t.mask].tolist()) for t in everyone} == {BETWEEN + BETWEEN}
    assert max(batch.metrics["async/mixed_responses"] for batch in run.batches) > 0
    aborted = [r["max_tokens"] for engine in run.engines for r in engine.requests]
    assert len(aborted) > 3 * len(everyone) / 2, "no turn was sent again"
    for batch, sampled in zip(run.batches, run.trajectories, strict=True):
        assert batch.index.sampled.tolist() == [int(t.mask.sum()) for t in sampled]
        assert batch.index.response_length.tolist() == [len(t.response) for t in sampled]
        assert batch.metrics["response/length_max"] == max(int(t.mask.sum()) for t in sampled)


def test_slow_episodes_are_trained_like_the_others(settings: Settings, tmp_path, monkeypatch) -> None:
    """Which ones are trained on does not depend on which are fast: they are those of a synchronous run."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
    episode = EpisodeSettings.model_validate({"type": "tests.support.episodes:some_slow"})
    runs = [
        asyncio.run(Run(changed(settings, episode=episode, ahead=ahead), tmp_path / str(ahead), 5).go())
        for ahead in (2, 0)
    ]
    check(runs[0])
    size = settings.rollout.prompts_per_step
    assert runs[0].tickets() == [list(range(n * size, (n + 1) * size)) for n in range(STEPS)]
    assert max(batch.metrics["async/ready"] for batch in runs[0].batches) > 0, "none was overtaken"
    sampled, dispatched = (
        [
            (t.ticket, t.sample, t.response.tolist().count(BETWEEN[0]))
            for batch in run.trajectories
            for t in batch
        ]
        for run in runs
    )
    assert sampled == dispatched
    assert {turns for *_, turns in sampled} == {0, 1, 2, 3}


@pytest.mark.long  # fifty steps for each of several seeds and settings; the default tier has eight of one
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("ahead", [1, 2, 3, 4, 8])
def test_the_bound_holds_for_fifty_steps(settings: Settings, tmp_path: Path, ahead: int, seed: int) -> None:
    settings = settings.model_copy(update={"training": settings.training.model_copy(update={"steps": 50})})
    check(asyncio.run(Run(with_dynamic(settings, ahead=ahead), tmp_path / "run", seed).go(last=50)))


def test_rejected_groups_are_replaced_in_prompt_order(settings: Settings, tmp_path: Path) -> None:
    run = asyncio.run(Run(with_dynamic(settings), tmp_path / "run", 1).go())
    check(run)
    for batch in run.trajectories:
        rewards = np.array([t.reward for t in batch]).reshape(-1, 2)
        assert (rewards.max(axis=1) > rewards.min(axis=1)).all()
    generated = sum(batch.metrics["sampling/generated"] for batch in run.batches)
    assert generated > STEPS * settings.rollout.prompts_per_step
    assert run.sampler._stream._next_ticket >= generated
    assert not [ticket for ticket in run.worker._groups if ticket >= 0], "rejected groups stay in memory"


@pytest.mark.parametrize("reject", [False, True])
def test_drained_batches_have_one_version_and_are_the_same_again(
    settings: Settings, tmp_path: Path, reject: bool
) -> None:
    change = with_dynamic if reject else changed
    drained = change(settings, ahead=1, inflight="drain")
    a = asyncio.run(Run(drained, tmp_path / "a", 1).go())
    b = asyncio.run(Run(drained, tmp_path / "b", 2, engines=3).go())
    check(a)
    assert a.contents() == b.contents()
    for step, batch in enumerate(a.trajectories, 1):
        versions = {version for t in batch for version in t.versions.tolist()}
        assert versions == {max(step - 2, 0)}


def test_a_resumed_run_starts_with_the_first_untrained_group(settings: Settings, tmp_path: Path) -> None:
    dynamic = with_dynamic(settings, ahead=1, inflight="drain")

    async def part() -> Run:
        return await Run(dynamic, tmp_path / "first", 1).go(last=5)

    uninterrupted = asyncio.run(Run(dynamic, tmp_path / "whole", 3).go())
    first = asyncio.run(part())
    state = json.loads(json.dumps(first.batches[-1].state))
    resumed = asyncio.run(Run(dynamic, tmp_path / "rest", 7).go(first=6, state=state))
    assert first.tickets() == uninterrupted.tickets()[:5]
    assert state["next_ticket"] == first.tickets()[-1][-1] + 1
    assert resumed.tickets()[0][0] > first.tickets()[-1][-1]
    prompt_of = {t.ticket: t.prompt_id for batch in uninterrupted.trajectories for t in batch}
    common = [t for batch in resumed.trajectories for t in batch if t.ticket in prompt_of]
    assert common
    assert all(t.prompt_id == prompt_of[t.ticket] for t in common)
    check(first)
    for step, batch in enumerate(resumed.trajectories, 6):
        assert {v for t in batch for v in t.versions.tolist()} == {max(step - 2, 5)}
    plain = asyncio.run(Run(settings, tmp_path / "plain", 1).go(first=6, state=state | {"next_ticket": 20}))
    assert [ticket for batch in plain.tickets() for ticket in batch] == list(range(20, 32))


def test_every_engine_answers_probes_with_the_present_weights(settings: Settings, tmp_path: Path) -> None:
    run = asyncio.run(Run(settings, tmp_path / "run", 1).go())
    earlier: list[list[int]] = []
    for step, (batch, probes) in enumerate(zip(run.batches, run.probes, strict=True), 1):
        number = 2 + (step > 1)
        assert batch.probes.group.tolist() == [0] * number + [1] * number
        prompts = [t.prompt.tolist() for t in probes[:number]]
        if step > 1:
            assert prompts[-1] == max(earlier[:2], key=len), "the longest of the weights before"
        earlier = prompts
        assert [len(t.response) for t in probes] == batch.probes.response_length.tolist()
        assert [len(t.prompt) for t in probes] == batch.probes.prompt_length.tolist()
        for t in probes:
            assert 1 <= len(t.response) <= 4
            assert set(t.versions.tolist()) == {step - 1}
    off = settings.model_copy(update={"guards": settings.guards.model_copy(update={"mismatch": "off"})})
    assert asyncio.run(Run(off, tmp_path / "off", 1).go(last=2)).batches[0].probes is None


@pytest.mark.parametrize("inflight", ["continue", "drain"])
def test_engines_that_die_lose_and_repeat_nothing(settings: Settings, tmp_path: Path, inflight: str) -> None:
    settings = changed(settings, ahead=1, inflight=inflight)
    settings = settings.model_copy(update={"engine": settings.engine.model_copy(update={"restarts": 99})})
    run = Run(settings, tmp_path / "run", 1)

    async def disturb() -> None:
        for number in range(10):
            await asyncio.sleep(0.03 * run.rng.random())
            # One, the other, and both at once, when only new weights can make them serve again.
            for engine in run.engines[number % 2 :] if number % 3 else run.engines:
                engine.up = False
            await asyncio.sleep(0.02 * run.rng.random())
            for engine in run.engines:
                if not engine.up:
                    engine.restart()

    async def both() -> None:
        disturbing = asyncio.create_task(disturb())
        await run.go()
        disturbing.cancel()

    asyncio.run(both())
    check(run)
    size = settings.rollout.prompts_per_step
    assert run.tickets() == [list(range(n * size, (n + 1) * size)) for n in range(STEPS)]


def test_a_step_that_cannot_be_filled_ends_with_its_counts(settings: Settings, tmp_path: Path) -> None:
    reward = settings.reward.model_copy(update={"type": "digit_reward:never"})
    starving = with_dynamic(settings).model_copy(update={"reward": reward})
    with pytest.raises(UserError, match=r"step 1: after 20 rounds .* all wrong\)"):
        asyncio.run(Run(starving, tmp_path / "run", 1).go())


def test_a_streaming_source_that_ends_ends_the_step(settings: Settings, tmp_path: Path) -> None:
    """Groups are taken from it when others are graded, where an error would only be logged."""
    (tmp_path / "ending_source_of_test.py").write_text(
        "def sums():\n    for i in range(36):\n        yield {'prompt': f'{i}?', 'answer': i}\n"
    )
    source = {"source": {"type": "ending_source_of_test:sums"}, "streaming": True, "shuffle": False}
    data = source | {"max_prompt_tokens": 128}
    ending = with_dynamic(settings).model_copy(update={"data": DataSettings.model_validate(data)})
    with pytest.raises(UserError, match="ending_source_of_test:sums has ended after 36 rows"):
        asyncio.run(Run(ending, tmp_path / "run", 1).go())


def test_a_filter_that_fails_ends_the_step(settings: Settings, tmp_path: Path) -> None:
    """The run would wait for ever if its error were only logged."""
    dynamic = DynamicSamplingSettings(type="digit_reward:broken")
    run = Run(changed(settings, dynamic=dynamic), tmp_path / "run", 1)
    with pytest.raises(UserError, match=r"digit_reward:broken fails at .*: KeyError: 'right'; fix it"):
        asyncio.run(run.go())
