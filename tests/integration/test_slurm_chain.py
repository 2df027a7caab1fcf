"""A chain of jobs takes as long as ``plan`` says: real Slurm, launcher and loop, rollouts of a given time.

Why: days and GPU-hours are what a user decides by, and what a job loses at its end (start, warning, requeue)
is a part of them. Stand-in times: the reward answers slowly, so that a rollout takes ``ROLLOUT`` seconds and
its groups finish one after the other; jobs have ``MINUTES``. Two hours of steps, at a thirteenth of that.
Not covered: the times of a step on a GPU.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

import pytest

from rpg_megatron.commands.plan.run_cost import Job as PlannedJob
from rpg_megatron.commands.plan.run_cost import run_cost
from rpg_megatron.commands.plan.step_time import Phase, StepTime
from tests.support.runs import QUICKSTART
from tests.support.same_runs import read_rows
from tests.support.slurm import Job, Slurm, missing, start_slurm

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(bool(missing()), reason=f"no Slurm can be started here: {missing()}"),
    pytest.mark.timeout(2700),
]

GROUPS, SAMPLES, ROLLOUT, STEPS = 20, 4, 20.0, 26
MINUTES, WARNING = 6, 60
REWARD = f"""
import time
def reward(response, answer):
    time.sleep({ROLLOUT / GROUPS / SAMPLES})
    return float(len(response) % 3)
"""


@pytest.fixture
def cluster() -> Iterator[Slurm]:
    yield from start_slurm(1)


def test_a_chain_takes_what_plan_says(cluster: Slurm, tmp_path: Path) -> None:
    (tmp_path / "slow_reward.py").write_text(REWARD)
    words = [
        f"training.steps={STEPS}",
        "training.minibatches=2",
        f"rollout.prompts_per_step={GROUPS}",
        f"rollout.samples_per_prompt={SAMPLES}",
        "reward={type: 'slow_reward:reward', workers: 1, concurrency: 1}",
        "parallel.tensor=1",
        "engine.max_sequences=128",
        "evaluation=null",
        "export.enabled=false",
    ]
    options = (f"--time={MINUTES}", f"--signal=USR1@{WARNING}")
    job = Job(
        cluster,
        tmp_path,
        "train_single_node",
        str(QUICKSTART),
        *words,
        options=options,
        PYTHONPATH=str(tmp_path),
    )
    job.wait_for("starting (takes")
    began = time.time()
    job.wait_for("step 1/")
    facts = job.wait_for_end(2400)
    took = time.time() - began
    assert facts["JobState"] == "COMPLETED", job.logs()
    rows = read_rows(job.run)[1:]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))

    def typical(*names: str) -> float:
        return fmean(sum(row[f"time/{name}"] for name in names) for row in rows)

    step, log_probs = typical("step"), typical("logprobs")
    rollout = typical("collect")
    first = seconds_to_start(job, rows[0]["time/step"])
    rest = Phase("other", step - rollout - log_probs, "")
    phases = Phase("rollout", rollout, ""), Phase("log-probs", log_probs, ""), rest
    planned = StepTime("by turns", phases, 1.0, under_way=ROLLOUT / GROUPS)
    job = PlannedJob(60 * MINUTES, warning=WARNING, start=first, save=1)
    cost = run_cost(planned, STEPS, job, every=50, gpus=1)
    assert cost is not None
    print(
        f"\n{STEPS} steps of {step:.1f} s (rollout {rollout:.1f}, log-probs {log_probs:.2f}), start "
        f"{first:.0f} s: plan {cost.seconds:.0f} s in {cost.jobs} jobs, took {took:.0f} s in "
        f"{1 + int(facts['Restarts'])} jobs ({took / cost.seconds - 1:+.1%})"
    )
    assert rollout == pytest.approx(ROLLOUT, rel=0.2)
    assert took == pytest.approx(cost.seconds, rel=0.15)


def seconds_to_start(job: PlannedJob, step: float) -> float:
    """Mean seconds from a launcher's start to the begin of its first step. step: seconds of step 1."""
    log = (job.run / "logs" / "launcher.log").read_text()
    times = [
        time.mktime(time.strptime(line[:19], "%Y-%m-%d %H:%M:%S"))
        for line in log.splitlines()
        if "starting (takes" in line or "step 1/" in line
    ]
    engines = [float(seconds) for seconds in re.findall(r"engine 0 is up after (\d+) s", log)]
    return times[1] - times[0] - step + fmean(engines) - engines[0]
