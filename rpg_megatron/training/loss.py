"""Build the loss function and its aggregation from the settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from rpg_megatron.config import Settings, UserError
from rpg_megatron.config.base import ImportedSettings
from rpg_megatron.config.objective import CorrectionSettings
from rpg_megatron.objectives import Correction, LossOutput, ResponseTokens, aggregate, rollout_correction
from rpg_megatron.policy.policy import Aggregator, TokenLoss
from rpg_megatron.system.custom_code import load_section


def build_loss(settings: Settings) -> TokenLoss:
    """The configured loss of each response token, times the rollout correction, minus the entropy bonus.

    With ``sft``: -log p.
    """
    if settings.sft is not None:
        return lambda logp, tokens: LossOutput(-logp)
    loss = _objective(settings)
    if settings.correction is not None:
        loss = _corrected(loss, settings.correction)
    return _with_entropy(loss, settings.objective.entropy_bonus) if settings.objective.entropy_bonus else loss


def build_aggregator(settings: Settings) -> Aggregator:
    """The configured aggregation of per-token losses into the loss of a mini-batch."""
    aggregation = settings.aggregation
    constant = float(settings.rollout.max_response_tokens)

    correction = settings.correction
    correct = None
    if correction is not None and correction.denominator == "kept":
        correct = build_correction(correction, checks=False)  # the loss checks the log-probs

    def aggregator(per_token: Tensor, tokens: ResponseTokens) -> tuple[Tensor, Tensor]:
        return aggregate(
            per_token,
            tokens.sequences,
            kind=aggregation.type,
            constant=constant,
            sequence_count=tokens.sequence_count,
            kept=None if correct is None else correct(tokens).kept,
        )

    return aggregator


def _objective(settings: Settings) -> TokenLoss:
    section = settings.objective
    loss: TokenLoss = load_section(section, "objective", positional=0, instantiate=True)
    if isinstance(section, ImportedSettings):
        loss = _checked(loss, settings)
    if settings.anchor.type != "old" or settings.teacher is not None:
        return loss
    return lambda logp, tokens: loss(logp, tokens and replace(tokens, anchor=tokens.old))


def _checked(loss: TokenLoss, settings: Settings) -> TokenLoss:
    """A user's loss with checked results."""
    name = f"objective.type {settings.objective.type}"

    def checked(logp: Tensor, tokens: ResponseTokens) -> LossOutput:
        out = loss(logp, tokens)
        if not isinstance(out, LossOutput):
            raise UserError(f"{name}: returns a {type(out).__name__}, not a LossOutput; see docs/extend.md")
        for output, values in {"per_token": out.per_token, **out.metrics}.items():
            if not isinstance(values, Tensor) or values.shape != logp.shape:
                actual = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
                raise UserError(
                    f"{name}: {output} is {actual}; it must be a tensor with one value per token, "
                    f"{tuple(logp.shape)} like logp"
                )
        if settings.anchor.type == "kl_trigger" and "kl" not in out.metrics:
            raise UserError(
                f"{name}: anchor.type kl_trigger needs the metric 'kl' (KL to tokens.anchor in nats); return "
                "it, or set anchor.type to fixed or every"
            )
        return out

    return checked


def build_correction(
    settings: CorrectionSettings, *, checks: bool = True
) -> Callable[[ResponseTokens], Correction]:
    """``rollout_correction`` as configured. checks: as there."""

    def correct(tokens: ResponseTokens) -> Correction:
        return rollout_correction(
            tokens.old,
            tokens.behaviour,
            tokens.sequences,
            kind=settings.type,
            level=settings.level,
            low=settings.low,
            high=settings.high,
            token_high=settings.token_high,
            sequence_count=tokens.sequence_count,
            checks=checks,
        )

    return correct


def _corrected(loss: TokenLoss, settings: CorrectionSettings) -> TokenLoss:
    correct = build_correction(settings)

    def corrected(logp: Tensor, tokens: ResponseTokens) -> LossOutput:
        out = loss(logp, tokens)
        correction = correct(tokens)
        return LossOutput(out.per_token * correction.factor, out.metrics | correction.metrics)

    return corrected


def _with_entropy(loss: TokenLoss, coefficient: float) -> TokenLoss:
    """Not corrected: the entropy depends on the tokens before a token, not on the sampled token."""

    def with_entropy(logp: Tensor, tokens: ResponseTokens) -> LossOutput:
        out = loss(logp, tokens)
        assert tokens.entropy is not None, "the policy's entropy_gradient is off"
        bonus = coefficient * tokens.entropy
        return LossOutput(out.per_token - bonus, out.metrics | {"entropy_bonus": bonus.detach()})

    return with_entropy
