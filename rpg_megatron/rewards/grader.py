"""Grades responses against reference answers: by rules if they suffice, otherwise by math-verify in a worker.

Rules take microseconds and cannot hang, so most answers need no worker process (docs/evidence/rewards.md).
"""

from __future__ import annotations

import atexit
import itertools
import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, NamedTuple

from rpg_megatron.rewards import normalize
from rpg_megatron.rewards.compare import compare
from rpg_megatron.rewards.extraction import STYLES, Style, find_answer
from rpg_megatron.rewards.latex_numbers import compare_constants
from rpg_megatron.system.fork_server import FailureKind

if TYPE_CHECKING:
    from rpg_megatron.system.forked_workers import Outcome

DEADLINE = 5.0
"""Default limit of math-verify for one answer, in seconds."""
MAX_CHARACTERS, MAX_DEPTH = 300, 12
"""Maximum characters and nesting depth of brackets of an answer for math-verify, whose time grows with the
square of the length and exponentially with the depth.
"""
_CACHE_SIZE = 10_000
_SYMBOLIC = "rpg_megatron.rewards.math_verify_worker:equal"
_SAME, _OTHER = "same number or text", "another number or word"
_FAILED = {
    "timeout": "math-verify was killed at the deadline",
    "crash": "math-verify's process died",
    "memory": "math-verify ran out of memory",
    "error": "math-verify failed",
}


class Verdict(NamedTuple):
    """Whether a response is correct, and why."""

    correct: bool
    """Whether its answer equals the reference answer."""
    extracted: str | None
    """The answer of the response, verbatim; None if there is none in the expected style."""
    reason: str
    """Why it is correct or not, in a few words."""
    failure: FailureKind | None = None
    """Why math-verify gave no verdict, so that it counts as wrong."""


def map_future[A, B](source: Future[A], function: Callable[[A], B]) -> Future[B]:
    """A future for ``function`` applied to the result of ``source``."""
    result: Future[B] = Future()
    result.set_running_or_notify_cancel()  # so that a caller who stops waiting cannot cancel it

    def done(finished: Future[A]) -> None:
        try:
            result.set_result(function(finished.result()))
        except Exception as e:
            result.set_exception(e)

    source.add_done_callback(done)
    return result


def completed_future[A](value: A) -> Future[A]:
    """A future that already has its result."""
    future: Future[A] = Future()
    future.set_result(value)
    return future


def grade_by_rules(extracted: str | None, answer: str) -> Verdict | None:
    """The verdict if rules suffice; None if math-verify is needed. Takes linear time in the text's length."""
    if extracted is None:
        return Verdict(False, None, "no answer found")
    if extracted.strip() == answer.strip() != "":
        return Verdict(True, extracted, _SAME)
    x, y = normalize.plain_number(extracted), normalize.plain_number(answer)
    if x is not None and y is not None:
        return Verdict(x == y, extracted, _SAME if x == y else _OTHER)
    if max(len(extracted), len(answer)) > MAX_CHARACTERS:
        return Verdict(False, extracted, f"not the same text, and longer than {MAX_CHARACTERS} characters")
    if _depth(extracted) > MAX_DEPTH:
        return Verdict(False, extracted, f"not the same text, and more than {MAX_DEPTH} brackets deep")
    equal = compare_constants(extracted, answer)  # a fast path for constants in plain LaTeX
    if equal is not None:
        return Verdict(equal, extracted, "the same value" if equal else "another value")
    equal = compare(answer, extracted)
    if equal is None:
        return None
    simple = normalize.is_simple(extracted) and normalize.is_simple(answer)
    if equal:
        return Verdict(True, extracted, _SAME if simple else "the same value")
    return Verdict(False, extracted, _OTHER if simple else "another value")


def _depth(text: str) -> int:
    """Nesting depth of brackets, closed or not."""
    steps = ((c in "([{") - (c in ")]}") for c in text)
    return max(itertools.accumulate(steps, lambda depth, step: max(depth + step, 0), initial=0))


class Grader:
    """Grades responses with its own workers, which start when first needed. Thread-safe."""

    def __init__(self, *, workers: int = 1, deadline: float = DEADLINE):
        """deadline: seconds for one answer."""
        from rpg_megatron.rewards.pool import WorkerPool, start_function  # imports asyncio

        self._pool = WorkerPool(start_function(_SYMBOLIC, deadline, lazy=True), workers)
        self._lock = threading.Lock()
        # Responses of a group often have the same answer; one that hangs should occupy one worker only.
        self._cache: OrderedDict[tuple[str, str], Future[Outcome]] = OrderedDict()

    def submit(
        self,
        response: str,
        answer: str,
        style: Style = "auto",
        *,
        thoughts: bool = False,
        opened: bool = False,
    ) -> Future[Verdict]:
        """Grade one response, for any text. thoughts, opened: see ``find_answer``.

        Raises ValueError for an unknown style.
        """
        if style not in STYLES:
            raise ValueError(f"style {style!r} is not known; use one of {', '.join(STYLES)}")
        return self.grade_answer(find_answer(response, style, thoughts=thoughts, opened=opened), answer)

    def grade_answer(self, extracted: str | None, answer: str) -> Future[Verdict]:
        """Grade an answer that was extracted from a response."""
        verdict = grade_by_rules(extracted, answer)
        if verdict is not None:
            return completed_future(verdict)
        assert extracted is not None
        return map_future(self._compare(extracted, answer), lambda outcome: _verdict(extracted, outcome))

    def pop_counts(self) -> dict[str, int]:
        """See ``WorkerPool.pop_counts``."""
        return self._pool.pop_counts()

    def close(self) -> None:
        """End the workers."""
        self._pool.close()

    def __enter__(self) -> Grader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _compare(self, extracted: str, answer: str) -> Future[Outcome]:
        key = extracted, answer
        with self._lock:
            cached = self._cache.get(key)
            if cached is not None and not (cached.done() and (cached.exception() or cached.result().failure)):
                self._cache.move_to_end(key)
                return cached
            future = self._cache[key] = self._pool.submit([extracted, answer])
            if len(self._cache) > _CACHE_SIZE:
                self._cache.popitem(last=False)
        return future


def _verdict(extracted: str, outcome: Outcome) -> Verdict:
    if outcome.failure is not None:
        detail = f" ({outcome.detail})" if outcome.failure == "error" else ""
        return Verdict(False, extracted, _FAILED[outcome.failure] + detail, outcome.failure)
    correct = bool(outcome.value)
    return Verdict(correct, extracted, "equal by math-verify" if correct else "not equal by math-verify")


_shared: tuple[int, Grader] | None = None
_shared_lock = threading.Lock()


def grade(response: str, answer: str, *, style: Style = "auto", thoughts: bool = False) -> Verdict:
    """Grade one response against the reference answer.

    style: where to search for the answer, see ``extraction.Style``; the last match counts. thoughts: whether
    an answer in the thoughts (``<think>``) counts. Most answers are
    compared by rules, others by math-verify in a worker process that is killed after ``DEADLINE`` seconds.
    Works for any text. For many responses use a ``Grader`` with several workers.
    """
    global _shared
    with _shared_lock:
        if _shared is None or _shared[0] != os.getpid():  # threads do not survive a fork: create a new grader
            grader = Grader()
            atexit.register(grader.close)
            _shared = os.getpid(), grader
    return _shared[1].submit(response, answer, style, thoughts=thoughts).result()
