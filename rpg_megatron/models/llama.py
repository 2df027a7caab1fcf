"""Llama 2 and 3: the plain dense layer. The rope scaling of Llama 3.1 and later has no weights."""

from __future__ import annotations

from rpg_megatron.config.model_shape import ModelShape
from rpg_megatron.models.dense import DENSE_LAYER, DenseLayout


def llama_layout(shape: ModelShape) -> DenseLayout:
    """The table of one Llama model."""
    return DenseLayout(shape, DENSE_LAYER)
