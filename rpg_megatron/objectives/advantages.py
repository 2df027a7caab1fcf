"""From rewards to advantages."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

AdvantageKind = Literal[
    "rpg", "grpo", "leave_one_out", "batch_mean", "reinforce_plus_plus", "reinforce_plus_plus_baseline"
]


def group_advantages(
    rewards: Tensor, groups: Tensor, *, kind: AdvantageKind = "rpg", lengths: Tensor | None = None
) -> Tensor:
    """Advantage of each response; every token of the response gets it.

    Shapes: rewards [N] float, groups [N] integer labels of the prompts (any values), lengths [N] response
    tokens (only the whitened kinds need them) -> [N], dtype of rewards.

    - ``rpg``: reward minus group mean, no division by the standard deviation.
    - ``grpo``: the same, over (unbiased group standard deviation + 1e-6).
    - ``leave_one_out``: reward minus the mean of the others in the group.
    - ``batch_mean``: reward minus the batch mean.
    - ``reinforce_plus_plus``: the reward, whitened over all response tokens of the batch.
    - ``reinforce_plus_plus_baseline``: reward minus group mean, whitened likewise.

    A group of one has nothing to compare with: its baseline is 0 (and its deviation 1), so the reward counts
    as it is. A group of equal rewards has advantage exactly 0 with ``rpg``, ``grpo`` and ``leave_one_out``,
    which compare within a group only.
    Raises ValueError if shapes differ or lengths are missing.
    Source: arXiv 2505.17508's released code (its estimator ``rpg`` and its baselines); leave-one-out arXiv
    2402.14740.
    """
    if rewards.dim() != 1 or rewards.shape != groups.shape:
        raise ValueError(
            f"rewards {tuple(rewards.shape)} and groups {tuple(groups.shape)} must be alike and 1-d"
        )
    if kind == "batch_mean":
        return rewards - rewards.mean()
    if kind == "reinforce_plus_plus":
        return _whiten(rewards, lengths)
    centred, member, count = _centre(rewards, groups)
    if kind == "rpg":
        return centred
    if kind == "reinforce_plus_plus_baseline":
        return _whiten(centred, lengths)
    others = (count - 1).clamp(min=1)[member]
    if kind == "leave_one_out":
        return centred * count[member] / others
    if kind == "grpo":
        variance = torch.zeros_like(count).scatter_add_(0, member, centred.square())[member] / others
        deviation = torch.where(count[member] > 1, variance.sqrt(), 1.0)
        return centred / (deviation + 1e-6)
    raise ValueError(f"advantage kind {kind!r} is not known")


def _centre(rewards: Tensor, groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rewards minus their group's mean; each response's group number; each group's size."""
    _, member = torch.unique(groups, return_inverse=True)
    count = torch.bincount(member).to(rewards.dtype)
    # Differences to one of the group's rewards are averaged: equal rewards then give 0, not a rounding error.
    some = torch.empty_like(count).scatter_(0, member, rewards)[member]
    shifted = rewards - some
    mean = torch.zeros_like(count).scatter_add_(0, member, shifted) / count
    centred = torch.where(count[member] > 1, shifted - mean[member], rewards)
    return centred, member, count


def _whiten(values: Tensor, lengths: Tensor | None) -> Tensor:
    """Zero mean and unit variance over tokens, each response's value counted once for each of its tokens."""
    if lengths is None or lengths.shape != values.shape:
        raise ValueError("whitened advantages need lengths, one for each response")
    weight = lengths.to(values.dtype)
    tokens = weight.sum()
    mean = (values * weight).sum() / tokens
    variance = ((values - mean).square() * weight).sum() / (tokens - 1).clamp(min=1)
    return (values - mean) * torch.rsqrt(variance + 1e-8)
