"""Learning rates: warm-up and schedule. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable

from rpg_megatron.config.base import ImportedSettings
from rpg_megatron.config.policy import OptimizerSettings
from rpg_megatron.system.custom_code import load_section


def build_schedule(settings: OptimizerSettings, steps: int) -> Callable[[int], float]:
    """Learning rate of a training step (from 1): lr x warm-up x the schedule's factor.

    steps: ``training.steps``. The warm-up is linear and reaches 1 at step ``warmup_steps``. Built-in
    schedules start after it; a user's own schedule is called with the step of the run.
    Raises UserError if the user's code cannot be imported or called.
    """
    warmup, is_custom = settings.warmup_steps, isinstance(settings.schedule, ImportedSettings)
    factor = load_section(settings.schedule, "optimizer.schedule", positional=2)

    def learning_rate(step: int) -> float:
        rate = settings.lr * min(1.0, step / warmup) if warmup else settings.lr
        if is_custom:
            return rate * float(factor(step, steps))
        return rate * float(factor(max(step - warmup, 1), max(steps - warmup, 1)))

    return learning_rate
