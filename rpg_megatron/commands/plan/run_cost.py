"""What a whole run costs: a chain of Slurm jobs, each with the same walltime. Computed, not measured.

A job needs ``start`` seconds, then does steps until it is warned, ``warning`` seconds before its walltime.
It saves (``save`` seconds), ends, and starts again ``requeue`` seconds later; waiting in a queue is not
counted. The warning finds each moment of a step, of ``rollout`` + ``log_probs`` + ``rest`` seconds, equally
often, and costs:

- in the rollout ``under_way`` seconds, or all if less is done: finished groups are kept, others are not;
- in the log-probs the rollout, and what was done of the log-probs;
- in the rest (updates, sync, handover, fixed costs) nothing: it is finished after the warning.

Every ``every`` steps a checkpoint stops the run for ``save`` seconds. Where rollouts overlap with training,
the first step of a job takes ``fill`` seconds more. If a step is longer than a job, the result is too high.
Evaluations are not counted: how many problems their sets have is known only from the data.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from rpg_megatron.commands.plan.gpus import Assumptions
from rpg_megatron.commands.plan.step_time import StepTime


@dataclass(frozen=True)
class StepParts:
    """Seconds of a step by what a warning costs in them."""

    rollout: float
    log_probs: float
    rest: float
    under_way: float = 0.0
    fill: float = 0.0

    @property
    def step(self) -> float:
        """Seconds of a step."""
        return self.rollout + self.log_probs + self.rest


def step_parts(step: StepTime) -> StepParts:
    """The parts of a step. Overlapped, the rollout is the time in which the trainer waits for it."""
    both = min(step.generation, step.training) if step.placement == "overlapped" else 0.0
    rollout, log_probs = step.generation - both, step.seconds("log-probs")
    # On average, half of what was sampled beside training is finished groups, which are kept.
    return StepParts(rollout, log_probs, step.step - rollout - log_probs, step.under_way, both / 2)


@dataclass(frozen=True)
class RunCost:
    """The cost of a run."""

    step: float
    """Seconds of a step."""
    steps: int
    steps_per_job: float
    """Of a job that is warned, on average; of the only job, all."""
    jobs: int
    seconds: float
    """From the start of the first job to the end of the last one, without waiting in a queue."""
    gpu_hours: float

    @property
    def days(self) -> float:
        """``seconds`` in days."""
        return self.seconds / 86_400


def run_cost(
    parts: StepParts, steps: int, assumed: Assumptions, *, every: int | None, gpus: float
) -> RunCost | None:
    """The cost of ``steps`` steps on ``gpus`` GPUs, with a checkpoint every ``every`` steps.

    None: the run never ends, since a job is too short for a step, or for the run if ``every`` is None.
    """
    save = assumed.save if every else 0.0
    step = parts.step + (save / every if every else 0.0)
    warned = 3600 * assumed.walltime - assumed.warning - assumed.start - parts.fill  # from the first step on
    lost, finished = _warned(parts, step)
    progress = warned - lost + finished
    more = max(0, math.ceil((steps * step - warned) / progress)) if progress > 0 else math.inf
    if warned < parts.log_probs or more == math.inf or (more and not every):
        return None
    jobs = 1 + int(more)
    between = (jobs - 1) * assumed.requeue
    seconds = steps * step + jobs * (assumed.start + parts.fill) + (jobs - 1) * (lost + save) + between
    per_job = progress / step if more else float(steps)
    return RunCost(parts.step, steps, per_job, jobs, seconds, gpus * (seconds - between) / 3600)


def _warned(parts: StepParts, step: float) -> tuple[float, float]:
    """Mean seconds that a warning costs, and that a job continues to work after it. step: with its saves."""
    in_rollout = min(parts.under_way, parts.rollout)  # at most what is done: less near the beginning
    lost = in_rollout * (parts.rollout - in_rollout / 2)
    lost += parts.log_probs * (parts.rollout + parts.log_probs / 2)
    rest = step - parts.rollout - parts.log_probs
    return lost / step, rest**2 / 2 / step
