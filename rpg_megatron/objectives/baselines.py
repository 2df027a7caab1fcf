"""Baseline losses for RPG, each as published by its authors or as in the scripts of arXiv 2505.17508.

All take log-probs (nats) and advantages of the same shape, one value per token, and return the unreduced loss
of each token. Advantage and aggregation of a method are configured separately: see docs/objectives.md.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from rpg_megatron.objectives.clip import Clip, dual_bounds, dual_clip_loss
from rpg_megatron.objectives.divergences import unnormalised_kl
from rpg_megatron.objectives.interface import LossOutput
from rpg_megatron.objectives.ratios import check_shapes_and_finite, clamp_log_ratio, sequence_sum
from rpg_megatron.objectives.token_metrics import ratio_metrics

KLEstimator = Literal["k1", "k3", "k3_weighted"]


def ppo_loss(
    logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    *,
    clip: Clip | None = Clip(),  # noqa: B008 (frozen dataclass)
    beta: float = 0.0,
    kl: KLEstimator | None = None,
    anchor_logp: Tensor | None = None,
) -> LossOutput:
    """PPO's dual-clip loss, with or without an additive KL term: also GRPO, DAPO and REINFORCE++.

    Shapes: all the same. ``kl``: ``k1`` and ``k3`` are added to samples of the old policy without a ratio, as
    the scripted REINFORCE++ and GRPO do. Neither has the gradient of the reverse KL: k3's, on-policy, is that
    of the forward KL, and k1's is minus that of KL(old || p). ``k3_weighted`` carries the ratio,
    differentiably, and is exact.
    Raises ValueError as ``rpg_loss`` does.
    Source: PPO arXiv 1707.06347, dual clip arXiv 1912.09729; GRPO arXiv 2402.03300; DAPO arXiv 2503.14476;
    REINFORCE++ arXiv 2501.03262, its k1 term: scripts released with arXiv 2505.17508, whose section 2.2
    compares the KL terms.
    """
    anchor = old_logp if anchor_logp is None else anchor_logp
    check_shapes_and_finite(logp, old_logp=old_logp, advantages=advantages, anchor_logp=anchor)
    advantage = advantages.detach()
    log_w, clamped_w = clamp_log_ratio(logp - old_logp.detach())
    log_u, clamped_u = clamp_log_ratio(logp - anchor.detach())
    w, v = log_w.exp(), clamp_log_ratio(anchor.detach() - old_logp.detach())[0].exp()
    if clip is None:
        loss = -w * advantage
    elif clip.kind == "dual":
        loss = dual_clip_loss(w, advantage, clip)
    else:
        loss = -clip.clamp(w).detach() * (logp - logp.detach() + 1) * advantage
    if kl == "k1":
        loss = loss + beta * log_u
    elif kl == "k3":
        loss = loss + beta * (torch.exp(-log_u) - 1 + log_u)
    elif kl == "k3_weighted":
        loss = loss + beta * unnormalised_kl(w, log_u, v)
    return LossOutput(loss, _metrics(w, log_u, v, advantage, clip, clamped_w | clamped_u))


def cispo_loss(
    logp: Tensor, old_logp: Tensor, advantages: Tensor, *, low: float = 1.0, high: float = 0.28
) -> LossOutput:
    """CISPO: the ratio is clamped to [1 - low, 1 + high] and detached; every token keeps its gradient.

    Shapes and errors: as ``ppo_loss``; low 1 means no lower bound. Source: arXiv 2506.13585.
    """
    check_shapes_and_finite(logp, old_logp=old_logp, advantages=advantages)
    advantage = advantages.detach()
    log_w, clamped = clamp_log_ratio(logp - old_logp.detach())
    w = log_w.exp().detach()
    loss = -w.clamp(1 - low, 1 + high) * advantage * logp
    metrics = _metrics(w, log_w, torch.ones_like(w), advantage, None, clamped)
    metrics |= {"clip_high": (w > 1 + high).to(w.dtype), "clip_low": (w < 1 - low).to(w.dtype)}
    return LossOutput(loss, metrics)


def gspo_loss(
    logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    sequences: Tensor,
    *,
    low: float = 3e-4,
    high: float = 4e-4,
    sequence_count: int | None = None,
) -> LossOutput:
    """GSPO: one ratio per sequence, the geometric mean over its tokens, clipped as in PPO.

    Shapes: all [tokens]; ``sequences`` integer labels, with all tokens of each sequence present;
    ``sequence_count``: as in ``sequence_lengths``. Every token has the loss of its sequence, so aggregate by
    sequence mean. Errors: as ``ppo_loss``. Source: arXiv 2507.18071.
    """
    check_shapes_and_finite(logp, old_logp=old_logp, advantages=advantages)
    advantage = advantages.detach()
    total, count = sequence_sum(logp - old_logp.detach(), sequences, sequence_count)
    log_s, clamped = clamp_log_ratio(total / count)
    s = log_s.exp()
    clip = Clip(low=low, high=high, c=float("inf"))
    loss = torch.maximum(-s * advantage, -clip.clamp(s) * advantage)
    return LossOutput(loss, _metrics(s, log_s, torch.ones_like(s), advantage, clip, clamped))


def _metrics(
    w: Tensor, log_u: Tensor, v: Tensor, advantage: Tensor, clip: Clip | None, clamped: Tensor
) -> dict[str, Tensor]:
    none = torch.zeros_like(w, dtype=torch.bool)
    if clip is None:
        bounds = none, none, none
    elif clip.kind == "dual":
        bounds = dual_bounds(advantage, w, clip)
    else:
        bounds = w > 1 + clip.high, w < 1 - clip.low, none
    return ratio_metrics(w, log_u, v, bounds, clamped)
