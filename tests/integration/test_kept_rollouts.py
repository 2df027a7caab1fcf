"""A run that is stopped at 80% of a rollout samples only the rest again, and ends as if it were not stopped.

Why: a rollout takes most of a step of an hour, and the end of a job comes in the middle of one. Real engine,
ranks and sampler by the command line. The reward holds the moment: it answers for 16 of a step's 20 prompts
and waits for a file before the others. It notes what it grades, so what was sampled again shows.
Not covered: nodes (test_slurm_scripts.py), which groups may be used (tests/unit/test_kept_groups.py).
"""

from __future__ import annotations

import os
import shutil
import signal
from collections import Counter
from pathlib import Path

import pytest

from rpg_megatron.data.rollout_files import read_rollouts, rollouts_file
from tests.support.ahead_runs import compare_ahead
from tests.support.commands import Command
from tests.support.held_reward import graded as all_graded
from tests.support.held_reward import hold_rewards
from tests.support.runs import QUICKSTART
from tests.support.same_runs import read_rows
from tests.support.slurm import Slurm

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]

PROMPTS, GRADED, SAMPLES = 20, 16, 4


def write_task(folder: Path, first: int) -> list[str]:
    """Settings of a run in which the last problems of the step that begins at ``first`` wait."""
    return [
        *hold_rewards(folder, range(first + GRADED, first + PROMPTS)),
        f"rollout.prompts_per_step={PROMPTS}",
        f"rollout.samples_per_prompt={SAMPLES}",
        "training.minibatches=2",
        "training.steps=3",
        "parallel.tensor=1",
        "engine.max_sequences=128",
        "evaluation=null",
        "export.enabled=false",
        "reward.workers=24",
        "reward.concurrency=24",
    ]


def graded(folder: Path) -> Counter[int]:
    """How often each problem was graded in the run; the check before it grades the first one once."""
    return all_graded(folder) - Counter({0: 1})


def train(folder: Path, monkeypatch: pytest.MonkeyPatch, *settings: str) -> Command:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]))
    return Command(folder, "train", str(QUICKSTART), f"runs={folder / 'runs'}", *settings)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_run_stopped_in_a_rollout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int, number: signal.Signals
) -> None:
    words = write_task(tmp_path, first=PROMPTS)  # the reward holds the last fifth of step 2
    words.append(f"rollout.workers={workers}")
    run = tmp_path / "runs" / "quickstart-001"
    first = train(tmp_path, monkeypatch, *words)
    expected = Counter(dict.fromkeys(range(PROMPTS + GRADED), SAMPLES))
    Slurm.wait(lambda: first.process.poll() is not None or graded(tmp_path) >= expected, 600)
    before = graded(tmp_path)
    targets = [first.process.pid] if number == signal.SIGTERM else first.processes()
    for pid in targets:  # SIGUSR1: as Slurm does, to all processes
        os.kill(pid, number)
    code, err = first.finish()
    assert code == 75, err
    first.assert_nothing_left()
    assert f"kept {GRADED} groups" in first.out.read_text()
    (tmp_path / "graded").unlink()
    (tmp_path / "go").touch()
    second = train(tmp_path, monkeypatch, *words)
    code, err = second.finish()
    assert code == 0, err
    again = [problem for problem in graded(tmp_path) if problem < 2 * PROMPTS]
    assert set(again) == set(range(PROMPTS + GRADED, 2 * PROMPTS)), before
    assert not (run / "unfinished").exists()

    shutil.move(tmp_path / "runs", tmp_path / "stopped")
    third = train(tmp_path, monkeypatch, *words)
    assert third.finish()[0] == 0
    assert_same(tmp_path / "stopped" / run.name, run)


def assert_same(stopped: Path, straight: Path) -> None:
    rows, others = read_rows(stopped), read_rows(straight)
    assert [row["step"] for row in rows] == [row["step"] for row in others] == [0, 1, 2, 3]
    for row, other in zip(rows[1:], others[1:], strict=True):
        for key in ("policy/loss", "policy/grad_norm", "reward/mean", "reward/std", "response/length_mean"):
            assert row[key] == other[key], key
    for step in (1, 2, 3):
        columns = ("ticket", "sample", "reward", "text", "seed", "finish")
        here, there = (
            [
                (*(getattr(t, c) for c in columns), t.behaviour.tobytes(), t.old.tobytes())
                for t in read_rollouts(rollouts_file(run, step))
            ]
            for run in (stopped, straight)
        )
        assert here == there, step


def test_groups_that_were_sampled_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = write_task(tmp_path, first=2 * PROMPTS)
    words += ["rollout.ahead=1", "correction={type: truncate}", "rollout.workers=2"]
    run = tmp_path / "runs" / "quickstart-001"
    first = train(tmp_path, monkeypatch, *words)
    expected = Counter(dict.fromkeys(range(2 * PROMPTS + GRADED), SAMPLES))
    Slurm.wait(lambda: first.process.poll() is not None or graded(tmp_path) >= expected, 600)
    os.kill(first.process.pid, signal.SIGTERM)
    code, err = first.finish()
    assert code == 75, err
    first.assert_nothing_left()
    step = max(row["step"] for row in read_rows(run))
    (tmp_path / "graded").unlink()
    (tmp_path / "go").touch()
    code, err = train(tmp_path, monkeypatch, *words).finish()
    assert code == 0, err
    kept = set(range(PROMPTS * step, 2 * PROMPTS + GRADED))
    assert not set(graded(tmp_path)) & kept, (step, sorted(graded(tmp_path)))
    shutil.move(tmp_path / "runs", tmp_path / "stopped")
    assert train(tmp_path, monkeypatch, *words).finish()[0] == 0
    assert compare_ahead(tmp_path / "stopped" / run.name, run) == []
