"""A run that is disturbed resumes, and ends bit-identical to an undisturbed one.

Why: whatever a checkpoint or a restarted engine forgets (a moment, the place in the data, the anchor, a
version, a sample) shows only as a run that learns a little worse. Proved, with a real engine and two trainer
ranks by the command line in fp32, for ten steps of one run: its engine is killed in a rollout and in a sync,
comes back and is synced; a damaged copy of the weights is published again; the death of a rank in a sync ends
the run with one message; all processes are killed with SIGKILL at a random moment of step 8; the scheduler's
warning comes at a random moment of a start (long: also of a step; SIGTERM and SIGUSR1, to the launcher alone
or to every process as ``scancel`` sends it), and the run saves, leaves with code 75, and leaves no process
and no shared memory. The same command resumes each time. Weights after the last step,
rollouts and metrics rows equal those of an undisturbed run, and each row is there once.

The undisturbed run leaves its folder as documented, engine and trainer agree after every sync,
and transformers loads its export. A step of it is then trained again from its journal alone (``rpg-megatron
replay``), bit for bit, and a journal or a row that was changed is noticed. Not covered: GPUs, a change of
layout (tests/distributed), several nodes.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from rpg_megatron.data.rollout_files import read_rollouts, write_rollouts
from rpg_megatron.system import process_groups
from tests.support.forking import fresh_starts
from tests.support.runs import QUICKSTART, STEPS, Run, cores_of, flip, kill, signal_all

# A busy machine takes minutes to start an engine.
pytestmark = [pytest.mark.timeout(3600), pytest.mark.usefixtures("forked_starts")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("resume")


@pytest.fixture(scope="module")
def runs(folder: Path) -> Iterator[list[Run]]:
    """The runs that were started, the undisturbed one first; the end of the module ends them."""
    started = [Run(folder, "straight")]
    with fresh_starts():  # the others, which are forked, are compared with it
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
    """The undisturbed run, after its end."""
    if not (runs[0].folder / "summary.json").exists() or runs[0].now.process.poll() is None:
        runs[0].finish()
    return runs[0]


def test_a_run_that_meets_with_everything(
    runs: list[Run], disturbed: Run, request: pytest.FixtureRequest
) -> None:
    run = disturbed
    step = lose_engine_twice_and_a_rank(run)
    run.start().wait_for_output(f"resuming {run.folder} from step {step + 1};", 60)
    run.wait_in_step(8)
    run.kill()
    run.start().wait_for_output(f"resuming {run.folder} from step ", 60)
    time.sleep(random.uniform(0, 1))
    run.warn(signal.SIGUSR1, everyone=True)  # while it starts: forked, in little more than a second
    run.start()
    run.finish()
    # Killed in step 8, early in which the save of step 6 may still be under way, or soon after it.
    assert any(f"resuming {run.folder} from step {step};" in run.output() for step in range(5, 10)), (
        run.output()
    )
    run.assert_like(request.getfixturevalue("straight"), lost_sync=step)
    rows = run.rows()
    # The second is lost in the sync that ends the step, and may be up again before the step has its row.
    assert [row["engine/restarts"] for row in rows[step - 1 : step + 3]] in ([0, 1, 1, 0], [0, 2, 0, 0])
    assert rows[step]["engine/requests_resent"] > 0
    assert all(row["mismatch/logp_max"] < 1e-3 for row in rows[1:])


def lose_engine_twice_and_a_rank(run: Run) -> int:
    """Returns the step in which the engine is lost first; the run ends two steps later."""
    command = run.start()
    command.wait_for_engine()
    command.wait_for_first_rollout()  # or the evaluation before it: now the engine is complete
    engine = command.engine()
    step = command.hold_rollout(engine)
    kill(engine)
    command.wait_for_restart(1)
    engine = command.wait_for_engine()
    command.wait(lambda: bool(cores_of(engine)))
    stopped = [engine, *cores_of(engine)]  # the search may take as long as the update
    command.wait_for_rollouts(step)
    signal_all(stopped, signal.SIGSTOP)
    command.wait_for_sync_of(0, step)
    kill(engine)
    command.wait_for_restart(2)
    # With the distributed optimizer shared memory holds a copy, so a second publication repairs it.
    command.wait_for_sync(step + 1)
    flip(command.bridge / "shard-00001.bin")
    os.kill(command.sampler(), signal.SIGCONT)
    command.wait_for_sync(step + 3)
    log = (command.run / "logs" / "rank_0.log").read_text()
    assert f"publishing again: engine 0: version {step + 1} refused" in log
    assert "damaged: shard-00001.bin of trainer rank 1" in log
    command.lose_rank_in_a_sync()
    return step


def test_the_run_that_was_left_alone(straight: Run) -> None:
    assert "held-out accuracy" in straight.output()
    rows = straight.rows()
    assert 0.05 < rows[0]["eval/heldout/avg@2"] < 0.7  # 16 samples, each right with about a third
    assert all(row["mismatch/logp_max"] <= 1e-3 for row in rows[1:])
    assert all(row["sync/bytes"] > 0 for row in rows[1:])
    for part in (
        "config.yaml",
        "summary.json",
        f"rollouts/step_{STEPS:06d}.parquet",
        "logs",
        "tensorboard",
    ):
        assert (straight.folder / part).exists(), part
    export = AutoModelForCausalLM.from_pretrained(straight.folder / "hf" / f"step_{STEPS:06d}", dtype="auto")
    before = AutoModelForCausalLM.from_pretrained(QUICKSTART.parent / "quickstart" / "model").state_dict()
    assert export.state_dict().keys() == before.keys()
    assert any((before[k] != v).any() for k, v in export.state_dict().items()), "nothing was learnt"


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
        before = len(disturbed.rows())
        if number % 2 or before >= STEPS:  # while it starts; or else it might be at its end
            end = time.monotonic() + random.uniform(1.5, 20)
            while time.monotonic() < end and len(disturbed.rows()) == before:
                time.sleep(0.02)
        else:
            disturbed.wait_in_step(before + 1)
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

    # A reward that differs from the one in training changes advantages, loss and gradient.
    file = run / "rollouts" / "step_000001.parquet"
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
    assert f"it has steps 1 to {STEPS}" in err
    assert not list(run.parent.glob("*-replay-*"))
