"""Two layers that Megatron's local spec lacks: RMSNorm with sequence parallelism, and packed attention."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm, computed in float32 as Hugging Face does.

    Megatron's own torch norm refuses sequence parallelism; this one marks its weight so that its gradient is
    summed over the tensor-parallel ranks, each of which saw only its share of the tokens.
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

    Megatron's local attention cannot pack. A loop over sequences touches only the diagonal blocks: no mask
    over all tokens, no work on padding. Dropout is not supported; RL does not use it.
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

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: None,
        packed_seq_params: Any,
        **_: Any,
    ) -> Tensor:
        """Shapes: query [t, heads, d], key and value [t, kv_heads, d] -> [t, heads * d].

        ``packed_seq_params.lengths`` (list of int) are the lengths of the sequences, summing to t.
        """
        lengths: list[int] = packed_seq_params.lengths
        # split, not slices: its backward is one concatenation, a slice's is a zero tensor of full size each.
        parts = zip(query.split(lengths), key.split(lengths), value.split(lengths), strict=True)
        return torch.cat([self._attend(q, k, v) for q, k, v in parts]).flatten(1)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True, scale=self.scale)
        return out.squeeze(0).transpose(0, 1)
