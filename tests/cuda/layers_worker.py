"""The process of test_fused_layers: one rank's model of Transformer Engine's layers, on fake CUDA tensors.

``python layers_worker.py FOLDER CASE``: CASE is JSON with ``parallel``, ``rank``, ``experts``,
``precision``, ``lora``.
"""

from __future__ import annotations

import json
import sys
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformer_engine.pytorch  # noqa: F401, before the fake: it looks at the driver

from benchmarks.policies import SHAPES
from rpg_megatron.config import Settings
from rpg_megatron.config.model_shape import ExpertShape
from rpg_megatron.models.lora import is_adapter, with_adapters
from rpg_megatron.models.registry import mapping_for
from rpg_megatron.policy.device import start_device, start_process_group
from rpg_megatron.policy.lora import LoraModel
from rpg_megatron.policy.model import build_model, named_parameters, start_mesh, transformer_config
from rpg_megatron.policy.offload import StateOffloader
from rpg_megatron.policy.optimizer import build_optimizer, wrap_data_parallel
from tests.support import fake_cuda

EXPERTS = ExpertShape(count=8, per_token=2, ffn_hidden_size=64, normalised=True, layers=(0, 1))


def look(case: dict[str, Any]) -> dict[str, Any]:
    base = {"model": {"path": "-"}, "data": {"path": "-"}, "device": "cuda", "training": {"minibatches": 1}}
    changes = {"precision": {"dtype": "bfloat16"} | case["precision"], "parallel": case["parallel"]}
    changes["lora"] = case["lora"]
    settings = Settings.model_validate(base | changes)
    device = start_device("cuda")
    start_process_group(device)
    shape = replace(SHAPES["tiny"], num_heads=8, num_kv_heads=4, num_layers=2)
    if case["experts"]:
        shape = replace(shape, family="qwen3_moe", experts=EXPERTS)
    mesh = start_mesh(settings.parallel)
    config = transformer_config(
        *(shape, settings.parallel, settings.precision, "selective"), device=device, fused=True
    )
    if case["experts"]:
        assert config.moe_permute_fusion
        assert config.moe_router_fusion
        replays = transformer_config(
            *(shape, settings.parallel, settings.precision), device=device, fused=True, replays=True
        )
        assert replays.moe_permute_fusion
        assert not replays.moe_router_fusion, "the kernel would choose other experts than the engine"
    lora = settings.lora
    built = build_model(shape, config, settings.model, mesh, separate_norms=lora is not None)
    chunks = [chunk.to(device) for chunk in built]
    layout, problems = with_adapters(mapping_for(shape), lora), []
    if lora is not None:
        LoraModel(chunks, shape, lora, 0)
    for name, p in named_parameters(chunks):
        expected_shape = layout.local_shape(name, mesh.coordinates(1))
        if expected_shape != tuple(p.shape):
            problems.append(f"{name} has shape {tuple(p.shape)}, not {expected_shape}")
        if p.dtype != torch.bfloat16 or p.device.type != "cuda":
            problems.append(f"{name} is {p.dtype} on {p.device}")
    models = wrap_data_parallel(chunks, settings.optimizer, settings.precision, mesh.data * mesh.context)
    optimizer = build_optimizer(models, settings.optimizer, settings.precision, settings.memory)
    state = StateOffloader(models, optimizer)
    state.offload()
    state.reload()
    layer = chunks[0].decoder.layers[0]
    parts = [layer.self_attention.linear_qkv, layer.self_attention.core_attention, layer.mlp]
    parts += [layer.mlp.experts] if case["experts"] else [layer.mlp.linear_fc1]
    inner = getattr(optimizer, "chained_optimizers", [optimizer])
    trained = [name for name, p in named_parameters(chunks) if p.requires_grad]
    if lora is not None and (wrong := [name for name in trained if not is_adapter(name)]):
        problems.append(f"not frozen: {wrong}")
    return {
        "problems": problems,
        "parts": [type(part).__name__ for part in parts],
        "optimizers": sorted({f"{type(o.optimizer).__module__}.{type(o.optimizer).__name__}" for o in inner}),
        "parameters": len(list(named_parameters(chunks))),
        "trained": len(trained),
    }


def main() -> None:
    folder, case = Path(sys.argv[1]), json.loads(sys.argv[2])
    parallel = case["parallel"]
    world = parallel.get("tensor", 1) * parallel.get("pipeline", 1) * parallel.get("data", 1)
    with fake_cuda.fake_cuda(case["rank"], world) as recorder:
        try:
            result = look(case)
        except Exception:
            result = {"error": traceback.format_exc()}
    (folder / "result.json").write_text(json.dumps(result | {"faults": recorder.faults}))
    fake_cuda.leave()


if __name__ == "__main__":
    main()
