"""Constants compared by value say what math-verify says, and stay silent where a text can be read two ways.

Why: they decide before math-verify sees an answer. Not covered: math-verify's own readings
(test_math_grader).
"""

from __future__ import annotations

import random

import pytest

from rpg_megatron.rewards.grader import grade_by_rules
from rpg_megatron.rewards.latex_numbers import compare_constants


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        (r"\frac{\sqrt{2}}{2}", r"\frac{1}{\sqrt 2}", True),
        (r"\sqrt{3}+\sqrt{2}", r"\sqrt{5+2\sqrt{6}}", True),
        (r"$4\pi$", r"2 \cdot 2\pi", True),
        (r"2^{10}-1", "1023", True),
        (r"\sqrt[3]{16}", r"2\sqrt[3]{2}", True),
        (r"-3^2", "-9", True),
        (r"\left(1+\sqrt5\right)/2", r"\dfrac{1+\sqrt{5}}{2}", True),
        (r"\sqrt{2}-\sqrt{2}", "0", True),
        (r"-\sqrt{2}", r"\sqrt{2}", False),
        (r"\frac{\pi}{6}", r"\frac{\pi}{3}", False),
        (r"2^{3^2}", "512", True),
        (r"10^{20}+1", r"10^{20}", False),
        (r"\pi^2", r"\pi^{3}", False),
    ],
)
def test_by_value(a: str, b: str, expected: bool) -> None:
    assert compare_constants(a, b) is expected
    assert compare_constants(b, a) is expected


@pytest.mark.parametrize(
    "text",
    [
        r"3\frac{1}{2}",  # 7/2 or 3/2
        r"2(3)",
        r"1/2\pi",
        "1/2/3",
        "0.5",  # math-verify rounds decimals
        "1,5",
        "2^10",  # LaTeX raises 1 only, people mean 10
        "2^{65}",
        r"2^{1/2}",
        r"\sqrt{-1}",
        r"\frac{1}{0}",
        r"\frac{1}{\sqrt{2}\sqrt{3}-\sqrt{6}}",  # nothing but rounding errors below
        r"\sqrt{2}\sqrt{3}-\sqrt{6}",
        "x",
        r"x = \pi",
        r"\pi i",
        "5!",
        r"\pm 2",
        "(1, 2)",
        "(((",
        r"\frac{1}",
        "",
        "7" * 30,
        "(" * 50 + "1" + ")" * 50,
        "\\sqrt" * 40,
    ],
)
def test_left_to_math_verify(text: str) -> None:
    assert compare_constants(text, r"\sqrt{2}") is None
    assert compare_constants(text, text) is None


def write(draw: random.Random, depth: int) -> str:
    """A constant: surds, fractions, powers and pi."""
    if depth == 0:
        return draw.choice([str(draw.randint(1, 12)), r"\pi", rf"\sqrt{{{draw.randint(2, 12)}}}"])
    a, b = write(draw, depth - 1), write(draw, depth - 1)
    return draw.choice(
        [
            rf"\frac{{{a}}}{{{b}}}",
            f"{a} + {b}",
            rf"({a}) \cdot ({b})",
            f"({a} - {b})^{draw.randint(2, 3)}",
            rf"\sqrt{{{a} + {b}}}",
        ]
    )


def test_the_verdicts_are_those_of_math_verify() -> None:
    from rpg_megatron.rewards.math_verify_worker import equal

    draw, counts = random.Random(5), {True: 0, False: 0}
    for _ in range(80):
        a = write(draw, draw.randint(0, 2))
        rewritten = [
            f"{a} + 1 - 1",
            rf"\frac{{3({a})}}{{3}}",
            rf"\frac{{2}}{{2}} \cdot ({a})",
            f"({a})^{{1}}",
        ]
        b = draw.choice([*rewritten, write(draw, 1), f"{a} + 1"])
        verdict = compare_constants(b, a)
        if verdict is not None:
            counts[verdict] += 1
            assert equal(b, a) is verdict, (b, a)
    assert min(counts.values()) > 15, counts


def test_the_grader_asks_them_first() -> None:
    verdict = grade_by_rules(r"\frac{\sqrt{8}}{2}", r"\sqrt{2}")
    assert verdict is not None
    assert (verdict.correct, verdict.reason) == (True, "the same value")
    assert grade_by_rules(r"x\sqrt{2}", r"\sqrt{2}x") is None
