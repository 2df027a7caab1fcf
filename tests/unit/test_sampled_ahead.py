"""The trainer's metrics of rollouts that were sampled ahead, on one rank.

The guard judges each engine by its own probes, whatever the others do; the correction is counted by the lag
of each token, at both levels, for the tokens that an update learns from. On several ranks, beside a step:
tests/distributed/test_probes.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from rpg_megatron.config import Settings, UserError
from rpg_megatron.config.objective import GuardSettings
from rpg_megatron.data.trajectory import NOT_SAMPLED, Trajectory
from rpg_megatron.objectives import rollout_correction
from rpg_megatron.training.mismatch import compare_probes, describe_mismatch, find_worst, out_of_bounds
from rpg_megatron.training.off_policy import correction_by_lag, off_policy_metrics
from tests.support.trajectories import make_trajectory

VERSION = 7


def trajectory(gap: list[float], versions: list[int], **fields: Any) -> Trajectory:
    old = np.linspace(-3, -0.1, len(gap)).astype(np.float32)
    fields |= {"behaviour": old - np.array(gap, np.float32), "versions": np.array(versions, np.int32)}
    return make_trajectory([5], len(gap), prompt_id=4, old=old, **fields)


def probe(engine: int, gap: float, tokens: int = 16, version: int = VERSION) -> Trajectory:
    return trajectory([gap] * tokens, [version] * tokens, group=engine)


@pytest.mark.parametrize("gap", [0.2, float("nan")])
def test_one_wrong_engine_of_many_is_named(gap: float) -> None:
    """In bfloat16, where only means are bounded, and the mean of all engines is small."""
    probes = [probe(engine, gap if engine == 5 else 1e-3) for engine in range(8) for _ in range(2)]
    row, engine = compare_probes(probes, VERSION, GuardSettings(), 8)
    assert engine == 5
    assert row["mismatch/logp_engine_mean"] == pytest.approx(gap, rel=1e-5, nan_ok=True)
    assert row["async/probe_tokens"] == 256
    row |= {"mismatch/logp_mean": 0.01, "mismatch/logp_max": 0.2}
    assert out_of_bounds(row, GuardSettings(), "bfloat16")
    worst = find_worst([trajectory([0.5], [VERSION])], VERSION)
    assert worst
    message = describe_mismatch(row, worst, GuardSettings(), "bfloat16", VERSION + 1, engine)
    assert "(bound 5e-02) nats, on probes of engine 5 mean" in message
    assert "probe of" not in message.partition("worst")[2]  # that token is the batch's


@pytest.mark.parametrize(
    ("gaps", "stops"),
    [
        ([1e-3, 0.02], True),
        ([1e-3, 0.02, 1e-3], True),
        ([0.02, 0.02, 0.025], False),
        ([1e-5, 8e-4, 1e-5], False),  # far below the bound
    ],
)
def test_an_engine_that_stands_out_is_named_far_below_the_bound(gaps: list[float], stops: bool) -> None:
    """In bfloat16 an engine that kept old weights may differ by less than the bound of 0.05."""
    row, engine = compare_probes(
        [probe(e, gap, 32) for e, gap in enumerate(gaps)], VERSION, GuardSettings(), len(gaps)
    )
    assert gaps[engine] == max(gaps)
    row |= {"mismatch/logp_mean": 0.01, "mismatch/logp_max": 0.2}
    assert out_of_bounds(row, GuardSettings(), "bfloat16") == stops
    worst = find_worst([trajectory([0.5], [VERSION])], VERSION)
    assert worst
    message = describe_mismatch(row, worst, GuardSettings(), "bfloat16", VERSION + 1, engine)
    assert ("on probes of engine 1 mean 2.00e-02 (20.0 times" in message) == stops


def test_a_few_tokens_of_an_engine_do_not_stop_a_run() -> None:
    row, _ = compare_probes([probe(0, 1e-3, 64), probe(1, 0.2, 3)], VERSION, GuardSettings(), 2)
    row |= {"mismatch/logp_mean": 0.01, "mismatch/logp_max": 0.2}
    assert not out_of_bounds(row, GuardSettings(), "bfloat16")


@pytest.mark.parametrize("probes", [[], [probe(0, 0.0, version=VERSION - 1)]])
@pytest.mark.parametrize("mode", ["stop", "warn"])
def test_a_guard_without_probes_is_an_error(probes: list[Trajectory], mode: Any) -> None:
    with pytest.raises(UserError, match=r"step 8: no engine answered a probe.* version 7.*logs/engine_.*off"):
        compare_probes(probes, VERSION, GuardSettings(mismatch=mode), 2)
    assert compare_probes(probes, VERSION, GuardSettings(mismatch="off"), 2)[0]["async/probe_tokens"] == 0


def lag_settings(**sections: Any) -> Settings:
    raw = {"model": {"path": "m"}, "data": {"path": "d"}, "rollout": {"ahead": 2}}
    return Settings.model_validate(raw | sections)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("kind", ["truncate", "icepop"])
def test_the_correction_is_counted_by_lag(level: Any, kind: Any) -> None:
    draw = np.random.default_rng(0)
    gaps = [draw.normal(0, 0.4, n).tolist() for n in (1, 7, 5, 20, 9)]
    batch = [trajectory(gap, np.sort(draw.integers(5, 8, len(gap))).tolist()) for gap in gaps]
    row = correction_by_lag(batch, VERSION, lag_settings(correction={"type": kind, "level": level}))
    metrics = rollout_correction(
        torch.from_numpy(np.concatenate([t.old for t in batch])),
        torch.from_numpy(np.concatenate([t.behaviour for t in batch])),
        torch.repeat_interleave(torch.tensor([len(gap) for gap in gaps])),
        kind=kind,
        level=level,
    ).metrics
    versions = np.concatenate([t.versions for t in batch])
    assert len(row) == 6
    for lag in range(3):
        for key, column in (("ratio_mean", "correction_ratio"), ("hit_frac", "correction_hit")):
            expected = metrics[column].double().numpy()[versions == VERSION - lag].mean()
            assert row[f"correction/lag_{lag}/{key}"] == pytest.approx(expected, rel=1e-12)


def test_off_policy_metrics_are_their_formulas() -> None:
    draw = np.random.default_rng(0)
    gaps = [draw.normal(0, 0.3, n) for n in (1, 7, 5, 20, 9)]
    batch = [trajectory(gap.tolist(), [VERSION] * len(gap)) for gap in gaps]
    gaps = [t.old.astype(np.float64) - t.behaviour for t in batch]
    cut = replace(trajectory([3.0], [VERSION]), finish="length")
    correction = {"type": "geometric", "low": 0.9, "high": 1.1}
    masked = {"mask_truncated": True}
    row = off_policy_metrics([*batch, cut], lag_settings(correction=correction, training=masked))
    log_r, sums = np.concatenate(gaps), np.array([g.sum() for g in gaps])
    r, s = np.exp(log_r), np.exp(sums)
    means = np.exp([g.mean() for g in gaps])
    outside = ((means < 0.9) | (means > 1.1)).mean()
    assert 0 < outside < 1
    assert row == pytest.approx(
        {
            "off_policy/kl_k1": -log_r.mean(),
            "off_policy/kl_k3": (r - 1 - log_r).mean(),
            "off_policy/ess_token": r.sum() ** 2 / (len(r) * (r**2).sum()),
            "off_policy/ess_sequence": s.sum() ** 2 / (len(s) * (s**2).sum()),
            "correction/sequences_hit_frac": outside,
        },
        rel=1e-9,
    )
    on_policy = off_policy_metrics(
        [trajectory([0.0] * 9, [VERSION] * 9)], lag_settings(guards={"uncorrected": True})
    )
    assert list(on_policy.values()) == [0.0, 0.0, 1.0, 1.0]
    assert off_policy_metrics([], lag_settings(correction=correction)) == {}


def test_tokens_of_others_are_in_no_weight() -> None:
    draw = np.random.default_rng(0)
    batch = [trajectory(draw.normal(0, 0.3, n).tolist(), draw.integers(5, 8, n).tolist()) for n in (4, 1, 9)]
    longer = []
    for t, places in zip(batch, ([0, 2, 2], [0, 1], [4, 9]), strict=True):
        parts = {"response": 3, "behaviour": 0, "versions": NOT_SAMPLED, "old": np.nan, "mask": False}
        parts = {name: np.insert(getattr(t, name), places, value) for name, value in parts.items()}
        longer.append(replace(t, **parts))
    longer.append(replace(batch[0], mask=np.zeros(4, bool)))
    for correction in (
        {"type": "geometric", "low": 0.9, "high": 1.1},
        {"type": "icepop", "level": "sequence"},
    ):
        settings = lag_settings(correction=correction)
        expected = off_policy_metrics(batch, settings)
        assert expected["off_policy/kl_k3"] > 0
        assert off_policy_metrics(longer, settings) == expected
        assert correction_by_lag(longer, VERSION, settings) == correction_by_lag(batch, VERSION, settings)


def test_only_lags_and_tokens_that_are_learnt_count() -> None:
    batch = [trajectory([0.0, 1.0], [5, 5]), trajectory([0.5], [7])]
    batch[1] = replace(batch[1], finish="length")
    settings = lag_settings(correction={"type": "truncate"}, training={"mask_truncated": True})
    row = correction_by_lag(batch, VERSION, settings)
    assert row == {
        "correction/lag_2/ratio_mean": pytest.approx((1 + np.e) / 2),
        "correction/lag_2/hit_frac": 0.5,
    }
    assert correction_by_lag([], VERSION, settings) == {}
