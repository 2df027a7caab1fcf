"""The sampler against stand-in engines that answer from the seed alone.

Why: a step must not depend on which engine was quick, and must be the same again after a resume; groups must
be whole and in order, no two responses drawn with one seed. Not covered: real engines (integration test),
weight updates.
"""

import asyncio
import itertools
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rpg_megatron.config import Settings, UserError, load_settings
from rpg_megatron.rollout.client import EngineError, Sample
from rpg_megatron.rollout.events import EventSender
from rpg_megatron.rollout.fleet import Fleet
from rpg_megatron.rollout.sampler import RolloutBatch, Sampler, seed_of, stop_tokens


class Tokenizer:
    """A byte is a token; 0 ends a text."""

    eos_token_id = 0

    def __call__(self, texts: list[str], *, add_special_tokens: bool) -> dict[str, list[list[int]]]:
        return {"input_ids": [list(text.encode()) for text in texts]}

    def decode(self, tokens: list[int], *, skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return bytes(t for t in tokens if t).decode(errors="replace")


class FakeEngine:
    """Answers "Answer: <digit>" after a random while; the digit and the log-probs come from the seed."""

    def __init__(self, index: int, rng: random.Random, fail_after: int | None = None):
        self.index, self.rng, self.fail_after = index, rng, fail_after
        self.requests: list[dict[str, Any]] = []
        self.running = self.most = 0

    async def generate(self, prompt_tokens: np.ndarray, **request: Any) -> list[Sample]:
        self.requests.append({"prompt": prompt_tokens.tolist()} | request)
        self.running += request["n"]
        self.most = max(self.most, self.running)
        await asyncio.sleep(self.rng.random() * 0.01)
        self.running -= request["n"]
        if self.fail_after is not None and len(self.requests) > self.fail_after:
            raise EngineError(f"engine {self.index} is gone")
        return [self.sample(request["seed"] + i, request["logprobs"]) for i in range(request["n"])]

    def sample(self, seed: int, logprobs: bool) -> Sample:
        draw = random.Random(seed)
        tokens = np.frombuffer(f"Answer: {draw.randint(0, 9)}".encode() + b"\0", np.uint8).astype(np.int32)
        values = [-draw.random() for _ in tokens] if logprobs else []
        return Sample(tokens, np.array(values, np.float32), draw.choice(["stop", "length"]))


@pytest.fixture
def settings(config_file: Path) -> Settings:
    overrides = ["rollout.prompts_per_step=6", "rollout.samples_per_prompt=5", "engine.max_sequences=8"]
    data = config_file.parent / "train.jsonl"
    evaluation = f"evaluation={{data: {{path: {data}, max_prompt_tokens: 99}}, samples: 3, temperature: 0.5}}"
    return load_settings(config_file, [*overrides, evaluation, "training.minibatches=2"])


def sampler_with(
    settings: Settings, engines: list[FakeEngine], events: Path = Path("/nowhere/events")
) -> Sampler:
    fleet = Fleet(settings.engine, engines, events.parent)  # never synced: they are taken as they are
    return Sampler(settings, Tokenizer(), fleet, EventSender(events))


def engines(seed: int, count: int = 2) -> list[FakeEngine]:
    return [FakeEngine(i, random.Random(100 * seed + i)) for i in range(count)]


def flat(batch: RolloutBatch) -> list[tuple]:
    return [
        (t.group, t.sample, t.prompt_id, t.response.tolist(), t.behaviour.tolist(), t.reward, t.finish)
        for t in batch.trajectories
    ]


def test_a_step_is_the_same_whatever_the_timing(settings: Settings) -> None:
    a = asyncio.run(sampler_with(settings, engines(1)).rollout(1, 0))
    b = asyncio.run(sampler_with(settings, engines(2, count=3)).rollout(1, 0))
    assert flat(a) == flat(b)
    assert [(t.group, t.sample) for t in a.trajectories] == [(g, s) for g in range(6) for s in range(5)]
    for t in a.trajectories:
        assert t.versions.tolist() == [0] * len(t.response)
        assert len(t.behaviour) == len(t.response)
        assert t.text == bytes(t.response[:-1].tolist()).decode()
        assert t.correct == (t.text == f"Answer: {2 * t.prompt_id}")
        assert t.reward == (1.0 if t.correct else -1.0)


def test_other_steps_and_seeds_draw_others(settings: Settings) -> None:
    async def two_steps() -> tuple[RolloutBatch, RolloutBatch]:
        sampler = sampler_with(settings, engines(1))
        state = await sampler.state()
        first = await sampler.rollout(1, 0)
        await sampler.restore(state)
        return first, await sampler.rollout(2, 0)

    first, second = asyncio.run(two_steps())
    assert [t.prompt_id for t in first.trajectories] == [t.prompt_id for t in second.trajectories]
    assert flat(first) != flat(second)
    other = replace_seed(settings, 1)
    assert flat(asyncio.run(sampler_with(other, engines(1)).rollout(1, 0))) != flat(first)


def replace_seed(settings: Settings, seed: int) -> Settings:
    return settings.model_copy(update={"seed": seed})


def test_a_resumed_sampler_goes_on_with_the_same_steps(settings: Settings) -> None:
    async def run() -> tuple[list[tuple], list[tuple]]:
        sampler = sampler_with(settings, engines(1))
        await sampler.rollout(1, 0)
        state = json.loads(json.dumps(await sampler.state()))
        resumed = sampler_with(settings, engines(5))
        await resumed.restore(state)
        return flat(await sampler.rollout(2, 1)), flat(await resumed.rollout(2, 1))

    went_on, resumed = asyncio.run(run())
    assert went_on == resumed


def test_a_prompt_that_comes_twice_makes_two_groups(settings: Settings) -> None:
    # 8 prompts in the set, 12 in the step: some come twice, with other seeds.
    larger = settings.model_copy(
        update={"rollout": settings.rollout.model_copy(update={"prompts_per_step": 12})}
    )
    fakes = engines(1)
    batch = asyncio.run(sampler_with(larger, fakes).rollout(1, 0))
    ids = [t.prompt_id for t in batch.trajectories[::5]]
    assert len(ids) == 12
    assert len(set(ids)) == 8
    seeds = [r["seed"] for f in fakes for r in f.requests]
    assert len(set(seeds)) == 12


def test_engines_share_the_work_and_are_not_flooded(settings: Settings) -> None:
    fakes = engines(1)
    sampler = sampler_with(settings, fakes)

    async def many() -> None:
        for step in range(4):
            await sampler.rollout(step, 0)

    asyncio.run(many())
    assert all(len(f.requests) >= 4 for f in fakes)
    assert all(8 <= f.most <= 15 for f in fakes)  # 8 at once, a quarter ahead, whole groups of 5
    for request in fakes[0].requests:
        assert request["temperature"] == 1.0
        assert request["stop_token_ids"] == [0, 256]
        assert request["max_tokens"] == 16
        assert request["logprobs"]


def test_a_group_larger_than_an_engine_takes_several_requests(settings: Settings) -> None:
    small = settings.model_copy(update={"engine": settings.engine.model_copy(update={"max_sequences": 2})})
    fakes = engines(1)
    batch = asyncio.run(sampler_with(small, fakes).rollout(1, 0))
    assert {r["n"] for f in fakes for r in f.requests} == {1, 2}
    assert flat(batch) == flat(asyncio.run(sampler_with(settings, engines(1)).rollout(1, 0)))


def test_a_failing_engine_ends_the_step_with_one_message(settings: Settings) -> None:
    fakes = [FakeEngine(0, random.Random(0)), FakeEngine(1, random.Random(1), fail_after=1)]
    with pytest.raises(EngineError, match=r"^engine 1 is gone$"):
        asyncio.run(sampler_with(settings, fakes).rollout(1, 0))


def test_metrics_and_events(settings: Settings, tmp_path: Path) -> None:
    import socket

    path = tmp_path / "events.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as display:
        display.bind(str(path))
        display.settimeout(5)
        batch = asyncio.run(sampler_with(settings, engines(1), path).rollout(1, 0))
        events = [json.loads(display.recv(4096)) for _ in range(7)]
    assert [(e["kind"], e["name"], e["total"]) for e in events] == [("phase", "rollout", 6)] * 7
    assert [e["done"] for e in events] == list(range(7))
    rewards = np.array([t.reward for t in batch.trajectories])
    assert batch.metrics["reward/mean"] == pytest.approx(rewards.mean())
    assert batch.metrics["reward/accuracy"] == pytest.approx((rewards > 0).mean())
    assert batch.metrics["reward/std"] == pytest.approx(rewards.std())
    lengths = [batch.metrics[f"response/length_{name}"] for name in ("mean", "p50", "p95", "max")]
    assert lengths == [10] * 4
    cut = [t.finish == "length" for t in batch.trajectories]
    assert batch.metrics["response/truncated_frac"] == pytest.approx(np.mean(cut)) != 0
    assert batch.seconds >= batch.metrics["time/reward"] >= 0


def test_evaluation_covers_the_whole_set_in_order_and_repeats_its_seeds(settings: Settings) -> None:
    fakes = engines(1)
    sampler = sampler_with(settings, fakes)

    async def twice() -> list:
        return [await sampler.evaluate(), await sampler.evaluate()]

    first, second = asyncio.run(twice())
    assert first == second
    assert [r.prompt_id for r in first] == list(range(8))
    for r in first:
        assert len(r.responses) == len(r.correct) == len(r.lengths) == len(r.finishes) == 3
        assert r.correct == [text == f"Answer: {r.answer}" for text in r.responses]
    assert all(q["temperature"] == 0.5 and not q["logprobs"] for f in fakes for q in f.requests)
    without = settings.model_copy(update={"evaluation": None})
    with pytest.raises(UserError, match=r"evaluation\.data"):
        asyncio.run(sampler_with(without, engines(1)).evaluate())


def test_seeds_are_far_apart_and_fit_into_63_bits() -> None:
    seeds = sorted(
        seed_of(s, purpose, step, place, p)
        for s in (0, 1)
        for purpose in ("rollout", "evaluation")
        for step in range(10)
        for place in range(10)
        for p in range(10)
    )
    assert seeds[0] >= 0
    assert seeds[-1] < 2**62
    assert min(b - a for a, b in itertools.pairwise(seeds)) > 1024


def test_stop_tokens_come_from_tokenizer_and_checkpoint(tmp_path: Path) -> None:
    assert stop_tokens(tmp_path, Tokenizer()) == [0]
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 0, 3]}')
    assert stop_tokens(tmp_path, Tokenizer()) == [0, 3, 5]
    (tmp_path / "generation_config.json").write_text("[]")
    nameless = Tokenizer()
    nameless.eos_token_id = None
    with pytest.raises(UserError, match="end-of-sequence"):
        stop_tokens(tmp_path, nameless)
