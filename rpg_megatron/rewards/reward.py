"""Rewards of responses: correctness (built-in grader or custom function), overlong and format penalties; or
several weighted terms.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

from rpg_megatron.config.errors import UserError
from rpg_megatron.config.reward import OverlongSettings, RewardSettings, RewardTerm
from rpg_megatron.rewards.custom_reward import PROMPT
from rpg_megatron.rewards.extraction import Style, find_answer
from rpg_megatron.rewards.failures import RewardFailure
from rpg_megatron.rewards.grader import Grader, Verdict
from rpg_megatron.rewards.pool import WorkerPool, start_custom_reward
from rpg_megatron.system.fork_server import FAILURES
from rpg_megatron.system.forked_workers import ForkServer, Outcome

if TYPE_CHECKING:  # it needs numpy, which a login node may lack
    from rpg_megatron.data.trajectory import Tokens

_METRICS = {"timeout": "timeouts", "crash": "crashes", "memory": "out_of_memory", "error": "errors"}


class Response(NamedTuple):
    """The part of a response that rewards can use."""

    text: str
    tokens: Tokens
    """Token ids, int32 [R], the end-of-sequence token included."""
    finish: str
    """"stop" (end of sequence) or "length" (truncated at the limit)."""
    sampled: int | None = None
    """Number of the tokens that the policy sampled, if it did not sample all of them."""
    opened: bool = False
    """Whether it begins within thoughts, because the prompt ends with ``<think>``."""


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
    failures: tuple[RewardFailure, ...] = ()
    """Of terms that failed, without set and prompt."""


class TermResult(NamedTuple):
    """What one term makes of a response."""

    value: float
    verdict: Verdict
    failure: RewardFailure | None = None


class Scorer:
    """Scores groups of responses with its own worker processes."""

    def __init__(self, settings: RewardSettings, max_tokens: int, share: int = 1):
        """max_tokens: length at which a response is truncated; the overlong penalty is largest there. share:
        number of scorers among which ``workers`` and ``concurrency`` of the settings are divided.

        Raises UserError, one line for each problem, if functions cannot be imported with their settings.
        """
        self._settings, self._max_tokens = settings, max_tokens
        self._weights = {name: term.weight for name, term in settings.all_terms.items()}
        self._terms: dict[str, _Term] = {}
        workers = -(-settings.workers // share)
        grader: Grader | None = None
        problems: list[str] = []
        try:
            for name, term in settings.all_terms.items():
                if term.is_custom:
                    concurrency = max(settings.concurrency // share, 1)
                    try:
                        server = start_custom_reward(settings, term)
                    except UserError as e:
                        problems.append(str(e))
                        continue
                    self._terms[name] = _CustomTerm(term, server, workers, concurrency)
                    continue
                grader = grader or Grader(workers=workers, deadline=settings.deadline)
                self._terms[name] = _BuiltInTerm(term, grader, settings.answer_in_thoughts)
            if problems:
                raise UserError("\n".join(problems))
        except BaseException:
            self.close()
            raise
        self._counts: dict[str, float] = {}

    @property
    def repeatable(self) -> bool:
        """Whether the same responses would get the same scores again; False with async functions."""
        return not self.async_terms

    @property
    def async_terms(self) -> list[str]:
        """Names of the terms that are async functions."""
        return [name for name, term in self._terms.items() if term.is_async]

    @property
    def reads_prompts(self) -> bool:
        """Whether a function gets anything of the prompt besides the answer: it needs a context."""
        return any(term.reads_prompts for term in self._terms.values())

    @property
    def reads_groups(self) -> bool:
        """Whether a function is called once for a whole group."""
        return any(term.is_group for term in self._terms.values())

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

    async def try_once(
        self, response: Response, answer: str, context: str, *, samples: int, first_only: bool, offline: bool
    ) -> tuple[list[RewardFailure], dict[str, float]]:
        """Call each function once; returns failures, and by key the value of the first if it gets the answer.

        samples: size of a group, which has copies of the response. first_only: as in ``score``. offline: call
        no async function. Judges are not called.
        """
        failures: list[RewardFailure] = []
        values: dict[str, float] = {}
        for place, term in enumerate(list(self._terms.values())[: 1 if first_only else None]):
            if not isinstance(term, _CustomTerm) or term.is_judge or (offline and term.is_async):
                continue
            group = [response] * (samples if term.is_group else 1)
            results = await term.collect(term.submit(group, answer, context))
            failures += [result.failure for result in results if result.failure]
            if place == 0 and term.reads_answer and results[0].failure is None:
                values[term.key] = results[0].value
        return failures, values

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

    def _combine(self, results: dict[str, TermResult], response: Response) -> Score:
        settings = self._settings
        verdict = next(iter(results.values())).verdict
        parts = {name: result.value for name, result in results.items()}
        if settings.overlong is not None:
            length = len(response.tokens) if response.sampled is None else response.sampled
            parts["overlong"] = overlong_penalty(settings.overlong, length, self._max_tokens)
        if settings.format:
            parts["format"] = settings.format if verdict.extracted is None else 0.0
        reward = sum(self._weights.get(name, 1.0) * value for name, value in parts.items())
        failures = tuple(result.failure for result in results.values() if result.failure)
        others = [f"{f.term}: {f.reason}" for f in failures if f is not next(iter(results.values())).failure]
        reason = "; ".join((verdict.reason, *others))
        return Score(reward, verdict.correct, verdict.extracted, reason, parts, failures)


def overlong_penalty(settings: OverlongSettings, length: int, max_tokens: int) -> float:
    """DAPO's soft penalty: 0 up to ``max_tokens - buffer``, then linear to ``-factor`` at ``max_tokens``."""
    buffer = settings.buffer_for(max_tokens)
    return min(0.0, -settings.factor * (length - (max_tokens - buffer)) / buffer)


# -- terms ---------------------------------------------------------------------------------------------------


class _Term(Protocol):
    is_async: bool
    is_group: bool
    reads_prompts: bool

    def submit(self, responses: Sequence[Response], answer: str, context: str) -> Any: ...

    async def collect(self, pending: Any) -> list[TermResult]:
        """One result for each response. pending: the result of ``submit``."""
        ...

    def pop_counts(self) -> tuple[dict[str, int], dict[str, float]]:
        """Failures by kind, and the function's own counts."""
        ...

    def close(self) -> None: ...


class _BuiltInTerm:
    is_async = is_group = reads_prompts = False

    def __init__(self, term: RewardTerm, grader: Grader, thoughts: bool):
        self._term, self._grader, self._thoughts = term, grader, thoughts

    def submit(self, responses: Sequence[Response], answer: str, context: str) -> list[Future[Verdict]]:
        style, submit = cast(Style, self._term.type), self._grader.submit
        return [submit(r.text, answer, style, thoughts=self._thoughts, opened=r.opened) for r in responses]

    async def collect(self, pending: list[Future[Verdict]]) -> list[TermResult]:
        return [self._judge(await _result(future)) for future in pending]

    def pop_counts(self) -> tuple[dict[str, int], dict[str, float]]:
        return self._grader.pop_counts(), {}  # terms share the grader; reading its counts resets them

    def close(self) -> None:
        self._grader.close()

    def _judge(self, verdict: Verdict) -> TermResult:
        term, failure = self._term, None
        if verdict.failure is not None:
            failure = RewardFailure(f"{term.where}.type {term.type}", verdict.failure, verdict.reason)
        return TermResult(term.correct if verdict.correct else term.wrong, verdict, failure)


class _CustomTerm:
    def __init__(self, term: RewardTerm, server: ForkServer, workers: int, concurrency: int):
        self._term, self._inputs = term, frozenset(server.description["inputs"])
        self.is_group, self._place = bool(server.description["group"]), str(server.description["place"])
        self.is_judge, self.reads_prompts = term.is_judge, not self._inputs.isdisjoint(PROMPT)
        self.is_async, self.reads_answer = server.is_async, "answer" in self._inputs
        self.key = f"{term.where}.type {term.type}"
        self._pool = WorkerPool(server, concurrency if self.is_async else workers)
        self._counts: Counter[str] = Counter()
        self._without_reward = 0
        """Responses for which the function returned None."""

    def submit(
        self, responses: Sequence[Response], answer: str, context: str
    ) -> tuple[list[str | None], list[Future[Outcome]]]:
        common: dict[str, Any] = {}
        if "answer" in self._inputs:
            common["answer"] = answer
        if self.reads_prompts:
            common["context"] = context
        each = [self._arguments(response) for response in responses]
        if self.is_group:
            lists = {name: [arguments[name] for arguments in each] for name in each[0]}
            futures = [self._pool.submit(common | {"responses": lists.pop("response")} | lists)]
        else:
            futures = [self._pool.submit(common | arguments) for arguments in each]
        return [find_answer(r.text, opened=r.opened) for r in responses], futures

    async def collect(self, pending: tuple[list[str | None], list[Future[Outcome]]]) -> list[TermResult]:
        answers, futures = pending
        outcomes = [await _result(future) for future in futures]
        for outcome in outcomes:
            self._counts.update(outcome.counts)
        if self.is_group:
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

    def _value(self, extracted: str | None, outcome: Outcome) -> TermResult:
        term, value = self._term, outcome.value
        if value is None:
            if outcome.failure is None:
                self._without_reward += 1
                outcome = outcome._replace(failure="error", detail="it returned None")
            failure = RewardFailure(
                self.key, str(outcome.failure), outcome.detail, outcome.place or self._place
            )
            reason = f"{term.type}: {failure.reason}"
            return TermResult(term.failed, Verdict(False, extracted, reason), failure)
        if isinstance(value, bool):
            return TermResult(term.correct if value else term.wrong, Verdict(value, extracted, term.type))
        decides = value if self.is_group else outcome.counts.get("acc", value)  # as in verl's evaluations
        return TermResult(value, Verdict(decides > 0, extracted, term.type))


async def _result[T](future: Future[T]) -> T:
    """The result of a future. Most are done at once, by rules, and need no wait in the event loop."""
    return future.result() if future.done() else await asyncio.wrap_future(future)
