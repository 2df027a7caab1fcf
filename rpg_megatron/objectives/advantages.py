"""Parts of advantages, in float64: group means and deviations, whitening, the KL in the reward."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from rpg_megatron.objectives.ratios import LOG_RATIO_LIMIT

Floats = NDArray[np.float64]
Integers = NDArray[Any]


def centre(rewards: Floats, group: Integers) -> tuple[Floats, Integers, Floats]:
    """Rewards minus their group's mean [N]; each response's group number [N]; each group's size.

    rewards: [N]. group: integer labels [N], any values. The baseline of a group of one is 0, so its reward is
    unchanged. A group of equal rewards gives exactly 0. Raises ValueError if shapes differ.
    """
    if rewards.ndim != 1 or rewards.shape != group.shape:
        raise ValueError(f"rewards {rewards.shape} and groups {group.shape} must have the same 1-d shape")
    _, member = np.unique(group, return_inverse=True)
    count = np.bincount(member).astype(np.float64)
    # Averages differences to one of the group's rewards: equal rewards then give 0, not a rounding error.
    reference = np.empty_like(count)
    reference[member] = rewards
    shifted = rewards - reference[member]
    mean = np.bincount(member, shifted) / count
    return np.where(count[member] > 1, shifted - mean[member], rewards), member, count


def group_deviation(centred: Floats, member: Integers, count: Floats) -> Floats:
    """Unbiased standard deviation of each response's group, [N]; 1 for a group of one.

    centred, member, count: the results of ``centre``.
    """
    variance = np.bincount(member, np.square(centred))[member] / np.maximum(count - 1, 1)[member]
    return np.where(count[member] > 1, np.sqrt(variance), 1.0)


def whiten(values: Floats, lengths: Integers) -> Floats:
    """Zero mean and unit variance over tokens, each response's value counted once for each of its tokens.

    Shapes: values, lengths and the result are [N]. Raises ValueError if they differ.
    """
    if lengths.shape != values.shape:
        raise ValueError(f"values {values.shape} and lengths {lengths.shape} must have the same shape")
    weight = lengths.astype(np.float64)
    tokens = weight.sum()
    mean = (values * weight).sum() / tokens
    variance = (np.square(values - mean) * weight).sum() / max(tokens - 1, 1)
    whitened: Floats = (values - mean) / np.sqrt(variance + 1e-8)
    return whitened


def response_kl(old: NDArray[Any], anchor: NDArray[Any], estimator: Literal["k1", "k3"]) -> float:
    """Estimate of the reverse KL(old || anchor) of one response, in nats: the sum over its tokens.

    old, anchor: log-probs of its tokens under the policy that sampled them and the anchor, [R]. With the log-
    ratio d = old - anchor, ``k1`` is d; subtracted from the reward, it gives the gradient of the KL. ``k3``
    is exp(-d) - 1 + d; it is never negative and has less variance, but does not give that gradient.
    """
    ratio = old.astype(np.float64) - anchor
    if estimator == "k1":
        return float(ratio.sum())
    ratio = ratio.clip(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return float((np.exp(-ratio) - 1 + ratio).sum())
