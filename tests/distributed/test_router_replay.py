"""Experts that are replayed are those of the token, the layer and the micro-batch, in every layout.

Why: a route of a neighbouring token, of another layer or of a later micro-batch gives plausible numbers. Each
trajectory has random experts, unlike the router's and one another's, and log-probs, loss and every
gradient are compared with transformers in float64, whose routers are forced to the same experts, and with one
rank. What the routers would have chosen is counted as transformers counts it.
Not covered here: where routes come from (tests/integration/test_router_replay_run.py), their way to the ranks
(tests/unit/test_batch_share.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from tests.support.layouts import FULL, SELECTIVE, SP, check, gradient_error, run_layouts
from tests.support.mixtures import REPLAYED, make_replayed

LAYOUTS: dict[str, tuple[int, dict[str, Any], int, dict[str, Any]]] = {
    "one rank": (1, {}, 5, {}),
    "PP2, full recompute": (2, {"pipeline": 2}, 5, FULL),
    "DP2, EP2": (2, {"data": 2, "expert": 2}, 7, {}),
    "TP2+SP": (2, SP, 3, {}),
    "CP2": (2, {"context": 2}, 3, {}),
}
"""Name -> (ranks, parallel settings, micro-batches, other settings)."""
MORE_LAYOUTS: dict[str, tuple[int, dict[str, Any], int, dict[str, Any]]] = {
    "one rank, experts recomputed": (1, {}, 5, SELECTIVE),
    "DP2, EP2, experts recomputed": (2, {"data": 2, "expert": 2}, 7, SELECTIVE),
    "TP2+SP, EP2, full recompute": (2, {**SP, "expert": 2}, 3, FULL),
    "PP2 x VPP2, full recompute": (2, {"pipeline": 2, "virtual": 2}, 5, FULL),
    "CP2, EP2, full recompute": (2, {"context": 2, "expert": 2}, 3, FULL),
    "TP2+SP x PP2, EP2, full recompute": (4, {**SP, "pipeline": 2, "expert": 2}, 3, FULL),
    "TP2+SP x CP2, EP4": (4, {**SP, "context": 2, "expert": 4}, 3, {}),
    "PP2 x DP2, EP2, full recompute": (4, {"pipeline": 2, "data": 2, "expert": 2}, 7, FULL),
    "CP2 x PP2, EP2": (4, {"context": 2, "pipeline": 2, "expert": 2}, 3, {}),
}
ONE = {"one rank": LAYOUTS["one rank"]}
FEW = {"TP2+SP, EP2, full recompute": MORE_LAYOUTS["TP2+SP, EP2, full recompute"]}


@pytest.mark.parametrize(
    ("family", "layouts"),
    [
        ("qwen3_moe", LAYOUTS),
        pytest.param("qwen3_moe", ONE | MORE_LAYOUTS, marks=pytest.mark.long),
        ("qwen3_next", ONE | FEW),
        pytest.param("qwen3_next", LAYOUTS | MORE_LAYOUTS, marks=pytest.mark.long),
        pytest.param("glm4_moe", ONE | FEW, marks=pytest.mark.long),
        pytest.param("glm4_moe", LAYOUTS | MORE_LAYOUTS, marks=pytest.mark.long),
        ("deepseek_v3", ONE | FEW),
        pytest.param("deepseek_v3", LAYOUTS | MORE_LAYOUTS, marks=pytest.mark.long),
    ],
    ids=[
        *("layouts", "more layouts", "hybrid", "hybrid, every layout", "sigmoid", "sigmoid, every layout"),
        *("latent", "latent, every layout"),
    ],
)
def test_replayed_experts_in_every_layout(
    tmp_path: Path, family: str, layouts: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    batch, rows, expected, counts = make_replayed(tmp_path / "model", family)
    results = run_layouts(tmp_path, layouts, batch, REPLAYED, lr=0.0, after=False, timeout=600)
    lines = []
    single = load_file(tmp_path / "gradients" / "one rank" / "model.safetensors")
    for name, result in results.items():
        check(tmp_path, name, result, batch, rows, expected)
        gradients = load_file(tmp_path / "gradients" / name / "model.safetensors")
        error, where = gradient_error(gradients, {key: value.double() for key, value in single.items()})
        gap = max(
            np.abs(np.subtract(dict(parts)["logp"], dict(results["one rank"]["scored"][key])["logp"])).max()
            for key, parts in result["scored"].items()
        )
        lines.append(f"{name:40s} log-probs {gap:.1e}, gradients {error:.1e} ({where}), {result['changes']}")
        assert result["changes"] == pytest.approx(counts), name
        assert gap <= 8e-6, name  # sums in another order: a log-prob of -8 has steps of 1e-6
        absolute = max(float((gradients[key] - g).abs().max()) for key, g in single.items())
        assert absolute <= 1e-6, name
    with capsys.disabled():
        print("\nreplayed experts: largest differences to one rank, gradients by their largest element")
        print("\n".join(lines))
