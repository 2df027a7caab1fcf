"""vLLM's cache for models with softmax and with linear attention: layers of both kinds share its blocks.

In each layer of a group, a block holds either the keys and values of some tokens, or a sequence's state; the
number of tokens is the least with which the state fits (vLLM's ``_align_hybrid_block_size``).
"""

from __future__ import annotations

from typing import NamedTuple

from rpg_megatron.config import ModelShape, Settings
from rpg_megatron.system.dtypes import ITEM_BYTES

_STEP = {"cpu": 128, "cuda": 16}
"""Of how many tokens the number in a block is a multiple."""


class HybridCache(NamedTuple):
    """The blocks of one engine worker."""

    block_bytes: int
    block_tokens: int
    state_blocks: int
    """Of a sequence's states, whatever its length."""
    token_blocks: int
    """Of ``block_tokens`` of a sequence."""

    def sequence(self, tokens: int) -> int:
        """Bytes of a sequence."""
        return (self.state_blocks + self.token_blocks * -(-tokens // self.block_tokens)) * self.block_bytes


def hybrid_cache(settings: Settings, shape: ModelShape) -> HybridCache | None:
    """The blocks; None for models without linear attention."""
    if (linear := shape.linear) is None:
        return None
    tensor, item = settings.engine.tensor, ITEM_BYTES[settings.precision.dtype]
    token = 2 * max(1, shape.num_kv_heads // tensor) * shape.head_dim * item
    recurrent = linear.values * linear.key_dim * 4  # engines have it in float32
    state = ((linear.kernel - 1) * linear.convolved * item + recurrent) // tensor
    tokens = _STEP[settings.device] * -(-state // (_STEP[settings.device] * token))
    layers = len(linear.layers), shape.softmax_layers
    group = max(layers) if max(layers) < 1.5 * min(layers) else min(layers)
    return HybridCache(tokens * token * group, tokens, *(-(-count // group) for count in layers))
