"""Emulates Transformer Engine's FP8 recipes on a CPU: operands are rounded to float8, products are float32.

This replaces the matrix products of the linear layers that Transformer Engine computes in FP8 (QKV,
projection and both of the MLP) in Megatron's local transformer layers. Each operand is cast to torch's float8
type and back, with the recipe's scale; the result has the layer's dtype. The rest of a layer, including
communication, is Megatron's.

Written for Transformer Engine 2.20.2: common/recipe/__init__.py, pytorch/quantization.py,
pytorch/module/linear.py; and, for the arithmetic of its kernels, common/recipe/recipe_common.cuh,
common/recipe/delayed_scaling.cu and common/transpose/quantize_transpose_{vector,square}_blockwise.cu. The
kernels' order of summation is not emulated.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor

from rpg_megatron.config.policy import FP8Settings

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
_BLOCK = 128
_ROW, _COLUMN, _SQUARE = (1, _BLOCK), (_BLOCK, 1), (_BLOCK, _BLOCK)
_HISTORY = 1024
"""History length of delayed scaling, in passes: fp8_amax_history_len of ``precision.fp8_fields``."""
_LARGEST = torch.finfo(torch.float32).max
_EXPONENT = -(1 << 23)
"""Sign and exponent of a float32, as a mask of int32."""

Operands = tuple[Tensor, Tensor]


def largest(x: Tensor, dim: tuple[int, ...] | None = None) -> Tensor:
    """Largest magnitude over some dimensions, kept with size 1, or over all; NaN is ignored."""
    x = x.abs()
    amax = x.amax() if dim is None else x.amax(dim, keepdim=True)
    if amax.isnan().any():
        return largest(x.nan_to_num(nan=0.0, posinf=torch.inf), dim)
    return amax


def scale_of(amax: Tensor, form: torch.dtype, *, power_of_two: bool) -> Tensor:
    """The scale, float32, that maps ``amax`` to the largest value of a float8 type.

    power_of_two: round down to a power of two. 1 where amax is 0 or infinite; the largest float32 where the
    quotient overflows. As compute_scale_from_amax in recipe_common.cuh.
    """
    # Dividing a number by a tensor would multiply by the reciprocal, which rounds twice.
    scale = torch.full_like(amax, torch.finfo(form).max).div_(amax)
    scale.clamp_(max=_LARGEST)
    if power_of_two:
        scale = (scale.view(torch.int32) & _EXPONENT).view(torch.float32)
    return scale.masked_fill_(~(amax.isfinite() & (amax > 0)), 1.0)


def round_scaled(x: Tensor, scale: Tensor, form: torch.dtype) -> Tensor:
    """``x`` times ``scale``, rounded to a float8 type, divided by ``scale``: float32, same shape.

    Values beyond the type's range saturate, as in the kernels; torch's cast would give NaN or infinity. NaN
    stays.
    """
    bound = torch.finfo(form).max
    scaled = torch.mul(x, scale).clamp_(-bound, bound)
    return scaled.copy_(scaled.to(form)).mul_(scale.reciprocal())


def round_blocks(x: Tensor, form: torch.dtype, block: tuple[int, int]) -> Tensor:
    """A matrix [m, n] rounded to a float8 type with a power-of-two scale for each block: float32.

    block: rows and columns of a block; blocks at the edges may be smaller.
    """
    (m, n), (rows, columns) = x.shape, block
    wide = x.float()
    if m % rows or n % columns:
        wide = torch.nn.functional.pad(wide, (0, -n % columns, 0, -m % rows))
    blocks = wide.view(-(-m // rows), rows, -(-n // columns), columns)
    scale = scale_of(largest(blocks, (1, 3)), form, power_of_two=True)
    return round_scaled(blocks, scale, form).view(wide.shape)[:m, :n]


def round_whole(x: Tensor, form: torch.dtype) -> Tensor:
    """A tensor rounded to a float8 type with one scale from its largest magnitude: float32."""
    wide = x.float()
    return round_scaled(wide, scale_of(largest(wide), form, power_of_two=False), form)


class _Product(torch.autograd.Function):
    """x [t, k], w [n, k], bias [n] or None -> x w^T + bias in x's dtype, operands rounded by the recipe."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None, recipe: EmulatedProduct, scales: Any
    ) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.recipe, ctx.scales, ctx.bias = recipe, scales, bias is not None
        rounded_x, rounded_w = recipe.for_output(x, w, scales)
        y = rounded_x @ rounded_w.t()
        if bias is not None:
            y += bias
        return y.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (g,) = grads
        x, w = ctx.saved_tensors
        for_x, for_w = ctx.recipe.for_gradients(g, x, w, ctx.scales)
        dx = (for_x[0] @ for_x[1]).to(x.dtype)
        dw = (for_w[0].t() @ for_w[1]).to(w.dtype) if ctx.needs_input_grad[1] else None
        return dx, dw, g.sum(0) if ctx.bias else None, None, None


class EmulatedProduct(torch.nn.Module):
    """Replaces the matrix product of one linear layer; a subclass for each recipe rounds the operands."""

    def forward(
        self,
        input: Tensor,  # the name that Megatron gives it
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        allreduce_dgrad: bool,
        sequence_parallel: bool,
        tp_group: dist.ProcessGroup | None,
        **_: Any,
    ) -> Tensor:
        """[t, 1, k] -> [t, 1, n], as linear_with_grad_accumulation_and_async_allreduce, in bfloat16.

        With sequence parallelism, Transformer Engine rounds before it gathers, with one scale for all ranks
        or with blocks inside one rank: the same values as rounding the gathered tensor here.
        """
        if sequence_parallel:
            input = gather_from_sequence_parallel_region(input, group=tp_group)
        elif allreduce_dgrad:
            input = copy_to_tensor_model_parallel_region(input, group=tp_group)
        x = input.flatten(0, -2)
        y: Tensor = _Product.apply(  # type: ignore[no-untyped-call]  # torch's own
            x, weight, bias, self, self.scales(x, weight)
        )
        return y.view(*input.shape[:-1], -1)

    def scales(self, x: Tensor, w: Tensor) -> Any:
        """Scales of this pass, kept for its backward, which may run after other passes."""

    def for_output(self, x: Tensor, w: Tensor, scales: Any) -> Operands:
        """Operands of x w^T: [t, k] and [n, k], float32."""
        raise NotImplementedError

    def for_gradients(self, g: Tensor, x: Tensor, w: Tensor, scales: Any) -> tuple[Operands, Operands]:
        """Operands of the input's gradient g w and of the weight's gradient g^T x, for g [t, n]; float32."""
        raise NotImplementedError


class Blockwise(EmulatedProduct):
    """Float8BlockScaling: E4M3, blocks of 128 along the contracted dimension, of 128 x 128 for weights."""

    def for_output(self, x: Tensor, w: Tensor, scales: Any) -> Operands:
        """See EmulatedProduct."""
        return round_blocks(x, E4M3, _ROW), round_blocks(w, E4M3, _SQUARE)

    def for_gradients(self, g: Tensor, x: Tensor, w: Tensor, scales: Any) -> tuple[Operands, Operands]:
        """See EmulatedProduct. The weight's gradient sums over tokens, so its blocks are along tokens."""
        return (
            (round_blocks(g, E4M3, _ROW), round_blocks(w, E4M3, _SQUARE)),
            (round_blocks(g, E4M3, _COLUMN), round_blocks(x, E4M3, _COLUMN)),
        )


class Tensorwise(EmulatedProduct):
    """Float8CurrentScaling: one scale for each tensor from its current values; E4M3, gradients E5M2."""

    def for_output(self, x: Tensor, w: Tensor, scales: Any) -> Operands:
        """See EmulatedProduct."""
        return round_whole(x, E4M3), round_whole(w, E4M3)

    def for_gradients(self, g: Tensor, x: Tensor, w: Tensor, scales: Any) -> tuple[Operands, Operands]:
        """See EmulatedProduct."""
        rounded = round_whole(g, E5M2)
        return (rounded, round_whole(w, E4M3)), (rounded, round_whole(x, E4M3))


class Delayed(EmulatedProduct):
    """DelayedScaling: one scale for each tensor from its largest magnitudes in earlier passes; E4M3,
    gradients E5M2.

    Passes without gradient use the scales and record magnitudes; only passes with gradient update the scales.
    """

    _FORMS = (E4M3, E4M3, E5M2)
    _X, _W, _G = range(3)

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.ones(3)
        """Scales of input, weight and output gradient: [3], float32."""
        self.seen = torch.zeros(_HISTORY, 3)
        """Largest magnitudes of each pass, [history, 3], float32; row 0: since the last update."""
        self._weight: Tensor | None = None
        self._recomputed: deque[Tensor] = deque()

    def train(self, mode: bool = True) -> Delayed:
        """Called by Policy before each pass over micro-batches, in which weights are quantised once."""
        self._weight = None
        return super().train(mode)

    def scales(self, x: Tensor, w: Tensor) -> Tensor:
        """Scales of input and weight in this pass, [2]; records the magnitudes of both for later passes."""
        if torch.is_grad_enabled() and self._recomputed:  # activation recompute in backward
            return self._recomputed.popleft()
        seen = [self._X]
        self._see(self._X, x)
        if self._weight is None:
            self._weight = self.scale[self._W].clone()
            self._see(self._W, w)
            seen.append(self._W)
        scales = torch.stack([self.scale[self._X], self._weight])
        if self.training:
            if not torch.is_grad_enabled():  # in training only inside activation recompute
                self._recomputed.append(scales)
            self._update(seen)
        return scales

    def for_output(self, x: Tensor, w: Tensor, scales: Any) -> Operands:
        """See EmulatedProduct."""
        return round_scaled(x.float(), scales[self._X], E4M3), round_scaled(w.float(), scales[self._W], E4M3)

    def for_gradients(self, g: Tensor, x: Tensor, w: Tensor, scales: Any) -> tuple[Operands, Operands]:
        """See EmulatedProduct."""
        rounded = round_scaled(g.float(), self.scale[self._G], E5M2)
        self._see(self._G, g)
        self._update([self._G])
        rounded_x, rounded_w = self.for_output(x, w, scales)
        return (rounded, rounded_w), (rounded, rounded_x)

    def _see(self, column: int, x: Tensor) -> None:
        self.seen[0, column] = torch.maximum(self.seen[0, column], largest(x.detach()).float())

    @torch.no_grad()
    def _update(self, columns: Iterable[int]) -> None:
        """Update scales from the magnitudes on all ranks that share the layer, as kernel_bulk in
        delayed_scaling.cu.

        Transformer Engine does this at the end of a pass for all layers at once, with the same result.
        """
        columns = list(columns)
        latest = self.seen[0, columns]
        group = mpu.get_amax_reduction_group(with_context_parallel=True)
        if group.size() > 1:
            dist.all_reduce(latest, op=dist.ReduceOp.MAX, group=group)
        for column, amax in zip(columns, latest, strict=True):
            if amax == 0:  # no new magnitude
                continue
            self.seen[0, column] = amax
            amax = self.seen[:, column].max()
            self.seen[:, column] = self.seen[:, column].roll(-1)
            self.seen[0, column] = 0.0
            if amax.isfinite():
                self.scale[column] = scale_of(amax, self._FORMS[column], power_of_two=False)

    def get_extra_state(self) -> dict[str, Tensor]:
        """State for checkpoints; Transformer Engine stores the same in another format, under another name."""
        return {"scale": self.scale.clone(), "seen": self.seen.clone()}

    def set_extra_state(self, state: dict[str, Tensor]) -> None:
        """Restore the result of ``get_extra_state``."""
        self.scale.copy_(state["scale"])
        self.seen.copy_(state["seen"])


RECIPES: dict[str, type[EmulatedProduct]] = {
    "blockwise": Blockwise,
    "tensorwise": Tensorwise,
    "delayed": Delayed,
}


def emulate_fp8(chunks: Iterable[GPTModel], fp8: FP8Settings) -> None:
    """Replace the products of the linear layers in a model's transformer layers by those of a recipe."""
    for chunk in chunks:
        last = chunk.config.num_layers - fp8.first_last_bf16
        for layer in chunk.decoder.layers:
            if not fp8.first_last_bf16 < layer.layer_number <= last:
                continue
            for module in list(layer.modules()):
                if isinstance(module, ColumnParallelLinear | RowParallelLinear):
                    module.fp8 = RECIPES[fp8.recipe]()
                    module._forward_impl = module.fp8.forward
