"""Settings of low-rank adapters (LoRA, arXiv 2106.09685)."""

from __future__ import annotations

import math
from typing import Literal, get_args

from pydantic import Field, field_validator

from rpg_megatron.config.base import Section
from rpg_megatron.config.model_shape import ModelShape

_Softmax = Literal["q_proj", "k_proj", "v_proj", "o_proj"]
_Separate = Literal["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"]
_Interleaved = Literal["in_proj_qkvz", "in_proj_ba"]
_Linear = Literal[_Separate, _Interleaved, "out_proj"]
Target = Literal[_Softmax, _Linear, "gate_proj", "up_proj", "down_proj", "lm_head"]
TARGETS: tuple[Target, ...] = get_args(Target)
PROJECTIONS, OUTPUT_LAYER = TARGETS[:-1], TARGETS[-1]
SOFTMAX_TARGETS: tuple[Target, ...] = get_args(_Softmax)
SEPARATE_TARGETS, INTERLEAVED_TARGETS = get_args(_Separate), get_args(_Interleaved)
LINEAR_TARGETS: tuple[Target, ...] = get_args(_Linear)
ATTENTION_TARGETS = SOFTMAX_TARGETS + LINEAR_TARGETS
ENGINE_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The values of vLLM's --max-lora-rank."""


class LoraSettings(Section, affects="training"):
    """Train adapters beside frozen weights: each target's W x becomes W x + scale B A x.

    The names are PEFT's. Each projection has an A of its own.
    """

    rank: int = Field(16, ge=1, le=ENGINE_RANKS[-1])
    """Rows of A and columns of B (PEFT's r)."""
    alpha: float = Field(32.0, gt=0)
    """The scale is alpha / rank (PEFT's lora_alpha)."""
    targets: Literal["all-linear"] | tuple[Target, ...] = "all-linear"
    """Matrices with adapters (PEFT's target_modules): all-linear, or a list of q_proj, k_proj, v_proj,
    o_proj, gate_proj, up_proj, down_proj, lm_head, and of linear attention in_proj_qkv, in_proj_z, in_proj_b,
    in_proj_a (of Qwen3-Next in_proj_qkvz, in_proj_ba), out_proj. all-linear is all but lm_head, the output
    layer, as in PEFT. For a mixture of experts leave out gate_proj, up_proj, down_proj: experts get no
    adapters."""
    rslora: bool = False
    """The scale is alpha / sqrt(rank) (PEFT's use_rslora)."""
    publish: Literal["adapters", "merged"] = "adapters"
    """What engines get after each update. adapters: A and B, for vLLM's own adapters. merged: the sums
    W + scale B A, with precision.dtype float32 only: rounded to bfloat16, a sum loses most of a small update.
    """

    @field_validator("targets")
    @classmethod
    def _check_targets(cls, value: str | tuple[Target, ...]) -> str | tuple[Target, ...]:
        if isinstance(value, tuple):
            if not value:
                raise ValueError("the list is empty; name a projection, or use all-linear")
            if twice := next((name for name in value if value.count(name) > 1), None):
                raise ValueError(f"names {twice} twice; remove one")
        return value

    @property
    def names(self) -> tuple[Target, ...]:
        """The targets, in the order of a layer, the output layer last; also those that a model lacks."""
        return PROJECTIONS if self.targets == "all-linear" else tuple(t for t in TARGETS if t in self.targets)

    def names_in(self, shape: ModelShape) -> tuple[Target, ...]:
        """Those of ``names`` that a model has."""
        absent = LINEAR_TARGETS
        if shape.linear is not None:
            absent = SEPARATE_TARGETS if shape.linear.interleaved else INTERLEAVED_TARGETS
        return tuple(t for t in self.names if t not in absent)

    @property
    def scale(self) -> float:
        """Factor of B A x."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    @property
    def engine_rank(self) -> int:
        """The smallest rank of vLLM's adapters that holds this one."""
        return next(rank for rank in ENGINE_RANKS if rank >= self.rank)
