"""Rotary position embedding of packed rows, for every kind of layer."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from rpg_megatron.config.model_shape import Llama3Rope, Rope, YarnRope
from rpg_megatron.policy.microbatch import PackedSequences


def rotary_frequencies(rope: Rope, head_dim: int) -> Tensor:
    """Radians per token of each rotated pair of a head's dimensions: [head_dim * fraction / 2], float32.

    Same operations in the same order as transformers, for bitwise equal results: an angle is frequency times
    position, so a rounding error would grow with the position.
    """
    size = int(head_dim * rope.fraction)
    powers = rope.theta ** (torch.arange(0, size, 2, dtype=torch.float32) / size)
    if isinstance(rope.scaling, Llama3Rope):
        return _llama3(1.0 / powers, rope.scaling)
    if isinstance(rope.scaling, YarnRope):
        return _yarn(powers, rope.theta, rope.scaling)
    return 1.0 / powers


def _llama3(plain: Tensor, scaling: Llama3Rope) -> Tensor:
    cycles = scaling.original_positions / (2 * math.pi / plain)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    keep = ((cycles - low) / (high - low)).clamp(0, 1)
    return (1 - keep) * plain / scaling.factor + keep * plain


def _yarn(powers: Tensor, theta: float, scaling: YarnRope) -> Tensor:
    """powers: the inverse of the frequencies without scaling. Equations 14 to 18 of the paper."""

    def index(turns: float) -> float:
        """The dimension of a head whose pair turns so often within the original positions."""
        return size * math.log(scaling.original_positions / (turns * 2 * math.pi)) / (2 * math.log(theta))

    size = 2 * len(powers)
    low, high = max(math.floor(index(scaling.fast)), 0), min(math.ceil(index(scaling.slow)), size - 1)
    span = high - low or 0.001
    keep = 1 - ((torch.arange(len(powers), dtype=torch.float32) - low) / span).clamp(0, 1)
    return 1.0 / (scaling.factor * powers) * (1 - keep) + 1.0 / powers * keep


class _Rotate(torch.autograd.Function):
    """Rotates the pairs (i, i + d / 2) of the last dimension; the gradient is rotated back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.angles = cos, sin
        return _rotated(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.angles
        return _rotated(gradient, cos, -sin), None, None


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    out = torch.empty_like(x)
    (a, b), (c, d) = x.chunk(2, -1), out.chunk(2, -1)
    torch.mul(a, cos, out=c).sub_(b * sin)
    torch.mul(b, cos, out=d).add_(a * sin)
    return out


class Rotary(torch.nn.Module):
    """Rotary position embedding of packed rows; a plain one is bit-identical to Megatron's.

    Megatron's unfused embedding loops over the sequences and computes cosines and sines for each. This one
    computes them once for all sequences, and for all layers with the same ``Rope``.
    """

    def __init__(self, rope: Rope, head_dim: int, *, interleaved: bool = False) -> None:
        """rope: of the layer. interleaved: pairs are neighbours; their first halves are then put in front of
        the second ones, in queries and keys alike, which changes no score.
        """
        super().__init__()
        self.rope, self.interleaved = rope, interleaved
        self.frequencies: Tensor
        self.register_buffer("frequencies", rotary_frequencies(rope, head_dim), persistent=False)

    def forward(self, query: Tensor, key: Tensor, packed: PackedSequences) -> tuple[Tensor, Tensor]:
        """Rotate query [c, heads, d] and key [c, kv_heads, d] by position; shapes and dtypes are kept."""
        if self.rope not in packed.rotary:
            angles = torch.outer(packed.positions.float(), self.frequencies)[:, None]
            magnitude = self.rope.scaling.magnitude if isinstance(self.rope.scaling, YarnRope) else 1.0
            parts = (angles.cos(), angles.sin())
            cos, sin = ((x if magnitude == 1 else x * magnitude).to(query.dtype) for x in parts)
            packed.rotary[self.rope] = cos, sin
        cos, sin = packed.rotary[self.rope]
        return self._rotate(query, cos, sin), self._rotate(key, cos, sin)

    def _rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rotated = 2 * cos.size(-1)
        if self.interleaved:
            x = x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        if rotated == x.size(-1):
            out: Tensor = _Rotate.apply(x, cos, sin)  # type: ignore[no-untyped-call]  # torch's own
            return out
        first, rest = x.split([rotated, x.size(-1) - rotated], -1)
        return torch.cat([_Rotate.apply(first, cos, sin), rest], -1)  # type: ignore[no-untyped-call]
