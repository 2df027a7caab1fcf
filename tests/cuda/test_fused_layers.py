"""Models of Transformer Engine's real layers on fake CUDA tensors: names, shapes, optimizer, off-loading.

Why: its layers have other names and shapes than Megatron's local ones, which all other tests without a GPU
use; a parameter that the mapping does not know ends a run at its start. Each layout is built as one of its
ranks (layers_worker). Not covered: a forward pass, which needs kernels; weights kept in FP8.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import run_ranks

SP = {"tensor": 2, "sequence": True}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "TP2+SP": {"parallel": SP, "rank": 1},
    "PP2, last rank": {"parallel": {"pipeline": 2}, "rank": 1},
    "experts": {"experts": True},
    "experts, TP2+SP x DP2, EP4": {"parallel": {**SP, "data": 2, "expert": 4}, "rank": 3, "experts": True},
    "experts, TP2+SP, ETP2": {"parallel": {**SP, "expert_tensor": 2}, "rank": 1, "experts": True},
    **{
        recipe: {"precision": {"fp8": {"recipe": recipe}}}
        for recipe in ("blockwise", "tensorwise", "delayed")
    },
    "experts, blockwise": {"precision": {"fp8": {"recipe": "blockwise"}}, "experts": True},
    "adapters, TP2+SP": {"parallel": SP, "rank": 1, "lora": {"rank": 4}},
    "adapters, blockwise": {"precision": {"fp8": {"recipe": "blockwise"}}, "lora": {"rank": 4}},
    "adapters, experts": {"experts": True, "lora": {"rank": 4, "targets": ["q_proj", "o_proj"]}},
}
PARTS = {
    False: [
        "TELayerNormColumnParallelLinear",
        "TEDotProductAttention",
        "MLP",
        "TELayerNormColumnParallelLinear",
    ],
    True: ["TELayerNormColumnParallelLinear", "TEDotProductAttention", "MoELayer", "TEGroupedMLP"],
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_model_of_fused_layers(name: str, tmp_path: Path) -> None:
    case = {"parallel": {}, "rank": 0, "experts": False, "precision": {}, "lora": None} | LAYOUTS[name]
    result = run_ranks("tests.cuda.layers_worker", 1, tmp_path, json.dumps(case), fresh=True)
    assert "error" not in result, result["error"]
    assert result["problems"] == result["faults"] == []
    norms = "ColumnParallelLinear" if case["lora"] else "LayerNormColumnParallelLinear"
    parts = [part.replace("LayerNormColumnParallelLinear", norms) for part in PARTS[case["experts"]]]
    assert result["parts"] == parts  # adapters read what comes out of the norms
    targets = len((case["lora"] or {}).get("targets", range(7)))
    assert result["trained"] == (result["parameters"] if not case["lora"] else 2 * 2 * targets)
    assert result["optimizers"] == ["transformer_engine.pytorch.optimizers.fused_adam.FusedAdam"]
    assert result["parameters"] >= 10


BOUNDS = """
import inspect
from fla.modules.convolution import causal_conv1d
from fla.ops.gated_delta_rule import chunk_gated_delta_rule
for function in (causal_conv1d, chunk_gated_delta_rule):
    assert "cu_seqlens_cpu" in inspect.signature(function).parameters, function
"""


def test_fla_takes_the_bounds_of_sequences_on_the_host() -> None:
    """Otherwise each layer of linear attention waits for the device. Without the stand-ins: Triton would call
    them.
    """
    environment = {k: v for k, v in os.environ.items() if k != "LD_LIBRARY_PATH"}
    subprocess.run([sys.executable, "-c", BOUNDS], env=environment, check=True, timeout=300)
