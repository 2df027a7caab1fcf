"""Episodes: how one response is generated. Write your own for environments, tools and conversations.

An episode is a coroutine function, named by ``rollout.episode``, that runs once for each response::

    async def episode(task: EpisodeTask, generate: Generate, score: ScoreText) -> Episode

It calls ``generate`` for each turn of the policy. Between two turns it may append tokens of its own, such as
an environment's output. Everything after the prompt is the response; only what the policy sampled is in the
loss (``Trajectory.mask``). ``single_turn`` is the default: one turn, graded by the run's reward.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import numpy as np

from rpg_megatron.config.reward import TERM_NAME
from rpg_megatron.data.trajectory import Floats, Tokens
from rpg_megatron.rewards.failures import RewardFailure
from rpg_megatron.rewards.reward import Score

OWN_METRICS = (
    "branches",
    "retokenized",
    "unparsed_calls",
    "undelivered",
    "turns",
    "turns_max",
    "turn_length",
    "given_length",
)
"""Names of metrics ``env/*`` that episodes cannot set."""


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
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Numbers by name, such as calls of tools that failed; the metrics ``env/<name>`` are their means."""


class TokenLimit(Exception):
    """No token or turn of the response is left. If an episode does not catch it, it ends there as
    ``Episode()``, with the finish reason "length".
    """


class EpisodeLost(Exception):
    """What an episode needs has ended, such as a server. If the episode raises it, it is run once more from
    its beginning.
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


type EpisodeFunction = Callable[[EpisodeTask, Generate, ScoreText], Awaitable[Any]]


async def single_turn(task: EpisodeTask, generate: Generate, score: ScoreText) -> Episode:
    """One turn, with the run's reward."""
    await generate(task.prompt)
    return Episode()


class EpisodeResult(NamedTuple):
    """How an episode has ended."""

    reward: float | Score | None = None
    """See ``Episode``."""
    metrics: Mapping[str, float] = MappingProxyType({})
    failure: RewardFailure | None = None
    """Why it has failed; it then has no reward."""
    lost: str = ""
    """What has ended that it needs: it is run once more."""


def result_of(ended: Any) -> EpisodeResult:
    """The result of what an episode returned. Raises TypeError or ValueError if that is not valid."""
    if not isinstance(ended, Episode):
        raise TypeError(f"it returned {type(ended).__name__} instead of an Episode; return Episode(reward)")
    reward = ended.reward
    if reward is not None and not isinstance(reward, Score):
        reward = _finite(reward, "the reward")
    metrics = {str(name): _finite(value, f"metric {name}") for name, value in ended.metrics.items()}
    for name in metrics:
        if not re.fullmatch(TERM_NAME, name) or name in OWN_METRICS:
            raise ValueError(
                f"metric {name!r}: use a letter, then letters, digits, _ and -, and no name of "
                f"{', '.join(OWN_METRICS)}"
            )
    return EpisodeResult(reward, metrics)


def token_array(tokens: Any) -> Tokens:
    """The argument of ``Generate``, integers [N]. Raises ValueError if these are no token ids."""
    try:
        given = np.asarray(tokens)
    except ValueError:  # lists of different lengths
        given = np.zeros(1)
    if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
        raise ValueError("generate is called with something that is no list of token ids; use task.encode")
    return given


def _finite(value: Any, name: str) -> float:
    number = float(value)
    if not np.isfinite(number):
        raise ValueError(f"{name} is {number}")
    return number
