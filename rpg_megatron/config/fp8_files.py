"""FP8 weights on disk, as DeepSeek-V3 and Qwen3 are released: which ``quantization_config`` is read."""

from __future__ import annotations

import json
from typing import Any

from rpg_megatron.config.errors import shorten

BLOCK = 128
"""Rows and columns of a matrix that have one scale."""
_READ: dict[str, tuple[Any, ...]] = {
    "quant_method": ("fp8",),
    "weight_block_size": ([BLOCK, BLOCK],),
    "activation_scheme": ("dynamic", None),
    "fmt": ("e4m3", "float8_e4m3fn", None),
    "scale_fmt": ("float", "ue8m0", None),
    "weight_per_tensor": (False, None),
    "act_per_tensor": (False, None),
    "dequantize": (False, None),
}
"""Key -> values that are read; None: the key is absent."""
_NAMES = ("modules_to_not_convert", "modules_to_convert", "ignored_layers")
"""Keys with names of modules. The dtype of a tensor says the same."""


def unread_quantisation(config: Any) -> str:
    """How weights are quantised, for a message; empty if this is read."""
    given = config if isinstance(config, dict) else {"quant_method": config}
    if (method := given.get("quant_method") or given.get("quant_algo")) != "fp8":
        return shorten(ascii(method), 80)
    keys = [key for key in {**_READ, **given} if key not in _NAMES]
    others = {key: given.get(key) for key in keys if given.get(key) not in _READ.get(key, ())}
    return f"'fp8' with {shorten(json.dumps(others), 200)}" if others else ""
