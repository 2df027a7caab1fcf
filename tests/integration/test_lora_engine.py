"""Adapters come into real vLLM engines, are what the engines compute with, and faults are found at once.

Long: real Megatron ranks (TP2) feed an engine with one worker and one with two, by both transports, with the
model once and then with the adapters alone: the log-probs of tokens that the engines sampled agree after each
sync, also of responses that were under way. A plug-in makes vLLM bind the adapters wrongly in seven ways,
each of which vLLM itself serves without a word: the check of the slots names them, in the first sync and in
later ones. With that check taken away the guard finds them: test_lora_runs.

Not covered: GPUs (Triton kernels, captured graphs), quantised engines.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from rpg_megatron.bridge.controller import ApplyFailed, CheckFailed
from rpg_megatron.bridge.transports.shared_memory import SharedMemoryPublisher
from rpg_megatron.checkpoints.hf_export import export_adapter
from rpg_megatron.config import Settings
from rpg_megatron.config.lora import TARGETS, LoraSettings
from rpg_megatron.config.model_config import read_model_shape
from rpg_megatron.models.lora import AdaptedMapping, AdapterMapping, with_adapters
from rpg_megatron.models.partition import ONE_RANK
from rpg_megatron.models.registry import mapping_for
from tests.support.bridge_rig import (
    PROMPT,
    bridge_engines,
    check_matrix,
    make_model,
    prompt_logprobs,
    settings_for,
)
from tests.support.bridge_trainers import alone_params
from tests.support.engine import Engine, running_engines
from tests.support.lora_faults import FAULTS

MODEL = "qwen3, as many key heads"
LORA = {"rank": 6, "alpha": 9, "targets": TARGETS}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lora")


@pytest.fixture(scope="module")
def engines(folder: Path) -> Iterator[list[Engine]]:
    with bridge_engines(folder, MODEL, [1, 2], [FAULTS], lora=LORA) as engines:
        yield engines


class Publisher:
    """One trainer rank in this process, with random adapters."""

    def __init__(self, model: Path, bridge: Path) -> None:
        layout = mapping_for(read_model_shape(model))
        mapping = with_adapters(layout, LoraSettings.model_validate(LORA))
        assert isinstance(mapping, AdaptedMapping)
        layers = range(layout.shape.num_layers)
        shapes = mapping.adapters.stage_params(ONE_RANK, layers=layers, first=True, last=True)
        self.adapters = {name: torch.zeros(shape) for name, shape in shapes.items()}
        self.names = mapping.adapters.hf_tensors().keys()
        params = alone_params(model) | self.adapters
        self.inner = SharedMemoryPublisher(bridge, ONE_RANK, params, mapping, torch.float32)
        self.version = 0

    def sync(self, engine: Engine, *, complete: bool) -> Any:
        self.version += 1
        generator = torch.Generator().manual_seed(self.version)
        for values in self.adapters.values():
            values.copy_(torch.randn(values.shape, generator=generator))
        manifest = self.inner.publish(self.version, None if complete else self.names)
        return engine.sync(self.version, manifest)


@contextmanager
def planted(engine: Engine, fault: str) -> Iterator[None]:
    file = engine.bridge / "fault"
    file.write_text(fault)
    yield
    file.unlink()


SEEN = {
    "not loaded": r"slots hold \[None\], expected \[1\]",
    "stale name": r"slots hold \[2\], expected \[1\]",
    "alpha ignored": r"B of q_proj in model.layers.0.self_attn.qkv_proj",
    "q and k swapped": r"A of q_proj in model.layers.0.self_attn.qkv_proj, B of q_proj .* A of k_proj",
    "half the modules": r"A of q_proj in model.layers.0.self_attn.qkv_proj",
    "no B of the head": r"adapters: B of lm_head in lm_head",
    "no scale of the head": r"adapters: B of lm_head in lm_head",
}


@pytest.mark.parametrize("number", [0, 1], ids=["one worker", "two workers"])
def test_the_slots_are_checked_in_each_sync(folder: Path, engines: list[Engine], number: int) -> None:
    engine = engines[number]
    publisher = Publisher(folder / "model", engine.bridge)
    try:
        with pytest.raises(CheckFailed, match="only adapters are published, and the engine has not loaded"):
            publisher.sync(engine, complete=False)
        for complete in (True, False):
            for fault, message in SEEN.items():
                with planted(engine, fault), pytest.raises(ApplyFailed, match=message):
                    publisher.sync(engine, complete=complete)
                assert engine.versions() == [None] * engine.tensor, fault
                publisher.sync(engine, complete=complete)
                assert engine.versions() == [publisher.version] * engine.tensor, fault
    finally:
        publisher.inner.close()


@pytest.mark.long
def test_engines_compute_with_the_adapters_of_each_sync(
    folder: Path, engines: list[Engine], capsys: pytest.CaptureFixture[str]
) -> None:
    layouts = {2: {"TP2": {"tensor": 2}}}
    check_matrix(folder, engines, MODEL, layouts, 2, capsys, tolerance=1e-4, lora=LORA)


@pytest.mark.long
@pytest.mark.parametrize(("name", "lora"), [(MODEL, LORA), ("qwen3.5", {"rank": 6, "alpha": 9})])
def test_a_stock_server_serves_the_exported_adapter(
    name: str, lora: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """VLLM's own route loads what ``export_adapter`` wrote, also in place of another; peft agrees to 1e-4."""
    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "True")
    make_model(name, tmp_path / "model")
    plain = settings_for(tmp_path / "model", 1)
    plain["engine"]["arguments"] += ["--enable-lora", "--max-lora-rank", "8"]
    shape = read_model_shape(tmp_path / "model")
    mapping = AdapterMapping(shape, LoraSettings.model_validate(lora))
    shapes = mapping.stage_params(ONE_RANK, layers=range(shape.num_layers), first=True, last=True)
    folders = [tmp_path / "one", tmp_path / "two"]
    for seed, folder in enumerate(folders):
        generator = torch.Generator().manual_seed(seed)
        params = {n: 0.2 * torch.randn(s, generator=generator) for n, s in shapes.items()}
        export_adapter(folder, params, mapping, ONE_RANK, tmp_path / "model", dtype=torch.float32)
    settings = Settings.model_validate(plain)
    with running_engines(tmp_path, [settings], weights="checkpoint") as (engine,):
        for folder in folders:
            body = {"lora_name": "mine", "lora_path": str(folder), "load_inplace": folder is folders[1]}
            status, text = engine.call("POST", "/v1/load_lora_adapter", body)
            assert status == 200, text
            model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
            adapted = PeftModel.from_pretrained(model, str(folder)).eval()
            with torch.no_grad():
                logits = adapted(torch.tensor([PROMPT])).logits[0].log_softmax(-1)
            expected = logits[:-1].gather(-1, torch.tensor(PROMPT)[1:, None])[:, 0]
            error = (prompt_logprobs(engine, "mine") - expected).abs().max().item()
            assert error < 1e-4, (folder.name, error)
            assert (prompt_logprobs(engine, "policy") - expected).abs().max() > 0.1, (
                "the base is another model"
            )
