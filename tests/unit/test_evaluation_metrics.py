"""The numbers of an evaluation.

Why: runs are judged by them. pass@k is checked against enumeration of all draws, the intervals against the
normal ones and by how often they contain the true value. Not covered: sampling.
"""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from rpg_megatron.evaluation.metrics import (
    bootstrap_intervals,
    describe_set,
    majority_correct,
    pass_at,
    score_results,
    write_results,
)
from rpg_megatron.evaluation.results import EvalResult


def result(answers: list[str | None], gold: str = "1", finishes: list[str] | None = None) -> EvalResult:
    texts = ["no answer" if a is None else f"Answer: {a}" for a in answers]
    return EvalResult(
        prompt_id=0,
        answer=gold,
        responses=texts,
        extracted=answers,
        correct=[a is not None and a in (gold, gold + ".0") for a in answers],
        lengths=[10 * (i + 1) for i in range(len(answers))],
        finishes=finishes or ["stop"] * len(answers),
    )


@pytest.mark.parametrize("n", [1, 2, 3, 6])
def test_pass_at_k_is_the_mean_over_all_draws(n: int) -> None:
    for right in range(n + 1):
        flags = [i < right for i in range(n)]
        for k in range(1, n + 1):
            draws = [any(d) for d in itertools.combinations(flags, k)]
            assert pass_at(n, right, k) == pytest.approx(sum(draws) / len(draws), abs=1e-12)
    with pytest.raises(ValueError, match="not defined"):
        pass_at(n, 0, n + 1)


def test_pass_at_k_of_many_responses_is_exact() -> None:
    assert pass_at(1024, 1, 512) == pytest.approx(0.5, abs=1e-12)


def test_majority() -> None:
    assert majority_correct(result(["1", "2", "1.0"]))  # 1 and 1.0 vote together
    assert not majority_correct(result(["2", "2.0", "1"]))
    assert not majority_correct(result(["2", "1"]))  # a tie: the first
    assert majority_correct(result([None, None, "1"]))  # no vote without an answer
    assert not majority_correct(result([None]))


def test_all_numbers_of_a_small_evaluation() -> None:
    results = [
        result(["1", "2", "1", "1"], finishes=["stop", "length", "stop", "stop"]),
        result(["2", "2", "3", "1"]),
    ]
    assert score_results("amc", results) == pytest.approx(
        {
            "eval/amc/avg@4": 4 / 8,
            "eval/amc/pass@1": 4 / 8,
            "eval/amc/pass@2": (1.0 + 0.5) / 2,
            "eval/amc/pass@4": 1.0,
            "eval/amc/maj@4": 0.5,
            "eval/amc/truncated_frac": 1 / 8,
            "eval/amc/length_mean": 25.0,
            "eval/amc/length_p50": 25.0,
            "eval/amc/length_p99": 40.0,
        }
    )
    assert set(score_results("amc", [result(["1"])])) >= {
        "eval/amc/avg@1",
        "eval/amc/pass@1",
        "eval/amc/maj@1",
    }


def test_unequal_or_no_results_are_refused() -> None:
    for results in ([], [result([])], [result(["1"]), result(["1", "1"])]):
        with pytest.raises(ValueError, match="same number of responses"):
            score_results("x", results)


def test_results_are_written_as_lines(tmp_path: Path) -> None:
    path = tmp_path / "eval" / "step_000000.jsonl"
    write_results(path, [result(["1", None]), result(["é\ud800"])])
    rows = [json.loads(row) for row in path.read_bytes().splitlines()]
    assert [EvalResult(**row) for row in rows] == [result(["1", None]), result(["é\ud800"])]
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_intervals_match_the_normal_distribution_where_it_holds() -> None:
    values = np.random.default_rng(3).normal(5.0, 2.0, 400)
    low, high = bootstrap_intervals({"x": values}, seed=1)["x"]
    half = 1.96 * values.std() / np.sqrt(400)
    assert (low, high) == pytest.approx((values.mean() - half, values.mean() + half), abs=0.06 * half)


def test_intervals_contain_the_true_value_as_often_as_stated() -> None:
    """60 problems, each right with a probability of 0.3, which the interval should contain."""
    rng = np.random.default_rng(5)
    columns = {str(i): rng.random(60) < 0.3 for i in range(300)}
    intervals = [
        bootstrap_intervals({"x": column.astype(float)}, seed=7, resamples=1000)["x"]
        for column in columns.values()
    ]
    covered = np.mean([low <= 0.3 <= high for low, high in intervals])
    assert 0.90 <= covered <= 0.98


def test_intervals_depend_on_the_seed_and_share_their_draws() -> None:
    values = np.random.default_rng(1).random(40)
    columns = {"a": values, "b": values, "c": 1 - values}
    first, repeated, reseeded = (bootstrap_intervals(columns, seed=s, resamples=700) for s in (4, 4, 5))
    assert first == repeated
    assert first != reseeded
    assert first["a"] == first["b"] == pytest.approx((1 - first["c"][1], 1 - first["c"][0]))
    assert first["a"][0] < values.mean() < first["a"][1]


def test_an_interval_of_problems_that_are_all_alike_has_no_width() -> None:
    for values in (np.ones(5), np.zeros(1)):
        assert bootstrap_intervals({"x": values}, seed=0)["x"] == (values[0], values[0])


def test_all_that_is_reported_of_a_set() -> None:
    results = [
        result(["1", "2", None, "1"], finishes=["stop", "length", "length", "stop"]),
        result(["2", "2", "3", "1"], finishes=["stop", "stop", "stop", "length"]),
    ]
    summary = describe_set(results, seed=2)
    assert (summary["problems"], summary["samples"]) == (2, 4)
    assert summary["metrics"]["avg@4"] == {
        "value": 3 / 8,
        "low": 1 / 4,
        "high": 1 / 2,
    }  # of two values, the ends
    assert list(summary["metrics"]) == ["avg@4", "pass@1", "pass@2", "pass@4", "maj@4"]
    assert summary["length"] == {"mean": 25.0, "p50": 25.0, "p99": 40.0, "max": 40}
    assert summary["truncated"] == {"frac": 3 / 8, "problems": 2, "correct_frac": 1 / 3}
    assert summary["unanswered_frac"] == 1 / 8
    assert describe_set([result(["1"])], seed=0)["truncated"]["correct_frac"] is None
    json.dumps(summary)
