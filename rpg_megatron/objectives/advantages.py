"""From rewards to advantages."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor


def group_advantages(rewards: Tensor, groups: Tensor, *, kind: Literal["rpg"] = "rpg") -> Tensor:
    """Advantage of each response within the group of responses to its prompt.

    Shapes: rewards [N] float, groups [N] integer labels (any values) -> [N], dtype of rewards.
    ``rpg``: reward minus group mean, no division by the standard deviation; a group of one, or one whose
    rewards are all equal, gets exactly 0.
    Raises ValueError if the shapes differ.
    Source: estimator ``rpg`` of the code released with arXiv 2505.17508.
    """
    if rewards.dim() != 1 or rewards.shape != groups.shape:
        raise ValueError(
            f"rewards {tuple(rewards.shape)} and groups {tuple(groups.shape)} must be alike and 1-d"
        )
    if kind != "rpg":
        raise ValueError(f"advantage kind {kind!r} is not known; use rpg")
    _, member = torch.unique(groups, return_inverse=True)
    count = torch.bincount(member).to(rewards.dtype)
    # Differences to the one of the group's rewards are summed: equal rewards then give 0, not a rounding
    # error of the mean.
    some = torch.empty_like(count).scatter_(0, member, rewards)[member]
    shifted = rewards - some
    mean = torch.zeros_like(count).scatter_add_(0, member, shifted) / count
    return shifted - mean[member]
