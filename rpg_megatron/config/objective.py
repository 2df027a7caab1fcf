"""Settings of the loss: divergence, estimator, clip, advantage, anchor."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from rpg_megatron.config.base import Section


class ClipSettings(Section):
    """RPG-style clip of the ratio w = pi / pi_old."""

    kind: Literal["dual", "truncate"] = "dual"
    """dual: drop a token outside the bounds; truncate: use the clamped ratio and keep the gradient."""
    low: float = Field(0.2, ge=0, lt=1)
    """Lower bound is 1 - low; acts on negative regularised advantages."""
    high: float = Field(0.28, ge=0)
    """Upper bound is 1 + high; acts on positive regularised advantages."""
    c: float = Field(10.0, gt=1)
    """Dual-clip cut-off: a token with negative regularised advantage and w >= c is dropped."""


class RPGSettings(Section):
    """KL-regularised policy gradient (arXiv 2505.17508)."""

    type: Literal["rpg"] = "rpg"
    """Which loss."""
    divergence: Literal["fkl", "ufkl", "rkl", "urkl"] = "urkl"
    """KL to the anchor: forward, unnormalised forward, reverse, unnormalised reverse."""
    estimator: Literal["reinforce", "differentiable"] = "reinforce"
    """REINFORCE-style (detached weight times log-prob) or fully differentiable."""
    beta: float = Field(1e-4, ge=0)
    """Strength of the KL term."""
    clip: ClipSettings | None = ClipSettings()
    """The clip; null for none."""
    kl_placement: Literal["folded", "additive"] | None = None
    """folded: inside the clip; additive: outside. null: reinforce folds, differentiable adds."""


class AdvantageSettings(Section):
    """From rewards to advantages."""

    type: Literal["rpg"] = "rpg"
    """rpg: reward minus the mean of its prompt's group, not divided by the standard deviation."""


class AnchorSettings(Section):
    """The policy that the KL term pulls towards."""

    type: Literal["old"] = "old"
    """old: the policy that the step began with, as in the paper; no second model is held."""


class TrainingSettings(Section):
    """Length of the run and cutting of a step's batch."""

    steps: int = Field(400, ge=1)
    """Rollout-and-update steps."""
    minibatches: int = Field(16, ge=1)
    """Optimizer updates in a step; the step's prompts are cut evenly over them."""
    tokens_per_microbatch: int = Field(8192, ge=1)
    """Token budget of one packed forward and backward pass on a data-parallel rank."""
    logprob_chunk: int = Field(1024, ge=1)
    """Tokens whose full-vocabulary logits are held at a time."""


class GuardSettings(Section):
    """Checks that stop a run which is silently wrong."""

    mismatch: Literal["stop", "warn", "off"] = "stop"
    """What to do when engine and trainer disagree on log-probs that the current weights sampled."""
    mismatch_max: float | None = Field(None, gt=0)
    """Largest allowed |log-prob difference| of a token; null: 1e-3 in float32, none in bfloat16."""
    mismatch_mean: float | None = Field(None, gt=0)
    """Largest allowed mean |log-prob difference|; null: 1e-4 in float32, 0.05 in bfloat16."""

    @model_validator(mode="after")
    def _thresholds_need_a_guard(self) -> GuardSettings:
        if self.mismatch == "off" and (self.mismatch_max is not None or self.mismatch_mean is not None):
            raise ValueError("a threshold is set, but guards.mismatch is off; remove one of the two")
        return self

    def thresholds(self, dtype: str) -> tuple[float, float]:
        """(max, mean) bounds in nats for a precision."""
        largest, mean = {"float32": (1e-3, 1e-4)}.get(dtype, (float("inf"), 0.05))
        return self.mismatch_max or largest, self.mismatch_mean or mean
