"""Constants compared by value say what is true, and stay silent where a text can be read two ways.

Why: they decide before math-verify sees an answer. math-verify's own comparison takes any two constants below
1e-15 for equal. Not covered: its readings (test_math_grader).
"""

import random
import time
import tomllib
from pathlib import Path

import pytest

from rpg_megatron.rewards.grader import grade_by_rules
from rpg_megatron.rewards.latex_numbers import compare_constants, integer_value

CASES = tomllib.loads((Path(__file__).parents[1] / "data" / "grader_cases.toml").read_text("utf-8"))


@pytest.mark.parametrize(("a", "b", "expected"), CASES["constants"])
def test_by_value(a: str, b: str, expected: bool) -> None:
    assert compare_constants(a, b) is expected
    assert compare_constants(b, a) is expected


LONG = ["7" * 101, "(" * 50 + "1" + ")" * 50, "\\sqrt" * 40]


@pytest.mark.parametrize("text", [*CASES["left_to_math_verify"], *LONG])
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


@pytest.mark.parametrize("size", [30, 300, 500])
def test_a_difference_is_seen_however_small(size: int) -> None:
    """Roots, sums and quotients that differ by less than the digits of a first look, and equal forms."""
    for a, near, same in (
        ("1", f"1+10^{{-{size}}}", f"10^{{-{size}}}+1-10^{{-{size}}}"),
        (f"10^{{{size}}}", rf"\sqrt{{10^{{{2 * size}}}-1}}", rf"\sqrt{{10^{{{2 * size}}}}}"),
        (rf"\frac{{1}}{{10^{{{size}}}}}", rf"\frac{{1}}{{10^{{{size}}}+1}}", f"10^{{-{size}}}"),
        (r"\sqrt{2}", rf"\sqrt{{2+10^{{-{size}}}}}", r"\frac{2}{\sqrt{2}}"),
    ):
        assert compare_constants(a, near) is False
        assert compare_constants(a, same) is True


def test_hostile_constants_take_little_time() -> None:
    draw = random.Random(11)

    def grow(depth: int) -> str:
        if not depth:
            return draw.choice(["9", "999", "e", r"\pi"])
        a = grow(depth - 1)
        forms = [
            f"({a})!",
            f"({a})^{{{grow(depth - 1)}}}",
            rf"\sqrt[99]{{{a}}}",
            rf"\ln({a})",
            f"e^{{{a}}}",
            f"{a}+1",
        ]
        return draw.choice(forms)

    slowest = 0.0
    for _ in range(500):
        text = grow(draw.randint(1, 6))
        started = time.thread_time()
        compare_constants(text, f"{text}+0")
        integer_value(text)
        slowest = max(slowest, time.thread_time() - started)
    assert slowest < 2.0  # a tower of powers takes for ever; a busy machine's caches cost tenths


def test_the_grader_asks_them_first() -> None:
    verdict = grade_by_rules(r"\frac{\sqrt{8}}{2}", r"\sqrt{2}")
    assert (verdict.correct, verdict.reason) == (True, "the same value")
    assert grade_by_rules(r"x\sqrt{2}", r"\sqrt{2}x") is None
