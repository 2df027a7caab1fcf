"""Regularised policy gradient losses (arXiv 2505.17508), as pure functions of log-probs."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from rpg_megatron.objectives.clip import Clip, dual_bounds, dual_clip_loss
from rpg_megatron.objectives.divergences import (
    DIVERGENCES,
    Divergence,
    kl_component,
    kl_penalty,
)
from rpg_megatron.objectives.interface import LossOutput
from rpg_megatron.objectives.ratios import check_shapes_and_finite, clamp_log_ratio, sequence_sum
from rpg_megatron.objectives.token_metrics import ratio_metrics


def rpg_loss(
    logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    *,
    divergence: Divergence = "urkl",
    estimator: Literal["reinforce", "differentiable"] = "reinforce",
    beta: float = 1e-4,
    clip: Clip | None = Clip(),  # noqa: B008 (frozen dataclass)
    kl_placement: Literal["folded", "additive"] | None = None,
    anchor_logp: Tensor | None = None,
    sequences: Tensor | None = None,
    sequence_count: int | None = None,
) -> LossOutput:
    """Loss of each token, to be minimised; its mean over valid tokens is the surrogate objective.

    Shapes: ``logp`` (has the gradient), ``old_logp``, ``anchor_logp`` (nats) and ``advantages`` have the same
    shape, any number of dimensions; float32 or float64. Nothing is masked or reduced here: pass valid tokens
    only, or mask the result.

    ``folded`` adds the KL component to the weight before clipping (section 3.3, algorithm 2); ``additive``
    clips only the reward part. None: folded for reinforce, additive for differentiable, as in the paper's
    algorithm 2 and the released code. ``anchor_logp`` None: the anchor is the old policy.

    ``sequences`` (integer labels; all inputs are then 1-d): one ratio per sequence, the product over its
    tokens, instead of one per token. This is exact off-policy for all divergences. The token-level loss is
    exact only at the old policy (reverse divergences), or for a fixed distribution of prefixes; the variance
    of the sequence-level loss grows with the length. The losses of a sequence's tokens sum to the loss of the
    sequence, so the mean over tokens is the sum over sequences divided by the token count.
    ``sequence_count``: as in ``sequence_lengths``.

    The regularised advantage of a folded differentiable loss is detached: with a gradient through it, as
    algorithm 1 reads literally, the KL gradient of the forward divergences would be lost.

    Raises ValueError if shapes differ or a log-prob is not finite; the message names the token.
    Source: arXiv 2505.17508, tables 1, 2 and 4; section 3.3; algorithms 1 and 2.
    """
    if divergence not in DIVERGENCES:
        raise ValueError(f"divergence {divergence!r} is not known; use one of {', '.join(DIVERGENCES)}")
    if estimator not in ("reinforce", "differentiable"):
        raise ValueError(f"estimator {estimator!r} is not known; use reinforce or differentiable")
    anchor = old_logp if anchor_logp is None else anchor_logp
    check_shapes_and_finite(logp, old_logp=old_logp, advantages=advantages, anchor_logp=anchor)
    placement = kl_placement or ("folded" if estimator == "reinforce" else "additive")
    old, anchor, advantage = old_logp.detach(), anchor.detach(), advantages.detach()

    ratios = [logp - old, logp - anchor, anchor - old]
    share: Tensor | float = 1.0  # of the loss of a token's sequence
    if sequences is not None:
        sums = [sequence_sum(x, sequences, sequence_count) for x in ratios]
        ratios, share = [total for total, _ in sums], 1.0 / sums[0][1]
    (log_w, clamped_w), (log_u, clamped_u), (log_v, clamped_v) = (clamp_log_ratio(x) for x in ratios)
    w, v = log_w.exp(), log_v.exp()

    # The weight of grad log p: w A + C when folded, w A when the KL is outside the clip.
    with torch.no_grad():
        if clip is not None and clip.kind == "truncate":
            w_used = clip.clamp(w)
            log_u_used = w_used.log() - log_v
        else:
            w_used, log_u_used = w, log_u
        weight = w_used * advantage
        if placement == "folded":
            weight = weight + kl_component(divergence, w_used, log_u_used, v, beta)
        if clip is None:
            high = low = cut = torch.zeros_like(w, dtype=torch.bool)
        elif clip.kind == "dual":
            high, low, cut = dual_bounds(weight, w, clip)
        else:
            high, low, cut = w > 1 + clip.high, w < 1 - clip.low, torch.zeros_like(w, dtype=torch.bool)
        kept = (
            torch.where(high | low | cut, 0.0, weight) if clip is not None and clip.kind == "dual" else weight
        )

    if estimator == "reinforce":
        loss = -kept * logp
        if placement == "additive":
            loss = loss - kl_component(divergence, w, log_u, v, beta).detach() * logp
    else:
        regularised = (weight / w_used).detach()
        if clip is None:
            loss = -w * regularised
        elif clip.kind == "dual":
            loss = dual_clip_loss(w, regularised, clip)
        else:
            # The value of the clamped ratio with the gradient of log p, so that a truncated token keeps its
            # gradient.
            score = logp if sequences is None else sequence_sum(logp, sequences, sequence_count)[0]
            loss = -w_used * (score - score.detach() + 1) * regularised
        if placement == "additive":
            loss = loss + kl_penalty(divergence, w, log_u, v, beta)
        loss = loss * share

    clamped = clamped_w | clamped_u | clamped_v
    return LossOutput(loss, ratio_metrics(w, log_u, v, (high, low, cut), clamped))
