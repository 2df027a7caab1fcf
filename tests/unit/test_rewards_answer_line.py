"""The rule-based grader.

Why: a reward that is wrong, that can be fooled by form, or that raises or hangs on some model's output in the
middle of the night ruins a run. Not covered: agreement with other graders on a real benchmark; algebraic
equality, which this grader does not attempt.
"""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rpg_megatron.config.rollout import RewardSettings
from rpg_megatron.rewards.answer_line import WINDOW, as_number, canonical, extract, grade, same
from rpg_megatron.rewards.score import score


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("Answer: 18", "18"),
        ("so\nANSWER : 18\nthat is all", "18"),
        ("Answer: 4\nAnswer: 18", "18"),
        ("Answer: 18\nAnswer:", "18"),
        ("Answer:\n\n  18", "18"),
        ("Answer: Answer: 18", "18"),
        ("**Answer:** 18", "18"),
        ("**Answer: 18**", "18"),
        ("Answer: 18.0", "18"),
        ("Answer: 18.", "18"),
        ("Answer: 0018", "18"),
        ("Answer: +18", "18"),
        ("Answer: \u2212 18", "-18"),
        ("Answer: $18$", "18"),
        ("Answer: \\$18", "18"),
        ("Answer: \\( 18 \\)", "18"),
        ("Answer: $\\boxed{18}$.", "18"),
        ("Answer: \\boxed{\\text{18}}", "18"),
        ("Answer: 1,234,567", "1234567"),
        ("Answer: 1{,}234", "1,234"),
        ("Answer: $1,234.50", "1234.5"),
        ("Answer: 50%", "50"),
        ("Answer: 50\\%", "50%"),
        ("Answer: 18 dollars", "18"),
        ("Answer: 18 \\text{ cm}^2", "18"),
        ("Answer: 90^\\circ", "90"),
        ("Answer: 90^{\\circ}", "90"),
        ("Answer: 5 m", "5"),
        ("Answer: x = 18", "18"),
        ("Answer: 1/2", "0.5"),
        ("Answer: \\frac{1}{2}", "0.5"),
        ("Answer: \\dfrac12", "1/2"),
        ("Answer: -\\frac{6}{4}", "-3/2"),
        ("Answer: \\frac{x+1}{2}", "\\frac{ x + 1 }{2}"),
        ("Answer: \\left( 1, 2 \\right)", "(1,2)"),
        ("Answer: Yes", "yes"),
        ("Answer: \\text{Yes}", "yes"),
        ("Answer: " + "7" * 100, "7" * 100),
    ],
)
def test_accepts(response: str, answer: str) -> None:
    assert grade(response, answer)


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("18", "18"),
        ("The answer is 18", "18"),
        ("Answer:", "18"),
        ("Answer: 18\nAnswer: 4", "18"),
        ("Answer: 18 or 19", "18"),
        ("Answer: 181", "18"),
        ("Answer: -18", "18"),
        ("Answer: 18.01", "18"),
        ("Answer: 18" + " " * WINDOW, "18"),
        ("Answer: 3\\frac{1}{2}", "31/2"),
        ("Answer: 1e2", "100"),
        ("Answer: 1/0", "0"),
        ("Answer: x <= 5", "5"),
        ("Answer: 3+5m", "3+5"),
        ("Answer: 1,23", "123"),
        ("Answer: (1,234)", "1234"),
        ("Answer: X", "Xy"),
        ("Answer: \\Delta", "\\delta"),
        ("Answer: " + "7" * 99 + "8", "7" * 100),
    ],
)
def test_rejects(response: str, answer: str) -> None:
    assert not grade(response, answer)


def test_looks_at_the_last_characters_only() -> None:
    ending = "Answer: 18"
    assert grade(ending + "x" * 0 + "\n" + "y" * (WINDOW - len(ending) - 1), "18")
    assert not grade(ending + "\n" + "y" * (WINDOW - len(ending)), "18")


def test_numbers_are_capped_and_plain() -> None:
    assert as_number("1" * 64) == int("1" * 64)
    assert as_number("1" * 65) is None
    for text in ("1e999999999", "0x10", "1_000", "\u0663", "inf", "nan", "1/2/3", "", "."):
        assert as_number(text) is None


@settings(max_examples=300, deadline=None)
@given(
    st.text(
        alphabet=st.characters() | st.sampled_from("Answer: \n\\{}$frac0123456789,./%=-+*_"), max_size=400
    )
)
def test_no_text_raises(text: str) -> None:
    grade(text, text)
    grade("Answer: " + text, text or "x")
    extract(text)
    canonical(text)


@settings(max_examples=100, deadline=None)
@given(st.integers(-(10**12), 10**12), st.integers(1, 999))
def test_a_number_is_the_same_however_it_is_spelt(a: int, b: int) -> None:
    assert same(f"{a:,}", f"{a}.00")
    assert same(f"\\frac{{{a}}}{{{b}}}", f"{a}/{b}")
    assert same(str(a), str(a * b) + f"/{b}")
    assert not same(str(a), str(a + b))


@pytest.mark.parametrize(
    "piece", ["{", "\\frac{", "\\text{a}", "1,000,", "Answer:", "\\boxed{", " ", "=", "9", "1/"]
)
def test_hostile_repetition_is_quick(piece: str) -> None:
    text = piece * 20_000
    start = time.monotonic()
    grade("Answer: " + text, text[:2000])
    assert time.monotonic() - start < 1.0


def test_score_keeps_reward_and_verdict_apart() -> None:
    settings = RewardSettings(correct=0.0, wrong=-0.5)
    assert score(settings, "Answer: 1", "1") == (0.0, True)
    assert score(settings, "Answer: 2", "1") == (-0.5, False)
