"""The cost of a run equals that of jobs which are walked second by second.

Why: days and GPU-hours decide whether a run is queued at all, and the formula averages over where in a step
a job is warned. The walk here knows no averages: it has a clock, a trainer and engines. Not covered: whether
the jobs of a cluster behave so; nothing was timed.
"""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

from rpg_megatron import cli
from rpg_megatron.commands import train
from rpg_megatron.commands.plan.gpus import assume
from rpg_megatron.commands.plan.plan import Plan, make_plan
from rpg_megatron.commands.plan.run_cost import Job, RunCost, cost_lines, estimate, run_cost
from rpg_megatron.commands.plan.step_time import Phase, StepTime, estimate_step
from rpg_megatron.config import load_settings
from rpg_megatron.launcher.nodes import Nodes

EXAMPLES = Path(__file__).parents[2] / "examples"
ASSUMED = assume("h100-80")
JOB = Job(4 * 3600)


class Parts(NamedTuple):
    """Seconds of a step, in turn; under_way: of those of the rollout, what a warning in it costs."""

    rollout: float
    log_probs: float
    rest: float
    under_way: float = 0.0

    def step(self) -> StepTime:
        names = ("rollout", self.rollout), ("log-probs", self.log_probs), ("other", self.rest)
        phases = tuple(Phase(name, seconds, "") for name, seconds in names)
        return StepTime("by turns", phases, 1.0, self.under_way)


def walk(
    parts: Parts, job: Job, steps: int, every: int, seed: int, spread: float, overlap: bool
) -> tuple[float, int]:
    """Seconds and jobs of a run, one second at a time.

    Each phase takes up to ``spread`` more or less than its mean. overlap: the next batch is sampled while one
    is trained.
    """
    rng = random.Random(seed)
    clock, jobs, done, sampled = 0, 0, 0, 0
    while done < steps:
        jobs += 1
        clock += int(job.requeue) if jobs > 1 else 0
        warned = clock + int(job.walltime - job.warning)
        clock += int(job.start)
        while done < steps:
            rollout, scored, rest = (
                seconds * rng.uniform(1 - spread, 1 + spread)
                for seconds in (parts.rollout, parts.log_probs, parts.rest)
            )
            while sampled < rollout and clock < warned:
                clock, sampled = clock + 1, sampled + 1
            if clock >= warned:
                sampled = max(0, sampled - int(parts.under_way))
                break
            sampled = 0  # this batch is now with the trainer, in memory only
            while scored > 0 and clock < warned:
                clock, scored, sampled = clock + 1, scored - 1, min(int(parts.rollout), sampled + overlap)
            if clock >= warned:
                sampled = max(0, sampled - int(parts.under_way))
                break
            for _ in range(round(rest)):  # to its end, also after the warning
                clock += 1
                sampled = min(int(parts.rollout), sampled + (overlap and clock < warned))
            done += 1
            if done % every == 0:
                clock += int(job.save)
            if clock >= warned:
                sampled = max(0, sampled - int(parts.under_way))
                break
        clock += int(job.save) if done < steps else 0
    return clock, jobs


def check_against_walks(
    cost: RunCost | None,
    parts: Parts,
    job: Job,
    *,
    spread: float,
    overlap: bool,
    within: float,
) -> None:
    assert cost is not None
    walks = [walk(parts, job, 120, 20, seed, spread, overlap) for seed in range(8)]
    seconds, jobs = (sum(values) / len(walks) for values in zip(*walks, strict=True))
    assert cost.seconds == pytest.approx(seconds, rel=within)
    assert cost.jobs == pytest.approx(jobs, rel=within, abs=1)
    assert cost.gpu_hours == pytest.approx(8 * (seconds - (jobs - 1) * job.requeue) / 3600, rel=within)


@pytest.mark.parametrize(
    ("parts", "changes", "within"),
    [
        ((2300, 170, 770, 150), {}, 0.02),
        ((1200, 90, 390, 1200), {}, 0.02),
        ((300, 40, 60, 30), {"walltime": 3600}, 0.02),
        ((500, 900, 300, 20), {"requeue": 900.0, "save": 200.0}, 0.02),
        ((4000, 400, 1500, 300), {"walltime": 43200, "start": 1200.0, "warning": 60.0}, 0.02),
        ((5000, 500, 800, 200), {"walltime": 3600}, 0.15),  # longer than a job, which keeps finished groups
        ((300, 50, 100, 50), {"walltime": 86400}, 0.02),  # in one job
    ],
)
def test_the_cost_is_that_of_a_walk_through_the_jobs(
    parts: tuple[int, ...], changes: dict[str, float], within: float
) -> None:
    job, step = replace(JOB, **changes), Parts(*parts)
    cost = run_cost(step.step(), 120, job, every=20, gpus=8)
    check_against_walks(cost, step, job, spread=0.5, overlap=False, within=within)


def overlapped(rollout: float, log_probs: float, update: float, under_way: float) -> StepTime:
    phases = Phase("rollout", rollout, ""), Phase("log-probs", log_probs, ""), Phase("update", update, "")
    return StepTime("overlapped", phases, 1.0, under_way, ahead=1)


@pytest.mark.parametrize(
    "seconds", [(2260, 170, 760, 150), (617, 100, 370, 100), (700, 150, 750, 100), (785, 100, 657, 100)]
)
def test_a_job_starts_without_a_batch_to_train_on(seconds: tuple[int, ...]) -> None:
    """Of a run that samples ahead. Phases vary little: plan's step does not count waits for slow batches."""
    cost = run_cost(overlapped(*seconds), 120, JOB, every=20, gpus=8)
    check_against_walks(cost, Parts(*seconds), JOB, spread=0.05, overlap=True, within=0.02)


def test_what_never_ends_has_no_cost() -> None:
    step = Parts(3000, 600, 400).step()
    assert run_cost(step, 10, replace(JOB, walltime=900), every=5, gpus=8) is None
    assert run_cost(step, 10, JOB, every=None, gpus=8) is None  # a second job would start over
    one = run_cost(step, 3, JOB, every=None, gpus=8)
    assert (one.jobs, one.seconds) == (1, 300 + 3 * 4000)


def run_of(file: str, *overrides: str) -> tuple[Plan, StepTime]:
    plan = make_plan(load_settings(EXAMPLES / file, list(overrides)))
    return plan, estimate_step(plan, ASSUMED)


SEPARATE = ("engine={replicas: 4, max_sequences: 128}", "parallel={data: 4}", "bridge.transport=cuda_ipc")
QWEN3_4B = "qwen3_4b_dapo_math_8k.yaml"


def test_an_update_longer_than_the_warning_is_told() -> None:
    plan, step = run_of(QWEN3_4B, *SEPARATE)
    _, line = cost_lines(plan, step, JOB)
    seconds = step.step - step.generation - step.seconds("log-probs") + JOB.save
    assert step.placement == "by turns"
    needed = int(line.rsplit("=", 1)[1])
    assert needed - 60 < seconds <= needed
    assert f"--signal=USR1@{needed + 60}," in line
    assert len([*cost_lines(plan, step, replace(JOB, warning=needed))]) == 1


def command(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit):
        cli.main(["plan", *arguments])
    return " ".join(capsys.readouterr().out.split())


def test_the_command_prints_the_cost(capsys: pytest.CaptureFixture[str]) -> None:
    file, assumed = str(EXAMPLES / QWEN3_4B), ("--assume", "walltime=12")
    data = json.loads(command(capsys, file, *SEPARATE, *assumed, "--json"))["run_cost"]
    assert data["placement"] == "by turns"
    assert data["steps"] == 400
    assert data["days"] == pytest.approx(data["seconds"] / 86400)
    out = command(capsys, file, *SEPARATE, *assumed)
    assert (
        f"of {data['jobs']} jobs of 12 h: {data['days']:.1f} days, {data['gpu_hours']:,.0f} GPU-hours" in out
    )
    assert "evaluations, waiting in the queue" in out
    for without in ("qwen3_8b_sft.yaml", "quickstart.yaml"):
        assert json.loads(command(capsys, str(EXAMPLES / without), "--json"))["run_cost"] is None
    never = command(capsys, file, *SEPARATE, "--assume", "walltime=0.2")
    assert "the run never ends: a job of 0.2 h is too short for a step" in never
    assert "saves nothing: set checkpoint.every" in command(capsys, file, *SEPARATE, "checkpoint.every=null")


def test_the_lines_in_the_documentation_are_plans() -> None:
    plan, step = run_of(QWEN3_4B, "engine.colocated=false", "parallel.data=4", "engine.replicas=4")
    page = " ".join((EXAMPLES.parent / "docs" / "plan.md").read_text().split())
    assert " ".join(cost_lines(plan, step, JOB)) in page


def test_a_dry_run_says_the_cost_where_there_is_one(capsys, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(train, "check_start", lambda run: None)  # there are no GPUs here
    settings = load_settings(EXAMPLES / QWEN3_4B, [*SEPARATE, f"runs={tmp_path}"])
    train.dry_run(settings, Nodes(0, 1))
    assert "# the run, by turns: 400 steps of " in capsys.readouterr().out
    assert estimate(settings.model_copy(update={"device": "cpu"})) == []
    gone = settings.model.model_copy(update={"path": tmp_path})
    assert estimate(settings.model_copy(update={"model": gone})) == []
    assert estimate(load_settings(EXAMPLES / "qwen3_8b_sft.yaml")) == []
    too_large = [*SEPARATE, "parallel={data: 1}", "memory.recompute=none"]
    assert estimate(load_settings(EXAMPLES / QWEN3_4B, too_large)) == []
