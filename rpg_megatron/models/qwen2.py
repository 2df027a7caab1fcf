"""Qwen2 and Qwen2.5 (dense): biases on the query, key and value projections only."""

from __future__ import annotations

from rpg_megatron.config.model_shape import ModelShape
from rpg_megatron.models.dense import DENSE_LAYER, DenseMapping
from rpg_megatron.models.partition import QKVMapping


def qwen2_mapping(shape: ModelShape) -> DenseMapping:
    """The mapping of a dense Qwen2 model."""
    return DenseMapping(shape, {**DENSE_LAYER, "self_attention.linear_qkv.bias": QKVMapping("bias")})
