"""vLLM's cache for models whose layers have either softmax or linear attention.

All layers share blocks of one size. In each layer of a group, a block holds either the keys and values of
some tokens, or a sequence's state; the number of tokens is the least with which the state fits
(``_align_hybrid_block_size`` in vLLM's platforms/interface.py, and v1/core/kv_cache_utils.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from rpg_megatron.config import ModelShape, Settings
from rpg_megatron.system.dtypes import ITEM_BYTES

BLOCK_STEP = {"cpu": 128, "cuda": 16}
"""Of how many tokens the number in a block is a multiple."""
STATE_BYTES = 4
"""Of a number of the recurrent states: engines keep them in float32 (``engine_command``)."""


@dataclass(frozen=True)
class HybridCache:
    """The blocks of one engine worker."""

    block_bytes: int
    block_tokens: int
    state_blocks: int
    """Of a sequence's states, whatever its length."""
    token_blocks: int
    """Of ``block_tokens`` of a sequence."""

    @property
    def state_bytes(self) -> int:
        """Bytes reserved for a sequence's states."""
        return self.state_blocks * self.block_bytes

    def needed(self, tokens: int) -> int:
        """Bytes with which vLLM starts: one sequence's, and a block that vLLM keeps empty."""
        return (
            1 + self.state_blocks + self.token_blocks * -(-tokens // self.block_tokens)
        ) * self.block_bytes


def hybrid_cache(settings: Settings, shape: ModelShape) -> HybridCache | None:
    """The blocks; None for models without linear attention."""
    if (linear := shape.linear) is None:
        return None
    tensor, item = settings.engine.tensor, ITEM_BYTES[settings.precision.dtype]
    token = 2 * max(1, shape.num_kv_heads // tensor) * shape.head_dim * item
    recurrent = linear.values * linear.key_dim * STATE_BYTES
    state = ((linear.kernel - 1) * linear.convolved * item + recurrent) // tensor
    step = BLOCK_STEP[settings.device]
    tokens = step * -(-state // (step * token))
    fewer, more = sorted((len(linear.layers), shape.softmax_layers))
    group = more if more < 1.5 * fewer else fewer  # layers that have blocks together
    blocks = (-(-count // group) for count in (len(linear.layers), shape.softmax_layers))
    return HybridCache(tokens * token * group, tokens, *blocks)
