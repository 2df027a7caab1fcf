"""Classes of equal answers, which vote together in maj@k.

Why: a majority that is split by spelling (x+1 and 1+x) counts as a minority, and one that is pooled wrongly
counts twice. The comparison is the grader's (test_grader_rules, test_math_grader); here it is which answers
are compared, and at what cost. Not covered: the sampler's processes, which pass classes on
(integration/test_evaluation_command).
"""

import asyncio
from collections.abc import Iterator, Sequence
from concurrent.futures import Future

import pytest

from rpg_megatron.evaluation.answer_classes import classify_answers
from rpg_megatron.evaluation.metrics import majority_correct
from rpg_megatron.evaluation.results import EvalResult
from rpg_megatron.rewards.grader import Grader, Verdict, completed_future


class CountingGrader(Grader):
    """Counts what is given to math-verify; with ``answer``, that is its result."""

    def __init__(self, answer: bool | None = None) -> None:
        super().__init__()
        self.asked: list[tuple[str | None, str]] = []
        self._answer = answer

    def grade_answer(self, extracted: str | None, answer: str) -> Future[Verdict]:
        self.asked.append((extracted, answer))
        if self._answer is not None:
            return completed_future(Verdict(self._answer, extracted, ""))
        return super().grade_answer(extracted, answer)


@pytest.fixture(scope="module")
def real() -> Iterator[CountingGrader]:
    with CountingGrader() as grader:
        yield grader


def classes(
    answers: Sequence[str | None], grader: Grader, correct: Sequence[bool] | None = None
) -> list[int | None]:
    return asyncio.run(classify_answers(answers, correct or [False] * len(answers), grader))


def test_equal_answers_are_one_class_whatever_their_spelling(real: CountingGrader) -> None:
    assert classes(["x+1", None, "1+x", "2", "x + 1", "(1 + x)"], real) == [0, None, 0, 1, 0, 0]
    assert ("1+x", "x+1") in real.asked, "rules cannot decide it"
    real.asked.clear()
    assert classes(["50%", "0.5", "1/2", r"\frac{1}{2}", ".50", "0.4"], real) == [0, 0, 0, 0, 0, 1]
    assert classes([r"\sqrt{8}", r"2\sqrt{2}", "(1, 2)", "(1,2)"], real) == [0, 0, 1, 1]
    assert real.asked == [], "rules suffice"


def test_answers_of_different_verdicts_are_different(real: CountingGrader) -> None:
    """25% equals 25 and 0.25, which are not equal; the reference 25 says which of them it is here."""
    assert classes(["25%", "0.25", "25"], real, [True, False, True]) == [0, 1, 0]
    assert classes(["25", "25%"], real, [False, True]) == [0, 1]
    assert classes(["7", "8", "7"], real, [True, False, False]) == [0, 1, 0], (
        "the same text, by a reward of one's own"
    )


def test_the_majority_is_that_of_classes(real: CountingGrader) -> None:
    """Four of seven are right and equal, in three spellings, of which none is the most frequent text."""
    answers = ["7", "x+1", "1+x", "7", "(x+1)", "7", "1 + x"]
    correct = [answer != "7" for answer in answers]
    result = EvalResult(0, "x+1", extracted=list(answers), correct=correct)
    result.classes = classes(answers, real, correct)
    assert majority_correct(result)
    result.classes = []
    assert not majority_correct(result)
    assert majority_correct(
        EvalResult(
            0, "1", extracted=["2", "1", "1", "2"], correct=[True, False, False, True], classes=[0, 1, 1, 0]
        )
    )
    assert not majority_correct(EvalResult(0, "1", extracted=[None], correct=[False], classes=[None]))


@pytest.mark.parametrize("count", [8, 40])
def test_math_verify_compares_at_most_as_often_as_it_grades(count: int) -> None:
    """Each spelling with the first of each class, once; never more than answers, with a few at least."""
    answers = [f"{i}x+{i + 1}y" for i in range(count)] * 2
    with CountingGrader(answer=False) as never:
        assert classes(answers, never) == [*range(count)] * 2
        pairs = count * (count - 1) // 2
        assert len(never.asked) == min(pairs, max(16, 2 * count))
        assert len(set(never.asked)) == len(never.asked)
    with CountingGrader(answer=True) as always:
        assert classes(answers, always) == [0] * len(answers)
        assert len(always.asked) == min(count - 1, 2 * count)
