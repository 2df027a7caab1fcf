"""Real mathematics: GSM8K, AIME and AMC are read, rendered and graded, also in other spellings.

Why: a reference answer that is not right against itself is a problem no policy can solve, and other spellings
of it, right and wrong, must be graded as such (docs/evidence/rewards.md has the shares). The data are no part
of the repository; without them these tests are skipped. Not covered: MATH, Minerva, OlympiadBench.
"""

import itertools
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

import pytest
from transformers import AutoTokenizer

from rpg_megatron.config.data import DataSettings
from rpg_megatron.data.problems import read_problems
from rpg_megatron.data.prompts import fit_prompts
from rpg_megatron.rewards import Grader
from rpg_megatron.rewards.normalize import normalise
from rpg_megatron.rewards.quantity import as_number

DATA = Path(__file__).parents[3] / "shared" / "data"
SETS = [
    ("gsm8k_train.jsonl", "gsm8k", 7473),
    ("gsm8k_test.jsonl", "gsm8k", 1319),
    ("aime24.jsonl", "aime24", 30),
    ("aime-2024.parquet", "aime24", 30),
    ("aime25.parquet", "aime25", 30),
    ("amc23.jsonl", "amc23", 40),
    ("amc-23.parquet", "amc23", 40),
]
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

pytestmark = pytest.mark.skipif(not DATA.is_dir(), reason=f"the data sets are not at {DATA}")


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


@pytest.mark.parametrize(("file", "preset", "count"), SETS)
def test_every_reference_is_right_against_itself(file: str, preset: str, count: int, checkpoint) -> None:
    settings = DataSettings(
        path=DATA / file, preset=preset, chat=True, system="Be brief.", max_prompt_tokens=4096
    )
    problems = read_problems(settings)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    tokenizer.chat_template = TEMPLATE
    prompts, too_long = fit_prompts(problems, settings, tokenizer)
    assert (len(problems), len(prompts), too_long) == (count, count, 0)
    for problem, prompt in zip(problems, prompts, strict=True):
        assert prompt.text == f"<|system|>Be brief.\n<|user|>{problem.text}\n<|assistant|>"
    with Grader() as grader:
        for form in ("{}", "Answer: {}", "so \\boxed{{{}}}.", "#### {}", "Answer: ${}$\n"):
            wrong = [
                p.answer
                for p in prompts
                if not grader.submit(form.format(p.answer), p.answer).result().correct
            ]
            assert wrong == []


def test_the_solutions_of_gsm8k_are_right_as_they_stand() -> None:
    """The reference is what follows the mark; the whole solution, graded as a response, must give it."""
    settings = DataSettings(path=DATA / "gsm8k_test.jsonl", prompt_key="question")
    references = read_problems(DataSettings(path=DATA / "gsm8k_test.jsonl", preset="gsm8k"))
    with Grader() as grader:
        for solution, reference in zip(read_problems(settings), references, strict=True):
            for style in ("gsm8k", "auto"):
                assert grader.submit(solution.answer, reference.answer, style).result().correct
        neighbours = itertools.pairwise(references)
        differ = [(a.answer, b.answer) for a, b in neighbours if a.answer != b.answer]
        assert not any(grader.submit(f"#### {a}", b).result().correct for a, b in differ)


@pytest.mark.parametrize("count", [3, pytest.param(200, marks=pytest.mark.long)])
def test_other_spellings_are_graded_as_they_should(count: int) -> None:
    """Of answers of GSM8K, and in the long tier of AIME and AMC too."""
    sets = [("gsm8k_test.jsonl", "gsm8k", count)]
    sets += [(SETS[i][0], SETS[i][1], None) for i in (2, 4, 5) if count > 3]
    found = [p for f, s, n in sets for p in read_problems(DataSettings(path=DATA / f, preset=s, limit=n))]
    answers = [p.answer for p in found if (n := as_number(normalise(p.answer))) is not None and n == int(n)]
    numbers = [int(as_number(normalise(answer)) or 0) for answer in answers]
    with Grader(workers=2, deadline=60.0) as grader:
        for form in FORMS:
            pairs = zip(numbers, answers, strict=True)
            verdicts = [grader.submit(form.write(n), answer) for n, answer in pairs]
            failed = sum(v.result().correct != form.right for v in verdicts)
            assert failed <= (form.name in ("dollars", "unit", "square unit") and count > 3), form.name
