"""Build the loss function and its aggregation from the settings.

The only place where names in a config are mapped to functions of ``objectives``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor

from rpg_megatron.config import Settings, UserError
from rpg_megatron.config.base import ImportedSettings
from rpg_megatron.config.objective import ClipSettings, CorrectionSettings, RPGSettings
from rpg_megatron.objectives import (
    Clip,
    Correction,
    LossOutput,
    aggregate,
    cispo_loss,
    dapo_loss,
    grpo_loss,
    gspo_loss,
    ppo_loss,
    reinforce_pp_loss,
    rollout_correction,
    rpg_loss,
)
from rpg_megatron.policy.microbatch import ResponseTokens
from rpg_megatron.policy.policy import Aggregator, TokenLoss
from rpg_megatron.system.own_code import Wanted, load_own


def build_loss(settings: Settings) -> TokenLoss:
    """The configured loss per response token, times the rollout correction if one is configured."""
    loss = _objective(settings)
    correction = settings.correction
    return loss if correction is None else _corrected(loss, correction)


def build_aggregator(settings: Settings) -> Aggregator:
    """The configured aggregation of per-token losses into the loss of a mini-batch."""
    aggregation = settings.aggregation
    constant = float(aggregation.constant or settings.rollout.max_response_tokens)

    def aggregator(
        per_token: Tensor, sequences: Tensor, sequence_count: int | None = None
    ) -> tuple[Tensor, Tensor]:
        return aggregate(
            per_token, sequences, kind=aggregation.type, constant=constant, sequence_count=sequence_count
        )

    return aggregator


def _objective(settings: Settings) -> TokenLoss:
    o = settings.objective
    anchor_is_old = settings.anchor.type == "old"

    def anchor(t: ResponseTokens) -> Tensor | None:
        return None if anchor_is_old else t.anchor

    if isinstance(o, ImportedSettings):
        return _checked(load_own(Wanted("objective", o.type, o.keywords, 0, makes=True)), settings)
    if isinstance(o, RPGSettings):
        rpg = partial(
            rpg_loss,
            divergence=o.divergence,
            estimator=o.estimator,
            beta=o.beta,
            clip=_clip(o.clip) if o.clip else None,
            kl_placement=o.kl_placement,
        )
        by_sequence = o.ratio == "sequence"
        return lambda logp, t: rpg(
            logp,
            t.old,
            t.advantages,
            anchor_logp=anchor(t),
            sequences=t.sequences if by_sequence else None,
            sequence_count=t.sequence_count,
        )
    if o.type == "grpo":
        grpo = partial(grpo_loss, clip=_clip(o.clip), beta=o.beta, corrected=o.corrected)
        return lambda logp, t: grpo(logp, t.old, t.advantages, anchor_logp=anchor(t))
    if o.type == "reinforce_plus_plus":
        reinforce = partial(reinforce_pp_loss, clip=_clip(o.clip), beta=o.beta)
        return lambda logp, t: reinforce(logp, t.old, t.advantages, anchor_logp=anchor(t))
    if o.type == "cispo":
        cispo = partial(cispo_loss, low=o.low, high=o.high)
        return lambda logp, t: cispo(logp, t.old, t.advantages)
    if o.type == "gspo":
        gspo = partial(gspo_loss, low=o.low, high=o.high)
        return lambda logp, t: gspo(logp, t.old, t.advantages, t.sequences, sequence_count=t.sequence_count)
    plain = partial(dapo_loss if o.type == "dapo" else ppo_loss, clip=_clip(o.clip))
    return lambda logp, t: plain(logp, t.old, t.advantages)


def _checked(loss: TokenLoss, settings: Settings) -> TokenLoss:
    """A loss of the user, whose results are checked."""
    name = f"objective.type {settings.objective.type}"

    def checked(logp: Tensor, tokens: ResponseTokens) -> LossOutput:
        out = loss(logp, tokens)
        if not isinstance(out, LossOutput):
            raise UserError(f"{name}: returns a {type(out).__name__}, not a LossOutput; see docs/extend.md")
        for what, values in {"per_token": out.per_token, **out.metrics}.items():
            if not isinstance(values, Tensor) or values.shape != logp.shape:
                found = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
                raise UserError(
                    f"{name}: {what} is {found}; it must be a tensor with one value per token, "
                    f"{tuple(logp.shape)} like logp"
                )
        if settings.anchor.type == "kl_trigger" and "kl" not in out.metrics:
            raise UserError(
                f"{name}: anchor.type kl_trigger needs the metric 'kl' (KL to tokens.anchor in nats); return "
                "it, or set anchor.type to another"
            )
        return out

    return checked


def _clip(settings: ClipSettings) -> Clip:
    return Clip(kind=settings.kind, low=settings.low, high=settings.high, c=settings.c)


def build_correction(settings: CorrectionSettings) -> Callable[..., Correction]:
    """``rollout_correction`` as configured: of (old, behaviour, sequences), ``sequence_count=``."""
    return partial(
        rollout_correction, kind=settings.type, level=settings.level, low=settings.low, high=settings.high
    )


def _corrected(loss: TokenLoss, settings: CorrectionSettings) -> TokenLoss:
    correct = build_correction(settings)

    def corrected(logp: Tensor, tokens: ResponseTokens) -> LossOutput:
        out = loss(logp, tokens)
        correction = correct(
            tokens.old, tokens.behaviour, tokens.sequences, sequence_count=tokens.sequence_count
        )
        return LossOutput(out.per_token * correction.factor, out.metrics | correction.metrics)

    return corrected
