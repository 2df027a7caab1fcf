"""Whole runs of hybrids of linear and softmax attention and of latent attention, on two trainer ranks.

Why: a state that outlives its sequence, a rate that is rounded in a checkpoint, or a partial response that is
continued from a wrong state would show only as a run that learns a little worse. Proved in float32 with the
quickstart's hybrid, with one of its MLPs as shared experts beside four others on two expert-parallel ranks,
and with a small DeepSeek-V3: engines agree with the trainer after each update; a run that is killed with
SIGKILL in a random moment of step 5 resumes and ends bit by bit as an undisturbed one, and transformers loads
its export; with ``rollout.ahead: 2`` engines agree with the trainer also on responses that weight updates
interrupted, which continue a partial response. Not covered: GPUs, other layouts (tests/distributed), engines
alone (test_hybrid_engines).
"""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.support.ahead_runs import LARGEST, count_mixed
from tests.support.runs import QUICKSTART, STEPS, Run
from tests.support.tiny_models import write_byte_model

MODEL = QUICKSTART.parent / "quickstart" / "hybrid_model"
HYBRID = [f"model.path={MODEL}", "parallel.sequence=true"]
pytestmark = [pytest.mark.long, pytest.mark.timeout(3600), pytest.mark.usefixtures("forked_starts")]


def write_mixture(folder: Path) -> Path:
    """The quickstart's hybrid as a mixture: at first its shared experts, whose gates are 1/2, compute twice
    the old MLPs; four small experts are new.
    """
    shutil.copytree(MODEL, folder)
    config = json.loads((MODEL / "config.json").read_text())
    columns, hidden = config["intermediate_size"], config["hidden_size"]
    config |= {"architectures": ["Qwen3_5MoeForCausalLM"], "model_type": "qwen3_5_moe_text"}
    config |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    (folder / "config.json").write_text(json.dumps(config | {"shared_expert_intermediate_size": columns}))
    random = torch.Generator().manual_seed(0)
    weights = {}
    for name, weight in load_file(MODEL / "model.safetensors").items():
        block, _, part = name.partition(".mlp.")
        name = f"{block}.mlp.shared_expert.{part}" if part else name
        weights[name] = 2 * weight if ".mlp.shared_expert.down" in name else weight
    for block in [f"model.layers.{layer}.mlp" for layer in range(config["num_hidden_layers"])]:
        weights[f"{block}.shared_expert_gate.weight"] = torch.zeros(1, hidden)
        shapes = {"gate": (4, hidden)}
        for e in range(4):
            shapes |= dict.fromkeys((f"experts.{e}.gate_proj", f"experts.{e}.up_proj"), (32, hidden))
            shapes[f"experts.{e}.down_proj"] = (hidden, 32)
        for part, shape in shapes.items():
            weights[f"{block}.{part}.weight"] = 0.02 * torch.randn(shape, generator=random)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("kind", ["dense", "mixture", "latent"])
def test_a_killed_run_resumes_bit_by_bit(tmp_path: Path, kind: str) -> None:
    straight, killed = Run(tmp_path, "straight"), Run(tmp_path, "killed")
    model, settings = MODEL, HYBRID
    if kind != "dense":
        write = partial(write_byte_model, family="deepseek_v3") if kind == "latent" else write_mixture
        model = write(tmp_path / kind)
        settings = [f"model.path={model}", "parallel={data: 2, tensor: 1, expert: 2}"]
    straight.start(*settings)
    straight.finish()
    assert all(row["mismatch/logp_max"] <= 1e-4 for row in straight.rows()[1:])
    killed.start(*settings)
    killed.wait_in_step(5)
    killed.kill()
    killed.start(*settings)
    killed.finish()
    killed.assert_like(straight)
    export = killed.folder / "hf" / f"step_{STEPS:06d}"
    again = AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32)
    again.save_pretrained(tmp_path / "again")  # by the names in files
    loaded, weights = (load_file(at / "model.safetensors") for at in (tmp_path / "again", export))
    before = load_file(model / "model.safetensors")
    assert loaded.keys() == weights.keys() == before.keys()
    assert all(torch.equal(loaded[name], weight) for name, weight in weights.items())
    unchanged = [name for name, weight in weights.items() if torch.equal(weight, before[name])]
    assert [name for name in unchanged if not name.endswith("e_score_correction_bias")] == []


def test_partial_responses_are_continued(tmp_path: Path) -> None:
    run = Run(tmp_path, "ahead")
    run.start(*HYBRID, "rollout.ahead=2", "correction.type=truncate")
    run.finish()
    assert count_mixed(run.folder) > 0
    assert all(row["mismatch/logp_max"] < LARGEST for row in run.rows()[1:])
