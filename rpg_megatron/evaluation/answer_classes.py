"""Groups the answers to a problem into classes of equal ones, which vote together in maj@k."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from rpg_megatron.rewards import normalize
from rpg_megatron.rewards.grader import Grader, grade_by_rules

_LEAST = 16
"""Comparisons by math-verify that a problem may always have."""


async def classify_answers(
    answers: Sequence[str | None], correct: Sequence[bool], grader: Grader
) -> list[int | None]:
    """Number of the class of each answer, from 0 in the order of their first answers; None: no answer.

    An answer joins the first class whose first answer, as the reference, the grader takes for equal: x+1 and
    1+x, or 50% and 0.5. Both must have the same verdict (``correct``): with 25 as the reference, 25% is right
    and 0.25 is not. The same text is always one class.

    Most comparisons are of canonical texts or by rules. math-verify, in the grader's workers with their
    limits, makes at most as many as there are answers, so that classes cost no more than grading; pairs
    beyond that count as different.
    """
    numbers: dict[str, int] = {}
    """Answer -> class."""
    texts: dict[tuple[str, bool], int] = {}
    """Canonical text and verdict -> class."""
    first: list[tuple[str, bool]] = []
    """First answer of each class, and its verdict."""
    left = max(len(answers), _LEAST)

    async def find_class(answer: str, right: bool) -> int | None:
        nonlocal left
        if (number := texts.get((normalize.canonical(answer), right))) is not None:
            return number
        undecided = []
        for number, (other, verdict) in enumerate(first):
            if verdict == right:
                comparison = grade_by_rules(answer, other)
                if comparison is not None and comparison.correct:
                    return number
                if comparison is None:
                    undecided.append(number)
        undecided = undecided[:left]
        left -= len(undecided)
        futures = [asyncio.wrap_future(grader.grade_answer(answer, first[n][0])) for n in undecided]
        verdicts = await asyncio.gather(*futures)
        return next((n for n, v in zip(undecided, verdicts, strict=True) if v.correct), None)

    classes: list[int | None] = []
    for answer, right in zip(answers, correct, strict=True):
        if answer is None:
            classes.append(None)
            continue
        if answer not in numbers:
            number = await find_class(answer, right)
            if number is None:
                number = len(first)
                first.append((answer, right))
            numbers[answer] = number
            texts.setdefault((normalize.canonical(answer), right), number)
        classes.append(numbers[answer])
    return classes
