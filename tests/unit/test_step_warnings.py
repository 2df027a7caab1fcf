"""A step that trains nothing gives a warning at once, which is not repeated while the state lasts.

Why: such a run looks healthy on the terminal for hours. Not covered: the report's checks of the same
(test_report.py), the metrics themselves (test_sampler.py, test_skipped_updates.py).
"""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rpg_megatron.config import load_settings
from rpg_megatron.rewards.failures import FailureCount
from rpg_megatron.training.run import RankRun
from rpg_megatron.training.step_warnings import StepWarnings

GOOD = {"response/truncated_frac": 0.9, "groups/equal_rewards": 0.9, "reward/std": 0.1, "reward/mean": 0.5}
CUT = GOOD | {"response/truncated_frac": 1.0}
IN_GROUPS = GOOD | {"groups/equal_rewards": 1.0}
BOTH = CUT | {"groups/equal_rewards": 1.0}
ALL_EQUAL = IN_GROUPS | {"reward/std": 0.0}


def test_truncated_responses_and_equal_rewards_are_reported(config_file: Path) -> None:
    messages: list[str] = []
    warnings = StepWarnings(load_settings(config_file), messages.append)
    for step, row in enumerate((GOOD, CUT, BOTH, CUT, GOOD, IN_GROUPS, ALL_EQUAL, GOOD, ALL_EQUAL)):
        warnings.check_batch(step, row)
    assert [text.partition(" (")[0] for text in messages] == [
        "step 1: every response was cut off at 16 tokens",
        "step 2: all rewards in each group were equal",
        "step 5: all rewards in each group were equal",
        "step 8: all rewards of the step were equal",
    ]
    messages.clear()
    across = StepWarnings(load_settings(config_file, ["advantage.type=batch_mean"]), messages.append)
    across.check_batch(1, IN_GROUPS)
    assert messages == []  # groups are compared with each other
    across.check_batch(2, ALL_EQUAL)
    assert len(messages) == 1
    messages.clear()
    for reward, told in ((0, 0), (0.5, 1)):  # distillation trains on rewards only if it is told to
        overrides = ["teacher={path: t}", f"objective={{type: distil, reward: {reward}}}"]
        distilled = StepWarnings(load_settings(config_file, overrides), messages.append)
        distilled.check_batch(1, ALL_EQUAL)
        assert len(messages) == told


def test_what_is_not_finite_is_told_at_each_step(config_file: Path) -> None:
    messages: list[str] = []
    warnings = StepWarnings(load_settings(config_file), messages.append)
    warnings.check_update(1, {"policy/skipped_updates": 0.0, "policy/loss": 0.1})
    for step in (2, 3):
        warnings.check_update(step, {"policy/skipped_updates": 2.0, "policy/loss": 0.1})
    odd = {f"a/{i}": math.nan for i in range(4)} | {"policy/loss": math.inf, "policy/grad_norm": 1.0}
    warnings.check_update(4, odd)
    assert [text[:60] for text in messages] == [
        f"step {step}: the gradient was not finite in 2 of its updates: skipped"[:60] for step in (2, 3)
    ] + ["step 4: NaN or infinite: a/0, a/1, a/2 and 2 more"]
    assert "5 in a row end the run" in messages[0]


def test_engines_that_are_not_compared(config_file: Path) -> None:
    two = ["engine.replicas=2", "rollout.ahead=1", "correction.type=truncate"]
    messages: list[str] = []
    warnings = StepWarnings(load_settings(config_file, two), messages.append)
    warnings.check_probes(1, {"mismatch/logp_engine_ratio": 1.0})
    assert messages == []
    for step in (2, 3):
        warnings.check_probes(step, {"async/probe_tokens": 40.0})
    assert len(messages) == 1
    assert messages[0].startswith("step 2: the engines' log-probs were not compared with each other")
    assert "takes 32 probe tokens of each, and all had 40" in messages[0]
    for overrides in (two[1:], [*two, "guards.mismatch=off"]):
        StepWarnings(load_settings(config_file, overrides), messages.append).check_probes(1, {})
    assert len(messages) == 1


def test_a_run_tells_in_the_step(config_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """RankRun's methods, with what they call replaced; probes: tests/distributed/test_probes."""
    monkeypatch.setattr("rpg_megatron.training.run.broadcast_object", lambda value, kind: value)
    messages: list[str] = []
    settings = load_settings(config_file)
    run: Any = object.__new__(RankRun)
    run.settings, run._warnings = settings, StepWarnings(settings, messages.append)
    batch: Any = SimpleNamespace(metrics=dict(CUT), failures=FailureCount(), index=None, sampler={})
    run.check_rewards(1, batch)
    assert len(messages) == 1
    assert messages[0].startswith("step 1: every response was cut off")
    run.weight_sync, run._stop = SimpleNamespace(check_stop=list), SimpleNamespace(listen=list)
    update = {"policy/skipped_updates": 1.0}
    run.trainer = SimpleNamespace(update=lambda step, batch, on_update: batch.metrics.update(update))
    run.update(1, batch)
    assert len(messages) == 2
    assert messages[1].startswith("step 1: the gradient was not finite in 1 of its updates: skipped; ")
