"""Settings of evaluations: which problems, how many responses to each, how they are sampled."""

from __future__ import annotations

from typing import NamedTuple

from pydantic import Field, model_validator

from rpg_megatron.config.base import Section
from rpg_megatron.config.data import DataSettings

NAME = r"^[A-Za-z0-9._-]+$"
"""What the name of a set may be: it stands in metrics and in file names."""


class HeldOutSettings(DataSettings):
    """One of several held-out sets."""

    name: str | None = Field(None, pattern=NAME)
    """Name of the set in metrics; null: the preset's."""


class HeldOutSet(NamedTuple):
    """One held-out set, however it was written down."""

    name: str
    data: DataSettings
    where: str
    """Its key in the settings, for messages."""
    seeds: str
    """What the seeds of its responses are made from, besides the seed of the run."""


class EvaluationSettings(Section):
    """Held-out problems, scored before training, every so many steps, and at the end."""

    data: DataSettings | None = None
    """The held-out set."""
    name: str = Field("heldout", pattern=NAME)
    """data: name of the set in metrics, eval/<name>/avg@k."""
    sets: tuple[HeldOutSettings, ...] = ()
    """Several sets, each with a name of its own, instead of ``data``."""
    samples: int = Field(1, ge=1)
    """Responses to each problem (k of avg@k)."""
    temperature: float = Field(1.0, ge=0, le=2)
    """Sampling temperature; 0 is greedy, with one response to a problem."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Draw from the most likely tokens whose probabilities add up to this; 1: from all."""
    every: int = Field(10, ge=1)
    """Steps between evaluations."""

    @model_validator(mode="after")
    def _engines_can_sample_that(self) -> EvaluationSettings:
        if self.temperature == 0 and self.samples > 1:
            raise ValueError("temperature 0 gives the same response each time; set samples to 1")
        if 0 < self.temperature < 0.01:
            raise ValueError("temperature must be 0, or at least 0.01, below which the engine does not go")
        return self

    @model_validator(mode="after")
    def _sets_have_names(self) -> EvaluationSettings:
        if (self.data is None) == (not self.sets):
            raise ValueError("needs either data, one held-out set, or sets, a list of them")
        if self.sets and self.name != type(self).model_fields["name"].default:
            raise ValueError("name has no effect on sets, each of which has a name of its own")
        names = [part.name or part.preset for part in self.sets]
        for place, name in enumerate(names):
            if name is None:
                raise ValueError(f"sets[{place}] has no name, and no preset to take it from; give it one")
            if name in names[:place]:
                raise ValueError(f"sets[{place}] is the second one of the name {name}; give it another")
        return self

    @property
    def heldout(self) -> tuple[HeldOutSet, ...]:
        """The sets, at least one, with different names."""
        if self.data is not None:
            return (HeldOutSet(self.name, self.data, "evaluation.data", "evaluation"),)
        return tuple(
            HeldOutSet(name, part, f"evaluation.sets[{place}]", f"evaluation/{name}")
            for place, part in enumerate(self.sets)
            if (name := part.name or part.preset)
        )
