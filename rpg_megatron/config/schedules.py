"""Built-in learning-rate schedules. Each is a settings section, and its instance is called like a user's own.

All subclasses of ``ScheduleSettings`` in this file are available; there is no list to extend.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal, override

from pydantic import Field

from rpg_megatron.config.base import ImportedSettings, Section, tagged_union


class ScheduleSettings(Section, affects="training"):
    """How the learning rate changes after the warm-up."""

    type: str
    """The schedule."""

    def __call__(self, step: int, steps: int) -> float:
        """Factor of lr in a step. step: from 1 after the warm-up; steps: their number.

        ``end`` would be reached one step after the last one: at a factor of 0 the last update would have no
        effect.
        """
        raise NotImplementedError


class ConstantSettings(ScheduleSettings):
    """Constant learning rate."""

    type: Literal["constant"] = "constant"
    """constant, linear, cosine, wsd, or the import path module:function of function(step, steps, **settings),
    which returns the factor of lr; the other keys are then its settings."""

    @override
    def __call__(self, step: int, steps: int) -> float:
        return 1.0


class LinearSettings(ScheduleSettings):
    """Linear decay from the end of the warm-up to the end of the run."""

    type: Literal["linear"]
    """The schedule."""
    end: float = Field(0.0, ge=0, le=1)
    """Factor of lr at the end."""

    @override
    def __call__(self, step: int, steps: int) -> float:
        return 1 - (1 - self.end) * _done(step, steps)


class CosineSettings(ScheduleSettings):
    """Cosine decay from the end of the warm-up to the end of the run."""

    type: Literal["cosine"]
    """The schedule."""
    end: float = Field(0.0, ge=0, le=1)
    """Factor of lr at the end."""

    @override
    def __call__(self, step: int, steps: int) -> float:
        return self.end + (1 - self.end) * (1 + math.cos(math.pi * _done(step, steps))) / 2


class WSDSettings(ScheduleSettings):
    """Warm-up, stable, decay: constant, then linear decay."""

    type: Literal["wsd"]
    """The schedule."""
    decay: float = Field(0.2, gt=0, le=1)
    """Fraction of the steps after the warm-up over which it decays."""
    end: float = Field(0.0, ge=0, le=1)
    """Factor of lr at the end."""

    @override
    def __call__(self, step: int, steps: int) -> float:
        return 1 - (1 - self.end) * max(_done(step, steps) - (1 - self.decay), 0) / self.decay


def _done(step: int, steps: int) -> float:
    """Fraction of the steps that are complete."""
    return min((step - 1) / steps, 1.0)


if TYPE_CHECKING:
    AnyScheduleSettings = ScheduleSettings | ImportedSettings
else:
    AnyScheduleSettings = tagged_union(ScheduleSettings, ImportedSettings, default="constant")
"""A schedule selected by ``type``, or a function of your own."""
