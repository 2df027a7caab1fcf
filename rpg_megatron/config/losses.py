"""Built-in losses. Each is a settings section, and its instance is called like a user's own loss.

All subclasses of ``LossSettings`` in this file are available; there is no list to extend. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar, Literal, override

from pydantic import Field

from rpg_megatron.config.base import ImportedSettings, Section, tagged_union

if TYPE_CHECKING:
    from torch import Tensor

    from rpg_megatron.objectives import Clip, LossOutput, ResponseTokens
    from rpg_megatron.objectives.baselines import KLEstimator


class ClipSettings(Section, affects="training"):
    """RPG-style clip of the ratio w = pi / pi_old."""

    kind: Literal["dual", "truncate"] = "dual"
    """dual: tokens outside the bounds get no gradient; truncate: they keep it, with the clamped ratio."""
    low: float = Field(0.2, ge=0, lt=1)
    """Lower bound 1 - low, for tokens with a negative regularised advantage."""
    high: float = Field(0.28, ge=0)
    """Upper bound 1 + high, for tokens with a positive regularised advantage."""
    c: float = Field(10.0, gt=1)
    """Dual-clip bound: tokens with a negative regularised advantage and w >= c get no gradient."""

    def _problems(self) -> Iterator[str]:
        if self.c <= 1 + self.high:
            yield f"c ({self.c}) must be greater than 1 + high ({1 + self.high})"

    def build(self) -> Clip:
        """The bounds, for the functions in ``objectives``."""
        from rpg_megatron.objectives import Clip

        return Clip(kind=self.kind, low=self.low, high=self.high, c=self.c)


class LossSettings(Section, affects="training"):
    """A loss: its settings, and what its published algorithm requires in other sections."""

    has_kl: ClassVar[bool] = False
    """Whether the loss has a KL term to the anchor."""
    advantages: ClassVar[tuple[str, ...]] = ()
    """Values of ``advantage.type`` that the published algorithm allows, the usual one first; empty: any."""
    aggregation: ClassVar[str | None] = None
    """The only value of ``aggregation.type`` that the loss supports; None: any."""

    type: str
    """The loss."""
    entropy_bonus: float = Field(0.0, ge=0)
    """Coefficient of the policy's entropy (nats) at each response token, which is added to the objective and
    delays entropy collapse. The entropy is that of the full distribution at rollout.temperature. 0: off."""

    def __call__(self, logp: Tensor, tokens: ResponseTokens) -> LossOutput:
        """The loss of each response token; see docs/extend.md."""
        raise NotImplementedError


class RPGSettings(LossSettings):
    """KL-regularised policy gradient (arXiv 2505.17508)."""

    has_kl: ClassVar[bool] = True

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

    @override
    def __call__(self, logp: Tensor, tokens: ResponseTokens) -> LossOutput:
        from rpg_megatron.objectives import rpg_loss

        return rpg_loss(
            logp,
            tokens.old,
            tokens.advantages,
            divergence=self.divergence,
            estimator=self.estimator,
            beta=self.beta,
            clip=self.clip.build() if self.clip else None,
            kl_placement=self.kl_placement,
            anchor_logp=tokens.anchor,
            sequences=tokens.sequences if self.ratio == "sequence" else None,
            sequence_count=tokens.sequence_count,
        )


class ClippedLoss(Section, affects="training"):
    """The clipped policy gradient that several published algorithms have, some with an additive KL term."""

    clip: ClipSettings = ClipSettings()
    """Clipping of the ratio."""

    def _kl_term(self) -> tuple[KLEstimator | None, float]:
        """Estimator and coefficient."""
        return None, 0.0

    def __call__(self, logp: Tensor, tokens: ResponseTokens) -> LossOutput:
        """The loss of each response token."""
        from rpg_megatron.objectives import ppo_loss

        clip, (kl, beta), old = self.clip.build(), self._kl_term(), tokens.old
        return ppo_loss(logp, old, tokens.advantages, clip=clip, beta=beta, kl=kl, anchor_logp=tokens.anchor)


class GRPOSettings(ClippedLoss, LossSettings):
    """GRPO (arXiv 2402.03300). Needs advantage.type grpo, and an anchor unless beta is 0."""

    has_kl: ClassVar[bool] = True
    advantages: ClassVar[tuple[str, ...]] = ("grpo",)

    type: Literal["grpo"]
    """The loss."""
    clip: ClipSettings = ClipSettings(low=0.2, high=0.2)
    """Clipping of the ratio."""
    beta: float = Field(1e-3, ge=0)
    """Coefficient of the additive k3 KL term."""
    corrected: bool = False
    """Weight k3 by the importance ratio: its gradient is then that of the reverse KL."""

    @override
    def _kl_term(self) -> tuple[KLEstimator | None, float]:
        return "k3_weighted" if self.corrected else "k3", self.beta


class DAPOSettings(ClippedLoss, LossSettings):
    """DAPO (arXiv 2503.14476): raised upper bound, no KL. Needs advantage.type grpo."""

    advantages: ClassVar[tuple[str, ...]] = ("grpo",)

    type: Literal["dapo"]
    """The loss."""


class PPOSettings(ClippedLoss, LossSettings):
    """PPO's dual-clip loss without critic and KL; also Dr.GRPO, with its advantage and aggregation."""

    type: Literal["ppo"]
    """The loss."""
    clip: ClipSettings = ClipSettings(low=0.2, high=0.2)
    """Clipping of the ratio."""


class ReinforcePlusPlusSettings(ClippedLoss, LossSettings):
    """REINFORCE++ as in the scripts of arXiv 2505.17508: additive k1, which pushes away from the anchor.

    Needs advantage.type reinforce_plus_plus or reinforce_plus_plus_baseline.
    """

    has_kl: ClassVar[bool] = True
    advantages: ClassVar[tuple[str, ...]] = ("reinforce_plus_plus", "reinforce_plus_plus_baseline")

    type: Literal["reinforce_plus_plus"]
    """The loss."""
    beta: float = Field(1e-4, ge=0)
    """Coefficient of the additive k1 KL term."""

    @override
    def _kl_term(self) -> tuple[KLEstimator | None, float]:
        return "k1", self.beta


class CISPOSettings(LossSettings):
    """CISPO (arXiv 2506.13585): clamped and detached ratio; every token keeps its gradient.

    Needs advantage.type grpo.
    """

    advantages: ClassVar[tuple[str, ...]] = ("grpo",)

    type: Literal["cispo"]
    """The loss."""
    low: float = Field(1.0, ge=0, le=1)
    """The ratio is at least 1 - low."""
    high: float = Field(0.28, ge=0)
    """The ratio is at most 1 + high."""

    @override
    def __call__(self, logp: Tensor, tokens: ResponseTokens) -> LossOutput:
        from rpg_megatron.objectives import cispo_loss

        return cispo_loss(logp, tokens.old, tokens.advantages, low=self.low, high=self.high)


class GSPOSettings(LossSettings):
    """GSPO (arXiv 2507.18071): one length-normalised ratio per sequence.

    Needs advantage.type grpo and aggregation.type sequence_mean.
    """

    advantages: ClassVar[tuple[str, ...]] = ("grpo",)
    aggregation: ClassVar[str | None] = "sequence_mean"

    type: Literal["gspo"]
    """The loss."""
    low: float = Field(3e-4, ge=0, lt=1)
    """Lower bound of the sequence's ratio is 1 - low."""
    high: float = Field(4e-4, ge=0)
    """Upper bound of the sequence's ratio is 1 + high."""

    @override
    def __call__(self, logp: Tensor, tokens: ResponseTokens) -> LossOutput:
        from rpg_megatron.objectives import gspo_loss

        return gspo_loss(
            logp,
            tokens.old,
            tokens.advantages,
            tokens.sequences,
            low=self.low,
            high=self.high,
            sequence_count=tokens.sequence_count,
        )


class DistilSettings(LossSettings):
    """On-policy distillation: the policy samples, and learns from a teacher (section ``teacher``)."""

    has_kl: ClassVar[bool] = True

    type: Literal["distil"]
    """The loss."""
    divergence: Literal["rkl", "fkl"] = "rkl"
    """rkl: KL(policy || teacher); fkl: KL(teacher || policy)."""
    form: Literal["token", "sequence", "full", "top_k"] = "token"
    """token: log-ratio of each sampled token as its reward. sequence: with those of all later tokens, the
    gradient of the divergence of whole responses, with a higher variance (rkl only). full: exact over the
    vocabulary at each sampled token; needs teacher.path. top_k: over the teacher's likeliest tokens and all
    others as one; needs teacher.url and teacher.top_k."""
    reward: float = Field(0.0, ge=0)
    """Weight of the advantage, beside the divergence. 0: rewards are measured and train nothing."""
    clip: ClipSettings | None = ClipSettings()
    """Clipping of the ratio, in sampled forms and of the reward; null: none."""

    def _problems(self) -> Iterator[str]:
        if self.form == "sequence" and self.divergence != "rkl":
            yield "form sequence is for divergence rkl; use form token or full"
        if self.form in ("full", "top_k") and self.entropy_bonus:
            yield f"entropy_bonus excludes form {self.form}; set it to 0, or use form token"

    @override
    def __call__(self, logp: Tensor, tokens: ResponseTokens) -> LossOutput:
        from rpg_megatron.objectives import full_divergence_loss, sampled_divergence_loss

        advantages, clip = self.reward * tokens.advantages, self.clip.build() if self.clip else None
        if self.form in ("full", "top_k"):
            assert tokens.divergence is not None
            return full_divergence_loss(logp, tokens.divergence, tokens.old, advantages, clip=clip)
        return sampled_divergence_loss(
            logp,
            tokens.old,
            tokens.anchor,
            advantages,
            divergence=self.divergence,
            clip=clip,
            sequences=tokens.sequences if self.form == "sequence" else None,
        )


class ImportedLossSettings(ImportedSettings):
    """A loss of your own, by import path. The other keys are its settings; docs/extend.md."""

    has_kl: ClassVar[bool] = True
    """Unknown for user code; assume it has a KL term."""

    entropy_bonus: float = Field(0.0, ge=0)
    """Coefficient of the entropy (nats) that is added to the objective, as for built-in losses; not passed to
    the loss."""


if TYPE_CHECKING:
    ObjectiveSettings = LossSettings | ImportedLossSettings
else:
    ObjectiveSettings = tagged_union(LossSettings, ImportedLossSettings, default="rpg")
"""A loss selected by ``type``, or a class of your own; the default is rpg."""
