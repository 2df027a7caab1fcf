"""Rewards of responses: correctness (built-in graders or a user's function), overlong and format penalty; or
several terms, each with a weight.
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
from rpg_megatron.rewards.extraction import Style, find_answer
from rpg_megatron.rewards.grader import Grader, Verdict
from rpg_megatron.rewards.own_reward import PROMPT
from rpg_megatron.rewards.pool import FAILURES, ForkServer, Outcome, WorkerPool, start_function

logger = logging.getLogger(__name__)

_METRICS = {"timeout": "timeouts", "crash": "crashes", "memory": "out_of_memory", "error": "errors"}


class Response(NamedTuple):
    """What rewards see of a response."""

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
        """max_tokens: length at which a response is truncated, where the overlong penalty is largest. share:
        number of scorers that share ``workers`` and ``concurrency`` of the settings.

        Raises UserError if the settings name a function that cannot be imported.
        """
        self._settings, self._max_tokens = settings, max_tokens
        self._weights = {name: term.weight for name, term in settings.all_terms.items()}
        self._terms: dict[str, _Term] = {}
        workers, memory = -(-settings.workers // share), settings.memory_bytes
        grader: Grader | None = None
        try:
            for name, term in settings.all_terms.items():
                if term.own:
                    concurrency = max(settings.concurrency // share, 1)
                    self._terms[name] = _OwnTerm(term, start_function(settings, term), workers, concurrency)
                    continue
                grader = grader or Grader(workers=workers, deadline=settings.deadline, memory=memory)
                self._terms[name] = _BuiltInTerm(term, grader)
        except BaseException:
            self.close()
            raise
        self._counts: dict[str, float] = {}

    @property
    def repeatable(self) -> bool:
        """Whether responses would get the same scores again: not promised by async functions."""
        return not any(term.is_async for term in self._terms.values())

    async def score(
        self, responses: Sequence[Response], answer: str, context: str = "", *, first_only: bool = False
    ) -> list[Score]:
        """The scores of a group's responses, for any texts and any failure.

        context: what functions of the user see of the prompt (``Prompt.context``). first_only: compute the
        first term only, which decides what is correct.
        """
        names = list(self._terms)[: 1 if first_only else None]
        begun = {name: self._terms[name].submit(responses, answer, context) for name in names}
        found = {name: await self._terms[name].collect(begun[name]) for name in names}
        return [self._combine({n: found[n][i] for n in names}, r) for i, r in enumerate(responses)]

    def pop_counts(self) -> dict[str, float]:
        """``reward/timeouts``, ``crashes``, ``out_of_memory`` and ``errors`` since the last call, and what
        functions of the user counted: ``reward/<term>/<name>``.
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

    async def collect(self, begun: Any) -> list[tuple[float, Verdict]]:
        """The value of each response, and the verdict, of what ``submit`` returned."""
        ...

    def pop_counts(self) -> tuple[dict[str, int], dict[str, float]]:
        """Failures by kind, and what the function counted."""
        ...

    def close(self) -> None: ...


class _BuiltInTerm:
    is_async = False

    def __init__(self, term: RewardTerm, grader: Grader):
        self._term, self._grader = term, grader

    def submit(self, responses: Sequence[Response], answer: str, context: str) -> list[Future[Verdict]]:
        return [self._grader.submit(r.text, answer, cast(Style, self._term.type)) for r in responses]

    async def collect(self, begun: list[Future[Verdict]]) -> list[tuple[float, Verdict]]:
        verdicts = [await _result(future) for future in begun]
        return [(self._term.correct if v.correct else self._term.wrong, v) for v in verdicts]

    def pop_counts(self) -> tuple[dict[str, int], dict[str, float]]:
        return self._grader.pop_counts(), {}  # shared by terms; counted once, since reading resets it

    def close(self) -> None:
        self._grader.close()


class _OwnTerm:
    def __init__(self, term: RewardTerm, server: ForkServer, workers: int, concurrency: int):
        self._term, self._names = term, frozenset(server.asks["names"])
        self._group = bool(server.asks["group"])
        self.is_async = bool(server.asks["async"])
        self._pool = AsyncPool(server, concurrency) if self.is_async else WorkerPool(server, workers)
        self._counted: Counter[str] = Counter()
        self._nothing = 0
        """Responses for which the function returned None."""
        self._warned = False

    def submit(
        self, responses: Sequence[Response], answer: str, context: str
    ) -> tuple[list[str | None], list[Future[Outcome]]]:
        common: dict[str, Any] = {}
        if "answer" in self._names:
            common["answer"] = answer
        if self._names.intersection(PROMPT):
            common["context"] = context
        each = [self._seen(response) for response in responses]
        if self._group:
            lists = {name: [one[name] for one in each] for name in each[0]}
            futures = [self._pool.submit(common | {"responses": lists.pop("response")} | lists)]
        else:
            futures = [self._pool.submit(common | one) for one in each]
        return [find_answer(r.text) for r in responses], futures

    async def collect(
        self, begun: tuple[list[str | None], list[Future[Outcome]]]
    ) -> list[tuple[float, Verdict]]:
        answers, futures = begun
        outcomes = [await _result(future) for future in futures]
        for outcome in outcomes:
            self._counted.update(outcome.counts)
        if self._group:
            (whole,) = outcomes
            values = whole.value if whole.failure is None else [None] * len(answers)
            outcomes = [whole._replace(value=value) for value in values]
        return [self._value(extracted, o) for extracted, o in zip(answers, outcomes, strict=True)]

    def pop_counts(self) -> tuple[dict[str, int], dict[str, float]]:
        failed, counted = self._pool.pop_counts(), {k: float(v) for k, v in self._counted.items()}
        failed["error"] += self._nothing
        self._nothing = 0
        self._counted.clear()
        return failed, counted

    def close(self) -> None:
        self._pool.close()

    def _seen(self, response: Response) -> dict[str, Any]:
        """What the function asks for of a response."""
        seen: dict[str, Any] = {"response": response.text}
        if "token_ids" in self._names:
            seen["token_ids"] = [int(token) for token in response.tokens]
        if "finish_reason" in self._names:
            seen["finish_reason"] = response.finish
        return seen

    def _value(self, extracted: str | None, outcome: Outcome) -> tuple[float, Verdict]:
        term, value = self._term, outcome.value
        if value is None:
            if outcome.failure is None:
                self._nothing += 1
                outcome = outcome._replace(failure="error", detail="it returned None")
            self._warn_once(outcome)
            return term.failed, Verdict(False, extracted, f"{term.type}: {outcome.failure}: {outcome.detail}")
        if isinstance(value, bool):
            return (term.correct if value else term.wrong), Verdict(value, extracted, term.type)
        return value, Verdict(value > 0, extracted, term.type)

    def _warn_once(self, outcome: Outcome) -> None:
        """Log the first failure of the user's function; metrics alone do not give the reason."""
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
    """Rules decide most answers at once: these need no turn of the event loop."""
    return future.result() if future.done() else await asyncio.wrap_future(future)
