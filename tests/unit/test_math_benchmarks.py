"""Real mathematics: GSM8K, AIME and AMC are read, rendered and graded, and the documented table holds.

Why: a reference answer that is not right against itself is a problem no policy can solve. The data are no
part of the repository; without them these tests are skipped. Not covered: MATH, Minerva, OlympiadBench.
"""

import itertools
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from benchmarks import grading
from benchmarks.setup import Report, read_block
from rpg_megatron.config.data import DataSettings
from rpg_megatron.data.problems import read_problems
from rpg_megatron.data.prompts import fit_prompts
from rpg_megatron.rewards import Grader

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


def test_the_forms_of_the_table_on_a_few_answers() -> None:
    answers = grading.read_answers(DATA, most=3)[:4]
    shares = grading.agreement(answers, grading.FORMS)
    assert [form.name for form, share in shares if share != 1] == []


@pytest.mark.long
def test_the_documented_table_is_what_comes_out() -> None:
    shown = read_block(grading.PAGE, grading.BLOCK)
    grading.spellings(report := Report("spellings", None), DATA)
    assert shown == str(report.tables[-1])
