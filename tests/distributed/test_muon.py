"""Muon's update of each hidden matrix is the orthogonalised gradient of that matrix, whole.

Why: Megatron marks which weights are query, key and value, or of an expert, and reads the marks of their
float32 copies. Without them query, key and value would be one matrix, and experts would be gathered from the
wrong ranks, without an error.
Proved, on real Megatron over gloo, for the first update of each matrix at TP2, dense and a mixture whose
experts are split over ranks, or not over the tensor ranks, in bfloat16 and float32: query, key and value
each by itself, gate and up together, experts each. Numbers in float64: test_layouts. Resume:
test_resume_layouts.
Not covered: GPUs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from tests.support.checkpoints import write_batch
from tests.support.layouts import make_case, make_layout_model
from tests.support.mixtures import SIZES
from tests.support.ranks import run_ranks
from tests.support.tiny_models import make_model


def dense(folder: Path) -> PreTrainedModel:
    return make_layout_model(folder, tied=False)


def mixture(folder: Path) -> PreTrainedModel:
    return make_model(folder, "qwen3_moe", noise=0.08, **SIZES)


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.long)])
@pytest.mark.parametrize(
    ("make", "parallel"),
    [
        (dense, {"tensor": 2}),
        (mixture, {"tensor": 2, "sequence": True, "expert": 2, "expert_tensor": 1}),
        (mixture, {"tensor": 2, "sequence": True, "expert": 1, "expert_tensor": 2}),
    ],
    ids=["dense", "experts on one rank each", "experts split"],
)
def test_each_matrix_is_updated_whole(
    tmp_path: Path, make: Any, parallel: dict[str, Any], dtype: str
) -> None:
    model = make(tmp_path / "model")
    write_batch(tmp_path, model)
    sections = {
        "optimizer": {"type": "muon", "distributed": False, "weight_decay": 0},
        "precision": {"dtype": dtype},
        "objective": {"beta": 0.05},
        "anchor": {"type": "fixed"},
    }
    heads = model.config.num_attention_heads // model.config.num_key_value_heads, model.config.head_dim
    case = make_case(tmp_path / "model", parallel, 3, sections) | {"heads": heads}
    (tmp_path / "cases.json").write_text(json.dumps({"update": case}))
    off = run_ranks("tests.distributed.muon_worker", 2, tmp_path)["update"]
    # Newton-Schulz of bfloat16 models computes in bfloat16; of matrices with few directions it is 0.13 off.
    assert max(off.values()) < (0.2 if dtype == "bfloat16" else 2e-5), off
    queries = [name for name in off if "linear_qkv.weight" in name]
    assert len(queries) == 3 * 4
