"""Llama 2 and 3: the common dense layer. The RoPE scaling of Llama 3.1 and later has no weights."""

from __future__ import annotations

from rpg_megatron.config.model_shape import ModelShape
from rpg_megatron.models.dense import DENSE_LAYER, DenseMapping


def llama_mapping(shape: ModelShape) -> DenseMapping:
    """The mapping of a Llama model."""
    return DenseMapping(shape, DENSE_LAYER)
