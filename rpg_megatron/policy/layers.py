"""Layers that Megatron's specs lack: norms, additions to the residual stream, packed attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state as mpu
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rpg_megatron.config.model_shape import Rope
from rpg_megatron.policy.context_parallel import gather_places
from rpg_megatron.policy.microbatch import PackedSequences
from rpg_megatron.policy.rotary import Rotary
from rpg_megatron.policy.shared_prompts import attend_with_prompts


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


class PackedAttention(torch.nn.Module):
    """Rotary embedding and causal attention of each packed sequence, by torch's scaled_dot_product_attention.

    Megatron's local attention does not support packed sequences. Sequences of similar length share a call.
    Each is padded at its end, where no real token attends, so no mask over all tokens is needed. Dropout is
    not supported. With context parallelism a rank has two chunks of the queries of each sequence, and gathers
    all keys and values. With a window, the queries of a sequence that is longer are computed in blocks of the
    window's size, each with the keys that it sees.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        softmax_scale: float | None = None,
        *,
        rope: Rope,
        window: int | None = None,
        **_: Any,
    ) -> None:
        """rope, window: of the layer, see ``ModelShape``. The rest as Megatron passes it."""
        super().__init__()
        if config.attention_dropout:
            raise ValueError("attention dropout is not supported with packed sequences; set it to 0")
        assert config.kv_channels is not None
        self.rotary = Rotary(rope, config.kv_channels)
        self.scale, self.window = softmax_scale, window
        self.context = config.context_parallel_size

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: None,
        packed_seq_params: PackedSequences,
        **_: Any,
    ) -> Tensor:
        """Shapes: query [c, heads, d], key and value [c, kv_heads, d] -> [c, heads * d].

        The row's lengths sum to t = c x context ranks.
        """
        row = packed_seq_params
        query, key = self.rotary(query, key, row)
        if row.prompts is not None:
            return attend_with_prompts(query, key, value, row, self.scale).flatten(1)
        if self.context > 1:
            return self._attend_in_chunks(query, key, value, row.lengths, row.places)
        groups = row.groups
        if groups.padded is not None:
            query, key, value = (x.index_select(0, groups.padded) for x in (query, key, value))
        # split, not slices: its backward is one concatenation; each slice would create a zero tensor of full
        # size.
        sizes = [n * longest for n, longest in groups.shapes]
        parts = zip(query.split(sizes), key.split(sizes), value.split(sizes), groups.shapes, strict=True)
        out = torch.cat([self._attend_group(*(x.unflatten(0, g) for x in qkv)) for *qkv, g in parts])
        if groups.restored is not None:
            out = out.index_select(0, groups.restored)
        return out.flatten(1)

    def _attend_group(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Sequences of one length: [sequences, length, heads, d] -> [sequences x length, heads, d]."""
        length, size = query.size(1), self.window
        if size is None or length <= size:
            return self._attend(query, key, value).flatten(0, 1)
        blocks = [
            self._attend_recomputed(first, query[:, first : first + size], key, value)
            for first in range(0, length, size)
        ]
        return torch.cat(blocks, 1).flatten(0, 1)

    def _attend_in_chunks(
        self, query: Tensor, key: Tensor, value: Tensor, lengths: list[int], places: Tensor
    ) -> Tensor:
        """Each chunk of queries attends to the keys of all earlier chunks and, causally, to its own."""
        chunks = [length // (2 * self.context) for length in lengths]
        keys, values = (gather_places(x, places, summed=True).split(lengths) for x in (key, value))
        queries = iter(query.split([n for n in chunks for _ in range(2)]))
        rank = mpu.get_context_parallel_rank()
        out = []
        for n, k, v in zip(chunks, keys, values, strict=True):
            for chunk in (rank, 2 * self.context - 1 - rank):
                out.append(self._attend_recomputed(chunk * n, next(queries)[None], k[None], v[None])[0])
        return torch.cat(out).flatten(1)

    def _attend_recomputed(self, first: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of queries that start at position ``first`` of their sequence to all that they see.

        Recomputed in backward: the masks of all layers would need more memory than everything else.
        """
        end = first + q.size(1)
        start = 0 if self.window is None else max(0, first + 1 - self.window)
        keys, values = k[:, start:end], v[:, start:end]
        out: Tensor = checkpoint(
            self._attend_from, first - start, q, keys, values, use_reentrant=False, preserve_rng_state=False
        )
        return out

    def _attend_from(self, first: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of queries that start at ``first`` of the keys: [sequences, length, heads, d]."""
        mask = torch.ones(q.size(1), k.size(1), dtype=torch.bool, device=q.device).tril(first)
        return self._attend(q, k, v, mask if self.window is None else mask.triu(first + 1 - self.window))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attention of sequences of one length: [sequences, length, heads, d]."""
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True, scale=self.scale
        )
        return out.transpose(1, 2)
