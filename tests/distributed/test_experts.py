"""A mixture of experts gives transformers' numbers in every layout, and its export equals its source.

Why: experts that are cut, sent or summed over the wrong ranks, a router that normalises in another order, or
an expert's gradient that is counted twice all give plausible numbers. Proved on real Megatron-Core in fp32
over gloo, with ragged micro-batches: log-probs, entropies, the loss and its norm, and the gradient of every
router, expert and other parameter against transformers in float64; the export after an update at a learning
rate of zero is the source bit by bit. The error is printed beside transformers' own in float32.
Not covered here: bfloat16, Transformer Engine's grouped layers, the engine.
"""

from __future__ import annotations

import copy
import json
import math
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from tests.support.layouts import (
    FULL,
    OBJECTIVES,
    SELECTIVE,
    SP,
    check,
    gradient_error,
    make_batch,
    make_case,
    reference_logprobs,
    reference_update,
    run_layouts,
    score_batch,
)
from tests.support.ranks import run_ranks
from tests.support.tiny_models import CONFIGS, HYBRIDS, MOONLIGHT, make_model, use_float64

SIZES = {
    "vocab_size": 251,
    "hidden_size": 48,
    "intermediate_size": 100,
    "num_hidden_layers": 5,
    "num_attention_heads": 6,
    "moe_intermediate_size": 32,
    "max_position_embeddings": 512,
}
LATENT = {**SIZES, "num_key_value_heads": 6}
NOISE = {**dict.fromkeys(HYBRIDS, 0.06), "deepseek_v3": 0.1, "glm4_moe_lite": 0.1}
HYBRID = {**SIZES, "head_dim": 32, "num_experts": 4, "shared_expert_intermediate_size": 40}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "experts in every layer": ("qwen3_moe", {**SIZES, "head_dim": 16}),
    "qwen3_5_moe": ("qwen3_5_moe", HYBRID),
    "qwen3_next, layer 2 dense": ("qwen3_next", {**HYBRID, "mlp_only_layers": [2]}),
    "qwen2_moe": ("qwen2_moe", {**SIZES, "norm_topk_prob": True}),
    "qwen3_moe, YaRN": (
        "qwen3_moe",
        {
            **SIZES,
            "head_dim": 16,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 500.0,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        },
    ),
    "olmoe": ("olmoe", {**SIZES, "intermediate_size": 32}),
    "glm4_moe": ("glm4_moe", {**SIZES, "head_dim": 16, "n_shared_experts": 2}),
    "glm4_moe, groups": (
        "glm4_moe",
        {
            **SIZES,
            "head_dim": 16,
            "num_experts_per_tok": 4,
            "n_group": 4,
            "topk_group": 2,
            "use_qk_norm": False,
            "attention_bias": False,
            "first_k_dense_replace": 2,
        },
    ),
    "deepseek_v3": ("deepseek_v3", LATENT),
    "moonlight": ("deepseek_v3", {**LATENT, **MOONLIGHT}),
    "glm4_moe_lite": ("glm4_moe_lite", LATENT),
    "layers 0, 2 and 3 dense": (
        "qwen3_moe",
        {
            **SIZES,
            "head_dim": 16,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3],
            "num_hidden_layers": 6,
            "num_experts": 4,
            "num_experts_per_tok": 3,
            "norm_topk_prob": False,
            "tie_word_embeddings": True,
        },
    ),
}
LAYOUTS: dict[str, tuple[int, dict[str, Any], int, dict[str, Any]]] = {
    "TP2+SP x DP2, EP2": (4, {**SP, "data": 2, "expert": 2}, 4, {}),
    "PP2 x DP2, EP2, full recompute": (4, {"pipeline": 2, "data": 2, "expert": 2}, 7, FULL),
    "DP4, EP2, packed to a budget, experts recomputed": (
        4,
        {"data": 4, "expert": 2},
        0,
        SELECTIVE,
    ),
}
"""Name -> (ranks, parallel settings, micro-batches; 0: packed to a token budget, other settings)."""
MORE_LAYOUTS: dict[str, tuple[int, dict[str, Any], int, dict[str, Any]]] = {
    "one rank": (1, {}, 3, {}),
    "one rank, experts recomputed": (1, {}, 2, SELECTIVE),
    "one rank, full recompute": (1, {}, 2, FULL),
    "DP2": (2, {"data": 2}, 7, {}),
    "DP2, EP2": (2, {"data": 2, "expert": 2}, 7, {}),
    "DP2, EP2, full recompute": (2, {"data": 2, "expert": 2}, 4, FULL),
    "DP2, EP2, experts recomputed": (2, {"data": 2, "expert": 2}, 4, SELECTIVE),
    "TP2+SP": (2, SP, 3, {}),
    "TP2+SP, ETP2": (2, {**SP, "expert_tensor": 2}, 3, {}),
    "TP2+SP, ETP2, full recompute": (2, {**SP, "expert_tensor": 2}, 3, FULL),
    "TP2+SP, EP2": (2, {**SP, "expert": 2}, 3, {}),
    "TP2+SP, EP2, experts recomputed": (2, {**SP, "expert": 2}, 3, SELECTIVE),
    "PP2": (2, {"pipeline": 2}, 5, {}),
    "PP2 x VPP2": (2, {"pipeline": 2, "virtual": 2}, 5, {}),
    "CP2": (2, {"context": 2}, 3, {}),
    "CP2, EP2": (2, {"context": 2, "expert": 2}, 3, {}),
    "CP2, EP2, full recompute": (2, {"context": 2, "expert": 2}, 3, FULL),
    "DP4, EP4": (4, {"data": 4, "expert": 4}, 7, {}),
    "DP4, EP4, packed to a budget": (4, {"data": 4, "expert": 4}, 0, {}),
    "TP2+SP x DP2": (4, {**SP, "data": 2}, 4, {}),
    "TP2+SP x DP2, EP4": (4, {**SP, "data": 2, "expert": 4}, 4, {}),
    "TP2+SP x DP2, ETP2": (4, {**SP, "data": 2, "expert_tensor": 2}, 4, {}),
    "TP2+SP x PP2, EP2": (4, {**SP, "pipeline": 2, "expert": 2}, 3, {}),
    "TP2+SP x PP2, ETP2": (4, {**SP, "pipeline": 2, "expert_tensor": 2}, 3, {}),
    "TP2+SP x CP2, EP4": (4, {**SP, "context": 2, "expert": 4}, 3, {}),
    "PP2 x DP2, EP2, experts recomputed": (4, {"pipeline": 2, "data": 2, "expert": 2}, 4, SELECTIVE),
    "PP2 x VPP2 x DP2, EP2": (4, {"pipeline": 2, "virtual": 2, "data": 2, "expert": 2}, 0, {}),
    "CP2 x DP2, EP2, packed to a budget": (4, {"context": 2, "data": 2, "expert": 2}, 0, {}),
    "CP2 x PP2, EP2": (4, {"context": 2, "pipeline": 2, "expert": 2}, 3, {}),
}
EIGHT = {
    name: (LAYOUTS | MORE_LAYOUTS)[name]
    for name in (
        "one rank",
        "DP2, EP2, full recompute",
        "TP2+SP, ETP2",
        "TP2+SP, EP2, experts recomputed",
        "CP2, EP2",
        "PP2 x VPP2",
        "TP2+SP x DP2, EP2",
        "TP2+SP x CP2, EP4",
    )
}
"""For families beside Qwen3."""
FEW = {name: EIGHT[name] for name in ("TP2+SP, ETP2", "TP2+SP x DP2, EP2")}


def yarn(**changes: float) -> dict[str, Any]:
    """The rotary embedding of the tiny DeepSeek-V3 with other numbers."""
    return {"rope_parameters": CONFIGS["deepseek_v3"]["rope_parameters"] | changes}


SMALL = 1e-9
"""In place of 0, which a multiplier may not be."""
ONE_RATIO = (1 + 0.1 * math.log(4)) / (1 + 0.05 * math.log(4))
"""By which YaRN multiplies cosines and sines there."""
PLANTED: dict[str, tuple[str, dict[str, Any], str]] = {
    "the gate of the shared expert": ("qwen3_5_moe", {}, "no gate of the shared expert"),
    "the shared expert": ("glm4_moe", {}, "no shared expert"),
    "the bias of the router": ("glm4_moe", {}, "no bias of the router"),
    "the scale of the weights": ("glm4_moe", {"routed_scaling_factor": 1.0}, ""),
    "groups of experts": ("glm4_moe, groups", {"n_group": 1, "topk_group": 1}, ""),
    "the sum of the weights": ("qwen2_moe", {"norm_topk_prob": False}, ""),
    "dimensions that are not rotated": (
        "glm4_moe",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}},
        "",
    ),
    "another expert a token": ("olmoe", {"num_experts_per_tok": 3}, ""),
    "the scale of the scores": (
        "deepseek_v3",
        yarn(mscale_all_dim=SMALL, mscale=10 * (ONE_RATIO - 1) / math.log(4)),
        "",
    ),
    "the magnitude of rotated pairs": ("deepseek_v3", yarn(mscale=0.5), ""),
    "the scaling of frequencies": ("deepseek_v3", yarn(original_max_position_embeddings=64), ""),
    "neighbours as pairs": ("moonlight", {}, "halves as pairs"),
    "the norm of the latent": ("moonlight", {}, "no norm of the latent"),
    "the norm of the queries' latent": ("glm4_moe_lite", {}, "no norm of the queries' latent"),
    "heads of other ranks": ("moonlight", {}, "each rank's own heads' key"),
    "tokens of other ranks": ("glm4_moe_lite", {}, "each rank's own tokens"),
}
"""What is left out -> model, changes of the config.json that our side reads, fault of the worker."""
ON_TWO_RANKS = ("heads of other ranks", "tokens of other ranks")
"""Of those, the ones that need tensor parallelism."""


@pytest.mark.long  # of the tests themselves: they can fail
def test_what_is_left_out_is_found(tmp_path: Path) -> None:
    """Log-probs or gradients of every model of ``PLANTED`` are not those of transformers."""
    batch, reference = make_batch(), {}
    for name in sorted({name for name, *_ in PLANTED.values()}):
        family, sizes = MODELS[name]
        with use_float64():
            model = make_model(tmp_path / name, family, noise=NOISE.get(family, 0.15), **sizes)
            reference[name] = score_batch(model, batch), reference_update(model, batch, "rpg")
    (tmp_path / "batch.pkl").write_bytes(pickle.dumps(batch))
    for world, faults in ((1, PLANTED.keys() - {*ON_TWO_RANKS}), (2, {*ON_TWO_RANKS})):
        cases = {}
        for fault in sorted(faults):
            name, changes, plant = PLANTED[fault]
            folder = shutil.copytree(tmp_path / name, tmp_path / fault.replace(" ", "_"))
            config = json.loads((folder / "config.json").read_text()) | changes
            (folder / "config.json").write_text(json.dumps(config))
            case = make_case(folder, SP if world == 2 else {}, 2, OBJECTIVES["rpg"], lr=0.0, after=False)
            cases[fault] = {**case, "batch": "batch.pkl", "plant": plant}
        (tmp_path / "cases.json").write_text(json.dumps(cases))
        for fault, result in run_ranks("tests.distributed.layout_worker", world, tmp_path).items():
            with pytest.raises(AssertionError, match=r"log-probs of|gradient of|gradients' norm|loss"):
                check(tmp_path, fault, result, batch, *reference[PLANTED[fault][0]], gradient_tolerance=1e-4)


def transformers_error(
    model: PreTrainedModel, batch: list, rows: list, expected: dict[str, Any]
) -> tuple[float, float]:
    """Errors of transformers in float32: log-probs, and gradients relative to their largest element."""
    narrow = copy.deepcopy(model).float()
    narrow.zero_grad()
    with torch.no_grad():
        logp = max(
            float((a.double() - torch.from_numpy(b)).abs().max())
            for (a, _), (b, _) in zip(reference_logprobs(narrow, batch), rows, strict=True)
        )
    update = reference_update(narrow, batch, "rpg")
    return logp, gradient_error(update["gradients"], expected["gradients"])[0]


@pytest.mark.parametrize(
    ("name", "layouts"),
    [
        ("experts in every layer", LAYOUTS),
        pytest.param("experts in every layer", MORE_LAYOUTS, marks=pytest.mark.long),
        pytest.param("layers 0, 2 and 3 dense", LAYOUTS | MORE_LAYOUTS, marks=pytest.mark.long),
        pytest.param("qwen3_5_moe", FEW, marks=pytest.mark.long),
        ("deepseek_v3", FEW),
        *(pytest.param(name, EIGHT, marks=pytest.mark.long) for name in [*MODELS][1:-1]),
    ],
    ids=[
        "experts",
        "experts, every layout",
        "some dense, every layout",
        "qwen3_5_moe, few",
        "deepseek_v3, few",
        *[*MODELS][1:-1],
    ],
)
def test_experts_in_every_layout(
    tmp_path: Path, name: str, layouts: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    family, sizes = MODELS[name]
    with use_float64():
        model = make_model(tmp_path / "model", family, noise=NOISE.get(family, 0.15), **sizes)
        batch = make_batch()
        rows = score_batch(model, batch)
        expected = reference_update(model, batch, "rpg")
    float32_errors = transformers_error(model, batch, rows, expected)
    tolerance = 1e-5
    if family in HYBRIDS:  # norms and rule are float32 also in transformers, and amplify its rounding
        tolerance = max(5e-5, 3 * float32_errors[1])
        assert tolerance < 1e-4
    source = load_file(tmp_path / "model" / "model.safetensors")
    lines = [
        f"{'transformers, float32':64s} log-probs {float32_errors[0]:.1e}, gradients {float32_errors[1]:.1e}"
    ]
    results = run_layouts(tmp_path, layouts, batch, OBJECTIVES["rpg"], lr=0.0, after=False, timeout=600)
    for layout, result in results.items():
        check(tmp_path, layout, result, batch, rows, expected, gradient_tolerance=tolerance)
        exported = load_file(tmp_path / "weights" / layout / "model.safetensors")
        assert set(exported) == set(source), layout
        for key, weight in source.items():
            assert torch.equal(exported[key], weight), f"{layout}: {key} is not what it was"
        gradients = load_file(tmp_path / "gradients" / layout / "model.safetensors")
        worst, where = gradient_error(gradients, expected["gradients"])
        logp = max(
            np.abs(dict(parts)["logp"] - rows[int(key)][0]).max() for key, parts in result["scored"].items()
        )
        lines.append(f"{layout:64s} log-probs {logp:.1e}, gradients {worst:.1e} ({where})")
    with capsys.disabled():
        print(f"\n{name}: largest differences to float64, of gradients relative to the largest element")
        print("\n".join(lines))
