"""Layers that Megatron's local spec lacks: RMSNorm with sequence parallelism, packed attention."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state as mpu
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rpg_megatron.policy.context_parallel import gather_places
from rpg_megatron.policy.microbatch import PackedSequences
from rpg_megatron.policy.shared_prompts import attend_with_prompts


class _Normalise(torch.autograd.Function):
    """Root-mean-square norm times a weight. Autograd's own backward needs three times as many passes over
    memory, and keeps the normalised input.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, inverse)
        return weight * (wide * inverse).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, inverse = ctx.saved_tensors
        normalised = x.float() * inverse
        d_x = d_weight = None
        if ctx.needs_input_grad[1]:
            d_weight = (gradient * normalised.to(x.dtype)).flatten(0, -2).sum(0)
        if ctx.needs_input_grad[0]:
            wide = (gradient * weight).float()
            along = (wide * normalised).mean(-1, keepdim=True)
            d_x = wide.addcmul_(normalised, along, value=-1).mul_(inverse).to(x.dtype)
        return d_x, d_weight, None


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm, computed in float32 as Hugging Face does.

    Megatron's torch norm does not support sequence parallelism. This one marks its weight, so that Megatron
    sums its gradient over the tensor-parallel ranks, each of which has only some of the tokens.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension; shape and dtype do not change."""
        out: Tensor = _Normalise.apply(x, self.weight, self.eps)  # type: ignore[no-untyped-call]
        return out


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
    """Rotary position embedding of packed rows, bit-identical to Megatron's.

    Megatron's unfused embedding loops over the sequences and computes cosines and sines for each. This one
    computes them once for all sequences and layers.
    """

    def __init__(self, frequencies: Tensor) -> None:
        """frequencies: radians per token, float32 [d / 2]."""
        super().__init__()
        self.frequencies: Tensor
        self.register_buffer("frequencies", frequencies, persistent=False)

    def forward(self, query: Tensor, key: Tensor, packed: PackedSequences) -> tuple[Tensor, Tensor]:
        """Rotate query [c, heads, d] and key [c, kv_heads, d] by position; shapes and dtypes are kept."""
        if packed.rotary is None:
            angles = torch.outer(packed.positions.float(), self.frequencies)[:, None]
            packed.rotary = angles.cos().to(query.dtype), angles.sin().to(query.dtype)
        cos, sin = packed.rotary
        return _Rotate.apply(query, cos, sin), _Rotate.apply(key, cos, sin)  # type: ignore[no-untyped-call]


class PackedAttention(torch.nn.Module):
    """Rotary embedding and causal attention of each packed sequence, by torch's scaled_dot_product_attention.

    Megatron's local attention does not support packed sequences. Sequences of similar length share a call.
    Each is padded at its end, where no real token attends, so no mask over all tokens is needed. Dropout is
    not supported. With context parallelism a rank has two chunks of the queries of each sequence, and gathers
    all keys and values.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        softmax_scale: float | None = None,
        *,
        frequencies: Tensor,
        **_: Any,
    ) -> None:
        """frequencies: see ``Rotary``. The rest as Megatron passes it."""
        super().__init__()
        if config.attention_dropout:
            raise ValueError("attention dropout is not supported with packed sequences; set it to 0")
        self.rotary = Rotary(frequencies)
        self.scale = softmax_scale
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
        out = torch.cat([self._attend(*(x.unflatten(0, g) for x in qkv)).flatten(0, 1) for *qkv, g in parts])
        if groups.restored is not None:
            out = out.index_select(0, groups.restored)
        return out.flatten(1)

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
                end = (chunk + 1) * n
                # Recomputed in backward: the masks of all layers would need more memory than everything else.
                out.append(
                    checkpoint(
                        self._attend_from,
                        chunk * n,
                        next(queries),
                        k[:end],
                        v[:end],
                        use_reentrant=False,
                        preserve_rng_state=False,
                    )
                )
        return torch.cat(out).flatten(1)

    def _attend_from(self, first: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of queries that start at position ``first`` of their sequence."""
        mask = torch.ones(len(q), len(k), dtype=torch.bool, device=q.device).tril(first)
        return self._attend(q[None], k[None], v[None], mask).squeeze(0)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attention of sequences of one length: [sequences, length, heads, d]."""
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True, scale=self.scale
        )
        return out.transpose(1, 2)
