"""Our learning-rate schedules. Each is a section whose instance is called as a schedule of a user's is.

The classes below ``ScheduleSettings`` are all there are: a new one needs no entry anywhere.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal, override

from pydantic import Field

from rpg_megatron.config.base import ImportedSettings, Section, tagged_union


class ScheduleSettings(Section):
    """How the learning rate changes after the warm-up."""

    type: str
    """The schedule."""

    def __call__(self, step: int, steps: int) -> float:
        """The factor of lr in a step, counted from the end of the warm-up, from 1; steps: how many there are.

        The last step still has a factor above that of the end, as its update would be lost otherwise.
        """
        raise NotImplementedError


class ConstantSettings(ScheduleSettings):
    """The learning rate stays."""

    type: Literal["constant"] = "constant"
    """constant, linear, cosine, wsd, or the import path module:function of function(step, steps, **settings),
    which returns the factor of lr; the other keys are then its settings."""

    @override
    def __call__(self, step: int, steps: int) -> float:
        return 1.0


class LinearSettings(ScheduleSettings):
    """The learning rate falls linearly from the end of the warm-up to the end of the run."""

    type: Literal["linear"]
    """The schedule."""
    end: float = Field(0.0, ge=0, le=1)
    """Factor of lr at the end."""

    @override
    def __call__(self, step: int, steps: int) -> float:
        return 1 - (1 - self.end) * _done(step, steps)


class CosineSettings(ScheduleSettings):
    """The learning rate falls along half a cosine from the end of the warm-up to the end of the run."""

    type: Literal["cosine"]
    """The schedule."""
    end: float = Field(0.0, ge=0, le=1)
    """Factor of lr at the end."""

    @override
    def __call__(self, step: int, steps: int) -> float:
        return self.end + (1 - self.end) * (1 + math.cos(math.pi * _done(step, steps))) / 2


class WSDSettings(ScheduleSettings):
    """Warm-up, stable, decay: the learning rate stays, then falls linearly."""

    type: Literal["wsd"]
    """The schedule."""
    decay: float = Field(0.2, gt=0, le=1)
    """Share of the steps after the warm-up over which it falls."""
    end: float = Field(0.0, ge=0, le=1)
    """Factor of lr at the end."""

    @override
    def __call__(self, step: int, steps: int) -> float:
        return 1 - (1 - self.end) * max(_done(step, steps) - (1 - self.decay), 0) / self.decay


def _done(step: int, steps: int) -> float:
    """Share of the steps that are complete."""
    return min((step - 1) / steps, 1.0)


if TYPE_CHECKING:
    AnyScheduleSettings = ScheduleSettings | ImportedSettings
else:
    AnyScheduleSettings = tagged_union(ScheduleSettings, ImportedSettings, default="constant")
"""A schedule chosen by ``type``, or a function of your own."""
