"""Rewards of responses: correctness (built-in graders or a user's function), overlong and format penalty."""

from __future__ import annotations

import logging
from concurrent.futures import Future
from typing import NamedTuple, cast

from rpg_megatron.config.rollout import BUILT_IN_REWARDS, OverlongSettings, RewardSettings
from rpg_megatron.rewards.extraction import Style, find_answer
from rpg_megatron.rewards.grader import Grader, Verdict, map_future
from rpg_megatron.rewards.pool import FAILURES, Outcome, WorkerPool

logger = logging.getLogger(__name__)

_METRICS = {"timeout": "timeouts", "crash": "crashes", "memory": "out_of_memory", "error": "errors"}


class Score(NamedTuple):
    """Reward and verdict of one response."""

    reward: float
    """The reward that advantages are computed from: the sum of ``parts``."""
    correct: bool
    """Whether the grader accepted the answer; independent of the reward."""
    extracted: str | None
    """The answer that was found."""
    reason: str
    """Why the answer is correct or not."""
    parts: dict[str, float]
    """Components of the reward: ``correctness``, and ``overlong`` and ``format`` if they are on."""


class Scorer:
    """Scores responses with its own worker processes. Thread-safe."""

    def __init__(self, settings: RewardSettings, max_tokens: int):
        """max_tokens: length at which a response is truncated, where the overlong penalty is largest.

        Raises UserError if the settings name a function that cannot be imported.
        """
        self._settings, self._max_tokens = settings, max_tokens
        memory = int(settings.memory_gib * 1024**3)
        self._warned = False
        self._grader: Grader | None = None
        self._function: WorkerPool | None = None
        workers, deadline = settings.workers, settings.deadline
        if settings.type in BUILT_IN_REWARDS:
            self._grader = Grader(workers=workers, deadline=deadline, memory=memory)
        else:
            self._function = WorkerPool(settings.type, workers=workers, deadline=deadline, memory=memory)

    def submit(self, response: str, answer: str, length: int) -> Future[Score]:
        """Score one response of ``length`` tokens. The future gets a Score for any text and any failure."""
        settings = self._settings

        def combine(verdict: Verdict, correctness: float) -> Score:
            parts = {"correctness": correctness}
            if settings.overlong is not None:
                parts["overlong"] = overlong_penalty(settings.overlong, length, self._max_tokens)
            if settings.format:
                parts["format"] = settings.format if verdict.extracted is None else 0.0
            return Score(sum(parts.values()), verdict.correct, verdict.extracted, verdict.reason, parts)

        if self._grader is not None:
            style = cast(Style, settings.type)
            return map_future(
                self._grader.submit(response, answer, style),
                lambda verdict: combine(verdict, settings.correct if verdict.correct else settings.wrong),
            )
        assert self._function is not None
        extracted = find_answer(response)

        def score(outcome: Outcome) -> Score:
            value = outcome.value
            if value is None:
                self._warn_once(outcome)
                failed = f"{settings.type}: {outcome.failure}: {outcome.detail}"
                return combine(Verdict(False, extracted, failed), settings.wrong)
            if isinstance(value, bool):
                value = settings.correct if value else settings.wrong
                return combine(Verdict(bool(outcome.value), extracted, settings.type), value)
            return combine(Verdict(value > 0, extracted, settings.type), value)

        return map_future(self._function.submit(response, answer), score)

    def pop_counts(self) -> dict[str, float]:
        """``reward/timeouts``, ``crashes``, ``out_of_memory`` and ``errors`` since the last call."""
        source = self._grader or self._function
        assert source is not None
        counts = source.pop_counts()
        return {f"reward/{_METRICS[failure]}": float(counts[failure]) for failure in FAILURES}

    def close(self) -> None:
        """End the workers."""
        for workers in (self._grader, self._function):
            if workers is not None:
                workers.close()

    def _warn_once(self, outcome: Outcome) -> None:
        """Log the first failure of the user's function; metrics alone do not give the reason."""
        if not self._warned:
            self._warned = True
            logger.warning(
                "reward.type %s: %s: %s; the response counts as wrong (later failures are only counted)",
                self._settings.type,
                outcome.failure,
                outcome.detail,
            )


def overlong_penalty(settings: OverlongSettings, length: int, max_tokens: int) -> float:
    """DAPO's soft penalty: 0 up to ``max_tokens - buffer``, then linear to ``-factor`` at ``max_tokens``."""
    buffer = settings.buffer_for(max_tokens)
    return min(0.0, -settings.factor * (length - (max_tokens - buffer)) / buffer)
