"""From a response to a reward, as the settings say."""

from __future__ import annotations

from typing import NamedTuple

from rpg_megatron.config.rollout import RewardSettings
from rpg_megatron.rewards import answer_line


class Score(NamedTuple):
    """Verdict on one response."""

    reward: float
    """What the advantage is made from."""
    correct: bool
    """Whether the verifier accepted the answer; kept apart from the reward."""


def score(settings: RewardSettings, response: str, answer: str) -> Score:
    """Score a response's text against the reference answer. Never raises on any text."""
    correct = answer_line.grade(response, answer)
    return Score(settings.correct if correct else settings.wrong, correct)
