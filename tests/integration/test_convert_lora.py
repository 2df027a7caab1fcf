"""A LoRA run's checkpoint, which has adapters alone, becomes the model that PEFT computes, and its adapter.

Why: the sums are what users serve; a wrong scale, transposed factor or second rounding is not seen in their
files. PEFT is the reference. Real Megatron-Core on gloo ranks. Not covered: optimizer state in the checkpoint
(a run has it), and experts.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rpg_megatron.checkpoints.hf_import import load_hf_weights
from rpg_megatron.checkpoints.index import StoredPart
from rpg_megatron.checkpoints.megatron import plan_save
from rpg_megatron.checkpoints.peft import ADAPTER_WEIGHTS, check_adapter
from rpg_megatron.commands.convert.command import convert_to_hf, open_megatron
from rpg_megatron.commands.convert.inspect import inspect_checkpoint
from rpg_megatron.config import UserError, read_model_shape
from rpg_megatron.config.lora import LINEAR_TARGETS, LoraSettings
from rpg_megatron.config.policy import ModelSettings, ParallelSettings, PrecisionSettings
from rpg_megatron.launcher.stopping import StopSignals
from rpg_megatron.models.lora import AdapterMapping, split_parameters, weight_name
from rpg_megatron.policy.lora import LoraModel
from rpg_megatron.policy.model import build_model, named_parameters, start_mesh, transformer_config
from rpg_megatron.system.collectives import barrier, gather_on_first
from rpg_megatron.system.dtypes import torch_dtype
from tests.support.peft_adapters import save_random_adapter
from tests.support.ranks import ranks
from tests.support.run_checkpoints import write_step
from tests.support.tiny_models import AWKWARD, make_model


@ranks(2)
def save_adapter(folder: Path, dtype: torch.dtype) -> None:
    """Write an adapter of PEFT's as the Megatron checkpoint of a LoRA run, without optimizer.

    folder: has model, adapter and lora.json. dtype: of the checkpoint.
    """
    parallel = ParallelSettings(tensor=dist.get_world_size())
    mesh = start_mesh(parallel)
    shape = read_model_shape(folder / "model")
    lora = LoraSettings.model_validate_json((folder / "lora.json").read_text())
    config = transformer_config(shape, parallel, PrecisionSettings(dtype="float32"))
    config.params_dtype = config.pipeline_dtype = dtype
    (model,) = build_model(shape, config, ModelSettings(path=folder / "model"), mesh)
    LoraModel([model], shape, lora, seed=0)
    mapping = AdapterMapping(shape, lora)
    load_hf_weights(
        folder / "adapter",
        split_parameters(dict(named_parameters([model])))[1].items(),
        mapping,
        mesh.coordinates(1),
        stored=check_adapter(folder / "adapter", mapping),
    )
    planned = plan_save(folder / "saved", [model], stage=False)
    if everyone := gather_on_first(planned.write(), list[StoredPart]):
        planned.finish(everyone)
    barrier()


pytestmark = pytest.mark.usefixtures("forked_starts")

LORA = LoraSettings(
    rank=3, alpha=5, targets=("q_proj", "v_proj", "o_proj", "up_proj", "down_proj", "lm_head")
)
HYBRID_LORA = LoraSettings(
    rank=3, alpha=5, targets=("q_proj", "in_proj_qkv", "in_proj_z", "in_proj_a", "out_proj", "lm_head")
)
TOKENS = torch.arange(40)[None]


@dataclass(frozen=True)
class Case:
    folder: Path
    logits: torch.Tensor
    """PEFT's."""
    lora: LoraSettings

    def step(self, run: Path, dtype: str) -> Path:
        """The adapter as a checkpoint of a LoRA run with two tensor-parallel ranks."""
        (self.folder / "saved").mkdir()
        save_adapter(self.folder, torch_dtype(dtype))
        settings = json.dumps(self.lora.model_dump(mode="json"))
        saved = self.folder / "saved"
        step = write_step(run, 1, self.folder / "model", saved, tensor=2, lora=settings, dtype=dtype)
        shutil.rmtree(saved)
        return step


@pytest.fixture(scope="module", params=[pytest.param("qwen3", marks=pytest.mark.long), "qwen3_5"])
def case(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Case:
    folder, hybrid = tmp_path_factory.mktemp("case"), request.param == "qwen3_5"
    lora = HYBRID_LORA if hybrid else LORA
    model = make_model(folder / "model", request.param, head_dim=32 if hybrid else 8, **AWKWARD)
    (folder / "model" / "tokenizer.json").write_text("{}")
    (folder / "lora.json").write_text(lora.model_dump_json())
    return Case(folder, save_random_adapter(model, lora, folder / "adapter", TOKENS), lora)


@pytest.fixture(scope="module")
def run(case: Case, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "r-001"
    case.step(run, "float32")
    return run


def merge(run: Path, out: Path) -> None:
    """Verified, in a process of its own."""
    command = [sys.executable, "-m", "rpg_megatron.cli", "convert", "megatron-to-hf", "--verify"]
    command += ["--megatron", str(run), "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "logits: max |difference| from transformers" in done.stdout


def test_the_merged_model_computes_what_peft_does(case: Case, run: Path, tmp_path: Path) -> None:
    merge(run, tmp_path / "merged")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(model(TOKENS).logits, case.logits, atol=1e-5, rtol=1e-5)
    base = AutoModelForCausalLM.from_pretrained(case.folder / "model", dtype=torch.float32)
    with torch.no_grad():
        assert (base(TOKENS).logits - case.logits).abs().max() > 0.01, "the adapter does nothing"


def test_the_adapter_alone_is_pefts_again(case: Case, run: Path, tmp_path: Path) -> None:
    with StopSignals() as signals:
        convert_to_hf(open_megatron(run, adapter=True), tmp_path / "adapter", signals)
    theirs, ours = (load_file(f / ADAPTER_WEIGHTS) for f in (case.folder / "adapter", tmp_path / "adapter"))
    assert theirs.keys() - ours.keys() == {"base_model.model.lm_head.base_layer.weight"}
    assert all(torch.equal(theirs[name], ours[name]) for name in ours)


def test_sums_are_rounded_once(case: Case, tmp_path: Path) -> None:
    case.step(tmp_path / "r-001", "bfloat16")
    merge(tmp_path / "r-001", tmp_path / "merged")
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    base = load_file(case.folder / "model" / "model.safetensors")
    adapter = load_file(case.folder / "adapter" / ADAPTER_WEIGHTS)
    shape = read_model_shape(case.folder / "model")
    for target in case.lora.names:
        name = weight_name(shape, 0 if target in LINEAR_TARGETS else 1, target)
        a, b = (
            adapter[f"base_model.model.{name.removesuffix('.weight')}.lora_{x}.weight"].bfloat16().float()
            for x in "AB"
        )
        expected = (base[name].float() + case.lora.scale * b @ a).bfloat16()
        assert (merged[name] == expected).float().mean() > 0.999, name
        twice = (base[name].bfloat16().float() + case.lora.scale * b @ a).bfloat16()
        assert (twice == expected).float().mean() < 0.9, "this model would not show it"


def test_messages_say_what_a_checkpoint_of_adapters_needs(case: Case, run: Path, tmp_path: Path) -> None:
    step = run / "checkpoints" / "step_000001"
    assert inspect_checkpoint(step).adapters
    assert "LoRA: adapters of this model, without its weights" in inspect_checkpoint(step).table()
    copied = write_step(tmp_path / "r-001", 1, Path("/nowhere"), step / "model", lora="{rank: 3, alpha: 5}")
    with pytest.raises(UserError, match=r"model\.path is /nowhere.*give the model that it was trained on"):
        open_megatron(copied)
    make_model(tmp_path / "other", head_dim=8, **AWKWARD | {"num_hidden_layers": 4})
    with StopSignals() as signals, pytest.raises(UserError, match=r"unexpected: decoder\.layers\.4"):
        convert_to_hf(open_megatron(step, config=tmp_path / "other"), tmp_path / "out", signals)
    bare = shutil.copytree(step / "model", tmp_path / "bare")
    with pytest.raises(UserError, match="is not a LoRA run or its checkpoint; leave out --adapter"):
        open_megatron(bare, config=case.folder / "model", adapter=True)
    with (
        StopSignals() as signals,
        pytest.raises(UserError, match="adapters of a LoRA run, without its model"),
    ):
        convert_to_hf(open_megatron(bare, config=case.folder / "model"), tmp_path / "out", signals)
    broken = write_step(tmp_path / "r-002", 1, case.folder / "model", step / "model", lora="{rank: x}")
    with pytest.raises(UserError, match=r"config\.yaml: lora\.rank: Input should be a valid integer"):
        open_megatron(broken)
    assert not (tmp_path / "out").exists()
