"""Grades responses against reference answers: by rules where these decide, else by math-verify in a worker.

Rules take microseconds and cannot hang, so plain numbers never see a process (``benchmarks/grading.py``).
"""

from __future__ import annotations

import atexit
import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from typing import NamedTuple

from rpg_megatron.rewards import normalize
from rpg_megatron.rewards.extraction import STYLES, Style, find_answer
from rpg_megatron.rewards.latex_numbers import compare_constants
from rpg_megatron.rewards.pool import Outcome, WorkerPool

DEADLINE = 5.0
"""Seconds that math-verify gets for one answer, unless told otherwise."""
MEMORY = 2 * 1024**3
"""Address space of a worker, in bytes, unless told otherwise."""
LONGEST, DEEPEST = 300, 12
"""Characters and nested brackets of an answer that math-verify gets to see. Beyond that it is hopeless to
wait: its time grows with the square of the one, and exponentially with the other.
"""
_REMEMBERED = 10_000
_SYMBOLIC = "rpg_megatron.rewards.math_verify_worker:equal"
_FAILED = {
    "timeout": "math-verify was killed at the deadline",
    "crash": "math-verify's process died",
    "memory": "math-verify ran out of memory",
    "error": "math-verify failed",
}


class Verdict(NamedTuple):
    """Whether a response is right, and why."""

    correct: bool
    """Whether it gives the reference answer."""
    extracted: str | None
    """The answer that it gives, as it stands there; None if there is none in the form asked for."""
    reason: str
    """What decided, in a few words."""


def map_future[A, B](source: Future[A], change: Callable[[A], B]) -> Future[B]:
    """The future of ``change`` of its result."""
    result: Future[B] = Future()

    def done(finished: Future[A]) -> None:
        try:
            result.set_result(change(finished.result()))
        except Exception as e:
            result.set_exception(e)

    source.add_done_callback(done)
    return result


def decided[A](value: A) -> Future[A]:
    """A future that is done."""
    future: Future[A] = Future()
    future.set_result(value)
    return future


def judge_plainly(extracted: str | None, answer: str) -> Verdict | None:
    """The verdict if rules alone give one; None if math-verify is to decide. Linear in long texts."""
    if extracted is None:
        return Verdict(False, None, "no answer found")
    if normalize.answers_match(extracted, answer):
        return Verdict(True, extracted, "same number or text")
    if max(len(extracted), len(answer)) > LONGEST:
        return Verdict(False, extracted, f"not the same text, and longer than {LONGEST} characters")
    if normalize.answers_differ(extracted, answer):
        return Verdict(False, extracted, "another number or word")
    if _depth(extracted) > DEEPEST:
        return Verdict(False, extracted, f"not the same text, and more than {DEEPEST} brackets deep")
    equal = compare_constants(extracted, answer)
    return (
        None if equal is None else Verdict(equal, extracted, "the same value" if equal else "another value")
    )


def _depth(text: str) -> int:
    """How deeply brackets are nested, closed or not."""
    depth = deepest = 0
    for character in text:
        if character in "([{":
            depth += 1
            deepest = max(deepest, depth)
        elif character in ")]}":
            depth = max(depth - 1, 0)
    return deepest


class Grader:
    """Grades with workers of its own, which are started when first needed. Safe to use from any thread."""

    def __init__(self, *, workers: int = 1, deadline: float = DEADLINE, memory: int = MEMORY):
        """deadline: seconds for one answer. memory: address space of a worker, in bytes."""
        self._pool = WorkerPool(_SYMBOLIC, workers=workers, deadline=deadline, memory=memory, lazy=True)
        self._lock = threading.Lock()
        # A group's responses often give the same answer, and the same bomb need not be met twice at once.
        self._known: OrderedDict[tuple[str, str], Future[Outcome]] = OrderedDict()

    def submit(self, response: str, answer: str, style: Style = "auto") -> Future[Verdict]:
        """Grade one response; never fails on any text."""
        if style not in STYLES:
            raise ValueError(f"style {style!r} is not known; use one of {', '.join(STYLES)}")
        extracted = find_answer(response, style)
        verdict = judge_plainly(extracted, answer)
        if verdict is not None:
            return decided(verdict)
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
            known = self._known.get(key)
            if known is not None and not (known.done() and (known.exception() or known.result().failure)):
                self._known.move_to_end(key)
                return known
            future = self._known[key] = self._pool.submit(extracted, answer)
            if len(self._known) > _REMEMBERED:
                self._known.popitem(last=False)
        return future


def _verdict(extracted: str, outcome: Outcome) -> Verdict:
    if outcome.failure is not None:
        detail = f" ({outcome.detail})" if outcome.failure == "error" else ""
        return Verdict(False, extracted, _FAILED[outcome.failure] + detail)
    correct = bool(outcome.value)
    return Verdict(correct, extracted, "equal by math-verify" if correct else "not equal by math-verify")


_shared: tuple[int, Grader] | None = None
_shared_lock = threading.Lock()


def grade(response: str, answer: str, *, style: Style = "auto") -> Verdict:
    """Grade one response against the reference answer.

    style: where the answer stands, see ``extraction.Style``; of several the last counts. Then text and
    plain numbers are compared, and what is neither goes to math-verify, in a worker process that is killed
    after ``DEADLINE`` seconds. Never raises on any text. For many responses use a ``Grader`` of several
    workers.
    """
    global _shared
    with _shared_lock:
        if _shared is None or _shared[0] != os.getpid():  # a fork has no threads: it gets its own
            grader = Grader()
            atexit.register(grader.close)
            _shared = os.getpid(), grader
    return _shared[1].submit(response, answer, style).result()
