"""Settings of evaluation: held-out sets, responses per problem, sampling."""

from __future__ import annotations

from typing import NamedTuple

from pydantic import Field, model_validator

from rpg_megatron.config.base import Section
from rpg_megatron.config.data import DataSettings

NAME = r"^[A-Za-z0-9._-]+$"
"""Allowed names of a set, which appear in metrics and file names."""


def pass_sizes(samples: int) -> list[int]:
    """The j for which pass@j is reported: powers of two below ``samples``, and ``samples``."""
    return [*(2**i for i in range(samples.bit_length()) if 2**i < samples), samples]


class HeldOutSettings(DataSettings):
    """One of several held-out sets."""

    name: str | None = Field(None, pattern=NAME)
    """Name of the set in metrics; null: the preset's."""


class HeldOutSet(NamedTuple):
    """One held-out set, from either form of the settings."""

    name: str
    data: DataSettings
    where: str
    """Its key in the settings, for messages."""
    seeds: str
    """Seeds of its responses are derived from this and the seed of the run."""


class EvaluationSettings(Section):
    """Evaluation on held-out problems: before training, every ``every`` steps, and at the end."""

    data: DataSettings | None = None
    """The held-out set."""
    name: str = Field("heldout", pattern=NAME)
    """data: name of the set in metrics, eval/<name>/avg@k."""
    sets: tuple[HeldOutSettings, ...] = ()
    """Several held-out sets, each with its own name, instead of ``data``."""
    samples: int = Field(1, ge=1)
    """Responses per problem (k of avg@k)."""
    temperature: float = Field(1.0, ge=0, le=2)
    """Sampling temperature; 0: greedy, with samples 1."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus sampling: sample from the most likely tokens whose probabilities sum to this; 1: all tokens."""
    top_k: int | None = Field(None, ge=1)
    """Sample from this many of the most likely tokens; null: all tokens."""
    min_p: float = Field(0.0, ge=0, lt=1)
    """Exclude tokens whose probability is below this fraction of that of the most likely token; 0: off."""
    every: int = Field(10, ge=1)
    """Steps between evaluations."""

    @model_validator(mode="after")
    def _engines_can_sample_that(self) -> EvaluationSettings:
        if self.temperature == 0 and self.samples > 1:
            raise ValueError("temperature 0 samples the same response each time; set samples to 1")
        if 0 < self.temperature < 0.01:
            raise ValueError("temperature must be 0, or at least 0.01, the engine's minimum")
        return self

    @model_validator(mode="after")
    def _sets_have_names(self) -> EvaluationSettings:
        if (self.data is None) == (not self.sets):
            raise ValueError("needs either data (one held-out set) or sets (a list of them)")
        if self.sets and self.name != type(self).model_fields["name"].default:
            raise ValueError("name has no effect with sets; each set has its own name")
        names = [part.name or part.preset for part in self.sets]
        for i, name in enumerate(names):
            if name is None:
                raise ValueError(f"sets[{i}] has neither a name nor a preset; set name")
            if name in names[:i]:
                raise ValueError(f"sets[{i}] repeats the name {name}; set another")
        return self

    @property
    def heldout(self) -> tuple[HeldOutSet, ...]:
        """The sets: at least one, with different names."""
        if self.data is not None:
            return (HeldOutSet(self.name, self.data, "evaluation.data", "evaluation"),)
        return tuple(
            HeldOutSet(name, part, f"evaluation.sets[{i}]", f"evaluation/{name}")
            for i, part in enumerate(self.sets)
            if (name := part.name or part.preset)
        )

    def metric_names(self) -> list[str]:
        """Keys of the metrics in metrics.jsonl; the first is avg@k of the first set."""
        k = self.samples
        keys = [f"avg@{k}", *(f"pass@{j}" for j in pass_sizes(k)), f"maj@{k}", "truncated_frac"]
        keys += ["length_mean", "length_p50", "length_p99"]
        return [f"eval/{part.name}/{key}" for part in self.heldout for key in keys]
