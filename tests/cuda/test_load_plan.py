"""How weights reach an engine, on the models of vLLM's CUDA build: dense, experts, latents, FP8.

Why: on a GPU most modules are loaded in place, and graphs hold the addresses of all; on a CPU nearly all are
re-packed. So the CPU tests do not show how a GPU loads each module. Compared with vLLM's own loading of
the same weights, over two syncs. The tensors are on the CPU; FP8 is quantised by a product in torch in place
of vLLM's kernel. Not covered: kernels that reorder weights on a GPU (other back ends of experts).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from rpg_megatron.bridge.transports.mapped_reader import Copies
from rpg_megatron.config.model_config import read_model_shape
from rpg_megatron.models.boxes import Box
from rpg_megatron.models.registry import mapping_for
from tests.support.tiny_models import CONFIGS

SIZES = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 512,
    "num_hidden_layers": 2,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
LATENT = {
    **{key: value for key, value in SIZES.items() if key != "head_dim"},
    "num_key_value_heads": 4,
    "q_lora_rank": 64,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
"""Heads as DeepSeek-V3's."""


@dataclass
class Published:
    """A reader of random weights, which differ between versions."""

    shapes: dict[str, tuple[int, ...]]
    float32: frozenset[str]
    version: int = 0
    manifest: Any = None

    def full(self, name: str) -> torch.Tensor:
        generator = torch.Generator().manual_seed(sorted(self.shapes).index(name) + 1000 * self.version)
        values = torch.randn(*self.shapes[name], generator=generator) * 0.05
        return values if name in self.float32 else values.bfloat16()

    def load(self, copies: Copies) -> None:
        for _, part, _, target in copies.parts(self.cut):
            target.copy_(part)

    def cut(self, name: str, box: Box) -> Iterator[tuple[torch.Tensor, Box]]:
        yield self.full(name)[box.slices()], box


def quantise(weight: torch.Tensor, *_: object, **__: object) -> tuple[torch.Tensor, torch.Tensor]:
    scale = (weight.float().abs().max() / 448).reshape(1)
    return (weight.float() / scale).to(torch.float8_e4m3fn), scale


@pytest.fixture
def make_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Builds a model of vLLM's CUDA build from a folder, with its weights on the CPU."""
    import vllm._custom_ops as ops
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading

    monkeypatch.setattr(ops, "scaled_fp8_quant", quantise)
    monkeypatch.setattr(torch.cuda, "Stream", SimpleNamespace)
    plain = {"dtype": "bfloat16", "skip_tokenizer_init": True, "max_model_len": 256}

    def make(folder: Path, **arguments: str) -> tuple[torch.nn.Module, Any]:
        config = EngineArgs(str(folder), **plain, **arguments).create_engine_config()
        with set_current_vllm_config(config):
            if not parallel_state.model_parallel_is_initialized():
                parallel_state.init_distributed_environment(1, 0, f"file://{tmp_path}/store", 0, "gloo")
                parallel_state.initialize_model_parallel(1, 1)
            torch.set_default_dtype(torch.bfloat16)
            try:
                model = initialize_model(config)
            finally:
                torch.set_default_dtype(torch.float32)
            get_model_loader(config.load_config).load_weights(model, config.model_config)
            process_weights_after_loading(model, config.model_config, torch.device("cpu"))
        return model, config

    yield make
    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()


def tensors_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def places_of(model: torch.nn.Module) -> dict[str, tuple[Any, ...]]:
    return {name: (t.data_ptr(), t.shape, t.stride(), t.dtype) for name, t in tensors_of(model).items()}


DENSE = ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]
CASES: dict[str, tuple[str, dict[str, str], list[str]]] = {
    "dense": ("qwen3", {}, []),
    "dense, FP8": ("qwen3", {"quantization": "fp8"}, DENSE * 2),
    "experts by Triton": ("qwen3_moe", {"moe_backend": "triton"}, []),
    "experts by FlashInfer": ("qwen3_moe", {"moe_backend": "flashinfer_cutlass"}, ["routed_experts"] * 2),
    "latent attention": ("deepseek_v3", {"moe_backend": "triton"}, []),
    "experts, FP8": (
        *("qwen3_moe", {"quantization": "fp8"}),
        ["qkv_proj", "o_proj", "gate", "routed_experts"] * 2,
    ),
}
"""Family, vLLM's options, and the modules that are not loaded in place."""


@pytest.mark.parametrize("case", CASES)
def test_a_plan_loads_what_vllm_loads(case, make_model, tmp_path, monkeypatch):
    family, options, processed = CASES[case]
    from vllm.config import set_current_vllm_config

    from rpg_megatron.bridge.vllm import weight_loader

    folder = tmp_path / "model"
    folder.mkdir()
    changes = LATENT if family == "deepseek_v3" else SIZES | (EXPERTS if "moe" in family else {})
    (folder / "config.json").write_text(json.dumps(CONFIGS[family] | changes))
    mapping = mapping_for(read_model_shape(folder))
    shapes = {n: tuple(s) for n, s in mapping.hf_tensors().items()}
    dtypes = {n: "float32" if n in mapping.float32 else "bfloat16" for n in shapes}
    model, config = make_model(folder, load_format="dummy", **options)
    is_processed, cuda = weight_loader._is_processed, torch.device("cuda")
    monkeypatch.setattr(weight_loader, "_is_processed", lambda layer, _: is_processed(layer, cuda))
    before = places_of(model)
    cpu = torch.device("cpu")
    plan = weight_loader.record_plan(model, cpu, tuple((n, dtypes[n], s) for n, s in shapes.items()))
    assert plan.reason == ""
    names = {module: name for name, module in model.named_modules()}
    assert [names[p.layer].rpartition(".")[2] for p in plan.layers if not p.in_place] == processed
    for version in (1, 2):
        published = Published(shapes, mapping.float32, version)
        with set_current_vllm_config(config):
            weight_loader.load_published(model, SimpleNamespace(dtype=torch.bfloat16), cpu, plan, published)
        save_file({name: published.full(name) for name in shapes}, folder / "model.safetensors")
        reference, _ = make_model(folder, load_format="safetensors", **options)
        expected = tensors_of(reference)
        assert tensors_of(model).keys() == expected.keys()
        for name, tensor in tensors_of(model).items():
            assert torch.equal(tensor, expected[name]), name
        assert places_of(model) == before  # graphs hold them
