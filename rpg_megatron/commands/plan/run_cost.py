"""What a whole run costs: a chain of Slurm jobs, each with the same walltime. Computed, not measured.

A job does steps until it is warned, saves, ends, and starts again; waiting in a queue is not counted. The
warning finds each moment of a step equally often, and costs:

- in the rollout ``under_way`` seconds, or all if less is done: finished groups are kept, others are not;
- in the log-probs the rollout, and what was done of the log-probs;
- in the rest (updates, sync, handover, fixed costs) nothing: it is finished after the warning.

Where rollouts overlap with training, the first step of a job takes ``fill`` seconds more. If a step is longer
than a job, the result is too high. Evaluations are not counted: only the data says how large their sets are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from rpg_megatron.commands.plan.gpus import assume
from rpg_megatron.commands.plan.plan import Plan, make_plan
from rpg_megatron.commands.plan.step_time import StepTime, estimate_step
from rpg_megatron.config import Settings, UserError


@dataclass(frozen=True)
class Job:
    """Seconds of a job: in all; between its warning and its end; before its first step; until Slurm starts it
    again; for which a checkpoint stops it. Guesses, or the values of slurm/*.sbatch.
    """

    walltime: float
    warning: float = 600.0
    start: float = 300.0
    requeue: float = 120.0
    save: float = 60.0


def seconds_waited(step: StepTime) -> float:
    """Seconds in which the trainer waits for a rollout: overlapped, those beyond its own work."""
    return max(0.0, step.generation - step.training * (step.placement == "overlapped"))


@dataclass(frozen=True)
class RunCost:
    """The cost of a run.

    steps_per_job: of a job that is warned, on average, or all of the only job; seconds: from the start of the
    first job to the end of the last one, without waiting in a queue.
    """

    steps: int
    steps_per_job: float
    jobs: int
    seconds: float
    gpu_hours: float

    @property
    def days(self) -> float:
        """``seconds`` in days."""
        return self.seconds / 86_400


def run_cost(step: StepTime, steps: int, job: Job, *, every: int | None, gpus: float) -> RunCost | None:
    """The cost of ``steps`` steps on ``gpus`` GPUs, with a checkpoint every ``every`` steps.

    None: the run never ends, since a job is too short for a step, or for the run if ``every`` is None.
    """
    rollout, log_probs = seconds_waited(step), step.seconds("log-probs")
    save = job.save if every else 0.0
    each = step.step + (save / every if every else 0.0)
    rest = each - rollout - log_probs
    # On average, half of what was sampled beside training is finished groups, which are kept.
    fill = (step.generation - rollout) / 2
    warned = job.walltime - job.warning - job.start - fill  # from the first step on
    # Means over the moments of a warning: seconds that it costs, and of the work that continues after it.
    in_rollout = min(step.under_way, rollout)  # at most what is done: less near the beginning
    lost = (in_rollout * (rollout - in_rollout / 2) + log_probs * (rollout + log_probs / 2)) / each
    progress = warned - lost + rest**2 / 2 / each
    more = max(0, math.ceil((steps * each - warned) / progress)) if progress > 0 else math.inf
    if warned < log_probs or more == math.inf or (more and not every):
        return None
    jobs = 1 + int(more)
    between = (jobs - 1) * job.requeue
    seconds = steps * each + jobs * (job.start + fill) + (jobs - 1) * (lost + save) + between
    per_job = progress / each if more else float(steps)
    return RunCost(steps, per_job, jobs, seconds, gpus * (seconds - between) / 3600)


def cost_of(plan: Plan, step: StepTime, job: Job) -> RunCost | None:
    """The cost of a plan's run, of steps that take this time; None: it never ends."""
    settings = plan.settings
    steps, every = settings.training.steps, settings.checkpoint.every
    return run_cost(step, steps, job, every=every, gpus=plan.gpus.total)


def estimate(settings: Settings) -> list[str]:
    """What ``plan`` says of the cost of a run on GPUs; empty where it has no estimate."""
    if settings.device != "cuda" or settings.sft is not None:
        return []
    try:
        plan = make_plan(settings)
    except UserError:  # plan says why
        return []
    assumed = assume(plan.target.name)
    job = Job(3600 * assumed.walltime)
    return list(cost_lines(plan, estimate_step(plan, assumed), job)) if plan.fits else []


def cost_lines(plan: Plan, step: StepTime, job: Job) -> Iterator[str]:
    """A line for the cost of the run, and one if an update is longer than the warning of a job."""
    cost, settings, hours = cost_of(plan, step, job), plan.settings, f"{job.walltime / 3600:g} h"
    if cost is None:
        saves_nothing = f"the run takes longer than a job of {hours}, and saves nothing: set checkpoint.every"
        too_short = f"the run never ends: a job of {hours} is too short for a step; ask for a longer walltime"
        yield saves_nothing if settings.checkpoint.every is None else too_short
        return
    jobs = f"{cost.steps_per_job:.1f} in each of {cost.jobs:,} jobs" if cost.jobs > 1 else "in one job"
    left_out = "evaluations, waiting" if settings.evaluation else "waiting"
    time = f"{cost.days:,.1f} days" if cost.days >= 2 else f"{cost.seconds / 3600:.1f} hours"
    yield (
        f"the run, {step.placement}: {cost.steps:,} steps of {step.step:,.0f} s, {jobs} of {hours}: "
        f"{time}, {cost.gpu_hours:,.0f} GPU-hours on {plan.gpus.total:,} {plan.target.name}; computed, "
        f"not measured; not counted: {left_out} in the queue"
    )
    late = step.step - seconds_waited(step) - step.seconds("log-probs") + job.save
    if late > job.warning and cost.jobs > 1:
        needed = 60 * math.ceil(late / 60)
        yield (
            f"an update and its save take {late:,.0f} s, but a job is warned {job.warning:,.0f} s "
            f"before it is killed: submit with --signal=USR1@{needed + 60}, set checkpoint.grace={needed}"
        )
