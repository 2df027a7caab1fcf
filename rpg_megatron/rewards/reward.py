"""From a response to a reward, as the settings say: correctness, overlong and format, each on its own."""

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
    """Verdict on one response."""

    reward: float
    """What the advantage is made from: the sum of the parts."""
    correct: bool
    """Whether the verifier accepted the answer; kept apart from the reward."""
    extracted: str | None
    """The answer that was found."""
    reason: str
    """What decided."""
    parts: dict[str, float]
    """``correctness``, and of ``overlong`` and ``format`` those that are on."""


class Scorer:
    """Scores responses with worker processes of its own. Safe to use from any thread."""

    def __init__(self, settings: RewardSettings, longest: int):
        """longest: tokens at which a response is cut (the overlong penalty's end).

        Raises UserError if the settings name a function that cannot be imported.
        """
        self._settings, self._longest = settings, longest
        memory = int(settings.memory_gib * 1024**3)
        self._told = False
        self._grader: Grader | None = None
        self._function: WorkerPool | None = None
        workers, deadline = settings.workers, settings.deadline
        if settings.type in BUILT_IN_REWARDS:
            self._grader = Grader(workers=workers, deadline=deadline, memory=memory)
        else:
            self._function = WorkerPool(settings.type, workers=workers, deadline=deadline, memory=memory)

    def submit(self, response: str, answer: str, length: int) -> Future[Score]:
        """Score one response of ``length`` tokens. Holds a Score whatever the text and the function do."""
        settings = self._settings

        def combine(verdict: Verdict, correctness: float) -> Score:
            parts = {"correctness": correctness}
            if settings.overlong is not None:
                parts["overlong"] = overlong_penalty(settings.overlong, length, self._longest)
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

        def judge(outcome: Outcome) -> Score:
            value = outcome.value
            if value is None:
                self._tell(outcome)
                failed = f"{settings.type}: {outcome.failure}: {outcome.detail}"
                return combine(Verdict(False, extracted, failed), settings.wrong)
            if isinstance(value, bool):
                value = settings.correct if value else settings.wrong
                return combine(Verdict(bool(outcome.value), extracted, settings.type), value)
            return combine(Verdict(value > 0, extracted, settings.type), value)

        return map_future(self._function.submit(response, answer), judge)

    def pop_counts(self) -> dict[str, float]:
        """``reward/timeouts``, ``crashes``, ``out_of_memory`` and ``errors`` since this was asked last."""
        source = self._grader or self._function
        assert source is not None
        counts = source.pop_counts()
        return {f"reward/{_METRICS[failure]}": float(counts[failure]) for failure in FAILURES}

    def close(self) -> None:
        """End the workers."""
        for part in (self._grader, self._function):
            if part is not None:
                part.close()

    def _tell(self, outcome: Outcome) -> None:
        """Say the first failure of the user's function: all responses being wrong would not tell why."""
        if not self._told:
            self._told = True
            logger.warning(
                "reward.type %s: %s: %s; the response counts as wrong (later failures are only counted)",
                self._settings.type,
                outcome.failure,
                outcome.detail,
            )


def overlong_penalty(settings: OverlongSettings, length: int, longest: int) -> float:
    """DAPO's soft penalty: 0 up to ``longest - buffer`` tokens, then linear, ``-factor`` at ``longest``."""
    return min(0.0, -settings.factor * (length - (longest - settings.buffer)) / settings.buffer)
