"""Transformer Engine's real modules give transformers' numbers, with stand-ins for its kernels.

Why: a GPU's policy is made of these modules, and no test without a GPU ran one: a wrong mask, scale, layout,
sequence length or saved tensor would show on a cluster only. Forward, backward and update of whole policies,
in float32 on the CPU (te_worker, te_kernels), against transformers in float64: log-probs, entropies, the loss
and every gradient, with recomputation, context parallelism, experts in grouped products and replayed routes.
FP8 is compared with the emulation for CPUs, and weights that are kept in FP8 with those that are not.
Not covered: the kernels; FP8 in grouped products; how the tokens of experts are sorted
(test_sorting_kernels).
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from rpg_megatron.checkpoints.peft import ADAPTER_WEIGHTS
from tests.support.layouts import (
    FULL,
    OBJECTIVES,
    SELECTIVE,
    SP,
    check,
    gradient_error,
    make_batch,
    make_layout_model,
    reference_update,
    run_layouts,
    score_batch,
)
from tests.support.mixtures import REPLAYED, SIZES, make_replayed
from tests.support.tiny_models import make_model, use_float64

WORKER = "tests.cuda.te_worker"
LOCAL = {"path": "local layers"}
"""The data path that tells the worker to use Megatron's local layers."""
DENSE: dict[str, Any] = {
    "one rank": (1, {}, 3),
    "one rank, selective recompute": (1, {}, 3, SELECTIVE),
    "one rank, full recompute": (1, {}, 3, FULL),
    "DP2": (2, {"data": 2}, 7),
    "TP2+SP": (2, SP, 3),
    "PP2": (2, {"pipeline": 2}, 7),
    "CP2": (2, {"context": 2}, 3),
}
EXPERTS: dict[str, Any] = {
    "one rank": (1, {}, 3),
    "one rank, experts recomputed": (1, {}, 2, SELECTIVE),
    "DP2, EP2": (2, {"data": 2, "expert": 2}, 7),
    "TP2+SP, ETP2": (2, {**SP, "expert_tensor": 2}, 3),
    "TP2+SP, EP2, full recompute": (2, {**SP, "expert": 2}, 3, FULL),
}
KERNELS = {"generic_gemm", "rmsnorm_fwd", "rmsnorm_bwd", "fused_rope_forward", "fused_rope_backward"}
KERNELS |= {"fused_attn_fwd", "fused_attn_bwd", "get_fused_attn_backend"}
KERNELS |= {"multi_tensor_adam", "multi_tensor_l2norm"}
GROUPED = {"te_general_grouped_gemm"}
ROUTER = {"fused_topk_with_score_function_fwd", "fused_topk_with_score_function_bwd"}
RING = {"thd_grad_correction", "thd_out_correction", "thd_read_half_tensor", "thd_read_second_half_lse"}
RING |= {"thd_second_half_lse_correction"}
"""Of context parallelism."""
CLIPPING = {"multi_tensor_scale", "multi_tensor_scale_tensor"}
"""One of the two runs, depending on the optimizer."""


def check_all(folder: Path, layouts: dict[str, Any], batch: Any, settings: Any, *expected: Any) -> set[str]:
    """Compare with the reference; the kernels that ran."""
    results = run_layouts(folder, layouts, batch, settings, lr=0.0, after=False, worker=WORKER)
    for name, result in results.items():
        check(folder, name, result, batch, *expected)
    ran = set((folder / "kernels.txt").read_text().split())
    assert ran & CLIPPING
    return ran - CLIPPING


LINEAR = {"linear_qkv.weight", "linear_proj.weight", "linear_fc1.weight", "linear_fc2.weight"}


def check_in_place(folder: Path, weights: int) -> None:
    """Every linear layer has added its gradient to Megatron's buffer, in each layout of one rank.

    The gradients are compared above, so nothing was added twice: there are several micro-batches.
    """
    of_layout = json.loads((folder / "in_place.json").read_text())
    for names in of_layout.values():
        ends = {re.sub(r"\d+$", "", ".".join(name.split(".")[-2:])) for name in names}
        assert ends == LINEAR, ends
        assert len(names) == weights


def test_dense(tmp_path: Path) -> None:
    model = make_layout_model(tmp_path / "model", tied=False)
    batch = make_batch()
    rows = score_batch(model, batch)
    expected = reference_update(model, batch, "rpg")
    assert check_all(tmp_path, DENSE, batch, OBJECTIVES["rpg"], rows, expected) == KERNELS | RING
    check_in_place(tmp_path, 4 * model.config.num_hidden_layers)


def test_experts(tmp_path: Path) -> None:
    with use_float64():
        model = make_model(tmp_path / "model", "qwen3_moe", noise=0.15, **SIZES)
        batch = make_batch()
        rows = score_batch(model, batch)
        expected = reference_update(model, batch, "rpg")
    ran = check_all(tmp_path, EXPERTS, batch, OBJECTIVES["rpg"], rows, expected)
    assert ran == KERNELS | GROUPED | ROUTER
    dense = len(model.config.mlp_only_layers)
    sparse = model.config.num_hidden_layers - dense
    check_in_place(tmp_path, 4 * dense + (2 + 2 * model.config.num_experts) * sparse)


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe_lite"])
def test_latent_attention(tmp_path: Path, family: str) -> None:
    with use_float64():
        sizes = {"vocab_size": 251, "num_hidden_layers": 3, "max_position_embeddings": 512}
        model = make_model(tmp_path / "model", family, noise=0.1, **sizes)
        batch = make_batch()
        rows = score_batch(model, batch)
        expected = reference_update(model, batch, "rpg")
    layouts = EXPERTS | {"CP2, EP2": (2, {"context": 2, "expert": 2}, 3)}
    ran = check_all(tmp_path, layouts, batch, OBJECTIVES["rpg"], rows, expected)
    assert ran >= {"fused_attn_fwd", "fused_attn_bwd", "rmsnorm_fwd", "generic_gemm", *GROUPED, *RING}


def test_replayed_experts(tmp_path: Path) -> None:
    batch, rows, expected, _ = make_replayed(tmp_path / "model")
    assert check_all(tmp_path, EXPERTS, batch, REPLAYED, rows, expected) == KERNELS | GROUPED


B = "lora_B"
"""A has no gradient as long as B is 0."""


def test_adapters(tmp_path: Path) -> None:
    """Beside frozen weights of these modules adapters have the gradients that they have with local layers."""
    make_layout_model(tmp_path / "model", tied=False)
    lora = {"lora": {"rank": 4}}
    layouts = {"fused": (1, {}, 3, lora), "local": (1, {}, 3, lora | {"data": LOCAL})}
    batch = make_batch()
    run_layouts(tmp_path, layouts, batch, OBJECTIVES["rpg"], lr=0.0, after=False, worker=WORKER)
    fused, local = (
        {key: x for key, x in load_file(tmp_path / "gradients" / name / ADAPTER_WEIGHTS).items() if B in key}
        for name in layouts
    )
    error, key = gradient_error(fused, local)
    assert len(fused) == 4 * 7
    assert error < 1e-5, key
    assert json.loads((tmp_path / "in_place.json").read_text())["fused"] == []


RECIPES = ("blockwise", "tensorwise", "delayed")
FP8_SIZES = {
    "num_hidden_layers": 2,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 251,
}
"""128 and its multiples."""
FP8_LAYOUTS: dict[str, Any] = {
    "1": (1, {}, 1),
    "3": (1, {}, 3),
    "TP2+SP": (2, SP, 1),
    "DP2": (2, {"data": 2}, 2),
}
NOISE = 0.05
"""Of the model's weights. With it, no number of a forward pass lies so close to the middle of two FP8 values
that float32's order of summation decides which one it is. Where one does, a token differs (0.08, TP2, one
scale for a tensor: one of 336), and gradients, which E5M2 keeps to two bits, by up to a tenth."""


def test_fp8(tmp_path: Path) -> None:
    """Against the emulation for CPUs: both round the same numbers, and delayed scales follow the same passes.

    In float32, so log-probs and gradients are equal unless a number between two FP8 values is rounded to the
    other one (see NOISE).
    """
    make_model(tmp_path / "model", noise=NOISE, **FP8_SIZES)
    batch = make_batch()
    for t in batch:
        t.old = t.anchor = t.behaviour = np.full(len(t.response), -5.5, np.float32)
    layouts: dict[str, Any] = {"unrounded": (1, {}, 1, {"data": LOCAL})}
    for recipe in RECIPES:
        fp8 = {"precision": {"dtype": "bfloat16", "fp8": {"recipe": recipe}}}
        for name, (ranks, parallel, count) in FP8_LAYOUTS.items():
            layouts[f"{recipe} {name}"] = (ranks, parallel, count, fp8)
            layouts[f"{recipe} {name}, emulated"] = (ranks, parallel, count, fp8 | {"data": LOCAL})
    results = run_layouts(tmp_path, layouts, batch, OBJECTIVES["rpg"], lr=0.0, after=False, worker=WORKER)
    scales = json.loads((tmp_path / "scales.json").read_text())

    def scores(name: str) -> np.ndarray:
        return np.concatenate([dict(parts)["logp"] for _, parts in sorted(results[name]["scored"].items())])

    def gradients(name: str) -> dict[str, Any]:
        return load_file(tmp_path / "gradients" / name / "model.safetensors")

    for recipe in RECIPES:
        for name in (f"{recipe} {layout}" for layout in FP8_LAYOUTS):
            rounding = np.abs(scores(name) - scores("unrounded"))
            gap = np.abs(scores(name) - scores(f"{name}, emulated"))
            error, key = gradient_error(gradients(name), gradients(f"{name}, emulated"))
            print(f"{name}: {(gap < 1e-5).mean():.3f} of log-probs equal, gradients {error:.1e} ({key})")
            assert (rounding > 1e-3).mean() > 0.9, "nothing was rounded"
            assert (gap < 1e-5).mean() > 0.95
            assert error < 0.05
    real_scales, emulated_scales = scales["delayed 3"], scales["delayed 3, emulated"]
    assert real_scales.keys() == emulated_scales.keys()
    assert len(real_scales) == 8
    for layer, values in real_scales.items():
        assert values[:2] == pytest.approx(emulated_scales[layer][:2], rel=1e-3), layer
        assert values[2] == pytest.approx(emulated_scales[layer][2], rel=0.2), layer
        assert all(value != 1 for value in values), layer


def test_fp8_parameters(tmp_path: Path) -> None:
    """Weights that are kept in FP8 give the log-probs of those that are rounded in each pass."""
    make_model(tmp_path / "model", noise=0.08, **FP8_SIZES)
    batch = make_batch()
    for t in batch:
        t.old = t.anchor = t.behaviour = np.full(len(t.response), -5.5, np.float32)
    layouts: dict[str, Any] = {}
    for recipe in RECIPES:
        for keep in (True, False):
            precision = {"dtype": "bfloat16", "fp8": {"recipe": recipe, "parameters": keep}}
            more = {"device": "cuda", "precision": precision, "optimizer": {"distributed": True}}
            more["anchor"] = {"type": "old"}
            layouts[f"{recipe}{', kept' * keep}"] = (1, {}, 1, more)
    results = run_layouts(tmp_path, layouts, batch, OBJECTIVES["rpg"], lr=0.0, worker=WORKER)
    for recipe in RECIPES:
        assert results[f"{recipe}, kept"]["scored"] == results[recipe]["scored"]
        before, after = json.loads((tmp_path / "parked.json").read_text())[recipe]
        assert before == 4 * FP8_SIZES["num_hidden_layers"], "no FP8 weight was cached"
        assert after == 0, "FP8 weights stay cached while engines run"
    again, scored = results["blockwise, kept"]["after"], results["blockwise, kept"]["scored"]
    for t, logps in zip(batch, again, strict=True):  # an update at a learning rate of zero
        assert logps == dict(scored[str(t.prompt_id)])["logp"]
