"""Episodes: how one response is generated. Write your own for environments, tools and conversations.

An episode is a coroutine function, named by ``rollout.episode``, that runs once for each response::

    async def episode(task: EpisodeTask, generate: Generate, score: ScoreText) -> Episode

It calls ``generate`` for each turn of the policy. Between two turns it may append tokens of its own, such as
an environment's output. Everything after the prompt is the response; only what the policy sampled is in the
loss (``Trajectory.mask``). ``single_turn`` is the default: one turn, graded by the run's reward.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np

from rpg_megatron.config.base import ImportedSettings
from rpg_megatron.data.trajectory import Floats, Tokens
from rpg_megatron.rewards.reward import Score
from rpg_megatron.system.custom_code import CustomCode, load_custom


@dataclass(frozen=True, eq=False)
class EpisodeTask:
    """Inputs of an episode."""

    prompt: tuple[int, ...]
    """Token ids of the prompt, which every turn begins with."""
    text: str
    """The rendered prompt."""
    answer: str
    """The reference answer."""
    row: dict[str, Any] | None
    """All columns of the row in the data."""
    max_tokens: int
    """Token limit of the response: of all turns and of everything between them."""
    seed: int
    """Seed of this response, for random numbers of your own."""
    held_out: str
    """Name of the held-out set in an evaluation; empty: the response is trained on."""
    encode: Callable[[str], tuple[int, ...]]
    """Token ids of a text, without special tokens of its own."""
    decode: Callable[[Sequence[int]], str]
    """Text of token ids, without special tokens."""
    base_url: str = ""
    """Base URL of the gateway's OpenAI API, at which any client samples turns of this response."""
    api_key: str = ""
    """Key of this response for the gateway; it ends with the episode."""


@dataclass(frozen=True, eq=False)
class Turn:
    """What the policy sampled in one call of ``generate``."""

    before: Tokens
    """Token ids of everything before the turn, int32 [N]."""
    sampled: Tokens
    """Sampled token ids, int32 [R], the end-of-sequence token included."""
    finish: str
    """"stop" (end of sequence), or "length" (truncated at a token limit)."""
    logprobs: Floats
    """Log-prob of each sampled token when it was sampled, float32 [R]; empty in an evaluation."""
    decode: Callable[[list[int]], str]

    @cached_property
    def text(self) -> str:
        """The turn's text, without special tokens."""
        return self.decode(self.sampled.tolist())

    @cached_property
    def tokens(self) -> tuple[int, ...]:
        """Sampled token ids."""
        return tuple(self.sampled.tolist())

    @cached_property
    def context(self) -> tuple[int, ...]:
        """Token ids of everything so far, the turn included; the next turn begins with them."""
        return (*self.before.tolist(), *self.tokens)


@dataclass(frozen=True)
class Episode:
    """The end of an episode."""

    reward: float | Score | None = None
    """The response's reward; above 0 counts as correct. A ``Score`` is what ``score`` returns. None: the
    run's reward of the whole response, together with the other responses of its group."""


class TokenLimit(Exception):
    """No token of the response is left for another turn. If an episode does not catch it, it ends there as
    ``Episode()``, with the finish reason "length".
    """


class Generate(Protocol):
    """Samples one turn."""

    async def __call__(
        self, tokens: Sequence[int], max_tokens: int | None = None, *, branch: bool = False
    ) -> Turn:
        """Let the policy continue ``tokens``, which must begin with the prompt and all turns so far.

        What follows them is yours, and not in the loss. max_tokens: limit of this turn. branch: if the tokens
        do not begin so, because the history was rewritten or shortened, start a new row of the batch with
        them. Only what is sampled in a row is in its loss, so a turn that several rows share is trained once;
        all rows have the response's reward and advantage. Later turns continue the row that they begin with.
        Raises TokenLimit. A weight update or a failed engine in between is not seen here.
        """
        ...


class ScoreText(Protocol):
    """Computes the run's reward."""

    async def __call__(self, text: str | None = None) -> Score:
        """The reward of a text; None: of the response so far."""
        ...


class NamedEpisode(NamedTuple):
    """An episode's coroutine function, and its import path; empty: the default one."""

    function: Callable[[EpisodeTask, Generate, ScoreText], Awaitable[Any]]
    path: str = ""


async def single_turn(task: EpisodeTask, generate: Generate, score: ScoreText) -> Episode:
    """One turn, with the run's reward."""
    await generate(task.prompt)
    return Episode()


SINGLE_TURN = NamedEpisode(single_turn)


def load_episode(settings: ImportedSettings | None) -> NamedEpisode:
    """The episode of ``rollout.episode``, with its settings. Raises UserError as ``load_custom`` does."""
    if settings is None:
        return SINGLE_TURN
    path = settings.type
    code = CustomCode("rollout.episode", path, settings.keywords, 3, coroutine=True)
    return NamedEpisode(load_custom(code), path)


def own_score(reward: float | Score) -> Score:
    """The score of a response whose episode set a reward. Raises ValueError if it is no finite number."""
    if isinstance(reward, Score):
        return reward
    value = float(reward)
    if not np.isfinite(value):
        raise ValueError(f"the reward is {value}")
    return Score(value, value > 0, None, "by the episode", {"episode": value})
