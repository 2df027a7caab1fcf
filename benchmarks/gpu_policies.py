"""What the benchmarks on a GPU share: models of known sizes with random weights, batches, figures of merit.

No checkpoint is needed for a policy here: its weights are Megatron's random ones. ``--device cpu`` with the
shape ``tiny`` is a dry run that shows that a script works; its figures mean nothing.
"""

from __future__ import annotations

import gc
import json
import os
import platform
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from rpg_megatron.config import Settings
from rpg_megatron.config.model_shape import ModelShape
from rpg_megatron.data.trajectory import Trajectory
from rpg_megatron.models.registry import mapping_for
from rpg_megatron.policy.device import start_device, start_process_group
from rpg_megatron.policy.model import Mesh, start_mesh
from rpg_megatron.policy.policy import Policy

BF16_FLOPS = 989e12
"""Dense bfloat16 of one H100 or H200 (SXM), by its data sheet: what MFU is relative to, FP8 included."""
_QWEN3 = ModelShape(
    family="qwen3",
    num_layers=36,
    hidden_size=2560,
    ffn_hidden_size=9728,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=151936,
    tied_embeddings=True,
    qk_norm=True,
    qkv_bias=False,
    rope_theta=1e6,
    norm_eps=1e-6,
    max_positions=40960,
    dtype="bfloat16",
)
SHAPES = {
    "0.6b": replace(_QWEN3, num_layers=28, hidden_size=1024, ffn_hidden_size=3072, num_heads=16),
    "4b": _QWEN3,
    "8b": replace(_QWEN3, hidden_size=4096, ffn_hidden_size=12288, tied_embeddings=False),
    "tiny": replace(
        _QWEN3,
        num_layers=2,
        hidden_size=128,
        ffn_hidden_size=256,
        num_heads=2,
        num_kv_heads=1,
        head_dim=64,
        vocab_size=512,
    ),
}
"""Qwen3's sizes, by name."""
QUICKSTART = Path(__file__).parents[1] / "examples" / "quickstart"


def start(device: str) -> tuple[torch.device, Mesh]:
    """This process as the only rank. Call it once, first."""
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="29571")
    place = start_device(device)
    start_process_group(place)
    return place, start_mesh(
        Settings.model_validate({"model": {"path": "-"}, "data": {"path": "-"}}).parallel
    )


def precision_of(name: str) -> dict[str, Any]:
    """Settings of a precision by name: fp32, bf16, or an FP8 recipe, with ``+params`` for FP8 parameters."""
    if name in ("fp32", "bf16"):
        return {"dtype": {"fp32": "float32", "bf16": "bfloat16"}[name]}
    recipe, _, params = name.partition("+")
    return {"dtype": "bfloat16", "fp8": {"recipe": recipe, "parameters": params == "params"}}


def build(shape: ModelShape, mesh: Mesh, device: torch.device, precision: str, **sections: Any) -> Policy:
    """A policy with random weights, the same for each seed of torch's and device."""
    settings = Settings.model_validate(
        {
            "model": {"path": "-"},
            "data": {"path": "-"},
            "device": device.type,
            "precision": precision_of(precision),
            "objective": {"clip": None},
            **sections,
        }
    )
    return Policy(settings, shape, mesh, device, lambda _: None)


def forget() -> None:
    """Give the memory of policies that were dropped back."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def batch_of(lengths: list[int], vocab: int, prompt: int = 8, seed: int = 0) -> list[Trajectory]:
    """Random sequences of so many tokens each."""
    rng = np.random.default_rng(seed)
    found = []
    for number, length in enumerate(lengths):
        behaviour = np.full(length - prompt, -np.log(vocab), np.float32)
        found.append(
            Trajectory(
                prompt_id=number,
                sample=0,
                group=number,
                prompt=rng.integers(0, vocab, prompt).astype(np.int32),
                response=rng.integers(0, vocab, length - prompt).astype(np.int32),
                behaviour=behaviour,
                old=behaviour,
                anchor=behaviour,
                versions=np.zeros(length - prompt, np.int32),
                finish="length",
                text="",
                advantage=(-1.0) ** number,
            )
        )
    return found


def flops(shape: ModelShape, lengths: list[int]) -> float:
    """Floating-point operations of forward and backward of these sequences; nothing that is done twice."""
    heads, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    layer = shape.hidden_size * (2 * heads + 2 * kv + 3 * shape.ffn_hidden_size)
    matrices = shape.num_layers * layer + shape.hidden_size * shape.vocab_size
    attention = shape.num_layers * 2 * heads  # a causal token sees half the sequence: 4 n heads / 2
    return 3 * sum(2 * matrices * n + attention * n * n for n in lengths)


def write_checkpoint(folder: Path, shape: ModelShape, seed: int = 0) -> Path:
    """A Hugging Face checkpoint of a shape with random weights, and the quickstart's tokenizer."""
    folder.mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copy(QUICKSTART / "model" / name, folder)
    eos = json.loads((folder / "generation_config.json").read_text(encoding="utf-8"))["eos_token_id"]
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "num_hidden_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.ffn_hidden_size,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab_size,
        "tie_word_embeddings": shape.tied_embeddings,
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.rope_theta,
        "max_position_embeddings": shape.max_positions,
        "hidden_act": "silu",
        "attention_bias": False,
        "dtype": "bfloat16",
        "eos_token_id": eos,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    shapes = mapping_for(shape).hf_tensors().items()
    with ThreadPoolExecutor(8) as pool:  # torch makes normal numbers on one thread, a minute for 4B of them
        made = pool.map(lambda item: _random(item[1][1], [seed, item[0]]), enumerate(shapes))
        tensors = {name: tensor for (name, _), tensor in zip(shapes, made, strict=True)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _random(dims: Sequence[int], seed: list[int]) -> torch.Tensor:
    """Ones for a norm, else normal numbers."""
    if len(dims) == 1:
        return torch.ones(dims, dtype=torch.bfloat16)
    numbers = np.random.default_rng(seed).standard_normal(dims, np.float32)
    return torch.from_numpy(numbers).mul_(0.02).bfloat16()


def machine(device: torch.device) -> str:
    """Card and versions, for the head of a table."""
    card = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()} CPU"
    engine = "none"
    if device.type == "cuda":
        import transformer_engine

        engine = transformer_engine.__version__
    return f"{card}; torch {torch.__version__}, Transformer Engine {engine}"
