"""Settings of evaluation: held-out sets, responses per problem, sampling."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from pydantic import Field

from rpg_megatron.config.base import NAME, Section
from rpg_megatron.config.data import DataSettings


def pass_sizes(samples: int) -> list[int]:
    """The j for which pass@j is reported: powers of two below ``samples``, and ``samples``."""
    return [*(2**i for i in range(samples.bit_length()) if 2**i < samples), samples]


class HeldOutSettings(DataSettings):
    """One of several held-out sets."""

    name: str | None = Field(None, pattern=NAME)
    """Name of the set in metrics; null: the preset's."""
    samples: int | None = Field(None, ge=1)
    """Responses per problem of this set. null, as for the keys below: the value of ``evaluation``."""
    temperature: float | None = Field(None, ge=0, le=2)
    """Sampling temperature of this set; 0: greedy."""
    top_p: float | None = Field(None, gt=0, le=1)
    """Nucleus sampling threshold of this set."""
    max_response_tokens: int | None = Field(None, ge=1)
    """Maximum tokens of a response to this set."""


OWN_SAMPLING = ("samples", "temperature", "top_p", "max_response_tokens")
"""Keys of the sampling that each set may have."""


class HeldOutSet(NamedTuple):
    """One held-out set, from either form of the settings, with its sampling."""

    name: str
    data: DataSettings
    where: str
    """Its key in the settings, for messages."""
    seeds: str
    """Seeds of its responses are derived from this and the seed of the run."""
    samples: int
    temperature: float
    top_p: float
    max_response_tokens: int | None
    """None: rollout.max_response_tokens."""
    limited_by: str
    """The key that sets it."""

    def response_tokens(self, rollout: int) -> int:
        """Maximum tokens of a response. rollout: rollout.max_response_tokens."""
        return self.max_response_tokens or rollout


class EvaluationSettings(Section, affects="results", evaluated=True):
    """Evaluation on held-out problems: before training, every ``every`` steps, and at the end."""

    data: DataSettings | None = None
    """The held-out set."""
    name: str = Field("heldout", pattern=NAME)
    """data: name of the set in metrics, eval/<name>/avg@k."""
    sets: tuple[HeldOutSettings, ...] = ()
    """Several held-out sets, each with its own name, instead of ``data``."""
    samples: int = Field(1, ge=1)
    """Responses per problem (k of avg@k). This key and the next three may also be set in each of ``sets``."""
    temperature: float = Field(1.0, ge=0, le=2)
    """Sampling temperature; 0: greedy, with samples 1."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus sampling: sample from the most likely tokens whose probabilities sum to this; 1: all tokens."""
    max_response_tokens: int | None = Field(None, ge=1)
    """Maximum tokens of a response; null: rollout.max_response_tokens."""
    top_k: int | None = Field(None, ge=1)
    """Sample from this many of the most likely tokens; null: all tokens."""
    every: int = Field(10, ge=1)
    """Steps between evaluations."""

    def _problems(self) -> Iterator[str]:
        if (self.data is None) == (not self.sets):
            yield "needs either data (one held-out set) or sets (a list of them)"
        if self.sets and self.name != type(self).model_fields["name"].default:
            yield "name has no effect with sets; each set has its own name"
        names = [part.name or part.preset for part in self.sets]
        for i, name in enumerate(names):
            if name is None:
                yield f"sets[{i}] has neither a name nor a preset; set name"
            if name in names[:i]:
                yield f"sets[{i}] repeats the name {name}; set another"
        for part in self.heldout:
            if part.data.streaming:
                yield f"{part.name}: an evaluation takes all problems of its set; set limit, not streaming"
        for i, part in enumerate(self.heldout):
            which = f"sets[{i}] ({part.name}): " if self.sets else ""
            if part.temperature == 0 and part.samples > 1:
                yield f"{which}temperature 0 samples the same response each time; set samples to 1"
            if 0 < part.temperature < 0.01:
                yield f"{which}temperature must be 0, or at least 0.01, the engine's minimum"

    @property
    def heldout(self) -> tuple[HeldOutSet, ...]:
        """The sets: at least one, with different names."""
        if self.data is not None:
            return (self._make_set(self.name, self.data, "evaluation.data", "evaluation"),)
        return tuple(
            self._make_set(name, part, f"evaluation.sets[{i}]", f"evaluation/{name}")
            for i, part in enumerate(self.sets)
            if (name := part.name or part.preset)
        )

    def _make_set(self, name: str, data: DataSettings, where: str, seeds: str) -> HeldOutSet:
        own = {key: getattr(data, key, None) for key in OWN_SAMPLING}  # without ``sets`` it has none
        sampling = {key: getattr(self, key) if value is None else value for key, value in own.items()}
        section = "rollout" if self.max_response_tokens is None else "evaluation"
        section = section if own["max_response_tokens"] is None else where
        return HeldOutSet(name, data, where, seeds, **sampling, limited_by=f"{section}.max_response_tokens")

    def metric_names(self) -> list[str]:
        """Keys of the metrics in metrics.jsonl; the first is avg@k of the first set."""
        names = []
        for part in self.heldout:
            k = part.samples
            keys = [f"avg@{k}", *(f"pass@{j}" for j in pass_sizes(k)), f"maj@{k}", "truncated_frac"]
            keys += ["length_mean", "length_p50", "length_p99"]
            names += [f"eval/{part.name}/{key}" for key in keys]
        return names
