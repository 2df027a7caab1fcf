"""Qwen3 (dense): a norm on each query and key head; no biases."""

from __future__ import annotations

from rpg_megatron.config.model_shape import ModelShape
from rpg_megatron.models.dense import DENSE_LAYER, DenseMapping
from rpg_megatron.models.partition import ReplicatedMapping


def qwen3_mapping(shape: ModelShape) -> DenseMapping:
    """The mapping of a dense Qwen3 model."""
    norms = {
        "self_attention.q_layernorm.weight": ReplicatedMapping("self_attn.q_norm.weight", per_head=True),
        "self_attention.k_layernorm.weight": ReplicatedMapping("self_attn.k_norm.weight", per_head=True),
    }
    return DenseMapping(shape, {**DENSE_LAYER, **norms})
