"""Checkpoints in FP8 with scales of blocks, and what they mean, element by element."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

SCALED = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}
"""quantization_config of DeepSeek-V3."""
LARGEST = 448.0


def _e4m3() -> list[float]:
    """The value of each byte: sign, 4 bits of exponent (bias 7), 3 of mantissa; without infinity."""
    table = []
    for byte in range(256):
        exponent, mantissa = byte >> 3 & 15, byte & 7
        value = (mantissa / 8) * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
        value = float("nan") if byte & 127 == 127 else value
        table.append(-value if byte >> 7 else value)
    return table


def _blocks(shape: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], tuple[Any, ...]]]:
    """Index of a scale, and of its block in the tensor."""
    *front, rows, columns = shape
    for index in np.ndindex(*front):
        for i in range(0, rows, 128):
            for j in range(0, columns, 128):
                block = (*index, slice(i, min(i + 128, rows)), slice(j, min(j + 128, columns)))
                yield (*index, i // 128, j // 128), block


def quantise(weight: torch.Tensor, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix, or several, in FP8, and the scales."""
    out = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    scales = torch.empty((*weight.shape[:-2], *(-(-size // 128) for size in weight.shape[-2:])), dtype=dtype)
    for at, block in _blocks(tuple(weight.shape)):
        scales[at] = weight[block].float().abs().max() / LARGEST
        out[block] = (weight[block].float() / scales[at].float()).clamp(-LARGEST, LARGEST).to(out.dtype)
    return out, scales


def dequantise(weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """What they mean: a table of the 256 values, times a float32 in float32, rounded to bfloat16 once."""
    table, codes = torch.tensor(_e4m3()), weight.view(torch.uint8)
    out = torch.empty(weight.shape, dtype=torch.bfloat16)
    for at, block in _blocks(tuple(weight.shape)):
        out[block] = (table[codes[block].long()] * scales[at].float()).bfloat16()
    return out


def is_projection(name: str) -> bool:
    """Whether releases have a tensor in FP8: matrices of layers, but no routers, gates and convolutions."""
    kept = ("embed", "lm_head", "norm", "mlp.gate.", "expert_gate", "conv1d", "in_proj_a", "in_proj_b")
    return name.endswith(
        ("proj.weight", "with_mqa.weight", "gate_up_proj", "down_proj", "fc.weight")
    ) and not any(part in name for part in kept)


def store_in_fp8(
    folder: Path,
    chosen: Callable[[str], bool] = is_projection,
    dtype: torch.dtype = torch.float32,
    **changes: Any,
) -> dict[str, torch.Tensor]:
    """Rewrite a checkpoint with the chosen tensors in FP8, the others in bfloat16; returns what it means.

    In two files, with the scales in the file that does not have their tensors.
    """
    old = sorted(folder.glob("*.safetensors"))
    meaning, parts = {}, ({}, {})
    for n, (name, tensor) in enumerate((k, v) for file in old for k, v in load_file(file).items()):
        if chosen(name):
            value, scale = quantise(tensor, dtype)
            parts[n % 2][name], parts[1 - n % 2][f"{name}_scale_inv"] = value, scale
            meaning[name] = dequantise(value, scale)
        else:
            kept = tensor.dtype == torch.float32 and name.endswith(
                ("A_log", "linear_attn.norm.weight", "correction_bias")
            )
            meaning[name] = parts[n % 2][name] = tensor if kept else tensor.bfloat16()
    for file in [*old, folder / "model.safetensors.index.json"]:
        file.unlink(missing_ok=True)
    weight_map = {}
    for n, part in enumerate(parts):
        save_file(part, folder / f"model-{n}.safetensors", metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, f"model-{n}.safetensors")
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )
    config = json.loads((folder / "config.json").read_text())
    config |= {"dtype": "bfloat16", "quantization_config": SCALED | changes}
    config.pop("torch_dtype", None)
    if "text_config" in config:
        config["text_config"]["dtype"] = "bfloat16"
    (folder / "config.json").write_text(json.dumps(config))
    return meaning
