"""Qwen3 (dense): a norm over each query and key head; no biases."""

from __future__ import annotations

from rpg_megatron.bridge.layouts.dense import DENSE_LAYER, DenseLayout
from rpg_megatron.bridge.layouts.parts import Whole
from rpg_megatron.config.model_shape import ModelShape


def qwen3_layout(shape: ModelShape) -> DenseLayout:
    """The table of one dense Qwen3 model."""
    norms = {
        "self_attention.q_layernorm.weight": Whole("self_attn.q_norm.weight", per_head=True),
        "self_attention.k_layernorm.weight": Whole("self_attn.k_norm.weight", per_head=True),
    }
    return DenseLayout(shape, {**DENSE_LAYER, **norms})
