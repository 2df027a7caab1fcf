"""Engines of models with latent attention, against transformers on the whole sequences.

Why: vLLM's CPU build rotates the parts of such heads wrongly, without an error, and the plug-in mends it. On
a GPU the engines compute with parts of a weight of their own, which must follow each sync. A CPU has these
only for latents of 512 and 64 dimensions: an engine with them shows it. Not covered: the trainer
(test_bridge_matrix), a GPU's kernels.
"""

from __future__ import annotations

import asyncio
import json
import random
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from safetensors.torch import load_file

from rpg_megatron.config import Settings
from tests.support import bridge_rig
from tests.support.bridge_rig import (
    Rig,
    ask,
    bridge_engines,
    gaps,
    hf_logprobs,
    make_model,
    prompt_logprobs,
    running_rig,
    settings_for,
)
from tests.support.bridge_trainers import state_dict
from tests.support.engine import Engine, running_engines

TOLERANCE = 1e-4
ABSORBED = """
import os
def register():
    os.environ["VLLM_MLA_DISABLE"] = "0"
"""
COPIED = """
def register():
    import vllm.model_executor.layers.attention.mla_attention as mla
    split = mla.split_kv_b_proj
    mla.split_kv_b_proj = lambda *given: tuple(part.clone() for part in split(*given))
"""
IN_PLACE = """
import torch
import vllm.model_executor.layers.utils as layers
import rpg_megatron.bridge.vllm.weight_loader as loader

def plain(layer, remove_weight):
    layer.cpu_linear = torch.nn.functional.linear

def register():
    layers.dispatch_cpu_unquantized_gemm = plain
    processed = loader._is_processed
    loader._is_processed = lambda layer, device: hasattr(layer, "w13_weight") and processed(layer, device)
"""
"""Linear layers as on a GPU."""


def prompts() -> list[list[int]]:
    draw = random.Random(0)
    return [[draw.randrange(101) for _ in range(n)] for n in (1, 2, 17, 64, 130, 300, 17, 64)]


def check_syncs(rig: Rig, engines: Sequence[Engine], syncs: int) -> None:
    for version in range(1, syncs + 1):
        transport = ("shared_memory", "process_group")[version % 2]
        manifest = rig.publish(version, version, transport)
        weights = state_dict(rig.model, version)
        reference = hf_logprobs(rig.model, weights)
        for engine in engines:
            assert engine.sync(version, manifest).mode == "slices"
            prompt_gap = (prompt_logprobs(engine, "policy") - reference).abs().max()
            samples = asyncio.run(ask(engine, prompts(), 5, 70, 30))
            decoded = gaps(rig.model, weights, prompts(), samples).max()
            print(f"\nTP{engine.tensor}, {transport}: prompt {prompt_gap:.1e}, decoding {decoded:.1e}")
            assert max(prompt_gap, decoded) <= TOLERANCE
    assert rig.error(syncs - 1) > 0.1, "the weights differ"


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("name", "workers"),
    [
        ("moonlight", [1]),
        pytest.param("moonlight", [2], marks=pytest.mark.long),
        *(pytest.param(name, [1, 2], marks=pytest.mark.long) for name in ("deepseek-v3", "glm-4.7-flash")),
    ],
)
def test_float32_after_each_sync(tmp_path: Path, name: str, workers: list[int]) -> None:
    """Engines with one and two workers; long and short requests, so that prompts join running batches."""
    with bridge_engines(tmp_path, name, workers) as engines, running_rig(tmp_path, engines[0]) as rig:
        check_syncs(rig, engines, 3)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("name", "stand_ins"),
    [("deepseek-v3", [IN_PLACE, COPIED]), pytest.param("moonlight", [], marks=pytest.mark.long)],
)
def test_absorbed_matrices_after_each_sync(
    tmp_path: Path, name: str, stand_ins: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Queries and latents are projected by one fused module, and W_UK and W_UV are parts of kv_b_proj: views
    where vLLM can, else copies, which are wrong if they are not made again.
    """
    for sizes in (bridge_rig.LATENT, bridge_rig.DEEPSEEK):
        monkeypatch.setitem(sizes, "kv_lora_rank", 512)
        monkeypatch.setitem(sizes, "qk_rope_head_dim", 64)
    section = settings_for(tmp_path / "model", 1)["engine"]
    section["arguments"] += ["--attention-backend", "CPU_MLA"]
    with (
        bridge_engines(tmp_path, name, [1], [ABSORBED, *stand_ins], engine=section) as engines,
        running_rig(tmp_path, engines[0]) as rig,
    ):
        assert "Using CPU_MLA" in engines[0].process.log.read_text()
        check_syncs(rig, engines, 2)


@pytest.mark.timeout(600)
def test_kimi_k2_from_its_checkpoint(tmp_path: Path) -> None:
    """Its config.json names code of its own, which no process runs: vLLM takes DeepSeek-V3's."""
    make_model("deepseek-v3", tmp_path / "model")
    shutil.copytree(tmp_path / "model", tmp_path / "kimi")
    config = json.loads((tmp_path / "kimi" / "config.json").read_text()) | {"model_type": "kimi_k2"}
    config["auto_map"] = {
        "AutoConfig": "configuration_deepseek.DeepseekV3Config",
        "AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM",
    }
    (tmp_path / "kimi" / "config.json").write_text(json.dumps(config))
    settings = Settings.model_validate(settings_for(tmp_path / "kimi", 1))
    weights = load_file(tmp_path / "model" / "model.safetensors")
    with running_engines(tmp_path, [settings], weights="checkpoint") as (engine,):
        reference = hf_logprobs(tmp_path / "model", weights)
        samples = asyncio.run(ask(engine, prompts(), 30))
        decoded = gaps(tmp_path / "model", weights, prompts(), samples).max()
        assert max((prompt_logprobs(engine, "policy") - reference).abs().max(), decoded) <= TOLERANCE
