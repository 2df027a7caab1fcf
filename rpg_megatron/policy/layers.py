"""Layers that Megatron's specs lack: norms, additions to the residual stream, gated activations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state as mpu
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


class _Normalise(torch.autograd.Function):
    """Root-mean-square norm times a weight, or with ``zero_centred`` times 1 + weight, then in float32.

    Autograd's own backward needs three times as many passes over memory, and keeps the normalised input.
    group: its ranks have equal parts of the last dimension.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, eps: float, group: Any, zero_centred: bool = False
    ) -> Tensor:
        wide, ctx.group, ctx.zero_centred = x.float(), group, zero_centred
        inverse = torch.rsqrt(_mean(wide.square(), group) + eps)
        ctx.save_for_backward(x, weight, inverse)
        if zero_centred:
            return (wide * inverse * (1 + weight.float())).to(x.dtype)
        return weight * (wide * inverse).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        x, weight, inverse = ctx.saved_tensors
        normalised, kept = x.float() * inverse, weight.dtype
        d_x = d_weight = None
        if ctx.zero_centred:
            gradient, weight = gradient.float(), 1 + weight.float()
        if ctx.needs_input_grad[1]:
            d_weight = (gradient * normalised.to(gradient.dtype)).flatten(0, -2).sum(0).to(kept)
        if ctx.needs_input_grad[0]:
            wide = (gradient * weight).float()
            along = _mean(wide * normalised, ctx.group)
            d_x = wide.addcmul_(normalised, along, value=-1).mul_(inverse).to(x.dtype)
        return d_x, d_weight, None, None, None


def _mean(x: Tensor, group: Any) -> Tensor:
    mean = x.mean(-1, keepdim=True)
    if group is not None:
        dist.all_reduce(mean, group=group)
        mean /= group.size()
    return mean


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm, computed in float32 as Hugging Face does.

    Megatron's torch norm does not support sequence parallelism. This one marks its weight, so that Megatron
    sums its gradient over the tensor-parallel ranks, each of which has only some of the tokens.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__()
        self.eps, self.zero_centred = eps, config.layernorm_zero_centered_gamma
        first = torch.full((hidden_size,), float(not self.zero_centred), dtype=config.params_dtype)
        self.weight = torch.nn.Parameter(first)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension; shape and dtype do not change."""
        out: Tensor = _Normalise.apply(  # type: ignore[no-untyped-call]
            x, self.weight, self.eps, None, self.zero_centred
        )
        return out


class WideNorm(torch.nn.Module):
    """Root-mean-square norm over all heads of the queries, or of the keys, of which each rank has a part.

    Every tensor-parallel rank has the whole weight and uses its own part, because Megatron sums the gradients
    of ``q_layernorm`` and ``k_layernorm`` over the ranks.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, *, heads: int) -> None:
        """hidden_size: of a head. heads: on all ranks together."""
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(heads * hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the heads of a rank [..., heads, d] by all ranks' mean square."""
        group = mpu.get_tensor_model_parallel_group()
        weight = self.weight.chunk(group.size())[group.rank()]
        among = group if group.size() > 1 else None
        out: Tensor = _Normalise.apply(x.flatten(-2), weight, self.eps, among)  # type: ignore[no-untyped-call]
        return out.view_as(x)


class ResidualAdd(torch.nn.Module):
    """Adds what attention or the MLP computes to the residual stream: normalised, scaled, or as it is.

    In place of Megatron's ``self_attn_bda`` and ``mlp_bda``. Without bias and dropout.
    """

    def __init__(self, config: TransformerConfig, norm: type | None, scale: float) -> None:
        """norm: in front of the sum. scale: factor."""
        super().__init__()
        self.norm = norm(config, config.hidden_size, config.layernorm_epsilon) if norm else None
        self.scale = scale

    def forward(self, training: bool, fused: bool) -> Callable[..., Tensor]:
        """The function that adds, as Megatron calls it."""
        return self._add

    def _add(self, output_and_bias: tuple[Tensor, None], residual: Tensor, dropout: float) -> Tensor:
        x, _ = output_and_bias
        # Megatron enables gradients here even under no_grad: in a pass that scores, or is recomputed, the
        # norm's weight would keep the graph of every layer. x is computed from the residual stream.
        with torch.set_grad_enabled(x.requires_grad):
            x = x if self.norm is None else self.norm(x)
            return residual + (x if self.scale == 1 else x * self.scale)


class _Gate(torch.autograd.Function):
    """silu(gate) * up of [gate, up]. Only the input is kept, and gradients are written where they belong."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        gate, up = x.chunk(2, -1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        (gate, up), d_x = x.chunk(2, -1), torch.empty_like(x)
        d_gate, d_up = d_x.chunk(2, -1)
        torch.mul(gradient, F.silu(gate), out=d_up)
        torch.ops.aten.silu_backward.grad_input(gradient * up, gate, grad_input=d_gate)
        return d_x


class SwiGLU(torch.nn.Module):
    """The activation of a gated block: [..., 2 n] -> [..., n]. Bit-identical to Megatron's unfused one."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        """x: gate and up beside each other."""
        out: Tensor = _Gate.apply(x)  # type: ignore[no-untyped-call]
        return out
