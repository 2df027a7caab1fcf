"""Settings of the loss: objective, clip, advantage, aggregation, correction, anchor, guards."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, field_validator, model_validator

from rpg_megatron.config.base import IMPORTED, ImportedSettings, Section, tag_of


class ClipSettings(Section):
    """RPG-style clip of the ratio w = pi / pi_old."""

    kind: Literal["dual", "truncate"] = "dual"
    """dual: tokens outside the bounds get no gradient; truncate: they keep it, with the clamped ratio."""
    low: float = Field(0.2, ge=0, lt=1)
    """Lower bound 1 - low, for tokens with a negative regularised advantage."""
    high: float = Field(0.28, ge=0)
    """Upper bound 1 + high, for tokens with a positive regularised advantage."""
    c: float = Field(10.0, gt=1)
    """Dual-clip bound: tokens with a negative regularised advantage and w >= c get no gradient."""

    @model_validator(mode="after")
    def _cut_off_lies_beyond_the_upper_bound(self) -> ClipSettings:
        if self.c <= 1 + self.high:
            raise ValueError(f"c ({self.c}) must be greater than 1 + high ({1 + self.high})")
        return self


class RPGSettings(Section):
    """KL-regularised policy gradient (arXiv 2505.17508)."""

    type: Literal["rpg"] = "rpg"
    """The loss."""
    divergence: Literal["fkl", "ufkl", "rkl", "urkl"] = "urkl"
    """KL to the anchor (reference policy): forward, unnormalised forward, reverse, unnormalised reverse."""
    estimator: Literal["reinforce", "differentiable"] = "reinforce"
    """REINFORCE-style (detached weight times log-prob) or fully differentiable."""
    beta: float = Field(1e-4, ge=0)
    """KL coefficient."""
    clip: ClipSettings | None = ClipSettings()
    """Clipping of the ratio; null: none."""
    kl_placement: Literal["folded", "additive"] | None = None
    """folded: KL inside the clip; additive: outside. null: folded for reinforce, additive for differentiable.
    """
    ratio: Literal["token", "sequence"] = "token"
    """token: one ratio per token. sequence: one per response, exact off-policy for every divergence, but with
    a far higher variance."""


class GRPOSettings(Section):
    """GRPO (arXiv 2402.03300). Needs advantage.type grpo, and an anchor unless beta is 0."""

    type: Literal["grpo"]
    """The loss."""
    clip: ClipSettings = ClipSettings(low=0.2, high=0.2)
    """Clipping of the ratio."""
    beta: float = Field(1e-3, ge=0)
    """Coefficient of the additive k3 KL term."""
    corrected: bool = False
    """Weight k3 by the importance ratio: its gradient is then that of the reverse KL."""


class DAPOSettings(Section):
    """DAPO (arXiv 2503.14476): raised upper bound, no KL. Needs advantage.type grpo."""

    type: Literal["dapo"]
    """The loss."""
    clip: ClipSettings = ClipSettings()
    """Clipping of the ratio."""


class PPOSettings(Section):
    """PPO's dual-clip loss without critic and KL; also Dr.GRPO, with its advantage and aggregation."""

    type: Literal["ppo"]
    """The loss."""
    clip: ClipSettings = ClipSettings(low=0.2, high=0.2)
    """Clipping of the ratio."""


class ReinforcePlusPlusSettings(Section):
    """REINFORCE++ as in the scripts of arXiv 2505.17508: additive k1, which pushes away from the anchor.

    Needs advantage.type reinforce_plus_plus or reinforce_plus_plus_baseline.
    """

    type: Literal["reinforce_plus_plus"]
    """The loss."""
    clip: ClipSettings = ClipSettings()
    """Clipping of the ratio."""
    beta: float = Field(1e-4, ge=0)
    """Coefficient of the additive k1 KL term."""


class CISPOSettings(Section):
    """CISPO (arXiv 2506.13585): clamped and detached ratio; every token keeps its gradient.

    Needs advantage.type grpo.
    """

    type: Literal["cispo"]
    """The loss."""
    low: float = Field(1.0, ge=0, le=1)
    """The ratio is at least 1 - low."""
    high: float = Field(0.28, ge=0)
    """The ratio is at most 1 + high."""


class GSPOSettings(Section):
    """GSPO (arXiv 2507.18071): one length-normalised ratio per sequence.

    Needs advantage.type grpo and aggregation.type sequence_mean.
    """

    type: Literal["gspo"]
    """The loss."""
    low: float = Field(3e-4, ge=0, lt=1)
    """Lower bound of the sequence's ratio is 1 - low."""
    high: float = Field(4e-4, ge=0)
    """Upper bound of the sequence's ratio is 1 + high."""


ObjectiveSettings = Annotated[
    Annotated[RPGSettings, Tag("rpg")]
    | Annotated[GRPOSettings, Tag("grpo")]
    | Annotated[DAPOSettings, Tag("dapo")]
    | Annotated[PPOSettings, Tag("ppo")]
    | Annotated[ReinforcePlusPlusSettings, Tag("reinforce_plus_plus")]
    | Annotated[CISPOSettings, Tag("cispo")]
    | Annotated[GSPOSettings, Tag("gspo")]
    | Annotated[ImportedSettings, Tag(IMPORTED)],
    Discriminator(lambda value: tag_of(value, "rpg")),
]
"""One of the losses, chosen by ``type``, or a class of your own; the default is rpg."""


class AdvantageSettings(Section):
    """How rewards become advantages."""

    type: Literal[
        "rpg", "grpo", "leave_one_out", "batch_mean", "reinforce_plus_plus", "reinforce_plus_plus_baseline"
    ] = "rpg"
    """rpg: reward minus group mean, not divided by the standard deviation; the others: docs/objectives.md."""


AnyAdvantageSettings = Annotated[
    Annotated[AdvantageSettings, Tag("rpg")] | Annotated[ImportedSettings, Tag(IMPORTED)],
    Discriminator(lambda value: IMPORTED if tag_of(value, "rpg") == IMPORTED else "rpg"),
]
"""An advantage chosen by ``type``, or a function of your own."""


class CorrectionSettings(Section):
    """Importance-sampling factor exp(old - behaviour) on each token's loss: corrects stale rollouts and the
    engine/trainer mismatch.
    """

    type: Literal["truncate", "icepop"]
    """truncate: at most ``high``; icepop: 0 outside [low, high]."""
    level: Literal["token", "sequence"] = "token"
    """One ratio per token, or the product over the sequence."""
    low: float = Field(0.5, ge=0, lt=1)
    """Lower bound (icepop)."""
    high: float = Field(2.0, gt=1)
    """Upper bound."""


class AggregationSettings(Section):
    """How token losses become the loss of a mini-batch."""

    type: Literal["token_mean", "sequence_mean", "constant"] = "token_mean"
    """token_mean: mean over all tokens; sequence_mean: mean over sequences of their token means; constant:
    sum of a sequence over a constant (Dr.GRPO)."""
    constant: int | None = Field(None, ge=1)
    """Divisor of type constant; null: rollout.max_response_tokens."""


class AnchorSettings(Section):
    """Reference policy of the KL term. All types but ``old`` are held in host memory and swapped in."""

    type: Literal["old", "fixed", "every", "kl_trigger"] = "old"
    """old: the policy at the start of the step, as in the paper; fixed: the initial policy; every: updated to
    the policy every ``updates`` optimizer updates; kl_trigger: updated when the KL to it exceeds kappa."""
    updates: int = Field(16, ge=1)
    """every: optimizer updates between anchor updates, checked after each step."""
    kappa: float = Field(0.01, gt=0)
    """kl_trigger: the anchor is updated when the moving average of the token KL (nats) exceeds this."""
    decay: float = Field(0.9, ge=0, lt=1)
    """kl_trigger: decay of the moving average, per step."""


class TrainingSettings(Section):
    """Number of steps, and how the batch of a step is split."""

    steps: int = Field(400, ge=1)
    """Rollout-and-update steps."""
    minibatches: int = Field(16, ge=1)
    """Optimizer updates per step; the prompts of the step are split evenly over them."""
    tokens_per_microbatch: int = Field(8192, ge=1)
    """Token budget of one packed micro-batch of a data-parallel replica, shared by its context-parallel
    ranks. A longer sequence gets a micro-batch of its own."""
    mask_truncated: bool = False
    """Mask out the tokens of truncated responses in the loss. Their rewards still count in the advantages of
    their groups."""
    logprob_chunk: int = Field(1024, ge=1)
    """Tokens whose full-vocabulary logits are in memory at a time."""


class GuardSettings(Section):
    """Checks that stop a run whose numbers are wrong."""

    mismatch: Literal["stop", "warn", "off"] = "stop"
    """What to do when engine and trainer log-probs of tokens sampled by the current weights differ by more
    than the bounds below."""
    mismatch_max: float | None = Field(None, gt=0)
    """Maximum |log-prob difference| of a token, in nats; null: 1e-3 in float32, no bound in bfloat16."""
    mismatch_mean: float | None = Field(None, gt=0)
    """Maximum mean |log-prob difference|, in nats; null: 1e-4 in float32, 0.05 in bfloat16."""
    probe_prompts: int = Field(16, ge=1)
    """With rollout.ahead: prompts that every engine answers after each weight update, for the comparison
    above: a batch may have no token of the current weights."""
    probe_tokens: int = Field(8, ge=1)
    """Maximum tokens of an answer to one of these prompts."""
    engine_ratio: float | None = Field(8.0, gt=1)
    """Maximum of an engine's mean difference on these answers, relative to the median of the other engines',
    which answer the same prompts. A difference below a fiftieth of mismatch_mean passes. null: no bound."""
    uncorrected: bool = False
    """Allow rollout.ahead without ``correction``: the gradient is then biased by the age of the rollouts."""
    skipped_updates: int = Field(5, ge=1)
    """Abort after this many consecutive updates with non-finite gradients. Each such update is skipped:
    weights and optimizer state stay unchanged."""

    @field_validator("mismatch", mode="before")
    @classmethod
    def _yaml_reads_off_as_false(cls, value: Any) -> Any:
        return "off" if value is False else value

    @model_validator(mode="after")
    def _thresholds_need_a_guard(self) -> GuardSettings:
        if self.mismatch == "off" and (self.mismatch_max is not None or self.mismatch_mean is not None):
            raise ValueError("a threshold is set, but guards.mismatch is off; remove one of the two")
        return self

    def problems_of_correction(self, ahead: int, *, corrected: bool) -> Iterator[str]:
        """What is wrong with ``uncorrected`` for ``rollout.ahead``, with a correction or without."""
        if ahead and not corrected and not self.uncorrected:
            yield (
                "rollout.ahead needs a correction, since older weights sample the responses: set "
                "correction.type to truncate or icepop, or guards.uncorrected to true"
            )
        if self.uncorrected and (corrected or not ahead):
            why = "correction is set" if ahead else "rollout.ahead is 0"
            yield f"guards.uncorrected has no effect: {why}; remove it"

    def engine_differs(self, mean: float, ratio: float, dtype: str) -> bool:
        """Whether an engine's mean on probes, ``ratio`` times that of the others, is beyond engine_ratio."""
        small = self.thresholds(dtype)[1] / 50
        return self.engine_ratio is not None and mean > small and ratio > self.engine_ratio

    def thresholds(self, dtype: str) -> tuple[float, float]:
        """(max, mean) bounds in nats for a dtype."""
        largest, mean = {"float32": (1e-3, 1e-4)}.get(dtype, (float("inf"), 0.05))
        return self.mismatch_max or largest, self.mismatch_mean or mean
