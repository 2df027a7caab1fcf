"""A loss may return any metrics: each is reduced over tokens and updates and logged under a key of its own.

Proved on one process, without Megatron: reduction of a micro-batch, the keys, means weighted by tokens,
maxima. Not covered here: ranks (tests/distributed).
"""

from types import SimpleNamespace

import pytest
import torch

from rpg_megatron.config import Settings, UserError
from rpg_megatron.objectives import LossOutput, metric_key, ppo_loss
from rpg_megatron.policy.policy import UpdateStats, _report
from rpg_megatron.training.trainer import Trainer, _mean_kl


def test_metrics_of_a_micro_batch_are_sums_and_maxima() -> None:
    values = torch.tensor([-3.0, -1.0, -2.0], requires_grad=True)
    out = LossOutput(values, {"mine": values, "mine_max": values})
    report = _report(out, values.sum(), torch.tensor(3))
    assert report["sums"].tolist() == [-6, 3, 3, 6]
    assert {name: value.item() for name, value in report["metrics"].items()} == {"mine": -6, "mine_max": -1}
    assert not report["metrics"]["mine"].requires_grad
    assert _report(LossOutput(values), values.sum(), torch.tensor(3))["metrics"] == {}


def test_metrics_of_a_step_are_means_over_tokens_and_maxima() -> None:
    first = UpdateStats(1, 0.0, 0.0, {"kl": 1.0, "mine": 2.0, "mine_max": -5.0}, 1.0, skipped=False)
    second = UpdateStats(3, 0.0, 0.0, {"kl": 1.0, "mine": 6.0, "mine_max": -7.0}, 1.0, skipped=False)
    row = Trainer._summarise(SimpleNamespace(anchor=None), [first, second])  # type: ignore[arg-type]
    assert row["kl/anchor"] == 1.0
    assert row["objective/mine"] == pytest.approx(5.0)
    assert row["objective/mine_max"] == -5.0


@pytest.mark.parametrize(("tokens", "expected"), [(0, 0.0), (1, 0.25)])
def test_the_mean_of_a_step_with_one_token_is_its_value(tokens: int, expected: float) -> None:
    update = UpdateStats(tokens, 0.0, 0.25, {"kl": 0.25}, 1.0, skipped=False)
    row = Trainer._summarise(SimpleNamespace(anchor=None), [update])  # type: ignore[arg-type]
    assert row["policy/loss_abs"] == row["kl/anchor"] == expected
    settings = Settings.model_validate({"model": {"path": "m"}, "data": {"path": "d"}})
    assert _mean_kl([update], settings) == expected


def test_a_kl_trigger_needs_a_loss_with_the_metric_kl() -> None:
    raw = {"model": {"path": "m"}, "data": {"path": "d"}, "objective": {"type": "mine:Loss"}}
    settings = Settings.model_validate(raw | {"anchor": {"type": "kl_trigger"}})
    stats = UpdateStats(2, 0.0, 0.0, {"kl": 0.5}, 1.0, skipped=False)
    empty = UpdateStats(0, 0.0, 0.0, {}, 1.0, skipped=False)
    assert _mean_kl([stats, empty], settings) == 0.5
    lacking = UpdateStats(2, 0.0, 0.0, {"mine": 0.5}, 1.0, skipped=False)
    with pytest.raises(UserError, match=r"^anchor.type kl_trigger: mine:Loss returns no metric 'kl'"):
        _mean_kl([stats, lacking], settings)
    every = Settings.model_validate(raw | {"anchor": {"type": "every"}})
    assert _mean_kl([lacking], every) == 0.0


def test_metrics_of_our_losses_have_the_keys_that_reports_read() -> None:
    x = torch.zeros(3)
    assert {metric_key(name) for name in ppo_loss(x, x, x).metrics} == {
        *("ratio/mean", "ratio/max", "kl/anchor", "kl/old", "policy/log_ratio_clamped"),
        *(f"policy/clip_frac_{bound}" for bound in ("high", "low", "c")),
    }
