"""Keys of a model's ``config.json``: the values that they may have."""

from __future__ import annotations

import math
from typing import Any

_LARGEST = {
    "num_hidden_layers": 10_000,
    "hidden_size": 2**20,
    "intermediate_size": 2**22,
    "num_attention_heads": 2**16,
    "num_key_value_heads": 2**16,
    "head_dim": 2**16,
    "vocab_size": 2**31 - 1,  # token ids are int32
    "max_position_embeddings": 2**31 - 1,
    "original_max_position_embeddings": 2**31 - 1,
    "sliding_window": 2**31 - 1,
    "linear_num_key_heads": 2**16,
    "linear_num_value_heads": 2**16,
    "linear_key_head_dim": 2**16,
    "linear_value_head_dim": 2**16,
    "linear_conv_kernel_dim": 2**10,
    "full_attention_interval": 10_000,
    "num_experts": 2**16,
    "num_local_experts": 2**16,
    "num_experts_per_tok": 2**16,
    "moe_intermediate_size": 2**22,
    "shared_expert_intermediate_size": 2**22,
    "decoder_sparse_step": 10_000,
    "n_routed_experts": 2**16,
    "n_shared_experts": 2**10,
    "n_group": 2**16,
    "topk_group": 2**16,
    "num_nextn_predict_layers": 100,
    "q_lora_rank": 2**20,
    "kv_lora_rank": 2**20,
    "qk_nope_head_dim": 2**16,
    "qk_rope_head_dim": 2**16,
    "v_head_dim": 2**16,
}
"""Key -> maximum value, far above that of any model."""

SIZES = list(_LARGEST)[:8]
"""Keys of all families; the other keys belong to experts."""


def read_size(key: str, value: Any) -> int:
    """A size in ``config.json``. Raises ValueError if it is not an integer from 1 to the key's maximum."""
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _LARGEST[key]:
        raise ValueError(f"{key} is {repr(value)[:80]}; it must be an integer of 1 to {_LARGEST[key]:,}")
    return value


def read_flag(raw: dict[str, Any], key: str) -> bool:
    """A key that is true or false, false where it is absent, as in transformers' classes of all families."""
    if not isinstance(value := raw.get(key), bool | None):
        raise ValueError(f"{key} is {repr(value)[:80]}; it must be true or false")
    return bool(value)


def read_positive(key: str, value: Any) -> float:
    """A number. Raises ValueError if it is not above 0 and finite."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise ValueError(f"{key} is {str(value)[:80]}; it must be a number greater than 0")
    return float(value)
