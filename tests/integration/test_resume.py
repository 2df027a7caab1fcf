"""A run that is killed or told to leave goes on by the same command, and ends, bit for bit, as if left alone.

Why: whatever a checkpoint forgets (a moment, the place in the data, the anchor, a version) shows only as a
run that learns a little worse. Proved, with real engines and two trainer ranks by the command line in fp32,
for twelve steps: all processes are killed with SIGKILL at a random moment of step 7; the scheduler's warning
(SIGTERM, SIGUSR1) comes at random moments, to the launcher alone or to every process as ``scancel`` sends it,
and the run saves, leaves with code 75, and leaves no process and no shared memory. Weights after the last
step, rollouts and metrics rows equal those of a run that was left alone, and each row is there once. A step
of it is then trained again from its journal alone (``rpg-megatron replay``), bit for bit, and a journal or a
row that was changed is noticed. Not covered: GPUs, a change of layout (tests/distributed), several nodes.
"""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rpg_megatron.data.rollout_files import read_rollouts, write_rollouts
from rpg_megatron.system import process_groups
from tests.support.runs import STEPS, Run

pytestmark = pytest.mark.timeout(3600)  # a busy machine takes minutes to start an engine


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("resume")


@pytest.fixture(scope="module")
def runs(folder: Path) -> Iterator[list[Run]]:
    """Those that were started, the undisturbed one first; the end of the module ends them."""
    started = [Run(folder, "straight")]
    started[0].start()  # starting an engine takes longest: it does so beside the first test's
    yield started
    for run in started:
        if run.now is not None:
            process_groups.send(run.now.sessions if run.now.processes() else [], signal.SIGKILL)
            run.now.process.wait()


@pytest.fixture
def disturbed(folder: Path, runs: list[Run], request: pytest.FixtureRequest) -> Run:
    runs.append(Run(folder, f"run{len(runs)}"))
    return runs[-1]


@pytest.fixture
def straight(runs: list[Run]) -> Run:
    """The run that is left alone, at its end."""
    if not (runs[0].folder / "summary.json").exists() or runs[0].now.process.poll() is None:
        runs[0].finish()
    return runs[0]


def test_killed_once_and_warned_twice(
    runs: list[Run], disturbed: Run, request: pytest.FixtureRequest
) -> None:
    run = disturbed
    run.start()
    run.wait_in_step(random.randint(2, 4), most=2.0)
    run.warn(signal.SIGTERM, everyone=False)
    run.start().wait_for_output(f"continuing {run.folder} from step ", 60)
    run.wait_in_step(7)
    run.kill()
    run.start().wait_for_output(f"continuing {run.folder} from step ", 60)
    time.sleep(random.uniform(0, 10))
    run.warn(signal.SIGUSR1, everyone=True)  # while it starts
    run.start()
    run.finish()
    # Killed in step 7, early in which the save of step 6 may still be under way, or soon after it.
    assert any(f"continuing {run.folder} from step {step};" in run.told() for step in range(4, 9)), run.told()
    run.assert_like(request.getfixturevalue("straight"))


@pytest.mark.long
@pytest.mark.parametrize("time", [1, 2, 3])
def test_killed_in_step_7(disturbed: Run, straight: Run, time: int) -> None:
    disturbed.start()
    disturbed.wait_in_step(7)
    disturbed.kill()
    disturbed.start()
    disturbed.finish()
    disturbed.assert_like(straight)


@pytest.mark.long
def test_warned_ten_times(disturbed: Run, straight: Run) -> None:
    for number in range(10):
        disturbed.start()
        if number % 2 or len(disturbed.rows()) >= STEPS:  # while it starts; or else it might be at its end
            time.sleep(random.uniform(1.5, 20))
        else:
            disturbed.wait_in_step(len(disturbed.rows()) + 1)
        disturbed.warn((signal.SIGTERM, signal.SIGUSR1)[number // 2 % 2], everyone=number % 5 > 2)
    disturbed.start()
    disturbed.finish()
    disturbed.assert_like(straight)


def replay(run: Path, step: int, *arguments: str) -> tuple[int, str, str]:
    command = [sys.executable, "-m", "rpg_megatron.cli", "replay", str(run), f"--step={step}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    return done.returncode, done.stdout, done.stderr


def test_a_step_is_trained_again_from_its_journal(straight: Run) -> None:
    run = straight.folder
    code, out, err = replay(run, 2, "--json")
    assert code == 0, out + err
    report = json.loads(out)
    row = straight.rows()[2]
    assert report["exact"]
    assert [step["exact"] for step in report["steps"]] == [True, True]
    for key in ("policy/loss", "policy/grad_norm", "policy/entropy"):
        assert report["metrics"][key] == {"run": row[key], "replay": row[key]}
    assert report["max_difference"] == {"old log-probs": 0, "anchor log-probs": 0, "advantages": 0}

    # A reward that is not the one that was learnt from changes advantages, loss and gradient.
    file = run / "rollouts" / "step_000001.jsonl.zst"
    untouched = file.read_bytes()
    try:
        changed = read_rollouts(file)
        changed[0].reward += 1.0
        write_rollouts(file, changed)
        code, out, err = replay(run, 1, "parallel.tensor=1")
        assert code == 1, out + err
        assert "step 1: DIFFERS" in out
        assert "policy/loss: " in out
        file.write_bytes(untouched[: len(untouched) // 2])
        assert replay(run, 1)[0] == 2
        file.unlink()
        code, _, err = replay(run, 2)
        assert code == 2
        assert "the rollouts of step 1 are missing" in err
    finally:
        file.write_bytes(untouched)
    code, _, err = replay(run, 99)
    assert (code, err.count("\n")) == (2, 1)
    assert "it has steps 1 to 12" in err
    assert not list(run.parent.glob("*-replay-*"))
