"""Qwen3-MoE: Qwen3 with a mixture of experts in some or all layers; no shared experts, no biases."""

from __future__ import annotations

from rpg_megatron.config.model_shape import ModelShape
from rpg_megatron.models.moe import MoEMapping
from rpg_megatron.models.qwen3 import qwen3_mapping


def qwen3_moe_mapping(shape: ModelShape) -> MoEMapping:
    """The mapping of a Qwen3-MoE model."""
    return MoEMapping(qwen3_mapping(shape))
