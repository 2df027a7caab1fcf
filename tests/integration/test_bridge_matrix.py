"""Trainer layouts into every engine layout by every transport; then both compute the same.

Real Megatron ranks, changed by random noise between syncs, and real vLLM engines with one and two workers
that start with weights of their own. What is compared are log-probs of tokens that the engines sampled, also
of responses that were under way when the weights changed. Not covered: GPUs, CUDA IPC, NCCL, several
machines.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from rpg_megatron.config import Settings
from rpg_megatron.engine.process import EngineProcess, engine_socket
from tests.support.ranks import run_ranks

WORLDS: dict[int, dict[str, dict[str, int]]] = {
    1: {"TP1": {}},
    2: {"TP2": {"tensor": 2}, "PP2": {"pipeline": 2}, "DP2": {"data": 2}},
    4: {"TP2xPP2": {"tensor": 2, "pipeline": 2}},
}
FEW: dict[int, dict[str, dict[str, int]]] = {2: {"PP2": {"pipeline": 2}, "DP2": {"data": 2}}, 4: WORLDS[4]}
COMMON: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 192,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.08,
    "bos_token_id": None,
    "eos_token_id": None,  # responses end at their limit
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
MODELS: dict[str, Any] = {
    "qwen2, tied": lambda: Qwen2ForCausalLM(Qwen2Config(**COMMON, tie_word_embeddings=True)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**COMMON, head_dim=32, tie_word_embeddings=False)),
    "llama 3, tied": lambda: LlamaForCausalLM(
        LlamaConfig(**COMMON, tie_word_embeddings=True, rope_parameters=LLAMA3)
    ),
}


def make_model(name: str, folder: Path) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().float()
    with torch.no_grad():
        for key, p in model.named_parameters():
            if "norm" in key or key.endswith("bias"):
                p.add_(0.2 * torch.randn_like(p))
    model.save_pretrained(folder)


def settings_for(model: Path, engine_tensor: int) -> dict[str, Any]:
    return {
        "device": "cpu",
        "model": {"path": str(model), "vocab_multiple": 4},
        "data": {"path": "unused", "max_prompt_tokens": 32},
        "precision": {"dtype": "float32"},
        "optimizer": {"distributed": False},
        "rollout": {"prompts_per_step": 16, "temperature": 1.0, "max_response_tokens": 600},
        "engine": {
            "tensor": engine_tensor,
            "max_sequences": 8,
            "kv_cache_gib": 0.25,
            "cpu_threads": 1,
            "arguments": ["--skip-tokenizer-init"],  # there is none; requests are tokens
        },
    }


@contextmanager
def engines_for(folder: Path, model: Path, sizes: list[int]) -> Iterator[dict[str, Any]]:
    """Running engines, one for each number of workers; what a trainer needs to know of them."""
    bridge = folder / "bridge"
    bridge.mkdir(mode=0o700)
    token = secrets.token_urlsafe(16)
    with ExitStack() as stack:
        engines = []
        for index, tensor in enumerate(sizes):
            engine = EngineProcess(
                Settings.model_validate(settings_for(model, tensor)),
                index,
                socket=engine_socket(folder, index),
                log=folder / f"engine_{index}.log",
                bridge_dir=bridge,
                token=token,
            )
            engine.start()
            stack.callback(engine.stop)
            engines.append(engine)
        for engine in engines:
            engine.wait_healthy()
        yield {
            "token": token,
            "bridge": str(bridge),
            "engines": sizes,
            "sockets": [str(e.socket) for e in engines],
        }


def check_matrix(
    folder: Path,
    name: str,
    worlds: dict[int, dict[str, dict[str, int]]],
    perturbations: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = folder / "model"
    make_model(name, model)
    weights = MODELS[name]().state_dict()
    names = {n for n, _ in MODELS[name]().named_parameters()}
    total = sum(4 * weights[n].numel() for n in names)
    norms = sum(4 * weights[n].numel() for n in names if "norm" in n)
    switched = 0
    with engines_for(folder, model, [1, 2]) as case:
        for world, layouts in worlds.items():
            case |= {
                "settings": settings_for(model, 1),
                "layouts": layouts,
                "perturbations": perturbations,
                # The noise adds up, and rounding grows with the weights.
                "noise": 0.05 if perturbations == 1 else 0.02,
                "version": 100_000 * world,
                "long_response": 500,
                "head_start": 0.7,
            }
            (folder / "case.json").write_text(json.dumps(case))
            results = run_ranks("tests.integration.sync_worker", world, folder, timeout=500 * perturbations)
            for layout, result in results.items():
                assert len(result["mismatch"]) == 2 * perturbations
                assert max(result["mismatch"]) < 1e-3, layout
                # Each worker gets what it keeps, once: norms are on every worker, all else on one.
                assert result["bytes"] == [[total, total + norms]] * (2 * perturbations + 2), layout
                read = dict(zip(("shared_memory", "process_group"), result["checked"], strict=False))
                assert read == {"shared_memory": [total, total + norms], "process_group": [0, 0]}, layout
                for switch, length, before in result["switched"]:
                    # The new weights' tokens are those from the switch on; all before must be the old ones'.
                    assert switch == 0 or before < 1e-4, f"{layout}: a token of neither weights"
                    switched += 0 < switch < length
                with capsys.disabled():
                    worst = max(result["mismatch"])
                    print(f"\n{name}: {layout}: mismatch at most {worst:.1e}, switches {result['switched']}")
    assert switched, "no response was under way when the weights changed"


def test_layouts_engines_and_transports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check_matrix(tmp_path, "qwen2, tied", FEW, 1, capsys)


@pytest.mark.long
@pytest.mark.timeout(5400)
@pytest.mark.parametrize("name", MODELS)
def test_every_family_after_five_perturbations(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    check_matrix(tmp_path, name, WORLDS, 5, capsys)
