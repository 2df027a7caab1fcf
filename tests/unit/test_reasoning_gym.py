"""reasoning-gym's problems as prompts, and its graders as rewards.

Why: a problem that the episode makes again must be the one in the prompt, or a correct answer is punished.
Every generator of the library is used, with its real graders. Skipped where the library is not installed.
Not covered: training on them (tests/integration/test_episode_run.py).
"""

from __future__ import annotations

import asyncio
import json
from itertools import islice
from typing import Any

import pytest

from rpg_megatron.config import UserError
from rpg_megatron.config.base import ImportedSettings
from rpg_megatron.data.custom_source import custom_rows
from rpg_megatron.environments.reasoning_gym import WITHOUT_ANSWER, play, problems
from rpg_megatron.rewards.reward import Score
from rpg_megatron.rollout.episode import Episode, EpisodeTask

library = pytest.importorskip("reasoning_gym")
DATASETS: dict[str, Any] = pytest.importorskip("reasoning_gym.factory").DATASETS


class Said:
    """Replaces ``Generate``: the policy says one text."""

    def __init__(self, text: str) -> None:
        self.text = text

    async def __call__(self, *_: object) -> Said:
        return self


def graded(row: dict[str, Any], text: str, **settings: str) -> tuple[Score, Episode]:
    row = json.loads(json.dumps(row))  # as the data hands it over
    task: Any = EpisodeTask((), row["prompt"], row["answer"], row, 100, 0, "", None, None)  # type: ignore[arg-type]
    generate: Any = Said(text)
    score: Any = None
    ended = asyncio.run(play(task, generate, score, **settings))
    assert isinstance(ended.reward, Score)
    return ended.reward, ended


@pytest.mark.parametrize("name", sorted(set(DATASETS) - {"composite"}))
def test_a_generators_own_answers_are_correct(name: str) -> None:
    if name in WITHOUT_ANSWER:
        assert library.create_dataset(name, seed=3, size=2)[0]["answer"] is None
        with pytest.raises(UserError, match=f"generator '{name}' has no reference answers"):
            problems(generators={name: None})
        return
    rows = list(problems(generators={name: None}, count=2, seed=3))
    assert rows == list(problems(generators={name: {}}, count=2, seed=3)), "the same each time"
    for row, other in zip(rows, library.create_dataset(name, seed=3, size=2), strict=True):
        assert (row["prompt"], row["answer"]) == (other["question"], other["answer"])
        score, _ = graded(row, f"I think.\n<answer>{row['answer']}</answer>")
        assert (score.reward, score.correct) == (1.0, True), score
        wrong, _ = graded(row, "<answer>no idea</answer>")
        assert wrong.correct == (name == "game_of_life_halting" and row["answer"] == "False")
        assert wrong.reward == 1 or not wrong.correct


def test_generators_take_turns_and_have_settings() -> None:
    generators = {"chain_sum": {"min_terms": 2, "max_terms": 2, "max_digits": 1}, "leg_counting": None}
    rows = list(problems(generators=generators, count=3, seed=1))
    assert [row["generator"] for row in rows] == ["chain_sum", "leg_counting"] * 3
    assert all(row["prompt"].count("+") + row["prompt"].count("-") == 1 for row in rows[::2])
    assert len({row["prompt"] for row in rows}) == 6
    assert next(problems(generators=generators, count=3, seed=2)) != rows[0]


def test_what_counts_as_the_answer() -> None:
    assert len(DATASETS) == 105 + 1  # and one that combines others
    (row,) = problems(generators={"chain_sum": {}}, count=1)
    score, ended = graded(row, row["answer"])
    assert (score.reward, score.correct, ended.metrics) == (
        0.0,
        False,
        {"no_answer": True, "unreadable_answer": False},
    )
    assert score.reason == "no <answer>"
    score, ended = graded(row, f"<answer>1</answer> or <answer> {row['answer']} </answer>")
    assert (score.correct, ended.metrics, score.extracted) == (
        True,
        {"no_answer": False, "unreadable_answer": False},
        row["answer"],
    )
    assert graded(row, f" {row['answer']}\n", tag="")[0].correct
    assert graded(row, f"<result>{row['answer']}</result>", tag="result")[0].correct
    part, _ = graded(row, f"<answer>it is {row['answer']}.</answer>")
    assert 0 < part.reward < 1, "the library's partial reward"
    assert not part.correct
    (row,) = problems(generators={"prime_factorization": {}}, count=1)
    score, ended = graded(row, "<answer>two and three</answer>")
    assert (score.reward, ended.metrics) == (0.0, {"no_answer": False, "unreadable_answer": True})
    assert "cannot read it: ValueError" in score.reason


@pytest.mark.parametrize(
    ("generators", "message"),
    [
        ({"chain_smu": {}}, "has no generator 'chain_smu'; did you mean 'chain_sum'?"),
        ({"composite": None}, "name several generators instead of 'composite', which combines others"),
        ({"chain_sum": {"terms": 3}}, "generator 'chain_sum' cannot be used with its settings (terms): Typ"),
        ({"chain_sum": {"min_terms": 9, "max_terms": 2}}, "cannot be used with its settings (min_terms, max"),
    ],
)
def test_a_wrong_generator_ends_the_start_with_one_message(generators: Any, message: str) -> None:
    settings = {"type": "rpg_megatron.environments.reasoning_gym:problems", "generators": generators}
    source = ImportedSettings.model_validate(settings)
    with pytest.raises(UserError) as raised:
        list(islice(custom_rows(source, None, "data.source"), 5))
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)
