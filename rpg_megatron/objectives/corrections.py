"""Factors for tokens that other weights, or the same weights in another engine, sampled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from rpg_megatron.objectives.ratios import check_shapes_and_finite, clamp_log_ratio, sequence_sum


@dataclass(frozen=True)
class Correction:
    """``factor``: what each token's loss is multiplied by. ``kept``: bool, False where a mask rejected the
    token. ``metrics``. All have the shape of the log-probs, without gradient.
    """

    factor: Tensor
    kept: Tensor
    metrics: dict[str, Tensor]


def rollout_correction(
    old_logp: Tensor,
    behaviour_logp: Tensor,
    sequences: Tensor,
    *,
    kind: Literal["truncate", "icepop", "geometric"],
    level: Literal["token", "sequence"] = "token",
    low: float = 0.5,
    high: float = 2.0,
    token_high: float | None = None,
    sequence_count: int | None = None,
    checks: bool = True,
) -> Correction:
    """Importance factor exp(old - behaviour) of each token, or of its whole sequence, kept within bounds.

    Shapes: all [tokens]; log-probs in nats, ``sequences`` integer labels. ``truncate`` (truncated importance
    sampling): the ratio, at most ``high``. ``icepop``: the ratio where it lies in [low, high], 0 elsewhere.
    At sequence level the ratio is the product over the sequence's tokens. ``geometric``: the ratio is their
    geometric mean, ``level`` is ignored, and a sequence outside [low, high] gets 0; the tokens of the others
    get 1, or their own ratio, at most ``token_high``. ``sequence_count``: as in ``sequence_lengths``.
    Metrics: ``correction_ratio`` (before bounds) and ``correction_hit`` (1 where a bound acted).
    checks: False if the log-probs have been checked, for which the host waits on a GPU.
    Raises ValueError as ``rpg_loss`` does, or if the bounds are not 0 <= low < 1 < high.
    Sources: truncated importance sampling as in arXiv 1802.01561; IcePop as its authors describe it (token
    masking); the geometric mean as the ratio of a sequence: arXiv 2507.18071, as a mask: verl.
    """
    if not 0 <= low < 1 < high:
        raise ValueError(f"correction bounds need 0 <= low < 1 < high; got low {low}, high {high}")
    if checks:
        check_shapes_and_finite(old_logp, behaviour_logp=behaviour_logp)
    with torch.no_grad():
        gap = old_logp - behaviour_logp
        token_ratio = clamp_log_ratio(gap)[0].exp()
        if kind == "geometric":
            total, length = sequence_sum(gap, sequences, sequence_count)
            gap = total / length
        elif level == "sequence":
            gap, _ = sequence_sum(gap, sequences, sequence_count)
        ratio = clamp_log_ratio(gap)[0].exp()
        if kind == "truncate":
            hit = ratio > high
            factor, kept = ratio.clamp(max=high), torch.ones_like(hit)
        else:
            hit = (ratio < low) | (ratio > high)
            kept = ~hit
            if kind == "geometric":
                ones = torch.ones_like(token_ratio)
                factor = kept * (ones if token_high is None else token_ratio.clamp(max=token_high))
            else:
                factor = torch.where(hit, 0.0, ratio)
    return Correction(factor, kept, {"correction_ratio": ratio, "correction_hit": hit.to(ratio.dtype)})
