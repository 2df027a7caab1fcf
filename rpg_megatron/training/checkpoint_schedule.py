"""When a checkpoint is due: by steps, by minutes, and before the end of the job. Imports no torch."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import suppress

from rpg_megatron.config.cluster import JOB_END_VARIABLE
from rpg_megatron.config.rollout import CheckpointSettings

_ROOM = 1.5
"""Steps that must fit before the job's warning; otherwise a checkpoint is written now."""
_LEAST = 60.0
"""Seconds between two such checkpoints, where steps are short."""


class CheckpointSchedule:
    """When this run's checkpoints are due."""

    def __init__(
        self, settings: CheckpointSettings, steps: int, environment: Mapping[str, str] = os.environ
    ) -> None:
        self._settings, self._steps = settings, steps
        self._saved = time.monotonic()
        self._end = 0.0
        """Unix time at which Slurm ends the job; in the past: unknown, or the job got more time."""
        with suppress(ValueError):
            self._end = float(environment.get(JOB_END_VARIABLE, ""))

    def due_by_step(self, step: int) -> bool:
        """Whether one is due after this step; the same on all ranks."""
        every = self._settings.every
        return every is not None and (step % every == 0 or step == self._steps)

    def due_by_time(self, step_seconds: float) -> bool:
        """Whether one is due now; for one rank, whose answer the others take. step_seconds: of the last step.

        Before the end of a job, the one that is written now is what a warning that comes too late in the next
        step, or a save that takes too long, leaves. The warning comes about ``checkpoint.grace`` before it.
        """
        settings = self._settings
        if settings.every is None:
            return False
        if settings.minutes is not None and time.monotonic() - self._saved >= 60 * settings.minutes:
            return True
        left = self._end - time.time()
        if left < 0 or time.monotonic() - self._saved < _LEAST:
            return False
        return left < settings.grace + _ROOM * step_seconds

    def saved(self) -> None:
        """A save has begun."""
        self._saved = time.monotonic()
