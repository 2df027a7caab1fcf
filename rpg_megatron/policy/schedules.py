"""Learning-rate schedules. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Callable

from rpg_megatron.config.base import ImportedSettings
from rpg_megatron.config.policy import CosineSettings, LinearSettings, OptimizerSettings, WSDSettings
from rpg_megatron.system.own_code import Wanted, load_own


def build_schedule(settings: OptimizerSettings, steps: int) -> Callable[[int], float]:
    """Learning rate of a training step (from 1): lr x warm-up x the schedule's factor.

    steps: ``training.steps``. The warm-up is linear and reaches 1 at step ``warmup_steps``; a decay starts
    after it. The last step still has a rate above the schedule's end, as its update would be lost otherwise.
    Raises UserError if code of the user cannot be imported or called.
    """
    schedule, warmup = settings.schedule, settings.warmup_steps
    own: Callable[..., float] | None = None
    if isinstance(schedule, ImportedSettings):
        own = load_own(Wanted("optimizer.schedule", schedule.type, schedule.keywords, 2))

    def factor(step: int) -> float:
        if own is not None:
            return float(own(step, steps))
        done = min(max(step - 1 - warmup, 0) / max(steps - warmup, 1), 1.0)
        if isinstance(schedule, LinearSettings):
            return 1 - (1 - schedule.end) * done
        if isinstance(schedule, CosineSettings):
            return schedule.end + (1 - schedule.end) * (1 + math.cos(math.pi * done)) / 2
        if isinstance(schedule, WSDSettings):
            return 1 - (1 - schedule.end) * max(done - (1 - schedule.decay), 0) / schedule.decay
        return 1.0

    def learning_rate(step: int) -> float:
        rate = settings.lr * min(1.0, step / warmup) if warmup else settings.lr
        return rate * factor(step)

    return learning_rate
