"""Models of known sizes with random weights, policies and batches for them, and ranks: for several
benchmarks.

On a GPU no checkpoint is needed for a policy: its weights are Megatron's random ones.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from benchmarks.setup import QUICKSTART
from rpg_megatron.checkpoints.hf_import import load_hf_weights
from rpg_megatron.config import Settings
from rpg_megatron.config.model_shape import ModelShape, Rope
from rpg_megatron.config.policy import ParallelSettings
from rpg_megatron.data.trajectory import Trajectory
from rpg_megatron.models.partition import ONE_RANK
from rpg_megatron.models.registry import mapping_for
from rpg_megatron.policy.device import start_device, start_process_group
from rpg_megatron.policy.model import Mesh, start_mesh
from rpg_megatron.policy.policy import Policy
from rpg_megatron.system.dtypes import torch_dtype
from tests.support.ranks import free_port
from tests.support.tiny_models import config_of

QWEN3 = ModelShape(
    "qwen3", num_layers=36, hidden_size=2560, ffn_hidden_size=9728, num_heads=32, num_kv_heads=8,
    head_dim=128, vocab_size=151936, tied_embeddings=True, qk_norm=True, qkv_bias=False, rope=Rope(1e6),
    norm_eps=1e-6, max_positions=40960, dtype="bfloat16",
)  # fmt: skip
_SIZES = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "vocab_size",
)


def sized(*sizes: int, **fields: Any) -> ModelShape:
    """A Qwen3 of other sizes: layers, hidden size, MLP, heads, key heads, head size, vocabulary."""
    return replace(QWEN3, **dict(zip(_SIZES, sizes, strict=True)), **fields)


SHAPES = {
    "0.6b": sized(28, 1024, 3072, 16, 8, 128, 151936),
    "4b": QWEN3,
    "8b": sized(36, 4096, 12288, 32, 8, 128, 151936, tied_embeddings=False),
    "29m": sized(8, 512, 1536, 8, 4, 64, 4096, tied_embeddings=False),
    "tiny": sized(2, 128, 256, 2, 1, 64, 512),
}
"""Qwen3's sizes, by name."""


def write_checkpoint(folder: Path, shape: ModelShape) -> Path:
    """A Hugging Face checkpoint of a shape with random weights, and the quickstart's tokenizer."""
    folder.mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copy(QUICKSTART / "model" / name, folder)
    eos = json.loads((folder / "generation_config.json").read_text(encoding="utf-8"))["eos_token_id"]
    config = config_of(shape) | {"eos_token_id": eos, "pad_token_id": eos}
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    shapes, dtype = mapping_for(shape).hf_tensors(), torch_dtype(shape.dtype)
    with ThreadPoolExecutor(8) as pool:  # torch draws normal numbers on one thread: a minute for 4B of them
        tensors = pool.map(_random, shapes.values(), range(len(shapes)))
        weights = {name: tensor.to(dtype) for name, tensor in zip(shapes, tensors, strict=True)}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _random(dims: Sequence[int], seed: int) -> torch.Tensor:
    """Ones for a norm or a bias, else normal numbers."""
    if len(dims) == 1:
        return torch.ones(dims)
    return torch.from_numpy(np.random.default_rng([0, seed]).standard_normal(dims, np.float32)).mul_(0.02)


def start(device: str) -> tuple[torch.device, Mesh]:
    """This process as the only rank. Call it once, first."""
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    place = start_device(device)
    start_process_group(place)
    return place, start_mesh(ParallelSettings())


def on_rank(function: Callable[..., Any], *arguments: Any) -> Any:
    """The result of ``function(device, mesh, *arguments)`` in a new process, which is the only rank."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_be_rank, function, arguments).result()


def _be_rank(function: Callable[..., Any], arguments: Sequence[Any]) -> Any:
    torch.set_num_threads(1)
    return function(*start("cpu"), *arguments)


def precision_of(name: str) -> dict[str, Any]:
    """Settings of a precision by name: fp32, bf16, or an FP8 recipe, with ``+params`` for FP8 parameters."""
    if name in ("fp32", "bf16"):
        return {"dtype": {"fp32": "float32", "bf16": "bfloat16"}[name]}
    recipe, _, params = name.partition("+")
    return {"dtype": "bfloat16", "fp8": {"recipe": recipe, "parameters": params == "params"}}


def build(
    shape: ModelShape,
    mesh: Mesh,
    device: torch.device,
    precision: str,
    folder: Path | None = None,
    **sections: Any,
) -> Policy:
    """A policy with a checkpoint's weights; without one random, the same for a given seed and device."""
    named = {"model": {"path": str(folder or "-")}, "data": {"path": "-"}, "device": device.type}
    numbers = {"precision": precision_of(precision), "objective": {"clip": None}}
    settings = Settings.model_validate(named | numbers | sections)

    def load(policy: Policy) -> None:
        if folder:
            load_hf_weights(folder, policy.loadable_parameters(), mapping_for(shape), ONE_RANK)

    return Policy(settings, shape, mesh, device, load)


def forget() -> None:
    """Free the memory of policies that were dropped."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def batch_of(lengths: Sequence[int], vocab: int, prompt: int = 8, seed: int = 0) -> list[Trajectory]:
    """Random sequences of these lengths in tokens."""
    rng = np.random.default_rng(seed)
    sequences = [rng.integers(0, vocab, length).astype(np.int32) for length in lengths]
    return [trajectory_of(tokens, prompt, number, vocab) for number, tokens in enumerate(sequences)]


def trajectory_of(tokens: np.ndarray, prompt: int, number: int = 0, vocab: int = 10_000) -> Trajectory:
    """A response of length ``len(tokens) - prompt``, each token with the log-prob of a uniform policy."""
    response = tokens[prompt:]
    uniform = np.full(len(response), -np.log(vocab), np.float32)
    versions = np.zeros(len(response), np.int32)
    return Trajectory(
        prompt_id=number, sample=0, group=number, prompt=tokens[:prompt], response=response,
        versions=versions, behaviour=uniform, old=uniform, anchor=uniform, finish="length", text="",
        advantage=(-1.0) ** number,
    )  # fmt: skip
