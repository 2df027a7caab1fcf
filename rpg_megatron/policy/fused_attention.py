"""Transformer Engine's attention for runs that share prompts. Needs that package."""

from __future__ import annotations

from typing import Any

from megatron.core.extensions.transformer_engine import TEDotProductAttention
from torch import Tensor

from rpg_megatron.policy.layers import Rotary
from rpg_megatron.policy.microbatch import PackedSequences
from rpg_megatron.policy.shared_prompts import attend_with_prompts


class SharingAttention(TEDotProductAttention):  # type: ignore[misc]  # untyped
    """Rotary embedding and attention: Transformer Engine's, or ours in rows with shared prompts.

    Megatron would rotate by the position in the piece of the row, here it is that in the whole sequence.
    """

    def __init__(self, *arguments: Any, frequencies: Tensor, **more: Any) -> None:
        """frequencies: see ``Rotary``. The rest as Megatron passes it."""
        super().__init__(*arguments, **more)
        self.rotary = Rotary(frequencies)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: None,
        packed_seq_params: PackedSequences,
        **more: Any,
    ) -> Tensor:
        """Shapes: query [c, heads, d], key and value [c, kv_heads, d] -> [c, heads * d]."""
        row = packed_seq_params
        query, key = self.rotary(query, key, row)
        if row.prompts is not None:
            return attend_with_prompts(query, key, value, row).flatten(1)
        out: Tensor = super().forward(query, key, value, attention_mask, packed_seq_params=row, **more)
        return out
