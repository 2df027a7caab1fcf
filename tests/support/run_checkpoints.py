"""A complete checkpoint of a run, with the weights of a Megatron checkpoint or without any."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from rpg_megatron.checkpoints.megatron_folder import CheckpointMetadata, write_manifest
from rpg_megatron.checkpoints.run_folder import FORMAT, step_folder


def write_step(
    run: Path,
    step: int,
    model: Path,
    weights: Path | None = None,
    tensor: int = 1,
    *,
    lora: str = "null",
    dtype: str = "float32",
) -> Path:
    """A checkpoint whose settings name ``model``. weights: Megatron's folder to copy; None: no tensors.

    lora: its section, in YAML.
    """
    folder = step_folder(run, step)
    if weights is None:
        (folder / "model").mkdir(parents=True)
        (folder / "model" / "metadata.json").write_text("{}")
    else:
        shutil.copytree(weights, folder / "model", ignore=shutil.ignore_patterns("hf", "manifest.json"))
    (folder / "state.json").write_text(json.dumps({"format": FORMAT, "step": step}))
    (folder / "rng.pt").write_bytes(b"")
    settings = f"model: {{path: {model}}}\nlora: {lora}\nreward: {{type: no_module:here}}\n"
    (folder / "config.yaml").write_text(settings)
    write_manifest(folder, CheckpointMetadata("0.0", dtype, tensor, 1))
    return folder
