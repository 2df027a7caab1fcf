"""Adapters in PEFT's format: adapter_config.json and adapter_model.safetensors. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rpg_megatron.checkpoints.hf_files import StoredTensor, check_stored, read_header
from rpg_megatron.config.errors import UserError, shorten
from rpg_megatron.config.files import read_json
from rpg_megatron.config.lora import TARGETS
from rpg_megatron.models.lora import AdapterMapping

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
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
        "target_modules": list(lora.names),
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
        raise UserError(
            f"model.adapter: {file} has peft_type {shorten(str(kind), 50)}; only LORA can be trained"
        )
    problems = [
        f"{key} is {shorten(str(config[key]), 100)}, and only {value!r} is supported"
        for key, value in _UNSUPPORTED.items()
        if config.get(key) and config[key] != value
    ]
    lora = mapping.lora
    for key, theirs, ours in (
        ("rank", config.get("r", 8), lora.rank),
        ("alpha", config.get("lora_alpha", 8), lora.alpha),
        ("rslora", bool(config.get("use_rslora")), lora.rslora),
    ):
        if theirs != ours:
            problems.append(f"set lora.{key} to {shorten(str(theirs), 50)}, it is {ours}")
    modules = config.get("target_modules")
    named = {str(name).rpartition(".")[2] for name in modules} if isinstance(modules, list) else set()
    if named != set(lora.names) and named <= set(TARGETS):
        problems.append(f"set lora.targets to [{', '.join(name for name in TARGETS if name in named)}]")
    if problems:
        raise UserError(f"model.adapter: {file}: {'; '.join(problems)}")
    stored = read_header(folder / ADAPTER_WEIGHTS)
    check_stored(folder, stored, mapping, "settings (lora)")
    return stored
