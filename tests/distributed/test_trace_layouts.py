"""A trace of the policy is that of the whole model, however it is cut over ranks and stages.

Why: the audit compares shares of heads and columns that ranks hold in Megatron's own order; one that is put
together wrongly would be reported as a fault of the weights. Every step must follow from the ones before it
by the Hugging Face weights. Transformer Engine's dense layers compute norms within the linear layers behind
them: those values cannot be observed, and the identity in their place must not be taken for them.
Not covered: the engine's share (tests/integration/test_audit.py), GPUs.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from tests.support.ranks import run_ranks
from tests.support.tiny_models import CONFIGS

LAYOUTS = {
    "TP4+SP, fewer groups than ranks": ("qwen3", {"tensor": 4, "sequence": True}),
    "TP2xPP2+SP, uneven stages": ("qwen3", {"tensor": 2, "pipeline": 2, "sequence": True}),
    "CP2xTP2+SP": ("qwen3", {"context": 2, "tensor": 2, "sequence": True}),
    "TP2xDP2, biases, no norms of heads": ("qwen2", {"tensor": 2, "data": 2}),
    "TP2+SP, EP4": ("qwen3_moe", {"tensor": 2, "sequence": True, "expert": 4, "data": 2}),
    "PP2xTP2+SP, ETP2": ("qwen3_moe", {"pipeline": 2, "tensor": 2, "sequence": True, "expert_tensor": 2}),
    "TP2xPP2+SP, fused norms": ("qwen3", {"tensor": 2, "pipeline": 2, "sequence": True}),
}


def test_every_step_follows_in_every_layout(tmp_path: Path, make_checkpoint: Callable[..., Path]) -> None:
    models = {
        "qwen3": make_checkpoint(tmp_path / "qwen3", num_hidden_layers=3),
        "qwen2": make_checkpoint(
            tmp_path / "qwen2", architectures=["Qwen2ForCausalLM"], model_type="qwen2", num_hidden_layers=3
        ),
        # The first of three layers is dense.
        "qwen3_moe": make_checkpoint(
            tmp_path / "moe", **CONFIGS["qwen3_moe"] | {"num_hidden_layers": 3, "mlp_only_layers": [0]}
        ),
    }
    cases = {
        name: {
            "fused": "fused norms" in name,
            "model": {"path": str(models[family]), "vocab_multiple": 5},
            "precision": {"dtype": "float32"},
            "parallel": parallel,
            "rollout": {"temperature": 0.9},
            "data": {"path": "unused.jsonl"},
        }
        for name, (family, parallel) in LAYOUTS.items()
    }
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    results = run_ranks("tests.distributed.trace_worker", 4, tmp_path)
    for name, (family, _) in LAYOUTS.items():
        links, shapes = results[name]["links"], results[name]["shapes"]
        fused = {"input_norm", "mlp_norm"} if "fused norms" in name else set()
        assert {site.rpartition(".")[2] for site in links}.isdisjoint(fused), name
        parts = (15 if family == "qwen2" else 17) - len(fused)
        fewer = 2 * 2 if family == "qwen3_moe" else 0  # router and experts in place of four sites
        assert len(links) == 3 * parts - fewer + 3, name  # the last norm, what goes into it, the log-probs
        assert max(links.values()) < 1e-5, (name, links)
        # 13 + 20 + 14 places; 4 query and 2 key/value heads of 32, 128 columns.
        assert shapes["layers.2.query_rope"] == [47, 128], name
        assert shapes["layers.0.key"] == [47, 64], name
        assert shapes["layers.0.gate"] == [47, 128], name
        if family == "qwen3_moe":
            assert shapes["layers.1.router"] == [47, 8], name
            assert shapes["layers.2.experts"] == [47, 64], name
