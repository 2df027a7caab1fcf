"""A checkpoint of a mixture of experts loads in any layout, and the next update is the right one.

Why: Megatron keeps the experts' optimizer apart from the rest only under expert parallelism, and cannot load
one kind of checkpoint into the other; and optimizer state that goes to the wrong expert shows only as a run
that learns worse. Proved, on real Megatron over gloo in fp32: after two updates in one layout, a policy that
loads the checkpoint in another, with more, fewer or no expert-parallel ranks, with and without tensor
parallelism of the experts, makes the next update with the same loss and gradient norm, and ends with the same
weights, moments and held anchor. In the layout that saved, every number is the same bit for bit.
Not covered: GPUs, bfloat16, Transformer Engine's grouped layers, dense models (test_resume_layouts).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rpg_megatron.checkpoints.run_folder import find_problems, step_folder
from tests.support.checkpoints import compare, make_resume_case, write_batch
from tests.support.ranks import run_ranks
from tests.support.tiny_models import HYBRIDS, MOONLIGHT, make_model

SP = {"tensor": 2, "sequence": True}
LAYOUTS: dict[str, dict[str, Any]] = {
    "TP2+SP x DP2, EP2": {**SP, "data": 2, "expert": 2},
    "DP4": {"data": 4},
    "DP4, EP4": {"data": 4, "expert": 4},
    "TP2+SP x PP2, ETP2": {**SP, "pipeline": 2, "expert_tensor": 2},
    "TP2+SP x PP2": {**SP, "pipeline": 2},
    "PP2 x VPP2 x DP2, EP2": {"pipeline": 2, "virtual": 2, "data": 2, "expert": 2},
    "CP2 x DP2, EP4": {"context": 2, "data": 2, "expert": 4},
    "DP2, EP2": {"data": 2, "expert": 2},
    "PP2": {"pipeline": 2},
}
FOUR = list(LAYOUTS)[:-2]
"""Those of four ranks."""
SAVED = ["TP2+SP x DP2, EP2", "DP4", "TP2+SP x PP2, ETP2"]
SIZES = {
    "num_hidden_layers": 4,
    "vocab_size": 251,
    "moe_intermediate_size": 32,
    "max_position_embeddings": 512,
}


def run_all(
    folder: Path,
    kind: str,
    saved: list[str],
    loaded: list[str],
    *,
    world: int = 4,
    dtype: str = "float32",
    count: int | None = None,
    tolerance: float = 1e-6,
) -> None:
    """Each layout of ``saved`` makes three updates; each of ``loaded`` the third from every checkpoint.

    count: weights in a checkpoint; None: those of a Qwen3-MoE. tolerance: of other layouts.
    """
    cases: dict[str, Any] = {}
    for source in saved:
        saves = [None, f"{source}: second", f"{source}: third"]
        cases[f"{source}, straight"] = make_resume_case(folder, kind, LAYOUTS[source], None, saves)
        for name in loaded:
            run = f"{source} to {name}"
            cases[run] = make_resume_case(folder, kind, LAYOUTS[name], f"{source}: second", [run])
    for case in cases.values():
        case["settings"]["precision"] = {**case["settings"].get("precision", {}), "dtype": dtype}
    (folder / "cases.json").write_text(json.dumps(cases))
    results = run_ranks("tests.distributed.resume_worker", world, folder, timeout=1200)
    config = json.loads((folder / "model" / "config.json").read_text())
    # All experts of a layer share a tensor; a dense layer has one fewer.
    count = count or config["num_hidden_layers"] * 9 + 3 - len(config["mlp_only_layers"])
    for source in saved:
        expected = results[f"{source}, straight"][2]
        third = step_folder(folder / kind / f"{source}: third", 1)
        for name in loaded:
            run, within = f"{source} to {name}", 0.0 if name == source else tolerance
            (actual,) = results[run]
            for key in ("loss", "grad_norm"):
                assert abs(actual[key] - expected[key]) <= within, (kind, run, key, actual, expected)
            checkpoint = step_folder(folder / kind / run, 1)
            assert not find_problems(checkpoint), run
            compare(third, checkpoint, within, count=count)


def test_a_checkpoint_loads_with_and_without_expert_parallelism(tmp_path: Path) -> None:
    write_batch(tmp_path, make_model(tmp_path / "model", "qwen3_moe", **SIZES))
    source = "TP2+SP x DP2, EP2"
    run_all(tmp_path, "distributed", [source], ["DP4", "TP2+SP x PP2, ETP2"])


@pytest.mark.parametrize(
    "family",
    [
        "deepseek_v3",
        *(
            pytest.param(family, marks=pytest.mark.long)
            for family in (
                "glm4_moe",
                "qwen3_5_moe",
                "qwen3_next",
                "qwen2_moe",
                "olmoe",
                "moonlight",
                "glm4_moe_lite",
            )
        ),
    ],
)
def test_shared_experts_and_biases_of_routers(tmp_path: Path, family: str) -> None:
    """A bias is a parameter without optimizer state; linear attention is stored in parts."""
    name, changes = ("deepseek_v3", MOONLIGHT) if family == "moonlight" else (family, {})
    write_batch(tmp_path, make_model(tmp_path / "model", name, noise=0.08, **SIZES | changes))
    # Attention and norms, 7 and 6 or 15; an MLP has 2, experts with router and shared expert 5 and one more.
    hybrid = 2 * (6 + 6) + 2 * (15 + 6)
    latent = {"deepseek_v3": 9, "glm4_moe_lite": 9, "moonlight": 7}
    counts = {"glm4_moe": 7 + 2 + 3 * (7 + 6), "qwen2_moe": 4 * (5 + 6), "olmoe": 4 * (6 + 3)}
    counts |= {kind: own + 2 + 3 * (own + 6) for kind, own in latent.items()}
    count = counts.get(family, hybrid) + 3
    loaded = ["TP2+SP x DP2, EP2", "DP4", "TP2+SP x PP2, ETP2"]
    other = 5e-6 if family in HYBRIDS else 1e-6  # their norms amplify rounding
    run_all(tmp_path, "distributed", loaded[:1], loaded, count=count, tolerance=other)


@pytest.mark.long
def test_muon_of_replicated_projections(tmp_path: Path) -> None:
    """Those to the latents, of which every tensor-parallel rank makes the same update."""
    write_batch(tmp_path, make_model(tmp_path / "model", "deepseek_v3", noise=0.08, **SIZES))
    source = "TP2+SP x DP2, EP2"
    run_all(tmp_path, "muon", [source], [source, "DP4"], count=9 + 2 + 3 * 15 + 3, tolerance=2e-6)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("muon", "bfloat16"),
        *(pytest.param(kind, "float32", marks=pytest.mark.long) for kind in ("muon", "plain")),
    ],
)
def test_a_stage_without_experts(tmp_path: Path, kind: str, dtype: str) -> None:
    """It has no state of the experts' optimizer, and may be rank 0, which writes what all ranks share."""
    sizes = SIZES | {"num_hidden_layers": 2, "mlp_only_layers": [0]}
    write_batch(tmp_path, make_model(tmp_path / "model", "qwen3_moe", **sizes))
    run_all(tmp_path, kind, ["DP2, EP2", "PP2"], ["PP2", "DP2, EP2"], world=2, dtype=dtype)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", ["distributed", "plain", "schedule-free"])
@pytest.mark.parametrize("dense", [[], [0]], ids=["experts", "first layer dense"])
def test_every_layout_loads_each_kind_of_checkpoint(tmp_path: Path, kind: str, dense: list[int]) -> None:
    write_batch(tmp_path, make_model(tmp_path / "model", "qwen3_moe", **SIZES, mlp_only_layers=dense))
    run_all(tmp_path, kind, SAVED, FOUR)
