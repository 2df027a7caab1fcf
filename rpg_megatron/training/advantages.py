"""The configured advantages: built-in, or the user's own function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rpg_megatron.config import UserError
from rpg_megatron.config.advantages import AnyAdvantageSettings
from rpg_megatron.data.batch_index import BatchIndex
from rpg_megatron.system.custom_code import load_section

Advantages = Callable[[NDArray[Any], NDArray[Any], NDArray[Any]], NDArray[np.float64]]
"""(rewards [N] float64, group [N] integer labels of the prompts, response lengths [N]) -> advantages [N]."""


def build_advantages(settings: AnyAdvantageSettings) -> Advantages:
    """The configured advantages. Raises UserError if the user's code cannot be imported or called.

    Each call checks the result, and raises UserError unless it is N finite numbers.
    """
    function = load_section(settings, "advantage", positional=3)

    def checked(rewards: NDArray[Any], group: NDArray[Any], lengths: NDArray[Any]) -> NDArray[np.float64]:
        returned = function(rewards.copy(), group.copy(), lengths.copy())
        try:
            values = np.asarray(returned, np.float64)
        except (TypeError, ValueError):  # such as None, or rows of unequal length
            values = np.full(rewards.shape, np.nan)
        if values.shape != rewards.shape or not np.isfinite(values).all():
            problem = (
                f"shape {values.shape}" if values.shape != rewards.shape else "a value that is not finite"
            )
            raise UserError(
                f"advantage.type {settings.type}: returns {problem}; return one finite number per response, "
                f"shape {rewards.shape}"
            )
        return values

    return checked


def advantages_of(
    index: BatchIndex, advantages: Advantages, penalty: NDArray[np.float64] | None = None
) -> NDArray[np.float64]:
    """Advantage of each trajectory, [N]: of its response, which may have several.

    penalty: to be subtracted from the reward of each response.
    """
    starts = index.starts
    rows = np.diff(np.append(starts, len(index)))
    rewards = index.reward[starts] - (0.0 if penalty is None else penalty)
    sampled = np.add.reduceat(index.sampled, starts) if len(starts) else index.sampled
    return np.repeat(advantages(rewards, index.group[starts], sampled), rows)
