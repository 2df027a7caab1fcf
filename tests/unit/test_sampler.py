"""The sampler against stand-in engines that answer from the seed alone.

Why: a step must not depend on the engines' timing, and must be the same after a resume; groups must be
complete and in order, and every response needs its own seed. Not covered: real engines (integration test),
weight updates.
"""

import asyncio
import itertools
import json
import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rpg_megatron.config import Settings, UserError, load_settings
from rpg_megatron.config.data import DataSettings
from rpg_megatron.config.reward import RewardSettings
from rpg_megatron.data.batch_index import index_of
from rpg_megatron.data.prompts import codec_of
from rpg_megatron.data.trajectory import Trajectory
from rpg_megatron.engine.client import EngineError
from rpg_megatron.evaluation.metrics import score_sets
from rpg_megatron.rollout.dispatcher import Dispatcher
from rpg_megatron.rollout.engine_pool import EnginePool
from rpg_megatron.rollout.sampler import Sampler
from rpg_megatron.rollout.sampler_client import EvaluatedSets, RolloutBatch
from rpg_megatron.rollout.seeds import seed_of, stop_tokens
from rpg_megatron.rollout.worker import Worker
from rpg_megatron.system.events import EventSender
from rpg_megatron.training.summary import add_accuracy
from tests.support.sampler_rig import FakeEngine, dynamic, engines, sampler_settings, write_rewards
from tests.support.stand_in_engines import ByteTokenizer


@pytest.fixture
def settings(config_file: Path) -> Settings:
    return sampler_settings(config_file)


@dataclass
class Batch:
    """A step's batch with its trajectories."""

    trajectories: list[Trajectory]
    metrics: dict[str, float]
    seconds: float


class LocalSampler(Sampler):
    """With one worker, in the same process."""

    def __init__(self, settings: Settings, engines: list[FakeEngine], events: Path = Path("/nowhere/events")):
        tokenizer = ByteTokenizer()
        pool = EnginePool(settings.engine, engines, events.parent)  # used without a sync
        stops = stop_tokens(settings.model.path, tokenizer)
        self.worker = Worker(settings, codec_of(tokenizer), engines, events.parent, stops)
        super().__init__(settings, tokenizer, pool, [self.worker], EventSender(events), events.parent)

    async def batch(self, step: int, version: int) -> Batch:
        rollout = await self.rollout(step, version)
        assert isinstance(rollout, RolloutBatch)
        trajectories = await self.worker.fetch(rollout.index.ticket.tolist(), rollout.index.sample.tolist())
        assert [t.ticket for t in trajectories] == rollout.index.ticket.tolist()
        trajectories = [
            replace(t, group=group)
            for t, group in zip(trajectories, rollout.index.group.tolist(), strict=True)
        ]
        for local, sent in zip(
            index_of(trajectories).columns()[2:], rollout.index.columns()[2:], strict=True
        ):
            assert local.tolist() == sent.tolist()
        await self.release()
        return Batch(trajectories, rollout.metrics, rollout.seconds)

    def close(self) -> None:
        self.worker.close()


def flat(batch: Batch) -> list[tuple]:
    return [
        (t.group, t.sample, t.prompt_id, t.response.tolist(), t.behaviour.tolist(), t.reward, t.finish)
        for t in batch.trajectories
    ]


def test_a_step_is_the_same_whatever_the_timing(settings: Settings) -> None:
    a = asyncio.run(LocalSampler(settings, engines(1)).batch(1, 0))
    b = asyncio.run(LocalSampler(settings, engines(2, count=3)).batch(1, 0))
    assert flat(a) == flat(b)
    assert [(t.group, t.sample) for t in a.trajectories] == [(g, s) for g in range(6) for s in range(5)]
    for t in a.trajectories:
        assert t.versions.tolist() == [0] * len(t.response)
        assert len(t.behaviour) == len(t.response)
        assert t.text == bytes(t.response[:-1].tolist()).decode()
        assert t.correct == (t.text == f"Answer: {2 * t.prompt_id}")
        assert t.reward == (1.0 if t.correct else -1.0)


def test_restricted_sampling_applies_to_rollouts_not_probes(config_file: Path) -> None:
    """Each engine's probes come with the batch, from the full distribution, for the guard."""
    rollout = "rollout={prompts_per_step: 2, samples_per_prompt: 2, top_p: 0.9, top_k: 9, stop: ['.']}"
    settings = load_settings(
        config_file,
        [rollout, "training.minibatches=1", "correction={type: icepop}"],
    )

    async def run() -> tuple[RolloutBatch, list[FakeEngine]]:
        fakes = engines(1)
        sampler = LocalSampler(settings, fakes)
        for engine in sampler._pool.engines:
            engine.version = 4
            sampler._pool.on_synced(engine, 4)
        batch = await sampler.rollout(5, 4)
        assert isinstance(batch, RolloutBatch)
        probes = await sampler.worker.fetch(batch.probes.ticket.tolist(), batch.probes.sample.tolist())
        assert all((t.versions == 4).all() and len(t.behaviour) == len(t.response) for t in probes)
        sampler.close()
        return batch, fakes

    batch, fakes = asyncio.run(run())
    assert batch.probes.group.tolist() == [0] * 17 + [1] * 17  # one repeats a prompt of version 3
    requests = [request for fake in fakes for request in fake.requests]
    sampling = [(r["top_p"], r["top_k"], r["max_tokens"] == 8) for r in requests]
    assert sorted(set(sampling)) == [(0.9, 9, False), (1.0, None, True)]
    assert sampling.count((1.0, None, True)) == 34
    assert {r["stop"] for r in requests} == {(".",)}


def test_other_steps_and_seeds_draw_others(settings: Settings) -> None:
    drawn: dict[tuple[int, int], list[bytes]] = {}
    batches = run_steps(settings, 3)
    for batch in batches:
        for t in batch.trajectories:
            drawn.setdefault((t.prompt_id, t.sample), []).append(t.behaviour.tobytes())
    assert sum(len(draws) > 1 for draws in drawn.values()) == 8 * 5
    assert all(len(set(draws)) == len(draws) for draws in drawn.values())
    reseeded = replace_seed(settings, 1)
    assert flat(asyncio.run(LocalSampler(reseeded, engines(1)).batch(1, 0))) != flat(batches[0])


def replace_seed(settings: Settings, seed: int) -> Settings:
    return settings.model_copy(update={"seed": seed})


def test_a_resumed_sampler_goes_on_with_the_same_steps(settings: Settings) -> None:
    async def run() -> tuple[list[tuple], list[tuple]]:
        sampler = LocalSampler(settings, engines(1))
        await sampler.batch(1, 0)
        state = json.loads(json.dumps(await sampler.state()))
        resumed = LocalSampler(settings, engines(5))
        await resumed.restore(state)
        return flat(await sampler.batch(2, 1)), flat(await resumed.batch(2, 1))

    continued, resumed = asyncio.run(run())
    assert continued == resumed


def test_a_prompt_that_comes_twice_makes_two_groups(settings: Settings) -> None:
    # 8 prompts in the set, 12 in the step: some come twice, with other seeds.
    larger = settings.model_copy(
        update={"rollout": settings.rollout.model_copy(update={"prompts_per_step": 12})}
    )
    fakes = engines(1)
    batch = asyncio.run(LocalSampler(larger, fakes).batch(1, 0))
    ids = [t.prompt_id for t in batch.trajectories[::5]]
    assert len(ids) == 12
    assert len(set(ids)) == 8
    seeds = [r["seed"] for f in fakes for r in f.requests]
    assert len(set(seeds)) == 12


def test_engines_share_the_work_and_are_not_flooded(settings: Settings) -> None:
    fakes = engines(1)
    sampler = LocalSampler(settings, fakes)

    async def many() -> None:
        for step in range(4):
            await sampler.batch(step, 0)

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
    batch = asyncio.run(LocalSampler(small, fakes).batch(1, 0))
    assert {r["n"] for f in fakes for r in f.requests} == {1, 2}
    assert flat(batch) == flat(asyncio.run(LocalSampler(settings, engines(1)).batch(1, 0)))


def test_a_failing_engine_ends_the_step_with_one_message(settings: Settings) -> None:
    fakes = [FakeEngine(0, random.Random(0)), FakeEngine(1, random.Random(1), fail_after=1)]
    with pytest.raises(EngineError, match=r"^engine 1 is gone$"):
        asyncio.run(LocalSampler(settings, fakes).batch(1, 0))


def test_metrics_and_events(settings: Settings, tmp_path: Path) -> None:
    import socket

    path = tmp_path / "events.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as display:
        display.bind(str(path))
        display.settimeout(5)
        batch = asyncio.run(LocalSampler(settings, engines(1), path).batch(1, 0))
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


def test_counts_are_of_all_workers() -> None:
    class Counting:
        def __init__(self, **counts: float):
            self.values = {f"reward/{name}": value for name, value in counts.items()}

        async def counts(self) -> dict[str, float]:
            return self.values

    workers: list[Any] = [Counting(errors=1, a=2), Counting(errors=3), Counting(errors=0, b=5)]
    pool: Any = None
    totals = asyncio.run(Dispatcher(pool, workers, 1).counts())
    assert totals == {"reward/errors": 4, "reward/a": 2, "reward/b": 5}


# -- dynamic sampling ----------------------------------------------------------------------------------------


@pytest.fixture
def rewards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_rewards(tmp_path)
    monkeypatch.chdir(tmp_path)


def run_steps(settings: Settings, count: int, seed: int = 1) -> list[Batch]:
    async def steps() -> list[Batch]:
        sampler = LocalSampler(settings, engines(seed))
        try:
            return [await sampler.batch(step, step) for step in range(1, count + 1)]
        finally:
            sampler.close()

    return asyncio.run(steps())


@pytest.mark.usefixtures("rewards")
@pytest.mark.parametrize(
    ("reward", "message"), [("right", "all right, 0 all wrong"), ("wrong", "0 all right, ")]
)
def test_a_step_that_cannot_be_filled_ends_with_its_counts(
    settings: Settings, reward: str, message: str
) -> None:
    starving = dynamic(settings, reward, rounds=3, oversample=1.5)
    with pytest.raises(UserError) as error:
        run_steps(starving, 1)
    assert "step 1: after 3 rounds of dynamic sampling 0 of 4 groups" in str(error.value)
    assert "(sampled 18: " in str(error.value)  # 3 rounds of 1.5 x 4
    assert message in str(error.value)
    assert f"too {'easy' if reward == 'right' else 'hard'}" in str(error.value)


@pytest.mark.usefixtures("rewards")
def test_failures_of_the_reward_are_counted_by_set(settings: Settings, caplog) -> None:
    async def both() -> tuple[RolloutBatch, EvaluatedSets]:
        sampler = LocalSampler(failing, engines(1))
        try:
            return await sampler.rollout(1, 0), await sampler.evaluate()
        finally:
            sampler.close()

    failing = settings.model_copy(update={"reward": RewardSettings(type="digit_reward:odd")})
    batch, evaluated = asyncio.run(both())
    share = (batch.index.reward < 0).mean()
    assert 0 < share < 1
    assert batch.metrics["reward/failed_frac"] == batch.failures.share == share
    (heldout,) = evaluated.failures
    assert (heldout.set, heldout.graded) == ("heldout", 24)
    assert (
        heldout.failed
        == sum(r.failed for r in evaluated.results)
        == sum(not c for r in evaluated.results for c in r.correct)
    )
    for count in (batch.failures, heldout):
        (first,) = count.first
        assert (first.set, first.detail) == (count.set, "it returned None")
        assert first.prompt.startswith("What is ")
    assert caplog.text.count("it returned None at") == 2, "the first of each set is in the log"


@pytest.mark.usefixtures("rewards")
def test_a_step_with_only_reward_failures_shows_the_first(settings: Settings) -> None:
    with pytest.raises(
        UserError, match=r"0 of 4 groups are kept; the reward failed on 90 of 90 .*\n.* KeyError"
    ):
        run_steps(dynamic(settings, "never", rounds=3, oversample=1.5), 1)


@pytest.mark.usefixtures("rewards")
@pytest.mark.parametrize("oversample", [1.0, 2.5])
def test_dynamic_sampling_fills_each_step_from_its_own_weights(settings: Settings, oversample: float) -> None:
    batches = run_steps(dynamic(settings, "mixed", oversample=oversample), 12)
    discarded = 0.0
    for step, batch in enumerate(batches, 1):
        m = {k.removeprefix("sampling/"): v for k, v in batch.metrics.items() if k.startswith("sampling/")}
        assert len(batch.trajectories) == 4 * 5
        for group in range(4):
            correct = [t.correct for t in batch.trajectories if t.group == group]
            assert 0 < sum(correct) < len(correct) == 5
        assert m["generated"] == 4 + m["all_right"] + m["all_wrong"]
        assert {v for t in batch.trajectories for v in t.versions.tolist()} == {step}
        discarded += m["discarded"]
    assert any(b.metrics["sampling/generated"] > 4 for b in batches)
    assert (discarded > 0) == (oversample > 1)
    # Every prompt that can give a mixed group is trained on, also slow and late ones.
    assert {t.prompt_id for b in batches for t in b.trajectories} == {2, 3, 4, 5, 6, 7}


@pytest.mark.usefixtures("rewards")
def test_batches_do_not_depend_on_the_oversampling(settings: Settings) -> None:
    one, more, many = (
        [flat(batch) for batch in run_steps(dynamic(settings, "mixed", oversample=n), 4, seed)]
        for seed, n in enumerate((1.0, 1.6, 4.0))
    )
    assert one == more == many


@pytest.mark.usefixtures("rewards")
def test_every_group_has_seeds_of_its_own(settings: Settings) -> None:
    fakes = engines(1)
    sampler = LocalSampler(dynamic(settings, "even"), fakes)

    async def steps() -> list[Batch]:
        return [await sampler.batch(step, 0) for step in (1, 2, 3, 4)]

    try:
        batches = asyncio.run(steps())
    finally:
        sampler.close()
    seeds = [r["seed"] for f in fakes for r in f.requests]
    assert len(seeds) == len(set(seeds)) == sum(b.metrics["sampling/generated"] for b in batches)


def from_source(settings: Settings, tmp_path: Path, **data: object) -> Settings:
    """Settings with prompts from code, in its order. Call it in ``tmp_path``."""
    (tmp_path / "doubles_of_test.py").write_text(
        "def doubles():\n"
        "    for i in range(1000):\n"
        "        yield {'prompt': f'What is {i}+{i}?', 'answer': 2 * i}\n"
    )
    source = {"source": {"type": "doubles_of_test:doubles"}, "shuffle": False, "max_prompt_tokens": 128}
    return settings.model_copy(update={"data": DataSettings.model_validate(source | data)})


def test_streaming_and_reading_a_source_whole_give_equal_batches(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    expected = run_steps(from_source(settings, tmp_path), 2)
    assert [flat(batch) for batch in run_steps(from_source(settings, tmp_path, streaming=True), 2)] == [
        flat(batch) for batch in expected
    ]


@pytest.mark.usefixtures("rewards")
@pytest.mark.parametrize("streaming", [False, True])
def test_a_resumed_sampler_samples_discarded_prompts_again(
    settings: Settings, tmp_path: Path, streaming: bool
) -> None:
    mixture = dynamic(settings, "mixed", oversample=3.0)
    if streaming:
        mixture = from_source(mixture, tmp_path, streaming=True)

    async def run() -> tuple[list[tuple], list[tuple]]:
        sampler = LocalSampler(mixture, engines(1))
        resumed = LocalSampler(mixture, engines(5))
        try:
            first = await sampler.batch(1, 1)
            assert first.metrics["sampling/discarded"] > 0
            state = json.loads(json.dumps(await sampler.state()))
            await resumed.restore(state)
            return flat(await sampler.batch(2, 2)), flat(await resumed.batch(2, 2))
        finally:
            sampler.close()
            resumed.close()

    continued, resumed = asyncio.run(run())
    assert continued == resumed


def test_evaluation_covers_the_set_in_order_with_fixed_seeds(settings: Settings) -> None:
    fakes = engines(1)
    sampler = LocalSampler(settings, fakes)

    async def twice() -> list:
        return [(await sampler.evaluate()).results, (await sampler.evaluate()).results]

    first, second = asyncio.run(twice())
    assert first == second
    assert [r.prompt_id for r in first] == list(range(8))
    for r in first:
        assert len(r.responses) == len(r.correct) == len(r.lengths) == len(r.finishes) == 3
        assert r.correct == [text == f"Answer: {r.answer}" for text in r.responses]
    assert all(q["temperature"] == 0.5 and not q["logprobs"] for f in fakes for q in f.requests)
    assert {r.set for r in first} == {"heldout"}
    without = settings.model_copy(update={"evaluation": None})
    with pytest.raises(UserError, match=r"evaluation\.data"):
        asyncio.run(LocalSampler(without, engines(1)).evaluate())


def test_several_held_out_sets_are_told_apart(config_file: Path) -> None:
    data = config_file.parent / "train.jsonl"

    def evaluate(*parts: str) -> list:
        sets = ", ".join(f"{{name: {name}, path: {data}, max_prompt_tokens: 99}}" for name in parts)
        settings = load_settings(config_file, [f"evaluation={{sets: [{sets}], samples: 3, top_p: 0.9}}"])
        fakes = engines(1)
        results = asyncio.run(LocalSampler(settings, fakes).evaluate()).results
        assert {q["top_p"] for f in fakes for q in f.requests} == {0.9}
        return results

    both, one = evaluate("a", "b"), evaluate("b")
    assert [(r.set, r.prompt_id) for r in both] == [(name, i) for name in "ab" for i in range(8)]
    assert both[8:] == one  # whatever else is evaluated
    assert [r.responses for r in both[:8]] != [r.responses for r in one]
    metrics = score_sets(both)
    assert metrics["eval/a/avg@3"] == sum(sum(r.correct) for r in both[:8]) / 24
    assert {key.split("/")[1] for key in metrics} == {"a", "b"}


def test_each_held_out_set_is_sampled_as_it_asks(config_file: Path) -> None:
    """AIME with many samples and MATH-500 greedily, in one evaluation; other sets follow the section."""
    data = config_file.parent / "train.jsonl"
    part = f"path: {data}, max_prompt_tokens: 99, limit: 2"
    sets = f"{{name: a, samples: 5, {part}}}, {{name: c, {part}}}, "
    sets += f"{{name: b, samples: 1, temperature: 0, top_p: 1.0, max_response_tokens: 7, {part}}}"
    evaluation = (
        f"evaluation={{sets: [{sets}], samples: 2, temperature: 0.6, top_p: 0.9, max_response_tokens: 30}}"
    )
    settings = load_settings(config_file, [evaluation])
    fakes = engines(1)
    results = asyncio.run(LocalSampler(settings, fakes).evaluate()).results
    assert [(r.set, len(r.responses)) for r in results] == [("a", 5)] * 2 + [("c", 2)] * 2 + [("b", 1)] * 2
    sampling = {
        tuple(q[key] for key in ("temperature", "top_p", "max_tokens")) for f in fakes for q in f.requests
    }
    assert sampling == {(0.6, 0.9, 30), (0.0, 1.0, 7)}
    row = score_sets(results)
    assert set(settings.evaluation.metric_names()) == set(row)
    assert {"eval/a/avg@5", "eval/a/pass@4", "eval/b/avg@1", "eval/c/maj@2"} <= set(row)
    summary: dict[str, Any] = {}
    add_accuracy(summary, settings.evaluation, row)
    assert summary["accuracy_before"] == {
        s: row[f"eval/{s}/avg@{k}"] for s, k in (("a", 5), ("c", 2), ("b", 1))
    }


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
    assert stop_tokens(tmp_path, ByteTokenizer()) == [0]
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 0, 3]}')
    assert stop_tokens(tmp_path, ByteTokenizer()) == [0, 3, 5]
    (tmp_path / "generation_config.json").write_text("[]")
    nameless = ByteTokenizer()
    nameless.eos_token_id = None
    with pytest.raises(UserError, match="end-of-sequence"):
        stop_tokens(tmp_path, nameless)
