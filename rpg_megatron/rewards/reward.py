"""Rewards of responses: correctness (built-in grader or custom function), overlong and format penalties; or
several weighted terms.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, Protocol, cast

from rpg_megatron.config.reward import OverlongSettings, RewardSettings, RewardTerm
from rpg_megatron.data.trajectory import Tokens
from rpg_megatron.rewards.async_pool import AsyncPool
from rpg_megatron.rewards.custom_reward import PROMPT
from rpg_megatron.rewards.extraction import Style, find_answer
from rpg_megatron.rewards.grader import Grader, Verdict
from rpg_megatron.rewards.pool import FAILURES, ForkServer, Outcome, WorkerPool, start_custom_reward

logger = logging.getLogger(__name__)

_METRICS = {"timeout": "timeouts", "crash": "crashes", "memory": "out_of_memory", "error": "errors"}


class Response(NamedTuple):
    """The part of a response that rewards can use."""

    text: str
    tokens: Tokens
    """Token ids, int32 [R], the end-of-sequence token included."""
    finish: str
    """"stop" (end of sequence) or "length" (truncated at the limit)."""


class Score(NamedTuple):
    """Reward and verdict of one response."""

    reward: float
    """The reward that advantages are computed from: the sum of ``parts``, each times its term's weight."""
    correct: bool
    """Whether the first term accepted the answer; independent of the reward."""
    extracted: str | None
    """The answer that was found."""
    reason: str
    """Why the answer is correct or not."""
    parts: dict[str, float]
    """Components of the reward: ``correctness`` or the terms by name, and ``overlong`` and ``format`` if they
    are on."""


class Scorer:
    """Scores groups of responses with its own worker processes."""

    def __init__(self, settings: RewardSettings, max_tokens: int, share: int = 1):
        """max_tokens: length at which a response is truncated; the overlong penalty is largest there. share:
        number of scorers among which ``workers`` and ``concurrency`` of the settings are divided.

        Raises UserError if the settings name a function that cannot be imported.
        """
        self._settings, self._max_tokens = settings, max_tokens
        self._weights = {name: term.weight for name, term in settings.all_terms.items()}
        self._terms: dict[str, _Term] = {}
        workers, memory = -(-settings.workers // share), settings.memory_bytes
        grader: Grader | None = None
        try:
            for name, term in settings.all_terms.items():
                if term.is_custom:
                    concurrency = max(settings.concurrency // share, 1)
                    server = start_custom_reward(settings, term)
                    self._terms[name] = _CustomTerm(term, server, workers, concurrency)
                    continue
                grader = grader or Grader(workers=workers, deadline=settings.deadline, memory=memory)
                self._terms[name] = _BuiltInTerm(term, grader)
        except BaseException:
            self.close()
            raise
        self._counts: dict[str, float] = {}

    @property
    def repeatable(self) -> bool:
        """Whether the same responses would get the same scores again; False with async functions."""
        return not any(term.is_async for term in self._terms.values())

    async def score(
        self, responses: Sequence[Response], answer: str, context: str = "", *, first_only: bool = False
    ) -> list[Score]:
        """The scores of a group's responses. Responses and failures of reward functions raise no errors.

        context: what custom functions get of the prompt (``Prompt.context``). first_only: compute only the
        first term, which decides correctness.
        """
        names = list(self._terms)[: 1 if first_only else None]
        pending = {name: self._terms[name].submit(responses, answer, context) for name in names}
        values = {name: await self._terms[name].collect(pending[name]) for name in names}
        return [self._combine({n: values[n][i] for n in names}, r) for i, r in enumerate(responses)]

    def pop_counts(self) -> dict[str, float]:
        """``reward/timeouts``, ``crashes``, ``out_of_memory`` and ``errors`` since the last call, and the
        counts of custom functions: ``reward/<term>/<name>``.
        """
        failures: Counter[str] = Counter()
        counts = dict.fromkeys(self._counts, 0.0)
        for name, term in self._terms.items():
            failed, counted = term.pop_counts()
            failures.update(failed)
            counts |= {f"reward/{name}/{key}": value for key, value in counted.items()}
        self._counts = counts
        return {f"reward/{_METRICS[failure]}": float(failures[failure]) for failure in FAILURES} | counts

    def close(self) -> None:
        """End the workers."""
        for term in self._terms.values():
            term.close()

    def _combine(self, values: dict[str, tuple[float, Verdict]], response: Response) -> Score:
        settings = self._settings
        verdict = next(iter(values.values()))[1]
        parts = {name: value for name, (value, _) in values.items()}
        if settings.overlong is not None:
            length = len(response.tokens)
            parts["overlong"] = overlong_penalty(settings.overlong, length, self._max_tokens)
        if settings.format:
            parts["format"] = settings.format if verdict.extracted is None else 0.0
        reward = sum(self._weights.get(name, 1.0) * value for name, value in parts.items())
        return Score(reward, verdict.correct, verdict.extracted, verdict.reason, parts)


def overlong_penalty(settings: OverlongSettings, length: int, max_tokens: int) -> float:
    """DAPO's soft penalty: 0 up to ``max_tokens - buffer``, then linear to ``-factor`` at ``max_tokens``."""
    buffer = settings.buffer_for(max_tokens)
    return min(0.0, -settings.factor * (length - (max_tokens - buffer)) / buffer)


# -- terms ---------------------------------------------------------------------------------------------------


class _Term(Protocol):
    is_async: bool

    def submit(self, responses: Sequence[Response], answer: str, context: str) -> Any: ...

    async def collect(self, pending: Any) -> list[tuple[float, Verdict]]:
        """Value and verdict of each response. pending: the result of ``submit``."""
        ...

    def pop_counts(self) -> tuple[dict[str, int], dict[str, float]]:
        """Failures by kind, and the function's own counts."""
        ...

    def close(self) -> None: ...


class _BuiltInTerm:
    is_async = False

    def __init__(self, term: RewardTerm, grader: Grader):
        self._term, self._grader = term, grader

    def submit(self, responses: Sequence[Response], answer: str, context: str) -> list[Future[Verdict]]:
        return [self._grader.submit(r.text, answer, cast(Style, self._term.type)) for r in responses]

    async def collect(self, pending: list[Future[Verdict]]) -> list[tuple[float, Verdict]]:
        verdicts = [await _result(future) for future in pending]
        return [(self._term.correct if v.correct else self._term.wrong, v) for v in verdicts]

    def pop_counts(self) -> tuple[dict[str, int], dict[str, float]]:
        return self._grader.pop_counts(), {}  # terms share the grader; reading its counts resets them

    def close(self) -> None:
        self._grader.close()


class _CustomTerm:
    def __init__(self, term: RewardTerm, server: ForkServer, workers: int, concurrency: int):
        self._term, self._inputs = term, frozenset(server.signature["inputs"])
        self._group = bool(server.signature["group"])
        self.is_async = bool(server.signature["async"])
        self._pool = AsyncPool(server, concurrency) if self.is_async else WorkerPool(server, workers)
        self._counts: Counter[str] = Counter()
        self._without_reward = 0
        """Responses for which the function returned None."""
        self._warned = False

    def submit(
        self, responses: Sequence[Response], answer: str, context: str
    ) -> tuple[list[str | None], list[Future[Outcome]]]:
        common: dict[str, Any] = {}
        if "answer" in self._inputs:
            common["answer"] = answer
        if self._inputs.intersection(PROMPT):
            common["context"] = context
        each = [self._arguments(response) for response in responses]
        if self._group:
            lists = {name: [one[name] for one in each] for name in each[0]}
            futures = [self._pool.submit(common | {"responses": lists.pop("response")} | lists)]
        else:
            futures = [self._pool.submit(common | one) for one in each]
        return [find_answer(r.text) for r in responses], futures

    async def collect(
        self, pending: tuple[list[str | None], list[Future[Outcome]]]
    ) -> list[tuple[float, Verdict]]:
        answers, futures = pending
        outcomes = [await _result(future) for future in futures]
        for outcome in outcomes:
            self._counts.update(outcome.counts)
        if self._group:
            (whole,) = outcomes
            values = whole.value if whole.failure is None else [None] * len(answers)
            outcomes = [whole._replace(value=value) for value in values]
        return [self._value(extracted, o) for extracted, o in zip(answers, outcomes, strict=True)]

    def pop_counts(self) -> tuple[dict[str, int], dict[str, float]]:
        failures, counts = self._pool.pop_counts(), {k: float(v) for k, v in self._counts.items()}
        failures["error"] += self._without_reward
        self._without_reward = 0
        self._counts.clear()
        return failures, counts

    def close(self) -> None:
        self._pool.close()

    def _arguments(self, response: Response) -> dict[str, Any]:
        """The function's inputs that come from a response."""
        arguments: dict[str, Any] = {"response": response.text}
        if "token_ids" in self._inputs:
            arguments["token_ids"] = [int(token) for token in response.tokens]
        if "finish_reason" in self._inputs:
            arguments["finish_reason"] = response.finish
        return arguments

    def _value(self, extracted: str | None, outcome: Outcome) -> tuple[float, Verdict]:
        term, value = self._term, outcome.value
        if value is None:
            if outcome.failure is None:
                self._without_reward += 1
                outcome = outcome._replace(failure="error", detail="it returned None")
            self._warn_once(outcome)
            return term.failed, Verdict(False, extracted, f"{term.type}: {outcome.failure}: {outcome.detail}")
        if isinstance(value, bool):
            return (term.correct if value else term.wrong), Verdict(value, extracted, term.type)
        return value, Verdict(value > 0, extracted, term.type)

    def _warn_once(self, outcome: Outcome) -> None:
        """Log the first failure of a custom function; metrics alone do not give the reason."""
        if not self._warned:
            self._warned = True
            logger.warning(
                "%s.type %s: %s: %s; the response counts as wrong, with %g (later failures are only counted)",
                self._term.where,
                self._term.type,
                outcome.failure,
                outcome.detail,
                self._term.failed,
            )


async def _result[T](future: Future[T]) -> T:
    """The result of a future. Most are done at once, by rules, and need no wait in the event loop."""
    return future.result() if future.done() else await asyncio.wrap_future(future)
