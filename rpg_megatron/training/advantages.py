"""The configured advantages: one of ours, or a function of the user."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rpg_megatron.config import UserError
from rpg_megatron.config.base import ImportedSettings
from rpg_megatron.config.objective import AdvantageSettings
from rpg_megatron.objectives import group_advantages
from rpg_megatron.system.own_code import Wanted, load_own

Advantages = Callable[[NDArray[Any], NDArray[Any], NDArray[Any]], NDArray[np.float64]]
"""(rewards [N] float64, group [N] integer labels of the prompts, response tokens [N]) -> advantages [N]."""


def build_advantages(settings: AdvantageSettings | ImportedSettings) -> Advantages:
    """The configured advantages. Raises UserError if code of the user cannot be imported or called.

    The result of the user's function is checked at each call: UserError unless it is N finite numbers.
    """
    if isinstance(settings, AdvantageSettings):

        def ours(rewards: NDArray[Any], group: NDArray[Any], lengths: NDArray[Any]) -> NDArray[np.float64]:
            found = group_advantages(
                torch.from_numpy(rewards),
                torch.from_numpy(group),
                kind=settings.type,
                lengths=torch.from_numpy(lengths),
            )
            return found.numpy()

        return ours
    function = load_own(Wanted("advantage", settings.type, settings.keywords, 3))

    def own(rewards: NDArray[Any], group: NDArray[Any], lengths: NDArray[Any]) -> NDArray[np.float64]:
        found = np.asarray(function(rewards.copy(), group.copy(), lengths.copy()), np.float64)
        if found.shape != rewards.shape or not np.isfinite(found).all():
            what = f"shape {found.shape}" if found.shape != rewards.shape else "a value that is not finite"
            raise UserError(
                f"advantage.type {settings.type}: returns {what}; return one finite number per response, "
                f"shape {rewards.shape}"
            )
        return found

    return own
