"""Cases of training checkpoints that are loaded in another layout, and what a checkpoint holds."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from transformers import PreTrainedModel

from rpg_megatron.checkpoints.run_folder import ANCHOR, MODEL, step_folder
from rpg_megatron.config.lora import TARGETS
from tests.support.layouts import make_batch, make_case, make_layout_model, reference_logprobs

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "distributed": {"distributed": True},
    "plain": {"distributed": False},
    "schedule-free": {"type": "schedule_free_adamw", "distributed": False},
    "muon": {"type": "muon", "distributed": False},
    "adapters": {"distributed": True},
}
WEIGHTS = {"adapters": 4 * 7 * 2 + 2}
"""Number of weights in a checkpoint, if it is not the model's."""
LINEAR = "qkv", "proj", "fc1", "fc2", "q_proj", "q_down_proj", "q_up_proj", "kv_down_proj", "kv_up_proj"
MATRICES = *(f"linear_{name}.weight" for name in LINEAR), "router.weight"
"""The hidden matrices of a layer, which Muon updates."""


def read_whole(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a torch_dist checkpoint, whole, by torch's own reader."""
    metadata = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    state = {
        name: torch.empty(t.size, dtype=t.properties.dtype)
        for name, t in metadata.items()
        if isinstance(t, TensorStorageMetadata)
    }
    dcp.load(state, checkpoint_id=str(folder), no_dist=True)
    return state


def trim(tensors: dict[str, torch.Tensor], vocab: int = 251) -> dict[str, torch.Tensor]:
    """Without the rows that pad the vocabulary."""
    padded = ("embedding.word_embeddings.weight", "output_layer.weight", "output_layer.lora.lm_head.B")
    return {n: t[:vocab] if n.endswith(padded) else t for n, t in tensors.items()}


def compare(reference: Path, folder: Path, tolerance: float, *, count: int = 4 * 8 + 3) -> None:
    """Weights, of which there are ``count``, optimizer state and anchor against those of the run that never
    stopped.

    A weight in bfloat16 may be the neighbouring number, if it is one of a thousand: a difference far below
    ``tolerance`` of its float32 main weight, which is compared too, decides where that is rounded to.
    """
    for part in (MODEL, ANCHOR):
        expected, actual = trim(read_whole(reference / part)), trim(read_whole(folder / part))
        assert actual.keys() == expected.keys(), folder
        weights = {name for name in expected if not name.startswith("optimizer.")}
        assert len(weights) == count
        if part == MODEL:  # two or three numbers for each trained weight; Muon has one moment of a matrix
            frozen = sum(name.endswith("expert_bias") for name in weights)
            assert not any(name.endswith("expert_bias") for name in expected if name not in weights)
            single = sum("momentum_buffer" in name for name in expected)
            assert single in (0, sum(name.endswith(MATRICES) for name in weights))
            states = len(expected) + single - len(weights)
            assert states in [n * (len(weights) - frozen) for n in (2, 3)], sorted(expected)
        for key, tensor in expected.items():
            gaps = (actual[key].double() - tensor.double()).abs()
            if tensor.dtype == torch.bfloat16:
                neighbours = (gaps > tolerance) & (gaps <= tensor.double().abs() * 2.0**-7)
                assert neighbours.double().mean() <= 1e-3, f"{folder}: {key} is rounded differently"
                gaps = gaps[~neighbours]
            gap = float(gaps.max())
            assert gap <= tolerance, f"{folder}: {key} is off by {gap:.1e}"


def write_batch(folder: Path, model: PreTrainedModel | None = None) -> None:
    """The batch of all cases and, unless another one is given that is in ``folder / "model"``, the model."""
    model = model or make_layout_model(folder / "model", tied=False)
    batch = make_batch()
    with torch.no_grad():
        for t, (logp, _) in zip(batch, reference_logprobs(model, batch), strict=True):
            t.old = t.anchor = logp.float().numpy().astype(np.float32)
    (folder / "batch.pkl").write_bytes(pickle.dumps(batch))


def make_resume_case(
    folder: Path, kind: str, parallel: dict[str, Any], load: str | None, then: list[str | None]
) -> dict[str, Any]:
    """Load a checkpoint, then as many updates as ``then`` has places to save at (None: do not save)."""
    # A large epsilon: where gradients are tiny, Adam would otherwise blow rounding errors up.
    optimizer = {"weight_decay": 0.1, "eps": 1e-3, "clip_grad": 1.0, **OPTIMIZERS[kind]}
    settings = {"optimizer": optimizer, "objective": {"beta": 0.05}, "anchor": {"type": "fixed"}}
    if kind == "adapters":
        settings |= {"lora": {"rank": 4, "alpha": 8, "targets": TARGETS}}
    return {
        "settings": make_case(folder / "model", parallel, 5, settings)["settings"],
        "load": load and str(step_folder(folder / kind / load, 1)),
        "then": [place and str(folder / kind / place) for place in then],
    }
