"""What a Hugging Face ``config.json`` says of a model, read without torch or transformers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rpg_megatron.config.errors import UserError

FAMILIES = {"Qwen3ForCausalLM": "qwen3"}
"""HF architecture name -> family; a family has one file in ``bridge/layouts``."""


@dataclass(frozen=True)
class ModelShape:
    """The sizes that decide layouts, memory and the Megatron configuration. Counts are plain integers."""

    family: str
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tied_embeddings: bool
    qk_norm: bool
    qkv_bias: bool
    rope_theta: float
    norm_eps: float
    max_positions: int
    dtype: str
    """Type of the weights in the checkpoint: float32, bfloat16 or float16."""

    def padded_vocab(self, tensor: int, multiple: int = 1) -> int:
        """Vocabulary rows, padded so that each of ``tensor`` ranks holds a multiple of ``multiple``."""
        step = tensor * multiple
        return -(-self.vocab_size // step) * step


def read_model_shape(path: Path) -> ModelShape:
    """Read ``path/config.json``.

    Raises UserError if the directory or the file is missing, is not JSON, or describes a family we have no
    layout for.
    """
    file = path / "config.json"
    if not path.is_dir():
        raise UserError(
            f"model.path: {path} is not a directory; give the folder of a Hugging Face checkpoint"
        )
    try:
        raw: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"model.path: {file} is missing; a Hugging Face checkpoint holds one") from None
    except (UnicodeDecodeError, json.JSONDecodeError) as e:
        raise UserError(f"{file}: not valid JSON ({e}); copy the checkpoint again") from None
    if not isinstance(raw, dict):
        raise UserError(f"{file}: holds a {type(raw).__name__}, not an object; copy the checkpoint again")
    names = raw.get("architectures") or ["(none)"]
    family = FAMILIES.get(names[0])
    if family is None:
        raise UserError(
            f"{file}: architecture {names[0]} has no layout; known: {', '.join(sorted(FAMILIES))}"
        )
    try:
        rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != "default":
            raise UserError(f"{file}: rope type {kind!r} is not supported for {family}; known: default")
        return ModelShape(
            family=family,
            num_layers=int(raw["num_hidden_layers"]),
            hidden_size=int(raw["hidden_size"]),
            ffn_hidden_size=int(raw["intermediate_size"]),
            num_heads=int(raw["num_attention_heads"]),
            num_kv_heads=int(raw.get("num_key_value_heads") or raw["num_attention_heads"]),
            head_dim=int(raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"]),
            vocab_size=int(raw["vocab_size"]),
            tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
            qk_norm=family == "qwen3",
            qkv_bias=bool(raw.get("attention_bias", False)),
            rope_theta=float(rope.get("rope_theta") or raw.get("rope_theta") or 10000.0),
            norm_eps=float(raw["rms_norm_eps"]),
            max_positions=int(raw["max_position_embeddings"]),
            dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "float32"),
        )
    except KeyError as e:
        raise UserError(f"{file}: the key {e.args[0]!r} is missing; copy the checkpoint again") from None
    except (TypeError, ValueError) as e:
        raise UserError(f"{file}: a size is not a number ({e}); copy the checkpoint again") from None
