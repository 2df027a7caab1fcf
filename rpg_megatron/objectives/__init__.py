"""Losses and advantages: pure tensor mathematics, nothing of the rest of the package."""

from rpg_megatron.objectives.advantages import group_advantages
from rpg_megatron.objectives.clip import Clip
from rpg_megatron.objectives.divergences import DIVERGENCES, Divergence
from rpg_megatron.objectives.rpg import LossOutput, rpg_loss

__all__ = ["DIVERGENCES", "Clip", "Divergence", "LossOutput", "group_advantages", "rpg_loss"]
