"""Losses as pure functions of tensors, and the parts of advantages."""

from rpg_megatron.objectives.aggregate import Aggregation, aggregate
from rpg_megatron.objectives.baselines import cispo_loss, gspo_loss, ppo_loss
from rpg_megatron.objectives.clip import Clip
from rpg_megatron.objectives.corrections import Correction, rollout_correction
from rpg_megatron.objectives.distillation import full_divergence_loss, sampled_divergence_loss
from rpg_megatron.objectives.divergences import DIVERGENCES, Divergence, unnormalised_kl
from rpg_megatron.objectives.interface import LossOutput, ResponseTokens
from rpg_megatron.objectives.rpg import rpg_loss
from rpg_megatron.objectives.token_metrics import metric_key, takes_maximum

__all__ = [
    "DIVERGENCES",
    "Aggregation",
    "Clip",
    "Correction",
    "Divergence",
    "LossOutput",
    "ResponseTokens",
    "aggregate",
    "cispo_loss",
    "full_divergence_loss",
    "gspo_loss",
    "metric_key",
    "ppo_loss",
    "rollout_correction",
    "rpg_loss",
    "sampled_divergence_loss",
    "takes_maximum",
    "unnormalised_kl",
]
