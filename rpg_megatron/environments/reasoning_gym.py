"""Problems of the library reasoning-gym: its generators as a source of prompts, its graders in an episode.

A row of the source names generator, settings and index of a problem. The episode makes the same problem again
from these, since what the graders need is not always representable as JSON.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from rpg_megatron.config.errors import UserError
from rpg_megatron.rewards.reward import Score
from rpg_megatron.rollout.episode import Episode, EpisodeTask, Generate, ScoreText

try:
    import reasoning_gym
    from reasoning_gym.factory import DATASETS
    from reasoning_gym.utils import extract_answer
except ImportError:
    reasoning_gym = None

WITHOUT_ANSWER = ("boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour")
"""Generators whose problems have no reference answer, which prompts need."""
_NAME = "rpg_megatron.environments.reasoning_gym"


def problems(
    *, generators: dict[str, dict[str, Any] | None], count: int = 1000, seed: int = 0
) -> Iterator[dict[str, Any]]:
    """Rows of ``count`` problems of each generator, in turn: a source of prompts.

    generators: name -> settings of the generator, such as its difficulty. seed: of all of them. Raises
    UserError if the library is not installed, or for a generator or setting that it does not have.
    """
    if reasoning_gym is None:
        raise UserError(
            f"{_NAME} needs the library reasoning-gym; run pip install 'rpg-megatron[reasoning-gym]'"
        )
    for name, settings in generators.items():
        if name in WITHOUT_ANSWER:
            raise UserError(f"{_NAME}: generator {name!r} has no reference answers; choose another one")
        if name == "composite":
            raise UserError(f"{_NAME}: name several generators instead of {name!r}, which combines others")
        if name not in DATASETS:
            near = difflib.get_close_matches(name, DATASETS, n=1)
            fix = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(sorted(DATASETS))}"
            raise UserError(f"{_NAME}: reasoning-gym has no generator {name!r}; {fix}")
        try:
            _problem(name, json.dumps(settings or {}), seed, count, 0)
        except Exception as e:  # of the library, which has no type of its own for them
            given = ", ".join(settings or {}) or "none"
            raise UserError(
                f"{_NAME}: generator {name!r} cannot be used with its settings ({given}): "
                f"{type(e).__name__}: {e}; correct them"
            ) from None
    return _rows(generators, count, seed)


async def play(task: EpisodeTask, generate: Generate, score: ScoreText, *, tag: str = "answer") -> Episode:
    """One turn, graded by the problem's generator, from 0 to 1; only 1 counts as correct.

    tag: the answer is the text in the last <tag> and </tag> of the response; empty: all of its text.
    """
    row = task.row or {}
    turn = await generate(task.prompt)
    dataset, problem = _problem(*(row[key] for key in ("generator", "settings", "seed", "count", "index")))
    answer = extract_answer(turn.text, tag) if tag else turn.text.strip()
    reason = f"graded by reasoning-gym's {row['generator']}" if answer is not None else f"no <{tag}>"
    refused = False
    try:
        value = float(dataset.score_answer(answer, problem))
    except Exception as e:  # of graders that expect a number, or a certain form
        value, reason, refused = 0.0, f"{reason}, which cannot read it: {type(e).__name__}", True
    graded = Score(value, value >= 1.0, answer, reason, {"reasoning_gym": value})
    return Episode(graded, {"no_answer": answer is None, "unreadable_answer": refused})


def _rows(generators: dict[str, dict[str, Any] | None], count: int, seed: int) -> Iterator[dict[str, Any]]:
    for index in range(count):
        for name, settings in generators.items():
            row = {"generator": name, "settings": json.dumps(settings or {}), "seed": seed, "count": count}
            _, problem = _problem(*row.values(), index)
            yield {"prompt": problem["question"], "answer": problem["answer"]} | row | {"index": index}


@lru_cache(64)
def _dataset(name: str, settings: str, seed: int, count: int) -> Any:
    return reasoning_gym.create_dataset(name, seed=seed, size=count, **json.loads(settings))


@lru_cache(256)
def _problem(name: str, settings: str, seed: int, count: int, index: int) -> tuple[Any, dict[str, Any]]:
    """The generator and the problem."""
    dataset = _dataset(name, settings, seed, count)
    return dataset, dataset[index]
