"""The grader's verdicts on answers written in other ways: the table of docs/rewards.md.

``python -m benchmarks.agreement DATA`` takes reference answers from the files of GSM8K (test), AIME 2024,
AIME 2025 and AMC 2023 in the folder DATA, writes each in every way below and prints how often the verdict is
the one that it should be; ``--write`` puts the table into the page. Both verdicts matter: a grader that takes
everything would be wrong in the rows of wrong answers.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

from rpg_megatron.config.data import DataSettings
from rpg_megatron.data.problems import read_problems
from rpg_megatron.rewards import Grader
from rpg_megatron.rewards.normalize import normalise
from rpg_megatron.rewards.quantity import as_number

PAGE = Path(__file__).parents[1] / "docs" / "rewards.md"
BEGIN, END = "<!-- table: benchmarks/agreement.py -->", "<!-- end of table -->"
FILES = {
    "gsm8k_test.jsonl": "gsm8k",
    "aime24.jsonl": "aime24",
    "aime25.parquet": "aime25",
    "amc23.jsonl": "amc23",
}
GSM8K = 200
"""So many of GSM8K's are taken: each form of the table is graded for each answer."""


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


def read_answers(data: Path, most: int = GSM8K) -> list[str]:
    """Whole numbers among the reference answers."""
    answers = []
    for file, preset in FILES.items():
        source = DataSettings(path=data / file, preset=preset, limit=None if preset != "gsm8k" else most)
        answers += [p.answer for p in read_problems(source)]
    return [answer for answer in answers if (n := as_number(normalise(answer))) is not None and n == int(n)]


def measure(answers: list[str], forms: list[Form]) -> list[tuple[Form, float]]:
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


def table(rows: list[tuple[Form, float]]) -> str:
    """The rows as Markdown."""
    lines = ["| form | the reference is 18, the response says | should be | agreement |", "|---|---|---|---|"]
    for form, share in rows:
        said = form.write(18).replace("\n", " ⏎ ")
        lines.append(f"| {form.name} | `{said}` | {'right' if form.right else 'wrong'} | {share:.1%} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="agreement of the grader on answers written in other ways")
    parser.add_argument("data", type=Path)
    parser.add_argument("--write", action="store_true", help=f"put the table into {PAGE.name}")
    arguments = parser.parse_args()
    found = table(measure(read_answers(arguments.data), FORMS))
    print(found)
    if arguments.write:
        page = PAGE.read_text(encoding="utf-8")
        start, end = page.index(BEGIN) + len(BEGIN), page.index(END)
        PAGE.write_text(f"{page[:start]}\n{found}\n{page[end:]}", encoding="utf-8")


if __name__ == "__main__":
    main()
