"""docs/metrics.md has every key that a run writes, and no other.

Why: a key without a meaning is noise to its reader, and a documented key that does not exist wastes time.
Proved by the strings of the code that make keys, and by the losses of all objectives. Rows of real runs are
compared with the page in tests/integration. Not covered: whether the ranges are good advice.
"""

import re
import typing

import pytest
import torch

from rpg_megatron.config import Settings
from rpg_megatron.config.base import sections_in
from rpg_megatron.config.evaluation import EvaluationSettings
from rpg_megatron.config.losses import ObjectiveSettings
from rpg_megatron.evaluation.metrics import score_results
from rpg_megatron.evaluation.results import EvalResult
from rpg_megatron.objectives import metric_key
from rpg_megatron.training.loss import ResponseTokens, build_loss
from tests.support.metrics_page import documented, missing_from_page, pattern, written


def as_pattern(key: str) -> re.Pattern[str]:
    return re.compile(re.escape(key).replace(r"\*", ".+"))


def test_the_page_has_every_key_of_the_code() -> None:
    keys, _ = written()
    page = [re.sub("<[^>]*>", "*", key) for key in documented()]
    assert len(keys) > 80
    assert sorted(key for key in keys if not any(as_pattern(key).fullmatch(entry) for entry in page)) == []


def test_the_page_has_no_key_that_the_code_does_not_write() -> None:
    keys, strings = written()
    unknown = []
    for entry in documented():
        key = re.sub("<[^>]*>", "*", entry)
        wide = [k for k in keys if "*" in k and as_pattern(k).fullmatch(key)]
        # What a wide key puts in has to be a string of the code too.
        parts = [key.removeprefix(k.partition("*")[0]).removeprefix("*/") for k in wide]
        if key not in keys and not any(text in strings for text in parts):
            unknown.append(entry)
    assert unknown == []
    assert len(documented()) == len(set(documented()))


OBJECTIVES = [
    tag
    for section in sections_in(ObjectiveSettings)
    for tag in typing.get_args(section.model_fields["type"].annotation)
]


@pytest.mark.parametrize("kind", OBJECTIVES)
def test_the_page_has_the_metrics_of_each_objective(kind: str) -> None:
    settings = Settings.model_validate(
        {
            "model": {"path": "m"},
            "data": {"path": "d"},
            "objective": {"type": kind},
            "advantage": {"type": "grpo"},
            "anchor": {"type": "fixed" if kind in ("rpg", "grpo", "reinforce_plus_plus") else "old"},
            "aggregation": {"type": "sequence_mean" if kind == "gspo" else "token_mean"},
            "correction": {"type": "truncate"},
            "teacher": {"url": "http://host/v1"} if kind == "distil" else None,
        }
    )
    logp = torch.linspace(-2, -1, 4, requires_grad=True)
    numbers, zeros = logp.detach(), torch.zeros(4, dtype=torch.int64)
    tokens = ResponseTokens(numbers, numbers, numbers, torch.ones(4), zeros, 1)
    metrics = build_loss(settings)(logp, tokens).metrics
    assert "kl" in metrics, "each of our losses returns kl; see ratio_metrics in token_metrics.py"
    assert "correction_ratio" in metrics
    assert missing_from_page([{metric_key(name): 0.0 for name in metrics}]) == set()
    assert missing_from_page([{"policy/los": 0.0}]) == {"policy/los"}


@pytest.mark.parametrize("samples", [1, 4, 6])
def test_names_of_evaluation_metrics_are_known_before_a_run(samples: int) -> None:
    """``checkpoint.keep_best.metric`` is checked against them."""
    result = EvalResult(
        0,
        "1",
        "1",
        ["1"] * samples,
        [True] * samples,
        ["1"] * samples,
        [1] * samples,
        ["stop"] * samples,
        "x",
    )
    row = score_results("x", [result])
    settings = EvaluationSettings.model_validate({"data": {"path": "d"}, "name": "x", "samples": samples})
    assert set(settings.metric_names()) == set(row)
    assert settings.metric_names()[0] == f"eval/x/avg@{samples}"
    assert missing_from_page([row]) == set()
    assert pattern("eval/<set>/avg@<k>").fullmatch("eval/x/avg@4")
