"""The grader of mathematics: its verdicts against math-verify's, on other spellings, and its speed."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

from benchmarks.setup import ROOT, Report, benchmark, cpu_seconds, main, write_block
from rpg_megatron.config.data import DataSettings
from rpg_megatron.data.problems import read_problems
from rpg_megatron.rewards import Grader
from rpg_megatron.rewards.normalize import normalise
from rpg_megatron.rewards.quantity import as_number

# -- against math-verify -------------------------------------------------------------------------------------

LABELLED = ("grader_rewrites.jsonl", "grader_near_misses.jsonl")


def math_verify_alone(response: str, reference: str) -> bool:
    """math-verify with its own extraction and its defaults."""
    from math_verify import parse, verify

    expected = parse(f"${reference}$", parsing_timeout=None)
    answer = parse(response, parsing_timeout=None)
    return bool(expected and answer) and verify(expected, answer, timeout_seconds=None)


@benchmark(only_ours=True)
def graders(report: Report, wrong_rows: bool = False, only_ours: bool = False) -> None:
    """This package, math-verify alone and the text rules of DAPO's recipe, on the labelled sets in
    tests/data.

    wrong_rows: list the wrong verdicts of this package.
    """
    files = [ROOT / "tests" / "data" / name for name in LABELLED]
    labelled = [json.loads(line) for file in files for line in file.read_text("utf-8").splitlines()]
    correct = sum(row["correct"] for row in labelled)
    columns = ("grader", f"right verdicts of {len(labelled)}", "share|.1%")
    incorrect = len(labelled) - correct
    columns += (f"right answers rejected of {correct}", f"wrong answers accepted of {incorrect}")
    table = report.table(*columns)
    wrong_verdicts: list[dict[str, str]] = []
    with Grader(workers=2, deadline=20.0) as grader:
        graders = {"rpg_megatron": lambda response, answer: grader.submit(response, answer).result().correct}
        graders |= {} if only_ours else {"math-verify alone": math_verify_alone}
        for name, grade in graders.items():
            wrong = [r for r in labelled if grade(r["response"], r["reference"]) is not r["correct"]]
            rejected = sum(row["correct"] for row in wrong)
            count = len(labelled) - len(wrong)
            table.row(name, count, count / len(labelled), rejected, len(wrong) - rejected)
            wrong_verdicts = wrong_verdicts or wrong
    for r in wrong_verdicts if wrong_rows else ():
        verdict = "rejected" if r["correct"] else "ACCEPTED"
        report.say(f"{verdict} {r['kind']} | {r['reference']} | {r['response'][-90:]!r}")


# -- other spellings -----------------------------------------------------------------------------------------

PAGE = "evidence/rewards.md"
BLOCK = "grading spellings"
DATA_FILES = {
    "gsm8k_test.jsonl": "gsm8k",
    "aime24.jsonl": "aime24",
    "aime25.parquet": "aime25",
    "amc23.jsonl": "amc23",
}
GSM8K = 200
"""Number of GSM8K answers: each form of the table is graded for each answer."""


class Form(NamedTuple):
    """One way to write an answer."""

    name: str
    write: Callable[[int], str]
    """The response that gives a number."""
    right: bool
    """What the verdict should be."""


def _boxed(text: str) -> str:
    return f"so we get $\\boxed{{{text}}}$."


FORMS = [
    Form("`Answer:` line", lambda n: f"so\nAnswer: {n}", True),
    Form("`\\boxed{}`", lambda n: _boxed(f"{n}"), True),
    Form("`####`", lambda n: f"so\n#### {n}", True),
    Form("number alone", lambda n: f"{n}", True),
    Form("the answer is ...", lambda n: f"We add.\nThe final answer is ${n}$. I hope it is correct.", True),
    Form("last of two boxes", lambda n: f"{_boxed(str(n + 1))} No: {_boxed(str(n))}", True),
    Form("last of three forms", lambda n: f"#### {n + 1}\nAnswer: {n + 2}\n{_boxed(str(n))}", True),
    Form("first of two forms", lambda n: f"{_boxed(str(n))}\nAnswer: {n + 1}", False),
    Form("box cut off", lambda n: f"so $\\boxed{{{n}", False),
    Form("wrong by one", lambda n: _boxed(f"{n + 1}"), False),
    Form("wrong sign", lambda n: _boxed(f"{-n - (n == 0)}"), False),
    Form("a digit too many", lambda n: _boxed(f"{n}0" if n else "01"), False),
    Form("off by a hundredth", lambda n: _boxed(f"{n}.01"), False),
    Form("two answers", lambda n: _boxed(f"{n} \\text{{ or }} {n + 1}"), False),
    Form("extra text before", lambda n: f"**Answer:** x = {n}.", True),
    Form("extra noun", lambda n: f"Answer: {n} green eggs", True),
    Form("noun in LaTeX", lambda n: _boxed(f"{n} \\text{{ eggs}}"), True),
    Form("number word after it", lambda n: f"Answer: {n} dozen", False),
    Form("separators", lambda n: f"Answer: {n:,}", True),
    Form("decimal zeros", lambda n: _boxed(f"{n}.00"), True),
    Form("dollars", lambda n: f"Answer: \\${n:,}.00", True),
    Form("unit", lambda n: f"Answer: {n} cm", True),
    Form("square unit", lambda n: _boxed(f"{n}\\,\\text{{cm}}^2"), True),
    Form("degrees", lambda n: _boxed(f"{n}^\\circ"), True),
    Form("wrong number, unit", lambda n: f"Answer: {n + 1} cm", False),
    Form("fraction", lambda n: _boxed(f"\\frac{{{6 * n}}}{{6}}"), True),
    Form("slashed fraction", lambda n: f"Answer: {6 * n}/6", True),
    Form("wrong fraction", lambda n: _boxed(f"\\frac{{{6 * n + 1}}}{{6}}"), False),
    Form("percent sign", lambda n: f"Answer: {n}%", True),
    Form("as a percentage", lambda n: f"Answer: {100 * n}\\%", True),
    Form("wrong percentage", lambda n: f"Answer: {100 * n + 1}%", False),
    Form("sum", lambda n: _boxed(f"{n - 7} + 7"), True),
    Form("power and product", lambda n: _boxed(f"2^3 \\cdot {n} \\div 8"), True),
    Form("root", lambda n: _boxed(f"\\sqrt{{{n * n}}}" if n >= 0 else f"-\\sqrt{{{n * n}}}"), True),
    Form("scientific", lambda n: _boxed(f"{Fraction(n, 10)!s} \\times 10^1"), True),
    Form("equation chain", lambda n: _boxed(f"x = {n - 1} + 1 = {n}"), True),
    Form("wrong sum", lambda n: _boxed(f"{n - 7} + 8"), False),
    Form("wrong root", lambda n: _boxed(f"\\sqrt{{{n * n + 1}}}"), False),
    Form("times pi", lambda n: _boxed(f"{n or 1}\\pi"), False),
    Form("pair", lambda n: _boxed(f"({n}, {n})"), False),
    Form("clause after it", lambda n: f"Answer: {n} because we add them all up", True),
    Form("words in brackets", lambda n: f"Answer: {n} (eggs)", True),
    Form("sentence", lambda n: f"Answer: The total is {n}.", True),
    Form("E notation", lambda n: f"Answer: {n}e0", True),
    Form("thin spaces", lambda n: _boxed(f"{n:,}".replace(",", "\\,")), True),
    Form("approximately", lambda n: _boxed(f"\\approx {n}"), True),
    Form("other unit scale", lambda n: f"Answer: {n} million", False),
    Form("strict inequality", lambda n: _boxed(f"x > {n}"), False),
    Form("plus a constant", lambda n: _boxed(f"{n} + C"), False),
    Form("inequality", lambda n: _boxed(f"x \\le {n}"), False),
]


@benchmark(most=3)
def spellings(report: Report, data: Path, write: bool = False, most: int = GSM8K) -> None:
    """Verdicts on reference answers written in other ways, right and wrong; a grader must get both.

    data: folder with the files of GSM8K (test), AIME 2024, AIME 2025 and AMC 2023. write: put the table into
    docs/evidence/rewards.md. most: number of GSM8K answers.
    """
    table = report.table("form", "the reference is 18, the response says", "should be", "agreement|.1%")
    for form, share in agreement(read_answers(data, most), FORMS):
        response = form.write(18).replace("\n", " ⏎ ")
        table.row(form.name, f"`{response}`", "right" if form.right else "wrong", share)
    if write:
        write_block(PAGE, BLOCK, str(table))


def read_answers(data: Path, most: int = GSM8K) -> list[str]:
    """Whole numbers among the reference answers."""
    answers = []
    for file, preset in DATA_FILES.items():
        limit = most if preset == "gsm8k" else None
        answers += [
            p.answer for p in read_problems(DataSettings(path=data / file, preset=preset, limit=limit))
        ]
    return [answer for answer in answers if (n := as_number(normalise(answer))) is not None and n == int(n)]


def agreement(answers: list[str], forms: list[Form]) -> list[tuple[Form, float]]:
    """Share of answers for which the verdict on a form is what it should be."""
    rows = []
    with Grader(workers=2, deadline=60.0) as grader:
        for form in forms:
            numbers = [int(as_number(normalise(answer)) or 0) for answer in answers]
            verdicts = [
                grader.submit(form.write(n), answer) for n, answer in zip(numbers, answers, strict=True)
            ]
            rows.append((form, sum(v.result().correct == form.right for v in verdicts) / len(verdicts)))
    return rows


# -- speed ---------------------------------------------------------------------------------------------------

COUNT = 2000
WORK = "We add the numbers and simplify. " * 40
CONSTANTS = [
    ("\\frac{{\\sqrt{{{0}}}}}{{2}}", "\\sqrt{{{0}}}/{1}"),
    ("{0}\\pi", "{0} \\cdot \\pi + {1} - 2"),
    ("{0}\\sqrt{{3}}", "\\sqrt{{3}} \\cdot {0} \\cdot {1} / 2"),
]
EXPRESSIONS = [
    ("x^2 + {0}x", "x(x+{0}) + {1} - 2"),
    ("\\frac{{n(n+{0})}}{{2}}", "\\frac{{n^2 + {0}n}}{{{1}}}"),
    ("({0}, \\sqrt{{2}})", "({0}, \\frac{{{1}}}{{\\sqrt{{2}}}})"),
]


def plain_numbers(count: int) -> list[tuple[str, str]]:
    """Numbers as a model writes them; half of them wrong."""
    forms = ["{:,}", "${}$", "{}.0", "\\boxed{{{}}}", "\\text{{{} cm}}", "\\frac{{{}}}{{1}}"]
    numbers = range(1000, 1000 + count)
    return [(f"{WORK}\nAnswer: {forms[i % len(forms)].format(i)}", str(i + i % 2)) for i in numbers]


def latex(forms: list[tuple[str, str]], count: int, different: int) -> list[tuple[str, str]]:
    """``count`` pairs, ``different`` of them distinct; half of them wrong."""
    pairs = []
    for i in range(count):
        number = i * different // count
        response, answer = forms[number % len(forms)]
        wrong = 2 + number % 6 // 3
        pairs.append((f"{WORK}\\boxed{{{response.format(number + 2, 2)}}}", answer.format(number + 2, wrong)))
    return pairs


@benchmark(count=96)
def speed(report: Report, workers: int = 2, count: int = COUNT) -> None:
    """Answers graded per second with the pool warm: plain numbers, and LaTeX by math-verify.

    Each row is the best of three runs of the same work. "In groups of 16" repeats answers as the responses to
    a prompt do; "all different" is math-verify's own speed, times the cores that there are. CPU time is that
    of this process and its workers: on a busy machine it says more than the clock.
    """
    work = {
        "plain numbers": plain_numbers(count),
        "constants in LaTeX, all different": latex(CONSTANTS, count, count),
        "expressions, in groups of 16": latex(EXPRESSIONS, count, count // 16),
        "expressions, all different": latex(EXPRESSIONS, count, count),
    }
    columns = (f"{count:,} answers of about 1,300 characters", "answers/s|,.0f", "CPU ms|.3f", "right|.0%")
    table = report.table(*columns, ratio="answers/s", title=f"{workers} workers")
    for name, pairs in work.items():
        rate, cpu = 0.0, float("inf")
        for _ in range(3):
            with Grader(workers=workers) as grader:
                warm = [
                    grader.submit(f"\\boxed{{{n}x\\sqrt{{8}}}}", f"{2 * n}x\\sqrt{{2}}") for n in range(64)
                ]
                assert all(future.result().correct for future in warm)
                started, cpu_start = time.perf_counter(), cpu_seconds(os.getpid())
                futures = [grader.submit(*pair) for pair in pairs]
                correct = sum(future.result().correct for future in futures)
                rate = max(rate, count / (time.perf_counter() - started))
                cpu = min(cpu, 1000 * (cpu_seconds(os.getpid()) - cpu_start) / count)
        table.row(name, rate, cpu, correct / count)


if __name__ == "__main__":
    main(__doc__, graders, spellings, speed)
