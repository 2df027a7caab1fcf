"""Layers that Megatron's local spec lacks: RMSNorm with sequence parallelism, and packed (THD) attention."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state as mpu
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rpg_megatron.policy.context_parallel import gather_places


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
        """Normalise the last dimension; shape and dtype stay."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class PackedAttention(torch.nn.Module):
    """Causal attention of each packed sequence to itself, by torch's scaled_dot_product_attention.

    Megatron's local attention does not support packed sequences. A loop over sequences computes only the
    diagonal blocks: no mask over all tokens, no work on padding. Dropout is not supported. With context
    parallelism a rank has two chunks of each sequence's queries and gathers all keys and values.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        softmax_scale: float | None = None,
        **_: Any,
    ) -> None:
        super().__init__()
        if config.attention_dropout:
            raise ValueError("attention dropout is not supported with packed sequences; set it to 0")
        self.scale = softmax_scale
        self.context = config.context_parallel_size

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: None,
        packed_seq_params: Any,
        **_: Any,
    ) -> Tensor:
        """Shapes: query [c, heads, d], key and value [c, kv_heads, d] -> [c, heads * d].

        ``packed_seq_params``: a ``PackedSequences`` whose lengths sum to t = c x context ranks.
        """
        lengths: list[int] = packed_seq_params.lengths
        if self.context > 1:
            return self._attend_in_chunks(query, key, value, lengths, packed_seq_params.places)
        # split instead of slices: its backward is one concatenation, that of each slice a zero tensor of full
        # size.
        parts = zip(query.split(lengths), key.split(lengths), value.split(lengths), strict=True)
        return torch.cat([self._attend(q, k, v) for q, k, v in parts]).flatten(1)

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
                seen = (chunk + 1) * n
                # Recomputed in backward: the masks of all layers would need more memory than everything else.
                out.append(
                    checkpoint(
                        self._attend_from,
                        chunk * n,
                        next(queries),
                        k[:seen],
                        v[:seen],
                        use_reentrant=False,
                        preserve_rng_state=False,
                    )
                )
        return torch.cat(out).flatten(1)

    def _attend_from(self, first: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of queries that start at position ``first`` of their sequence."""
        mask = torch.ones(len(q), len(k), dtype=torch.bool, device=q.device).tril(first)
        return self._attend(q, k, v, mask)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True, scale=self.scale
        )
        return out.squeeze(0).transpose(0, 1)
