r"""Each reading rule of the grader on examples, right and wrong, and the bounds on the labelled sets.

Why: a rule that reads too much rewards wrong answers, one that reads too little punishes right ones. The
labelled rows (tests/data) check both at once. Not covered: extraction forms and reasons
(test_math_grader), constants (test_latex_numbers), hostile texts (test_reward_pool_hostile).
"""

from __future__ import annotations

import json
import random
import time
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rpg_megatron.rewards import Grader
from rpg_megatron.rewards.compare import compare
from rpg_megatron.rewards.extraction import find_answer
from rpg_megatron.rewards.grader import grade_by_rules
from rpg_megatron.rewards.math_verify_worker import equal as by_math_verify
from rpg_megatron.rewards.quantity import exact
from rpg_megatron.rewards.units import parse_unit

DATA = Path(__file__).parents[1] / "data"

# Rule: (reference, answer) that agree, decided without math-verify; then pairs that do not agree.
RULES: dict[str, tuple[list[tuple[str, str]], list[tuple[str, str]]]] = {
    "mixed numbers": (
        [
            ("5/2", "2 1/2"),
            ("7/2", r"3\frac12"),
            ("-5/2", r"-2\frac{1}{2}"),
            ("9/2", "4½"),
            ("9/4", "2 and 1/4"),
        ],
        [("21/2", "2 1/2"), ("1", r"2\frac{1}{2}"), ("31/2", r"3\frac{1}{2}")],
    ),
    "repeating decimals": (
        [("1/3", r"0.\overline{3}"), ("1/6", "0.1666..."), ("1/9", "0.(1)"), ("8/9", r"0.\dot{8}")],
        [("0.3", r"0.\overline{3}"), ("1/3", "0.333"), ("1/6", r"0.\overline{16}")],
    ),
    "e-notation": (
        [(r"4.5 \times 10^{33}", "4.5e33"), ("18", "18e0"), ("10^{-3}", "10⁻³"), ("6.6e-34", "6.6 x 10^-34")],
        [("4.5e33", "4.5e32"), ("105", "10^5"), ("2000", "2e^{3}")],
    ),
    "units": (
        [
            ("36\\pi", r"36\pi\text{ cm}^2"),
            ("1.6", r"1.6 \mathrm{~cm}"),
            (r"60\text{ km/h}", "60 kilometers per hour"),
            (r"4\,\Omega", "4 ohms"),
            (r"24\text{ in}^3", "24 cubic inches"),
            ("$18", "18 dollars"),
            ("1.2", "1.2 kg in total"),
        ],
        [
            ("12 cm", "12 m"),
            (r"\$18", "18 cents"),
            ("9 ft^2", "9 yd^2"),
            (r"\pi r^2", r"\pi r^2 h"),
            ("5", "5m"),
        ],
    ),
    "left sides": (
        [
            ("5", "x = 5"),
            ("5", "f(2) = 5"),
            ("1/4", "P(A) = 1/4"),
            ("24", "[ABC] = 24"),
            ("5", "5 = x"),
            ("3", r"\log_2 8 = 3"),
            ("x=5,y=3", "(x,y) = (5,3)"),
            ("14", "a_5 = 2a_4 + 2 = 14"),
        ],
        [
            ("25", "x^2 = 25"),
            ("5", "-x = 5"),
            ("5", "|x| = 5"),
            ("100", r"\log x = 100"),
            ("5", r"x \ne 5"),
            ("(3,4)", "(y,x) = (3,4)"),
            ("18", "19 = 18"),
        ],
    ),
    "counted nouns": (
        [
            ("5", "5 apples"),
            ("8", "8 people per stop"),
            ("24", "2 dozen"),
            ("5/8", "5 eighths"),
            ("2/5", "2/5 of the land"),
        ],
        [
            ("5", "5 eighths"),
            ("3", "3 lakh"),
            ("2", "2 gross of pencils"),
            ("18", "18 percent off"),
            ("5", "5 less than Tom's"),
            ("18", "18 below zero"),
            ("3", "3 root two"),
            ("8", "8 cubed"),
        ],
    ),
    "regions": (
        [
            ("[1,2)", r"1\le x<2"),
            ("(3,\\infty)", "3 < x"),
            ("(-2,2)", "|x| < 2"),
            ("(2,5)", "5 > x > 2"),
            (r"(-\infty,-1)\cup(1,\infty)", "x < -1 or x > 1"),
            (r"(-\infty,2)\cup(2,\infty)", r"x \ne 2"),
            (r"(-\infty,\infty)", r"\mathbb{R}"),
            ("x>3", r"\{x : x > 3\}"),
        ],
        [
            ("[1,2)", r"1\le x\le 2"),
            ("3", "x > 3"),
            ("(2,5)", r"\{2,5\}"),
            (r"(-\infty,-1)\cup(1,\infty)", r"x < -1 \wedge x > 1"),
        ],
    ),
    "plus-minus": (
        [
            (r"\pm 3", "3 and -3"),
            ("3, 7", r"5 \pm 2"),
            ("-2,-1,1,2", r"\pm 1, \pm 2"),
            (r"\pm 5", "plus or minus 5"),
        ],
        [(r"\pm 3", "3"), ("3", r"\pm 3"), (r"\{-4,0,4\}", r"\pm 4")],
    ),
    "lists and tuples": (
        [
            ("1, 2, 3", "3, 2 and 1"),
            ("2, 7", "2; 7"),
            (r"\{1,3\}", "{3, 1}"),
            ("(1,2),(3,4)", "(3,4) and (1,2)"),
        ],
        [
            ("(3,4)", "(4,3)"),
            ("(5,3)", "(7,2)"),
            (r"(3,\sqrt{2})", r"(3,\frac{3}{\sqrt{2}})"),
            ("(3,4)", r"\{3,4\}"),
            (r"\{3,4\}", "(3,4)"),
            ("1", "1, 1"),
            ("1,2,3", "1,1,2"),
        ],
    ),
    "multiple choice": (
        [
            ("C", r"\textbf{(C) } 12"),
            (r"\textbf{(C)}\ 12", "12"),
            (r"\textbf{(C)}\ 12", "C"),
            ("B", "Option B"),
            ("A, C", "(A) and (C)"),
        ],
        [(r"\textbf{(C)}\ 12", r"\textbf{(D)}\ 12"), ("C", "B or C"), ("D", "not D")],
    ),
    "unicode": (
        [
            (r"\sqrt{2}", "√2"),
            (r"\infty", "∞"),
            ("(1,2)", "\uff081\uff0c2\uff09"),
            ("5", "x\uff1d\uff15。"),
            ("-7", "\u20137"),
        ],
        [(r"\sqrt 5", "∛5"), ("x^3", "x₃")],
    ),
    "markdown and end tokens": (
        [
            ("5", "**5** dollars"),
            ("17", "`17`"),
            ("18", "18<|im_end|>"),
            ("204", "204</answer>"),
            ("5", r"\color{red}{5}"),
        ],
        [("52", "5**2"), ("18", "~~18~~ 20")],
    ),
    "words around": (
        [
            ("18", "18 because 36 / 2 = 18"),
            ("18", "18 (eggs)"),
            ("18", "The total is 18."),
            ("50", "about 50"),
        ],
        [
            ("18", "The total is not 18."),
            ("15", "15 (or maybe 16)"),
            ("7", "more than 7"),
            ("6", "5 (not 6)"),
        ],
    ),
    "thousands and decimal commas": (
        [
            ("1234567", "1 234 567"),
            ("604800", r"604\,800"),
            ("0.75", "0,75"),
            ("2.5", "2{,}5"),
            ("12.75", "12,75 €"),
        ],
        [("12", "1 2"), ("123", "1 2 3"), ("1000", "1,00"), ("1234", "(1,234)")],
    ),
    "approximations": (
        [
            ("3.14", r"\approx 3.14"),
            (r"\sqrt{2}", r"\sqrt{2} \approx 1.41"),
            ("1.41", r"\sqrt{2} \approx 1.41"),
        ],
        [("5", r"5 \approx 6"), (r"\pi", r"\approx 3.14"), (r"\sqrt 2", "1.41421356237")],
    ),
    "bases": (
        [("1010_2", "1010"), ("12", "12_{10}"), ("2A_{16}", "0x2A"), ("1101_2", "1101 (base 2)")],
        [("1010_2", "1010_3"), ("12", "12_8")],
    ),
    "matrices": (
        [
            (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{bmatrix} 1 & 2 \\ 3 & 4 \end{bmatrix}"),
            (r"\begin{pmatrix}0&-1\\1&0\end{pmatrix}", "[[0,-1],[1,0]]"),
            (r"\langle 4,-1\rangle", r"4\mathbf{i}-\mathbf{j}"),
        ],
        [(r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix}1&3\\2&4\end{pmatrix}")],
    ),
    "words": (
        [
            ("17", "seventeen"),
            ("11:30 a.m.", "11:30 AM"),
            (r"\emptyset", r"\varnothing"),
            ("isosceles", "an isosceles triangle"),
        ],
        [("ABC", "abc"), ("ABCD", "ACBD"), ("Alice", "Alice and Bob"), ("east", "southeast")],
    ),
    "ratios": (
        [
            ("3:2", "6:4"),
            ("3:2", "3 to 2"),
            ("1:2:3", "2 : 4 : 6"),
            (r"\sqrt{2}:1", r"2:\sqrt{2}"),
            ("9:16", r"\frac{9}{16}"),
        ],
        [
            ("3:2", "2:3"),
            ("3:2", "6:2"),
            ("1:2:3", "1:2"),
            ("3:2", "3"),
            ("4:1", "4"),
            ("3:2", r"\frac{2}{3}"),
        ],
    ),
    "no solution": (
        [
            (r"\emptyset", "no solution"),
            (r"\varnothing", "There are no real solutions."),
            ("no solution", r"\{\}"),
            ("No solutions", "The equation has no solution."),
            (r"\emptyset", r"\text{the empty set}"),
            (r"\emptyset", "{}"),
        ],
        [
            (r"\emptyset", "0"),
            (r"\emptyset", r"\{0\}"),
            (r"\emptyset", r"\{\emptyset\}"),
            ("no solution", "one solution"),
            (r"\emptyset", "no solution except x = 0"),
            (r"\emptyset", "no"),
            ("0", "no solution"),
        ],
    ),
    "times": (
        [
            ("12:30", "12:30 p.m."),
            ("3:45 p.m.", "15:45"),
            ("7:20 a.m.", "7:20"),
            ("09:05", "9:05"),
            ("12:00 p.m.", "noon"),
            ("0:15", "12:15 AM"),
            ("4:00", "4 o'clock"),
            ("6:40", "It ends at 6:40 p.m."),
        ],
        [
            ("12:30", "12:31 p.m."),
            ("12:30 p.m.", "12:30 a.m."),
            ("15:45", "3:45 a.m."),
            ("15:45", "3:45"),
            ("noon", "midnight"),
            ("12:30", "6:15"),
            ("1:20", "2:40"),
            ("5", "5 a.m."),
        ],
    ),
    "congruences": (
        [
            ("3", r"7^{2023} \bmod 10 = 3"),
            ("3", r"7^{2023} \equiv 3 \pmod{10}"),
            (r"x \equiv 3 \pmod 7", r"x \equiv -4 \pmod{7}"),
            (r"x \equiv 3 \pmod{7}", "x ≡ 10 (mod 7)"),
            (r"4 \pmod 9", r"n \equiv 4 \pmod{9}"),
            ("352", r"N \bmod 1000 = 352"),
            ("100", r"100! \bmod 101 = 100"),
            (r"\pm 1 \pmod 8", r"1, 7 \pmod{8}"),
        ],
        [
            ("7", r"7^{2023} \bmod 10 = 7"),
            ("13", r"7^{2023} \equiv 13 \pmod{10}"),
            ("10", r"7^{2023} \bmod 10 = 3"),
            (r"x \equiv 3 \pmod 7", r"x \equiv 4 \pmod 7"),
            (r"x \equiv 3 \pmod 7", r"x \equiv 3 \pmod{14}"),
            (r"x \equiv 3 \pmod 7", r"y \equiv 3 \pmod 7"),
            (r"x \equiv 3 \pmod 7", "3"),
            (r"\pm 1 \pmod 8", r"1 \pmod 8"),
        ],
    ),
    "constants": (
        [
            ("10", "C(5,2)"),
            (r"\binom{10}{3}", "{}_{10}C_{3}"),
            (r"\binom{5}{2}", "C_5^2"),
            (r"{5 \choose 2}", "10"),
            (r"\frac{e^{-40} 40^3}{3!}", r"\frac{32000}{3e^{40}}"),
            ("10^{-22}", "1e-22"),
            (r"[0, 10^{-25})", r"0 \le x < \frac{1}{10^{25}}"),
            (r"\{3^{-60}, 1\}", r"\{1, 9^{-30}\}"),
        ],
        [
            (r"[0, 10^{-25})", r"[0, 2 \cdot 10^{-25})"),
            (r"(0, \frac{1}{23!})", r"(0, \frac{2}{23!})"),
            (r"\{\frac{1}{21!}, 1\}", r"\{\frac{1}{22!}, 1\}"),
            (r"\begin{pmatrix} e^{-50} \\ 1 \end{pmatrix}", r"\begin{pmatrix} e^{-51} \\ 1 \end{pmatrix}"),
            ("5", "2(3)"),
            ("(10, 3)", "C(10,3)"),
        ],
    ),
    "percent": ([("25%", "0.25"), ("25", "25 percent")], [("25", "0.25"), ("0.05", "0.05%"), ("7%", "0.7")]),
}


@pytest.mark.parametrize("rule", RULES)
def test_rule(rule: str) -> None:
    agree, differ = RULES[rule]
    assert [pair for pair in agree if compare(*pair) is not True] == []
    assert [(a, b) for a, b in differ if compare(a, b) or by_math_verify(b, a)] == []


@pytest.mark.parametrize(
    ("reference", "answer", "equal"),
    [
        ("x^2+2x", "x(x+2)", True),
        ("abc", "bca", True),
        ("0.5x", r"\frac{x}{2}", True),
        ("x^2+y^2=1", "2x^2+2y^2=2", True),
        ("xy=1", r"y=\frac{1}{x}", True),
        ("(x, 2y)", "(x, y+y)", True),
        ("x^2+y^2=1", "2x^2+2y^2=1", False),
        ("x = 5", "y = 5", False),
        ("0.333333333x", r"\frac{x}{3}", False),
        (r"\sqrt{1/n}", r"\frac{1}{\sqrt n}", True),
        (r"\frac{\sqrt a}{\sqrt b}", r"\sqrt{\frac{a}{b}}", True),
        (r"\sqrt{n^3}", r"n\sqrt n", True),
        (r"x\sqrt{x}", "x^{3/2}", True),
        (r"e^{-\lambda t}", r"\frac{1}{e^{\lambda t}}", True),
        (r"\cos\frac{\pi}{5}", r"\frac{1+\sqrt5}{4}", True),
        (r"\sin 15^\circ", r"\frac{\sqrt6-\sqrt2}{4}", True),
        ("x", r"\sqrt{x^2}", False),
        (r"\sqrt{1/n}", r"-\frac{1}{\sqrt n}", False),
        (r"\sqrt{a}+\sqrt{b}", r"\sqrt{a+b}", False),
        (r"\frac{x}{25!}", r"\frac{x}{24!}", False),
        ("x+10^{-30}", "x", False),
        (r"\sin(10^{-20})", r"\sin(2 \cdot 10^{-20})", False),
        (r"\tan(10^{-25})", "10^{-25}", False),
        (r"\cos(10^{-9})", "1", False),
        (r"\frac{i}{60!}", r"\frac{2i}{60!}", False),
        (r"\Delta", r"\delta", False),
    ],
)
def test_algebra_is_left_to_math_verify(reference: str, answer: str, equal: bool) -> None:
    assert by_math_verify(answer, reference) is equal


@pytest.mark.parametrize(
    "answer", [r"5 \approx 6 = 5", r"5 \iff x", r"5 \to 5", "5 # 5", r"\sum_n 5", "x more than 5", "x 5 6"]
)
def test_math_verify_sees_plain_algebra_only(answer: str) -> None:
    assert compare("x+5", answer) is False


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 99), st.integers(1, 99))
def test_a_mixed_number_is_a_sum(whole: int, top: int, bottom: int) -> None:
    value = whole + Fraction(top, bottom)
    for text in (rf"{whole}\frac{{{top}}}{{{bottom}}}", f"{whole} {top}/{bottom}"):
        assert exact(text) == value
        assert compare(f"{value.numerator}/{value.denominator}", text) is True


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 999), st.text("0123456789", max_size=4), st.text("0123456789", min_size=1, max_size=6))
def test_a_repeating_decimal_is_its_fraction(whole: int, fixed: str, period: str) -> None:
    value = exact(rf"{whole}.{fixed}\overline{{{period}}}")
    assert value is not None
    shifted = value * 10 ** len(fixed)
    assert shifted * 10 ** len(period) - shifted == int(f"{whole}{fixed}{period}") - int(f"{whole}{fixed}")


def test_units_have_one_form() -> None:
    for texts in (
        ("m/s^2", "meters per second squared", r"m \cdot s^{-2}"),
        ("km/h", "kph", "kilometres per hour"),
        ("ft^3", "cubic feet"),
        ("J/K", "joules per kelvin"),
    ):
        assert len({parse_unit(t) for t in texts}) == 1
        assert parse_unit(texts[0]) is not None
    assert parse_unit("kJ") != parse_unit("J")
    assert parse_unit("apples") is parse_unit("") is parse_unit("square") is None


def _rows(name: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (DATA / name).read_text("utf-8").splitlines()]


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [
        ("grader_rewrites.jsonl", 0.99, 1.0),
        ("grader_near_misses.jsonl", 0.0, 0.005),
        ("grader_second_rewrites.jsonl", 1.0, 1.0),
        ("grader_second_near_misses.jsonl", 0.0, 0.0),
    ],
)
def test_accepted_share_of_the_labelled_rows(name: str, least: float, most: float) -> None:
    rows = _rows(name)
    with Grader(deadline=20.0) as grader:
        verdicts = [grader.submit(r["response"], r["reference"]) for r in rows]
        share = sum(v.result().correct for v in verdicts) / len(rows)
    assert least <= share <= most


def test_spliced_answers_raise_nothing_and_take_no_time() -> None:
    draw = random.Random(3)
    texts = [find_answer(r["response"]) or "x" for r in _rows("grader_rewrites.jsonl")]
    slowest = 0.0
    for _ in range(3000):
        a, b, c = draw.choices(texts, k=3)
        spliced = a[: draw.randint(0, len(a))] + b[draw.randint(0, len(b)) :] * draw.choice((1, 1, 1, 8))
        started = time.thread_time()
        grade_by_rules(spliced, c)
        grade_by_rules(c, spliced)
        slowest = max(slowest, time.thread_time() - started)
    assert slowest < 2.0  # a pattern that backtracks takes minutes; a busy machine's caches cost tenths
