"""Adapters come into real vLLM engines, are what the engines compute with, and faults are found at once.

Long: real Megatron ranks (TP2) feed an engine with one worker and one with two, by both transports, with the
model once and then with the adapters alone: the log-probs of tokens that the engines sampled agree after each
sync, also of responses that were under way. A plug-in makes vLLM bind the adapters wrongly in five ways,
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

from rpg_megatron.bridge.controller import ApplyFailed, CheckFailed
from rpg_megatron.bridge.transports.shared_memory import SharedMemoryPublisher
from rpg_megatron.config.lora import LoraSettings
from rpg_megatron.config.model_shape import read_model_shape
from rpg_megatron.models.lora import AdaptedMapping, with_adapters
from rpg_megatron.models.registry import mapping_for
from tests.support.bridge_rig import bridge_engines, check_matrix
from tests.support.bridge_trainers import ALONE, alone_params
from tests.support.engine import Engine

MODEL = "qwen3, as many key heads"
LORA = {"rank": 6, "alpha": 9}
FAULTS = """
import os
from pathlib import Path

import rpg_megatron.bridge.vllm.plugin as plugin
from rpg_megatron.bridge.vllm import adapter_slots

load, check = plugin.load_adapters, plugin.check_slots

loads = []

def fault():
    file = Path(os.environ["RPG_BRIDGE_DIR"]) / "fault"
    kind = file.read_text() if file.exists() else os.environ.get("RPG_TEST_FAULT", "")
    return "" if "late" in kind and len(loads) < 3 else kind  # known ones, fresh ones, then the first update

def faulty(model, tensors, scale):
    loads.append(tensors)
    kind = fault()
    if "older" in kind:
        tensors = loads[-2]
    if "not loaded" in kind:
        return
    if "stale name" in kind:
        adapter_slots.ADAPTER_ID = 2
    if "alpha" in kind:
        scale = 1.0
    if "swapped" in kind:
        other = {"q_proj": "k_proj", "k_proj": "q_proj"}
        tensors = {
            name.replace(p, other[p]) if (p := name.split(".")[6]) in other else name: values
            for name, values in tensors.items()
        }
    if "half" in kind:
        tensors = {name: values for i, (name, values) in enumerate(tensors.items()) if i // 2 % 2}
    load(model, tensors, scale)
    adapter_slots.ADAPTER_ID = 1

def checked(*arguments):
    if "unchecked" not in fault():
        check(*arguments)

def serve_the_base():
    from vllm.lora.model_manager import LoRAModelManager as Manager

    plain = Manager.set_adapter_mapping

    def without(self, mapping):
        if "base" in fault():
            zeros = [(0,) * len(part) for part in (mapping.index_mapping, mapping.prompt_mapping)]
            mapping = type(mapping)(*zeros, is_prefill=mapping.is_prefill)
        plain(self, mapping)

    Manager.set_adapter_mapping = without

def register():
    plugin.load_adapters, plugin.check_slots = faulty, checked
    serve_the_base()
"""


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
        shapes = mapping.adapters.stage_params(
            layers=range(layout.shape.num_layers), first=True, last=True, tensor=1, vocab_multiple=1
        )
        self.adapters = {name: torch.zeros(shape) for name, shape in shapes.items()}
        self.names = mapping.adapters.hf_tensors().keys()
        params = alone_params(model) | self.adapters
        self.inner = SharedMemoryPublisher(bridge, ALONE, params, mapping, torch.float32)
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
}


@pytest.mark.parametrize("number", [0, 1], ids=["one worker", "two workers"])
def test_the_slots_are_checked_in_each_sync(folder: Path, engines: list[Engine], number: int) -> None:
    engine = engines[number]
    publisher = Publisher(folder / "model", engine.bridge)
    try:
        with pytest.raises(CheckFailed, match="only adapters are published, and the engine has no weights"):
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
