"""The grader: where an answer is in a response, and whether it equals the reference.

Why: a reward that is wrong, that can be fooled by form, or that raises or hangs on some model's output in the
middle of the night ruins a run. Not covered: workers that are killed (test_reward_pool), adversarial texts
(test_reward_pool_hostile), agreement over whole benchmarks (test_math_benchmarks).
"""

import asyncio
import re
import time
import tomllib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rpg_megatron.config.reward import BUILT_IN_REWARDS, OverlongSettings, RewardSettings
from rpg_megatron.rewards import Grader, Verdict, grade
from rpg_megatron.rewards.extraction import STYLES, WINDOW, Style, find_answer, opens_thoughts
from rpg_megatron.rewards.grader import grade_by_rules
from rpg_megatron.rewards.normalize import canonical
from rpg_megatron.rewards.quantity import as_number
from rpg_megatron.rewards.reward import Response, Scorer, overlong_penalty

CASES = tomllib.loads((Path(__file__).parents[1] / "data" / "grader_cases.toml").read_text("utf-8"))


def accepts(response: str, answer: str) -> bool:
    return grade(response, answer, style="answer_line").correct


@pytest.mark.parametrize(("response", "answer"), [*CASES["accepted"], ("Answer: " + "7" * 100, "7" * 100)])
def test_accepts(response: str, answer: str) -> None:
    assert accepts(response, answer)
    assert grade(response, answer).correct


LONG = [("Answer: 18" + " " * WINDOW, "18"), ("Answer: " + "7" * 99 + "8", "7" * 100)]


@pytest.mark.parametrize(("response", "answer"), [*CASES["rejected"], *LONG])
def test_rejects(response: str, answer: str) -> None:
    assert not accepts(response, answer)


def test_looks_at_the_last_characters_only() -> None:
    ending = "Answer: 18"
    assert accepts(ending + "\n" + "y" * (WINDOW - len(ending) - 1), "18")
    assert not accepts(ending + "\n" + "y" * (WINDOW - len(ending)), "18")
    assert grade(ending + "\n" + "y" * WINDOW, "18").correct  # auto looks further back


def test_numbers_are_capped_and_plain() -> None:
    assert as_number("1" * 64) == int("1" * 64)
    assert as_number("1" * 65) is None
    for text in ("1e999999999", "0x10", "1_000", "\u0663", "inf", "nan", "1/2/3", "", "."):
        assert as_number(text) is None


def test_every_style_is_a_built_in_reward() -> None:
    assert set(BUILT_IN_REWARDS) == set(STYLES)


@settings(max_examples=300, deadline=None)
@given(
    st.text(
        alphabet=st.characters() | st.sampled_from("Answer: \n\\{}$frac0123456789,./%=-+*_"), max_size=400
    )
)
def test_no_text_raises(text: str) -> None:
    for style in STYLES:
        grade_by_rules(find_answer(text, style), text)
        grade_by_rules(find_answer("Answer: " + text, style), text or "x")
    canonical(text)


def answers_match(a: str, b: str) -> bool:
    verdict = grade_by_rules(a, b)
    return verdict is not None and verdict.correct


@settings(max_examples=100, deadline=None)
@given(st.integers(-(10**12), 10**12), st.integers(1, 999))
def test_a_number_is_the_same_however_it_is_spelt(a: int, b: int) -> None:
    assert answers_match(f"{a:,}", f"{a}.00")
    assert answers_match(f"\\frac{{{a}}}{{{b}}}", f"{a}/{b}")
    assert answers_match(str(a), str(a * b) + f"/{b}")
    assert not answers_match(str(a), str(a + b))


@pytest.mark.parametrize(
    "piece", ["{", "\\frac{", "\\text{a}", "1,000,", "Answer:", "\\boxed{", " ", "=", "9", "1/"]
)
def test_hostile_repetition_is_quick(piece: str) -> None:
    text = piece * 20_000
    start = time.process_time()
    for style in STYLES:
        grade_by_rules(find_answer("Answer: " + text, style), text[:2000])
    assert time.process_time() - start < 1.0


@pytest.mark.parametrize(
    ("response", "style", "expected"),
    [*((*row, None)[:3] for row in CASES["last_form"]), ("5" * 400, "auto", None)],
)
def test_the_last_form_counts(response: str, style: str, expected: str | None) -> None:
    assert find_answer(response, style) == expected


FORMS = {
    "answer_line": "Answer: {}",
    "boxed": "\\boxed{{{}}}",
    "gsm8k": "#### {}",
    "auto": "The answer is {}",
}


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize(("response", "expected"), [(*row, None)[:2] for row in CASES["thoughts"]])
def test_thoughts_do_not_answer(style: Style, response: str, expected: str | None) -> None:
    written = re.sub(r"(?<![\w])\d(?!\w)", lambda m: FORMS[style].format(m[0]), response)
    found = find_answer(written, style)
    assert (found.removesuffix(".") if found else None) == expected


def test_thoughts_may_begin_in_the_prompt_and_may_count() -> None:
    unfinished = "Two and three: \\boxed{5}"
    assert grade(f"<think>{unfinished}", "5") == Verdict(False, None, "no answer found")
    assert grade(f"<think>{unfinished}", "5", thoughts=True).correct
    assert find_answer(unfinished, opened=True) is None
    assert find_answer(f"{unfinished}</think>\\boxed{{6}}", opened=True) == "6"
    for prompt, opened in (
        ("<think>\n", True),
        ("<think>\n\n</think>\n\n", False),
        ("in <think> tags: 1+1?", False),
    ):
        assert opens_thoughts(f"user: 2+3?\nassistant: {prompt}") is opened
    long = "We add. " * 50_000
    assert find_answer(f"<think>Answer: 4 {long}</think>Answer: 5") == "5"
    assert find_answer(f"<think>{long}Answer: 5", "answer_line") is None


@pytest.mark.parametrize(("response", "expected"), [(*row, None)[:2] for row in CASES["below_its_mark"]])
def test_an_answer_below_its_mark_is_the_next_expression(response: str, expected: str | None) -> None:
    assert find_answer(response, "answer_line") == find_answer(response, "auto") == expected


@pytest.mark.parametrize(("response_answer", "answer"), CASES["equal_by_value"])
def test_latex_is_compared_by_value(response_answer: str, answer: str) -> None:
    verdict = grade(f"\\boxed{{{response_answer}}}", answer)
    assert verdict.correct
    assert verdict.extracted == response_answer


@pytest.mark.parametrize(("response_answer", "answer"), CASES["other_value"])
def test_what_is_not_the_same_value(response_answer: str, answer: str) -> None:
    assert not grade(f"\\boxed{{{response_answer}}}", answer).correct


def test_a_verdict_says_why() -> None:
    assert grade("Answer: 18.0", "18") == Verdict(True, "18.0", "same number or text")
    assert grade("Answer: 19", "18") == Verdict(False, "19", "another number or word")
    assert grade("Answer: three", "4") == Verdict(False, "three", "another number or word")
    assert grade("I do not\nknow", "18") == Verdict(False, None, "no answer found")
    assert grade("\\boxed{2\\sqrt 3}", "\\sqrt{12}").reason == "the same value"
    assert grade("\\boxed{x\\sqrt 3}", "\\sqrt{3}x").reason == "equal by math-verify"
    assert "longer than" in grade("Answer: " + "7" * 2000, "1").reason
    assert "brackets deep" in grade("Answer: " + "(" * 20 + "x", "7").reason
    with pytest.raises(ValueError, match="use one of auto, answer_line"):
        grade("5", "5", style="bxoed")


def test_equal_answers_of_a_group_are_verified_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with Grader(workers=2) as grader:
        pairs = []
        submit = grader._pool.submit
        monkeypatch.setattr(grader._pool, "submit", lambda pair: pairs.append(pair) or submit(pair))
        futures = [grader.submit(f"#{i}: \\boxed{{\\sqrt{{8}}x}}", "2\\sqrt{2}x") for i in range(16)]
        assert all(f.result().correct for f in futures)
    assert pairs == [["\\sqrt{8}x", "2\\sqrt{2}x"]]


def score(settings: RewardSettings, response: str, length: int = 10, sampled: int | None = None) -> tuple:
    scorer = Scorer(settings, max_tokens=100)
    try:
        graded = Response(response, np.zeros(length, np.int32), "stop", sampled)
        return tuple(*asyncio.run(scorer.score([graded], "1")))
    finally:
        scorer.close()


def test_score_keeps_reward_and_verdict_apart() -> None:
    settings = RewardSettings(correct=0.0, wrong=-0.5)
    assert score(settings, "Answer: 1")[:2] == (0.0, True)
    assert score(settings, "Answer: 2")[:2] == (-0.5, False)
    assert score(settings, "<think>Answer: 1")[:3] == (-0.5, False, None)
    assert score(settings.model_copy(update={"answer_in_thoughts": True}), "<think>Answer: 1")[:2] == (
        0.0,
        True,
    )


def test_a_reward_is_the_sum_of_its_parts() -> None:
    settings = RewardSettings(overlong=OverlongSettings(buffer=40, factor=0.5), format=-0.25)
    reward, correct, extracted, _reason, parts, _failures = score(settings, "it is 1, I think\n", length=80)
    assert parts == {"correctness": -1.0, "overlong": -0.25, "format": -0.25}
    assert (reward, correct, extracted) == (-1.5, False, None)
    assert score(settings, "Answer: 1", length=60)[4] == {"correctness": 1.0, "overlong": 0.0, "format": 0.0}
    for sampled, penalty in ((80, -0.25), (60, 0.0), (0, 0.0)):
        assert score(settings, "Answer: 1", length=100, sampled=sampled)[4]["overlong"] == penalty


def test_overlong_is_dapos_formula() -> None:
    # Expected minus the tokens beyond 2048 - 512, as a share of 512.
    settings = OverlongSettings(buffer=512, factor=1.0)
    penalties = [overlong_penalty(settings, n, 2048) for n in (1, 1536, 1537, 1792, 2048)]
    assert penalties == [0.0, 0.0, -1 / 512, -0.5, -1.0]
