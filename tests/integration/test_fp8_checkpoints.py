"""A model that is released in FP8 converts, trains, is exported in bfloat16, and evaluated by a real vLLM.

Why: the same files mean an FP8 engine to vLLM and bfloat16 to the trainer, and the two would sample and train
different models. The reference of what the numbers mean is tests/support/fp8_models.py. Sizes are no
multiples of 128, so two ranks cut inside of blocks. Config.json also names Python code of the model
(auto_map), which nothing needs. Not covered: GPUs, where vLLM has FP8 kernels that it must not use.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from rpg_megatron.config import read_model_shape
from tests.support.commands import Command
from tests.support.conversion import difference, fail, succeed, tensors
from tests.support.fp8_models import store_in_fp8
from tests.support.tiny_models import write_byte_model, write_vision_model

pytestmark = [pytest.mark.usefixtures("forked_starts"), pytest.mark.timeout(1200)]

LARGE = {"hidden_size": 192, "intermediate_size": 320, "head_dim": 32}
LATENT = {"hidden_size": 192, "intermediate_size": 320, "q_lora_rank": 144, "kv_lora_rank": 136}
BY_BYTES = "def reward(text, answer, **_):\n    return len(text.encode()) % 7 / 7\n"
TOLD = "tensors in FP8 are read as bfloat16, which engines and exports have"


def add_code(folder: Path) -> None:
    """Names of Python files that are not there, as DeepSeek-V3 has them."""
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {
        "AutoConfig": "configuration_other.Other",
        "AutoModelForCausalLM": "modeling_other.Other",
    }
    (folder / "config.json").write_text(json.dumps(config))


def write_mixture(folder: Path, family: str = "glm4_moe") -> dict[str, torch.Tensor]:
    """A mixture with a layer that predicts the token after the next one, also in FP8."""
    sizes = LARGE if family == "glm4_moe" else LATENT
    write_byte_model(folder, family=family, **sizes, moe_intermediate_size=160, num_nextn_predict_layers=1)
    layer = {
        "model.layers.2.eh_proj.weight": torch.randn(192, 384),
        "model.layers.2.enorm.weight": torch.ones(192),
    }
    file = folder / "model.safetensors"
    save_file(load_file(file) | layer, file, metadata={"format": "pt"})
    meaning = store_in_fp8(folder)
    add_code(folder)
    return meaning


def write_released(folder: Path) -> dict[str, torch.Tensor]:
    """Qwen3.5 with its vision tower."""
    write_vision_model(folder, "qwen3_5")
    return store_in_fp8(folder)


def check_bfloat16(folder: Path, meaning: dict[str, torch.Tensor], changed: tuple[str, ...] = ()) -> None:
    """The folder is what the model in FP8 means, but for tensors that a run has trained."""
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())
    found = tensors(folder)
    assert found.keys() == meaning.keys()
    for name, value in meaning.items():
        assert found[name].dtype in (torch.bfloat16, torch.float32), name
        if not name.startswith(changed or "none"):
            assert torch.equal(found[name], value), name


@pytest.mark.parametrize(
    "family", ["deepseek_v3", *(pytest.param(f, marks=pytest.mark.long) for f in ("glm4_moe", "qwen3_5"))]
)
def test_there_and_back(tmp_path: Path, family: str) -> None:
    released = family == "qwen3_5"
    meaning = write_released(tmp_path / "hf") if released else write_mixture(tmp_path / "hf", family)
    there = succeed("hf_to_megatron", "--hf", tmp_path / "hf", "--out", tmp_path / "there", "--verify")
    assert difference(there) <= 1e-4
    small = ("--max-shard-gib", "0.001", "--verify")
    back = succeed("megatron_to_hf", "--megatron", tmp_path / "there", "--out", tmp_path / "back", *small)
    assert difference(back) <= 1e-4
    check_bfloat16(tmp_path / "back", meaning)
    assert not read_model_shape(next((tmp_path / "there").glob("*/hf"))).fp8_files
    if not released:
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "back", dtype=torch.bfloat16)
        weights = loaded.state_dict()
        name = "model.layers.0.mlp.down_proj.weight"
        assert torch.equal(weights[name], meaning[name])


def test_a_run_its_resume_and_evaluations(config_file: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    (tmp_path / "by_bytes.py").write_text(BY_BYTES)
    meaning = write_mixture(tmp_path / "model")
    model, run = f"model.path={tmp_path / 'model'}", tmp_path / "runs" / "tiny-001"
    settings = ["parallel={tensor: 2, sequence: true}", "reward.type=by_bytes:reward", "checkpoint.every=1"]
    refused = ['engine.arguments=["--hf-overrides={}"]', "--dry-run"]
    code, err = Command(tmp_path, "train", str(config_file), model, *settings, *refused).finish(timeout=120)
    assert (code, "--hf-overrides would change the model in engines only" in err) == (2, True), err
    for steps in (1, 2):
        whole = [str(config_file), model, *settings, f"training.steps={steps}"]
        code, err = Command(tmp_path, "train", *whole).finish(timeout=600)
        assert code == 0, err
        assert err.count(TOLD) == 1, err
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if row["step"]] == [1, 2]
    assert all(row["mismatch/logp_max"] < 1e-4 for row in rows if row["step"])
    export = run / "hf" / "step_000002"
    check_bfloat16(
        export, meaning, ("model.layers.0", "model.layers.1", "model.embed", "model.norm", "lm_head")
    )
    problems = tmp_path / "sums.jsonl"
    problems.write_text(json.dumps({"prompt": "1+1", "answer": "2"}) + "\n")
    sizes = ["engine.max_sequences=4", "engine.kv_cache_gib=0.25", "--max-response-tokens", "8"]
    options = ["--data", str(problems), "-n", "1", "--device", "cpu", *sizes]
    for folder in (export, tmp_path / "model"):
        code, err = Command(tmp_path, "eval", str(folder), *options).finish(timeout=400)
        assert code == 0, err
        assert (TOLD in err) == (folder != export), err


@pytest.mark.long
def test_adapters_and_a_teacher(config_file: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    (tmp_path / "by_bytes.py").write_text(BY_BYTES)
    for seed, name in enumerate(("model", "teacher")):
        write_byte_model(tmp_path / name, seed, **LARGE)
        meaning = store_in_fp8(tmp_path / name)
    settings = [
        f"model.path={tmp_path / 'model'}",
        f"teacher={{path: {tmp_path / 'teacher'}}}",
        "lora={rank: 4}",
    ]
    settings += ["objective={type: distil}", "reward.type=by_bytes:reward", "optimizer.lr=1e-2"]
    code, err = Command(tmp_path, "train", str(config_file), *settings).finish(timeout=600)
    assert code == 0, err
    assert f"teacher.path: 14 {TOLD}" in err
    run = tmp_path / "runs" / "tiny-001"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert all(row["mismatch/logp_max"] < 1e-4 for row in rows if row["step"])
    exported = tensors(run / "hf" / "step_000002")
    assert exported.keys() == meaning.keys()
    adapter = json.loads((run / "adapters" / "step_000002" / "adapter_config.json").read_text())
    assert adapter["base_model_name_or_path"] == str(tmp_path / "model")


def test_what_is_refused(tmp_path: Path) -> None:
    write_mixture(tmp_path / "hf")
    arguments = ("hf_to_megatron", "--hf", tmp_path / "hf", "--out", tmp_path / "there")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    config["quantization_config"]["activation_scheme"] = "static"
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    assert 'quantization_config (\'fp8\' with {"activation_scheme": "static"})' in fail(*arguments)
