"""User-defined episodes: turns, tokens between them, rewards, errors.

Why: no metric shows that a token was trained on that the policy did not sample, or that a turn continues
other tokens than those sampled. Stand-in engines answer from the prompt and the seed alone. Weight updates in
mid-turn: test_sampler_ahead. Not covered: real engines (tests/integration/test_episode_run.py).
"""

import asyncio
import dataclasses
import json
import os
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from rpg_megatron.config import UserError, load_settings
from rpg_megatron.data.batch_index import index_of
from rpg_megatron.data.prompts import codec_of
from rpg_megatron.data.trajectory import NOT_SAMPLED
from rpg_megatron.engine.client import Sample
from rpg_megatron.launcher.input_checks import list_custom_code
from rpg_megatron.rollout.batch_metrics import batch_metrics, index_of_groups
from rpg_megatron.rollout.dynamic_sampling import Group
from rpg_megatron.rollout.episode_pool import LocalEpisode
from rpg_megatron.rollout.groups import (
    Generated,
    GroupAnswers,
    TrajectorySize,
    by_response,
)
from rpg_megatron.rollout.worker import Worker
from rpg_megatron.rollout.worker_files import CODEC
from rpg_megatron.system.custom_code import find_problem
from tests.support import episodes
from tests.support.episode_rig import PROMPT, Engine, contents, make_settings, make_task, sample
from tests.support.ranks import ROOT
from tests.support.stand_in_engines import ByteTokenizer, write_byte_codec


def test_turns_continue_what_was_sampled(config_file: Path, tmp_path: Path) -> None:
    settings = make_settings(config_file, "tests.support.episodes:three_turns", longest=5)
    engine = Engine(random.Random(1))
    group, scores = sample(settings, [engine], tmp_path)
    each = [(tuple(r["prompt"]), r["seed"] + i, r) for r in engine.requests for i in range(r["n"])]
    assert len({seed for _, seed, _ in each}) == len(each) == 3 * 3
    answers = {(prompt, seed): r["max_tokens"] for prompt, seed, r in each if prompt != tuple(PROMPT)}
    assert len(answers) == 2 * 3
    for t in group:
        sequence = [*PROMPT, *t.response.tolist()]
        turns = re.fullmatch(rb"(\d{1,5}\0?)\(\)\*(\d{1,5}\0?)\(\)\*(\d{1,5}\0?)", bytes(t.response.tolist()))
        assert [bool(m) for m in t.mask] == [token not in b"()*" for token in t.response.tolist()]
        assert (t.versions == np.where(t.mask, 5, NOT_SAMPLED)).all()
        assert (t.behaviour[t.mask] < 0).all()
        assert not t.behaviour[~t.mask].any()
        for begin in (turns.start(2), turns.start(3)):  # a request for exactly the tokens before the turn
            assert [n for (a, _), n in answers.items() if list(a) == sequence[: 12 + begin]] == [5]
        assert t.text == bytes(token for token in t.response.tolist() if token).decode()
    assert scores.lengths == [int(t.mask.sum()) for t in group]
    assert [row.response for row in scores.rows] == [len(t.response) for t in group]
    assert scores.versions == {5: sum(scores.lengths)}
    assert (scores.segments, scores.mixed, scores.recomputed) == (3, 0, 0)
    assert not scores.repeatable


class ThinkingEngine(Engine):
    """Answers within thoughts that the prompt began, and in two of three responses after them."""

    def _one(self, prompt: list[int], seed: int, most: int) -> Sample:
        text = (b"\\boxed{3}", b"\\boxed{3}</think>\\boxed{2}", b"\\boxed{2}")[seed % 3] + b"\0"
        return Sample(
            np.frombuffer(text, np.uint8).astype(np.int32), np.full(len(text), -1, np.float32), "stop"
        )


@pytest.mark.parametrize(("end", "correct"), [(b"<think>\n", 1), (b"<think>\n\n</think>\n\n", 2)])
def test_thoughts_that_the_prompt_begins_do_not_answer(
    end: bytes, correct: int, config_file: Path, tmp_path: Path
) -> None:
    settings = load_settings(config_file, ["reward.type=boxed", "rollout.max_response_tokens=64"])
    prompt = np.frombuffer(PROMPT + end, np.uint8).astype(np.int32)
    engine, task = ThinkingEngine(random.Random(1)), replace(make_task(), prompt=prompt)
    _, scores = sample(settings, [engine], tmp_path, task)
    assert sum(scores.correct) == correct


def test_a_rewritten_history_is_a_row_of_its_own(config_file: Path, tmp_path: Path) -> None:
    """A turn is sampled in one row; rows share what belongs to the response, and count as one."""
    settings = make_settings(config_file, "tests.support.episodes:branching")
    engine = Engine(random.Random(1))
    group, scores = sample(settings, [engine], tmp_path)
    assert [(t.sample, t.branch) for t in group] == [(n, b) for n in range(3) for b in range(3)]
    requests = [(tuple(r["prompt"]), r["seed"] + i) for r in engine.requests for i in range(r["n"])]
    turns = {(tuple(engine._one(list(p), seed, 64).tokens.tolist()), p) for p, seed in requests}
    assert len(requests) == len({seed for _, seed in requests}) == len(turns) == 15
    for first, other, last in by_response(group):
        assert [bytes(t.prompt.tolist()) for t in (first, other, last)] == [PROMPT, b"another prompt", PROMPT]
        texts = [bytes(t.response.tolist()) for t in (first, other, last)]
        assert re.fullmatch(rb"\d{1,5}\0?\(\)\*\d+\0?", texts[0])
        assert re.fullmatch(rb"\d{1,5}\0?", texts[1])
        assert re.fullmatch(rb"\(\)\*\d{1,5}\0?\(\)\*\d+\0?", texts[2])
        for t in (first, other, last):
            assert t.mask.tolist() == [token not in b"()*" for token in t.response.tolist()]
            assert (t.versions == np.where(t.mask, 5, NOT_SAMPLED)).all()
            whole = (*t.prompt.tolist(), *t.response.tolist())
            starts = np.flatnonzero(np.diff(np.append(False, t.mask).astype(int)) == 1)
            assert all(whole[: len(t.prompt) + start] in {p for p, _ in requests} for start in starts)
        assert len({(t.reward, t.finish, t.seed, t.correct) for t in (first, other, last)}) == 1
    assert scores.rows == [
        TrajectorySize(t.sample, t.branch, len(t.prompt), len(t.response), t.sampled) for t in group
    ]
    assert scores.lengths == [sum(t.sampled for t in rows) for rows in by_response(group)]
    assert len(scores.rewards) == len(scores.correct) == len(scores.truncated) == 3
    assert scores.versions == {5: sum(scores.lengths)}

    groups = [Group(make_task(), scores), Group(make_task(), replace(scores, rewards=[0.0, 1.0, 2.0]))]
    index = index_of_groups(groups, lambda prompt_id: 0)
    assert index.starts.tolist() == list(range(0, 18, 3))
    assert index.reward[9:].tolist() == [0.0] * 3 + [1.0] * 3 + [2.0] * 3
    local = index_of([dataclasses.replace(t, group=g) for g in (0, 1) for t in group])
    for name in ("group", "sample", "branch", "row", "prompt_length", "response_length", "sampled"):
        assert np.array_equal(getattr(index, name), getattr(local, name)), name
    metrics = batch_metrics(groups)
    assert metrics["env/branches"] == 2
    assert metrics["response/length_mean"] == np.mean(scores.lengths)


def test_rows_survive_files_and_answer_for_their_response(config_file: Path, tmp_path: Path) -> None:
    settings = make_settings(config_file, "tests.support.episodes:branching")

    async def run() -> None:
        write_byte_codec(tmp_path / CODEC)
        worker = Worker(settings, codec_of(ByteTokenizer()), [Engine(random.Random(1))], tmp_path, [0])
        try:
            assert (await worker.generate(make_task(), 0, 0)).complete
            scores, group = await worker.score(7), await worker.fetch([7] * 9, list(range(9)))
            answers = await worker.answers(7)
            await worker.save([7], tmp_path / "group.parquet")
            await worker.drop([7])
            (loaded,) = await worker.load([7], tmp_path / "group.parquet")
            again = await worker.fetch([7] * 9, list(range(9)))
        finally:
            worker.close()
        assert answers.responses == [rows[-1].text for rows in by_response(group)]
        assert answers.lengths == scores.lengths
        assert loaded == replace(scores, repeatable=True, failures=loaded.failures)
        assert [(t.sample, t.branch, *contents([t])) for t in again] == [
            (t.sample, t.branch, *contents([t])) for t in group
        ]

    asyncio.run(run())


@pytest.mark.parametrize("episode", ["three_turns", "branching"])
def test_neither_timing_nor_failures_change_a_response(config_file, tmp_path, episode: str) -> None:
    """A turn that an engine has answered is not sampled again when it fails."""
    settings = make_settings(config_file, f"tests.support.episodes:{episode}")
    expected, _ = sample(settings, [Engine(random.Random(1))], tmp_path)
    for seed in range(20):
        lives = (seed % 7, 2, 100)
        engines = [Engine(random.Random(10 * seed + i), lives=count) for i, count in enumerate(lives)]
        here = LocalEpisode(getattr(episodes, episode), settings.rollout.episode)
        group, _ = sample(settings, engines, tmp_path, episode=here if seed % 7 else None)
        assert contents(group) == contents(expected)
        assert sum(engine.answered for engine in engines) == (9 if episode == "three_turns" else 15)


class BusyEngine(Engine):
    """Works on the turns of three samples until all of them are given up."""

    async def generate(self, prompt: np.ndarray, *, n: int, **request: Any) -> list[Sample]:
        samples = await super().generate(prompt, n=n, **request)
        if self.answered == 3:
            episodes.at_work.set()
        while len(episodes.given_up) < 3:
            await asyncio.sleep(0.001)
        return samples


def test_a_turn_that_was_given_up_leaves_nothing(config_file: Path, tmp_path: Path) -> None:
    engine = BusyEngine(random.Random(1))
    episodes.at_work = asyncio.Event()
    episodes.given_up.clear()
    settings = make_settings(config_file, "tests.support.episodes:impatient")
    here = LocalEpisode(episodes.impatient, settings.rollout.episode)
    group, _ = sample(settings, [engine], tmp_path, episode=here)
    assert sum(r["n"] for r in engine.requests) == 2 * 3
    expected, _ = sample(load_settings(config_file), [Engine(random.Random(1))], tmp_path)
    assert contents(group) == contents(expected)


def test_single_turns_are_asked_for_together(config_file: Path, tmp_path: Path) -> None:
    engine = Engine(random.Random(1))
    settings = load_settings(config_file, ["rollout.max_response_tokens=64"])
    sample(settings, [engine], tmp_path, make_task(samples=40, max_tokens=1000))
    assert [r["n"] for r in engine.requests] == [4] * 10  # 4,096 tokens at their limit
    assert [r["seed"] for r in engine.requests] == list(range(1000, 1040, 4))


def test_probes_have_one_turn(config_file: Path, tmp_path: Path) -> None:
    settings = make_settings(config_file, "tests.support.episodes:faulty", fault="raises")
    group, _ = sample(settings, [Engine(random.Random(1))], tmp_path, make_task(graded=False))
    assert all(t.mask.all() for t in group)


def test_the_token_limit_ends_a_response(config_file: Path, tmp_path: Path) -> None:
    settings = make_settings(config_file, "tests.support.episodes:three_turns")
    group, scores = sample(settings, [Engine(random.Random(1))], tmp_path, make_task(max_tokens=8))
    assert all(len(t.response) <= 8 and t.mask[-1] for t in group)
    assert [t.finish for t in group] == ["length"] * 3
    assert scores.truncated == [True] * 3


@pytest.mark.parametrize("limit", ["tokens", "turns"])
@pytest.mark.parametrize("ended", ["passes", "none", "score", "raises"])
def test_a_limit_ends_a_response_and_never_a_run(config_file, tmp_path, ended: str, limit: str) -> None:
    """Two of four responses reach it; whatever their episodes make of it, they are no failures, and have the
    number ``failed`` unless they return another.
    """
    keys: dict[str, Any] = {"failed": -0.5, "ended": ended} | ({"max_turns": 2} if limit == "turns" else {})
    settings = make_settings(config_file, "tests.support.episodes:numbered", **keys)
    group, scores = sample(
        settings, [Engine(random.Random(1))], tmp_path, make_task(samples=4, max_tokens=40)
    )
    assert scores.failures.failed == 0
    assert scores.truncated[::2] == [True, True]
    cut = -1.0 if ended == "score" else -0.5
    assert [t.reward for t in group] == scores.rewards == [cut, 1.5, cut, 1.5]
    assert [t.correct for t in group] == [False, True] * 2
    assert ["episode" in t.parts for t in group] == [t.reward != -1.0 for t in group]


def test_groups_that_a_limit_has_ended_whole(config_file: Path, tmp_path: Path) -> None:
    """They have the number too, once a response has shown that episodes return numbers; and the run's reward
    where episodes leave it to the run.
    """

    async def run(episode: str, **keys: Any) -> list[list[float]]:
        settings = make_settings(config_file, f"tests.support.episodes:{episode}", failed=-0.5, **keys)
        write_byte_codec(tmp_path / CODEC)
        worker = Worker(settings, codec_of(ByteTokenizer()), [Engine(random.Random(1))], tmp_path, [0])
        rewards = []
        try:
            for ticket, seed in ((1, 1001), (2, 1000), (3, 1002)):
                task = make_task(ticket=ticket, samples=1, max_tokens=24, seed=seed)
                assert (await worker.generate(task, 0, 0)).complete
                rewards.append((await worker.score(ticket)).rewards)
        finally:
            worker.close()
        return rewards

    assert asyncio.run(run("numbered")) == [[1.5], [-0.5], [-0.5]]
    assert asyncio.run(run("numbered", ended="'score kind'")) == [[-1.0]] * 3
    assert asyncio.run(run("until_the_limit")) == [[-1.0]] * 3
    both = asyncio.run(run("numbered", weight=2.0))
    assert both == [[-1.0 + 2 * number] for number in (1.5, -0.5, -0.5)], "the run's, and the episode's"


def test_an_episode_sets_its_reward(config_file: Path, tmp_path: Path) -> None:
    numbers, scores = sample(
        make_settings(config_file, "tests.support.episodes:scored"), [Engine(random.Random(1))], tmp_path
    )
    assert [t.reward for t in numbers] == [len(t.response) / 100 for t in numbers]
    assert all(t.correct and t.parts == {"episode": t.reward} for t in numbers)
    assert scores.failures.failed == 0
    graded, _ = sample(
        make_settings(config_file, "tests.support.episodes:scored", kind="score"),
        [Engine(random.Random(1))],
        tmp_path,
    )
    run, _ = sample(load_settings(config_file), [Engine(random.Random(1))], tmp_path)
    assert contents(graded) == contents(run)
    assert [t.parts for t in graded] == [t.parts for t in run]


def test_an_evaluation_runs_the_episode_too(config_file: Path, tmp_path: Path) -> None:
    settings = make_settings(config_file, "tests.support.episodes:told")
    context = json.dumps({"prompt": PROMPT.decode(), "row": {"level": 3}})
    held_out = make_task(set="amc", context=context, correctness_only=True, logprobs=False)

    async def run() -> GroupAnswers:
        clients: Any = [Engine(random.Random(1))]
        write_byte_codec(tmp_path / CODEC)
        worker = Worker(settings, codec_of(ByteTokenizer()), clients, tmp_path, [0])
        assert (await worker.generate(held_out, 0, 0)).complete
        answers = await worker.answers(7)
        assert answers.lengths == (await worker.score(7)).lengths
        worker.close()
        return answers

    answers = asyncio.run(run())
    assert answers.correct == [True] * 3
    assert all(
        len(text.replace("()*", "")) <= n for text, n in zip(answers.responses, answers.lengths, strict=True)
    )


def test_a_reward_that_fails_inside_an_episode_is_counted(config_file, tmp_path, monkeypatch) -> None:
    (tmp_path / "bad_reward.py").write_text("def bad(response, answer): return 1 / 0\n")
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
    monkeypatch.chdir(tmp_path)
    settings = make_settings(config_file, "tests.support.episodes:scored")
    reward = load_settings(config_file, ["reward.type=bad_reward:bad"]).reward
    settings = settings.model_copy(update={"reward": reward})
    _, scores = sample(settings, [Engine(random.Random(1))], tmp_path)
    assert (scores.failures.failed, scores.failures.graded) == (3, 3)
    assert "ZeroDivisionError" in str(scores.failures.first)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("no turn", "it ended without a turn of the policy"),
        ("nothing", "it returned NoneType instead of an Episode"),
        ("raises", "KeyError: 'a tool' at .*tests/support/episodes.py:[0-9]+$"),
        ("shorter", "do not begin with the 12 tokens of the conversation so far .they differ at token 11"),
        ("encoded again", "they differ at token 12"),
        ("text", "something that is no list of token ids"),
        ("ragged", "something that is no list of token ids"),
        ("numbers", "something that is no list of token ids"),
        ("unknown token", "token 1000000; the model has [0-9]+ tokens"),
        ("no limit", "max_tokens 0; at least 1"),
        ("two at once", "while it samples another turn"),
        ("cancelled", "CancelledError"),
        ("not finite", "the reward is nan"),
        ("own name", "metric 'turns': use a letter"),
        ("half a character", r"error: ValueError: \\ud800 at .*tests/support/episodes.py:[0-9]+$"),
        ("exits", "error: SystemExit: 3"),
    ],
)
def test_a_faulty_episode_is_counted(config_file: Path, tmp_path: Path, fault: str, message: str) -> None:
    """Its response is kept with the turns it has, for the guard to decide."""
    settings = make_settings(config_file, "tests.support.episodes:faulty", fault=fault, failed=-0.5)
    group, scores = sample(settings, [Engine(random.Random(1))], tmp_path)
    assert (scores.failures.failed, scores.failures.graded) == (3, 3)
    (failure,) = scores.failures.first
    assert re.search(message, str(failure))
    start = "rollout.episode tests.support.episodes:faulty, training set, prompt 0 ('What is 1+1?'): error: "
    assert str(failure).startswith(start)
    assert [(t.reward, t.correct) for t in group] == [(-0.5, False)] * 3
    assert all(1 <= t.sampled == len(t.response) for t in group)


def test_rewards_of_different_kinds_are_refused(config_file: Path, tmp_path: Path) -> None:
    settings = make_settings(config_file, "tests.support.episodes:scored", kind="either")
    with pytest.raises(UserError, match="return rewards of different kinds"):
        sample(settings, [Engine(random.Random(1))], tmp_path)


def test_a_dropped_group_ends_its_episodes(config_file: Path, tmp_path: Path) -> None:
    settings = make_settings(config_file, "tests.support.episodes:three_turns")

    async def run() -> None:
        clients: Any = [Engine(random.Random(1))]
        write_byte_codec(tmp_path / CODEC)
        worker = Worker(settings, codec_of(ByteTokenizer()), clients, tmp_path, [0])
        working = asyncio.create_task(worker.generate(make_task(), 0, 0))
        while not clients[0].requests:
            await asyncio.sleep(0)
        await worker.drop([7])
        assert await working == Generated(False)
        newer = make_task(version=6)
        assert (await worker.generate(newer, 0, 0)).complete
        assert await worker.generate(make_task(), 0, 0) == Generated(False)
        await worker.score(7)
        worker.close()
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(run())


@pytest.mark.parametrize(
    ("episode", "keys", "message"),
    [
        ("tests.support.episodes:none", {}, "the module tests.support.episodes has no 'none'"),
        ("tests.support.ranks:run_ranks", {}, "no coroutine function; define it with async def"),
        ("tests.support.episodes:three_turns", {"longst": 3}, "did you mean 'longest'"),
        ("tests.support.episodes:three_turns", {"longest": "many"}, "rollout.episode.longest: .*integer"),
    ],
)
def test_a_wrong_setting_is_found_before_the_start(
    config_file: Path, episode: str, keys: dict[str, Any], message: str
) -> None:
    """By the check that ``train``, ``plan`` and ``doctor`` run."""
    (code,) = list_custom_code(make_settings(config_file, episode, **keys))
    assert re.search(message, str(find_problem(code)))
    (valid,) = list_custom_code(
        load_settings(config_file, ["rollout.episode=tests.support.episodes:three_turns"])
    )
    assert find_problem(valid) is None


def test_the_example_of_the_page(
    config_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write_page: Callable[[Path], None]
) -> None:
    write_page(tmp_path)
    (tmp_path / "length.py").write_text("def length(response, answer): return len(response) / 8\n")
    monkeypatch.chdir(tmp_path)
    settings = make_settings(config_file, "my_episodes:ask_again", hint="'?'")
    reward = load_settings(config_file, ["reward.type=length:length"]).reward
    settings = settings.model_copy(update={"reward": reward})
    group, _ = sample(settings, [Engine(random.Random(1))], tmp_path)
    for t in group:
        assert t.mask.tolist() == [token != ord("?") for token in t.response.tolist()]
        turns = bytes(t.response.tolist()).split(b"?")
        before, after = (len(turn.strip(b"\0")) / 8 for turn in turns)
        assert t.reward == after + 0.5 * (after - before)


@pytest.fixture
def write_page() -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        page = (ROOT / "docs" / "extend.md").read_text()
        (text,) = re.findall(r"```python\n(# my_episodes.py\n.*?)```", page, re.DOTALL)
        (folder / "my_episodes.py").write_text(text)

    return write
