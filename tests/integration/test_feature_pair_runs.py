"""Small runs in which every pair of features meets that is not refused (tests/support/feature_pairs.py).

Why: what each feature's own tests prove may not hold beside another feature. Real engine, ranks and sampler
by the command line, on the quickstart's models. Each run is stopped in the rollout of its second step, with
some of its groups graded, and goes on; the reward holds the moment. It ends; in float32 the trainer's
log-probs are the engine's, token for token, in every step, whatever the features; all its numbers are finite;
nothing is left.
Long: all runs. Default: one that covers most features. Not covered: GPUs.
"""

from __future__ import annotations

import math
import os
import signal
from collections import Counter
from pathlib import Path

import pytest

from rpg_megatron.config import Settings
from tests.support.commands import Command
from tests.support.feature_pairs import (
    COVERING,
    PROMPTS,
    RL,
    RUNS,
    SAMPLES,
    SFT,
    STEPS,
    TUNED,
    WARM_START,
    settings_of,
)
from tests.support.held_reward import graded, hold_rewards
from tests.support.runs import QUICKSTART
from tests.support.same_runs import read_rows
from tests.support.slurm import Slurm

pytestmark = [pytest.mark.usefixtures("forked_starts"), pytest.mark.timeout(1200)]

HELD = 3
"""Groups of the stopped rollout whose rewards wait."""


def held_task(folder: Path, settings: Settings) -> list[str]:
    """The last groups of the second step, or of the one sampled ahead of it, wait for their rewards."""
    end = PROMPTS * (2 + settings.rollout.ahead)
    return [*hold_rewards(folder, range(end - HELD, end)), "reward.workers=16", "reward.concurrency=16"]


def stop(command: Command) -> str:
    if command.process.poll() is None:
        os.kill(command.process.pid, signal.SIGTERM)
    code, err = command.finish()
    assert code == 75, (command.out.read_text(), err)
    command.assert_nothing_left()
    return command.out.read_text()


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == COVERING else pytest.mark.long) for name in RUNS]
)
def test_features_meet(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    settings = settings_of(name)
    words = [*RL, *RUNS[name], f"runs={tmp_path / 'runs'}", *held_task(tmp_path, settings)]
    last = PROMPTS * (2 + settings.rollout.ahead)
    expected = Counter(dict.fromkeys(range(last - HELD), SAMPLES))
    first = Command(tmp_path, "train", str(QUICKSTART), *words)
    Slurm.wait(lambda: first.process.poll() is not None or graded(tmp_path) >= expected, 600)
    assert "kept" in stop(first), first.out.read_text()
    (tmp_path / "go").touch()
    second = Command(tmp_path, "train", str(QUICKSTART), *words)
    code, err = second.finish(900)
    assert code == 0, (second.out.read_text(), err)
    second.assert_nothing_left()
    check(tmp_path / "runs" / "quickstart-001", settings, STEPS)


@pytest.mark.long
@pytest.mark.parametrize("name", TUNED)
def test_features_meet_in_fine_tuning(name: str, tmp_path: Path) -> None:
    words = [*SFT, *TUNED[name], f"runs={tmp_path / 'runs'}"]
    first = Command(tmp_path, "sft", str(WARM_START), *words)
    run = tmp_path / "runs" / "warm-start-001"
    Slurm.wait(
        lambda: first.process.poll() is not None or (run / "checkpoints" / "step_000001").exists(), 600
    )
    stop(first)
    second = Command(tmp_path, "sft", str(WARM_START), *words)
    code, err = second.finish(900)
    assert code == 0, (second.out.read_text(), err)
    second.assert_nothing_left()
    check(run, settings_of(name), len(read_rows(run)) - 1)


def check(run: Path, settings: Settings, steps: int) -> None:
    """The rows of the run's steps."""
    rows = read_rows(run)
    assert [row["step"] for row in rows] == list(range(steps + 1))
    numbers = {key: value for row in rows for key, value in row.items() if isinstance(value, float)}
    assert all(map(math.isfinite, numbers.values()))
    for row in rows[1:]:
        if settings.sft is None and settings.precision.dtype == "float32":
            assert row["mismatch/logp_max"] < 1e-4, row
        assert row["policy/grad_norm"] > 0
