"""Transformer Engine's attention with our rotary embedding. Needs that package."""

from __future__ import annotations

from typing import Any

from megatron.core.extensions.transformer_engine import TEDotProductAttention
from torch import Tensor

from rpg_megatron.config.model_shape import Rope
from rpg_megatron.policy.attention import attend_runs
from rpg_megatron.policy.microbatch import PackedSequences
from rpg_megatron.policy.rotary import Rotary


class RotatingAttention(TEDotProductAttention):  # type: ignore[misc]  # untyped
    """Rotary embedding and attention: Transformer Engine's, or ours in rows with shared prompts.

    Megatron would rotate all layers alike, whole heads, and by the position in the piece of the row; here it
    is that in the whole sequence.
    """

    def __init__(self, *arguments: Any, rope: Rope | None, **more: Any) -> None:
        """rope: of the layer; None: queries and keys are rotated. The rest as Megatron passes it."""
        super().__init__(*arguments, **more)
        self.rotary: Any = Rotary(rope, self.config.kv_channels) if rope else None

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
        if self.rotary is not None:
            query, key = self.rotary(query, key, row)
        if row.prompts is not None:
            return attend_runs(query, key, value, row, self.config.softmax_scale).flatten(1)
        out: Tensor = super().forward(query, key, value, attention_mask, packed_seq_params=row, **more)
        return out
