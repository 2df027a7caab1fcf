"""Settings of the loss: divergence, estimator, clip, advantage, anchor."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, field_validator, model_validator

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

    @model_validator(mode="after")
    def _cut_off_lies_beyond_the_upper_bound(self) -> ClipSettings:
        if self.c <= 1 + self.high:
            raise ValueError(f"c ({self.c}) must be greater than 1 + high ({1 + self.high})")
        return self


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
    ratio: Literal["token", "sequence"] = "token"
    """sequence: one ratio a response, exact off-policy for every divergence, at a far higher variance."""


class GRPOSettings(Section):
    """GRPO (arXiv 2402.03300)."""

    type: Literal["grpo"]
    """Which loss."""
    clip: ClipSettings = ClipSettings(low=0.2, high=0.2)
    """The clip."""
    beta: float = Field(1e-3, ge=0)
    """Strength of the additive k3 term."""
    corrected: bool = False
    """Weight k3 by the importance ratio, which makes its gradient that of the reverse KL."""


class DAPOSettings(Section):
    """DAPO (arXiv 2503.14476): raised upper bound, no KL."""

    type: Literal["dapo"]
    """Which loss."""
    clip: ClipSettings = ClipSettings()
    """The clip."""


class PPOSettings(Section):
    """PPO's dual-clip loss, without critic or KL; with other advantages and aggregation, Dr.GRPO."""

    type: Literal["ppo"]
    """Which loss."""
    clip: ClipSettings = ClipSettings(low=0.2, high=0.2)
    """The clip."""


class ReinforcePlusPlusSettings(Section):
    """REINFORCE++ as scripted for arXiv 2505.17508: additive k1, which pushes away from the anchor."""

    type: Literal["reinforce_plus_plus"]
    """Which loss."""
    clip: ClipSettings = ClipSettings()
    """The clip."""
    beta: float = Field(1e-4, ge=0)
    """Strength of the additive k1 term."""


class CISPOSettings(Section):
    """CISPO (arXiv 2506.13585): clamped, detached ratio; every token keeps its gradient."""

    type: Literal["cispo"]
    """Which loss."""
    low: float = Field(1.0, ge=0, le=1)
    """The ratio is at least 1 - low."""
    high: float = Field(0.28, ge=0)
    """The ratio is at most 1 + high."""


class GSPOSettings(Section):
    """GSPO (arXiv 2507.18071): one length-normalised ratio a sequence; use aggregation sequence_mean."""

    type: Literal["gspo"]
    """Which loss."""
    low: float = Field(3e-4, ge=0, lt=1)
    """Lower bound of the sequence's ratio is 1 - low."""
    high: float = Field(4e-4, ge=0)
    """Upper bound of the sequence's ratio is 1 + high."""


def _objective_type(value: Any) -> str | None:
    if isinstance(value, dict):
        return str(value.get("type", "rpg"))
    return getattr(value, "type", None)


ObjectiveSettings = Annotated[
    Annotated[RPGSettings, Tag("rpg")]
    | Annotated[GRPOSettings, Tag("grpo")]
    | Annotated[DAPOSettings, Tag("dapo")]
    | Annotated[PPOSettings, Tag("ppo")]
    | Annotated[ReinforcePlusPlusSettings, Tag("reinforce_plus_plus")]
    | Annotated[CISPOSettings, Tag("cispo")]
    | Annotated[GSPOSettings, Tag("gspo")],
    Discriminator(_objective_type),
]
"""One of the losses, chosen by ``type``; without it, rpg."""


class AdvantageSettings(Section):
    """From rewards to advantages."""

    type: Literal[
        "rpg", "grpo", "leave_one_out", "batch_mean", "reinforce_plus_plus", "reinforce_plus_plus_baseline"
    ] = "rpg"
    """rpg: reward minus its group's mean, not over the standard deviation; the others: docs/objectives.md."""


class CorrectionSettings(Section):
    """Factor exp(old - behaviour) on each token's loss, for stale weights and engine/trainer differences."""

    type: Literal["truncate", "icepop"]
    """truncate: at most ``high``; icepop: 0 outside [low, high]."""
    level: Literal["token", "sequence"] = "token"
    """One ratio for each token, or the product over its sequence."""
    low: float = Field(0.5, ge=0, lt=1)
    """Lower bound (icepop)."""
    high: float = Field(2.0, gt=1)
    """Upper bound."""


class AggregationSettings(Section):
    """From losses of tokens to the loss of a mini-batch."""

    type: Literal["token_mean", "sequence_mean", "constant"] = "token_mean"
    """Every token alike; every sequence alike; or each sequence's sum over a constant (Dr.GRPO)."""
    constant: int | None = Field(None, ge=1)
    """Divisor of ``constant``; null: rollout.max_response_tokens."""


class AnchorSettings(Section):
    """The policy that the KL term pulls towards. Any but ``old`` is held in host memory and swapped in."""

    type: Literal["old", "fixed", "every", "kl_trigger"] = "old"
    """old: the policy that the step began with, as in the paper; fixed: the initial one; every: moved to
    the policy after so many updates; kl_trigger: moved when the KL to it has grown too large."""
    updates: int = Field(16, ge=1)
    """every: optimizer updates after which the anchor is moved, looked at after each step."""
    kappa: float = Field(0.01, gt=0)
    """kl_trigger: moving average of the token KL (nats) above which the anchor is moved."""
    decay: float = Field(0.9, ge=0, lt=1)
    """kl_trigger: weight of the past in the moving average, per step."""


class TrainingSettings(Section):
    """Length of the run and cutting of a step's batch."""

    steps: int = Field(400, ge=1)
    """Rollout-and-update steps."""
    minibatches: int = Field(16, ge=1)
    """Optimizer updates in a step; the step's prompts are cut evenly over them."""
    tokens_per_microbatch: int = Field(8192, ge=1)
    """Token budget of one packed forward and backward pass of a data-parallel replica; its context ranks
    share it. A longer sequence gets a pass of its own."""
    mask_truncated: bool = False
    """Learn nothing from responses that were cut at rollout.max_response_tokens. Their rewards still count in
    their groups' advantages, their tokens in no mean."""
    logprob_chunk: int = Field(1024, ge=1)
    """Tokens whose full-vocabulary logits are held at a time."""


class GuardSettings(Section):
    """Checks that stop a run which is silently wrong, or goes wrong."""

    mismatch: Literal["stop", "warn", "off"] = "stop"
    """What to do when engine and trainer disagree on log-probs that the current weights sampled."""
    mismatch_max: float | None = Field(None, gt=0)
    """Largest allowed |log-prob difference| of a token; null: 1e-3 in float32, none in bfloat16."""
    mismatch_mean: float | None = Field(None, gt=0)
    """Largest allowed mean |log-prob difference|; null: 1e-4 in float32, 0.05 in bfloat16."""
    skipped_updates: int = Field(5, ge=1)
    """So many updates in a row with a gradient that is not finite end the run. Each of them is skipped, which
    leaves weights and optimizer as they are."""

    @field_validator("mismatch", mode="before")
    @classmethod
    def _yaml_reads_off_as_false(cls, value: Any) -> Any:
        return "off" if value is False else value

    @model_validator(mode="after")
    def _thresholds_need_a_guard(self) -> GuardSettings:
        if self.mismatch == "off" and (self.mismatch_max is not None or self.mismatch_mean is not None):
            raise ValueError("a threshold is set, but guards.mismatch is off; remove one of the two")
        return self

    def thresholds(self, dtype: str) -> tuple[float, float]:
        """(max, mean) bounds in nats for a precision."""
        largest, mean = {"float32": (1e-3, 1e-4)}.get(dtype, (float("inf"), 0.05))
        return self.mismatch_max or largest, self.mismatch_mean or mean
