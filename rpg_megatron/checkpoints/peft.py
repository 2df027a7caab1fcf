"""Adapters in PEFT's format: adapter_config.json and adapter_model.safetensors. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rpg_megatron.checkpoints.hf_files import check_stored, read_header
from rpg_megatron.checkpoints.stored_tensor import StoredTensor
from rpg_megatron.config.errors import UserError, shorten
from rpg_megatron.config.files import read_json
from rpg_megatron.config.lora import OUTPUT_LAYER, TARGETS
from rpg_megatron.models.lora import AdapterMapping, peft_name

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PICKLE = "adapter_model.bin"
_UNSUPPORTED: dict[str, Any] = {
    "bias": "none",
    "use_dora": False,
    "fan_in_fan_out": False,
    "lora_bias": False,
    "modules_to_save": None,
    "layers_to_transform": None,
    "trainable_token_indices": None,
    "target_parameters": None,
    "rank_pattern": {},
    "alpha_pattern": {},
}
"""Keys of adapter_config.json, each with the value that an adapter of ours has."""
_VARIANTS = (
    "alora_invocation_tokens",
    "arrow_config",
    "kasa_config",
    "layer_replication",
    "monteclora_config",
    "use_bdlora",
    "use_qalora",
)
"""Keys of newer versions of PEFT, which change what an adapter does if they are set."""
_KEEP_BASE = ("gaussian", "eva", "orthogonal", "mica")
"""The values of init_lora_weights with which PEFT leaves the model's weights as they are."""


def peft_config(mapping: AdapterMapping, base: Path) -> dict[str, Any]:
    """Content of adapter_config.json. base: the model's folder."""
    lora = mapping.lora
    alpha = int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "r": lora.rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "target_modules": list(mapping.names),
        "use_rslora": lora.rslora,
        "inference_mode": True,
        **_UNSUPPORTED,
    }


def check_adapter(folder: Path, mapping: AdapterMapping) -> dict[str, StoredTensor]:
    """Check that an adapter has the settings and tensors of ``mapping``; returns the tensors by name.

    Raises UserError that names what differs.
    """
    file = folder / ADAPTER_CONFIG
    try:
        config = read_json(file)
        if not isinstance(config, dict):
            raise ValueError("not an object")
    except (OSError, ValueError) as e:
        reason = e.strerror if isinstance(e, OSError) else shorten(str(e), 200)
        raise UserError(
            f"model.adapter: {file} cannot be read ({reason}); give a folder that PEFT has saved"
        ) from None
    if (kind := config.get("peft_type")) != "LORA":
        raise UserError(f"model.adapter: {file} has peft_type {_shown(kind)}; only LORA can be trained")
    if problems := [*_unsupported(config), *_differences(config, mapping)]:
        raise UserError(f"model.adapter: {file}: {'; '.join(problems)}")
    weights = folder / ADAPTER_WEIGHTS
    if not weights.exists() and (folder / _PICKLE).exists():
        raise UserError(
            f"model.adapter: {folder} has its weights in {_PICKLE}, a pickle, which is not loaded; save them "
            f"as {ADAPTER_WEIGHTS}, with PEFT's save_pretrained"
        )
    stored = read_header(weights)
    if mapping.on_output_layer:
        # PEFT saves the frozen weight, too. Of another size, it is not the model's.
        base = peft_name(mapping.shape, 0, OUTPUT_LAYER, "A").replace("lora_A", "base_layer")
        size = mapping.shape.vocab_size, mapping.shape.hidden_size
        if base in stored and stored[base].shape == size:
            del stored[base]
    check_stored(folder, stored, mapping, "settings (lora)")
    return stored


def _unsupported(config: dict[str, Any]) -> Iterator[str]:
    for key, value in (_UNSUPPORTED | dict.fromkeys(_VARIANTS)).items():
        if config.get(key) and config[key] != value:
            yield f"{key} is {_shown(config[key])}, and only {value!r} is supported"
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start not in _KEEP_BASE:
        yield (
            f"init_lora_weights is {_shown(start)}, with which PEFT changes the model's weights too; save it "
            "with path_initial_model_for_weight_conversion"
        )


def _differences(config: dict[str, Any], mapping: AdapterMapping) -> Iterator[str]:
    """What differs from the settings, or cannot be compared with them."""
    lora = mapping.lora
    for key, name, ours in (("r", "rank", lora.rank), ("lora_alpha", "alpha", lora.alpha)):
        theirs = config.get(key, 8)
        if type(theirs) not in (int, float) or not 0 < theirs < math.inf:
            yield f"{key} is {_shown(theirs)}, not a number above 0"
        elif theirs != ours:
            yield f"set lora.{name} to {_shown(theirs)}, it is {ours}"
    if (theirs := bool(config.get("use_rslora"))) != lora.rslora:
        yield f"set lora.rslora to {str(theirs).lower()}"
    named = config.get("target_modules")
    if isinstance(named, list) and all(isinstance(name, str) for name in named):
        if set(named) != set(mapping.names) and set(named) <= set(TARGETS):
            yield f"set lora.targets to [{', '.join(sorted(set(named)))}]"
    elif not isinstance(named, str):  # a pattern, which the tensors' names show
        yield f"target_modules is {_shown(named)}, not a list of names"


def _shown(value: Any) -> str:
    """A value of a file, for a message."""
    return shorten(ascii(value), 100)
