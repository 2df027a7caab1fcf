"""Adapters have PEFT's numbers and gradients in every layout: dense, with experts, with linear attention.

Proved: real Megatron-Core in float32 over gloo, with an adapter that peft made (random A and B), also of the
output layer, whose vocabulary no layout divides, against peft on a float64 transformers model, one sequence
at a time: log-probs, entropies, the loss, the gradient of every A and B and their norm; no other parameter
has a gradient. Layouts: TP, SP, PP, VPP, CP, DP, EP, full and selective recomputation. After an update the
merged export gives transformers the log-probs that Megatron computes, and the exported adapter gives them to
peft; a held anchor still gives those from before. The distributed optimizer ends at the same adapters. Fresh
adapters (B = 0) change no bit of a log-prob. Of hybrids gradients are within three times the error of peft on
transformers in float32, whose norms and delta rule amplify rounding.
Not covered here: GPUs, Transformer Engine, the engine's side (tests/integration/test_lora_engine.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from rpg_megatron.checkpoints.peft import ADAPTER_WEIGHTS
from tests.support.layouts import (
    FULL,
    OBJECTIVES,
    SELECTIVE,
    SMOOTH,
    SP,
    check,
    gradient_error,
    make_batch,
    make_layout_model,
    reference_logprobs,
    reference_update,
    run_layouts,
    score_batch,
)
from tests.support.tiny_models import AWKWARD, make_model, use_float64

Layouts = dict[str, tuple[int, dict[str, Any], int, dict[str, Any]]]
DENSE: Layouts = {
    "TP1": (1, {}, 3, {}),
    "TP1, full recompute": (1, {}, 2, FULL),
    "TP2": (2, {"tensor": 2}, 3, {}),
    "TP2+SP, full recompute": (2, SP, 3, FULL),
    "PP2xVPP2, MLPs recomputed": (2, {"pipeline": 2, "virtual": 2}, 7, SELECTIVE),
    "CP2": (2, {"context": 2}, 3, {}),
    "DP2, packed to a budget": (2, {"data": 2}, 0, {}),
    "CP2xTP2+SP": (4, {"context": 2, **SP}, 3, {}),
    "TP2xPP2+SP, full recompute": (4, {"pipeline": 2, **SP}, 5, FULL),
}
EXPERTS: Layouts = {
    "one rank": (1, {}, 3, {}),
    "TP2+SP, EP2": (2, {**SP, "expert": 2}, 3, {}),
    "TP2+SP x DP2, EP2": (4, {**SP, "data": 2, "expert": 2}, 4, {}),
    "PP2 x DP2, EP2, full recompute": (4, {"pipeline": 2, "data": 2, "expert": 2}, 7, FULL),
}
HYBRID: Layouts = {
    "TP1": (1, {}, 3, {}),
    "TP2+SP, full recompute": (2, SP, 3, FULL),
    "PP2xVPP2": (2, {"pipeline": 2, "virtual": 2}, 7, {}),
    "CP2": (2, {"context": 2}, 3, {}),
    "DP2": (2, {"data": 2}, 3, {}),
    "CP2xTP2+SP": (4, {"context": 2, **SP}, 3, {}),
}
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
EVERYTHING = [*ATTENTION, "gate_proj", "up_proj", "down_proj", "lm_head"]
CASES: dict[str, tuple[Layouts, dict[str, Any]]] = {
    "all-linear": (DENSE, {"rank": 5, "alpha": 8, "targets": "all-linear"}),
    "some, rslora": (
        {name: DENSE[name] for name in ("TP1, full recompute", "TP2+SP, full recompute")},
        {"rank": 4, "alpha": 3, "targets": ["k_proj", "up_proj"], "rslora": True},
    ),
    "all-linear, shared prompts": (
        {name: DENSE[name] for name in ("TP2+SP, full recompute", "CP2")},
        {"rank": 5, "alpha": 8, "targets": "all-linear"},
    ),
    "output layer": (DENSE, {"rank": 5, "alpha": 8, "targets": EVERYTHING}),
    "output layer alone": (
        {name: DENSE[name] for name in ("TP1, full recompute", "TP2", "CP2xTP2+SP")},
        {"rank": 5, "alpha": 8, "targets": ["lm_head"], "rslora": True},
    ),
    "experts": (EXPERTS, {"rank": 4, "alpha": 8, "targets": [*ATTENTION, "lm_head"]}),
    **{
        f"experts of {family}": (EXPERTS, {"rank": 4, "alpha": 8, "targets": ATTENTION})
        for family in ("qwen2_moe", "olmoe", "glm4_moe")
    },
    "hybrid": (HYBRID, {"rank": 5, "alpha": 8, "targets": "all-linear"}),
    "hybrid, some": (
        {name: HYBRID[name] for name in ("TP1", "TP2+SP, full recompute")},
        {"rank": 4, "alpha": 8, "targets": ["q_proj", "in_proj_qkv", "in_proj_a", "lm_head"]},
    ),
    "hybrid experts, interleaved": (
        EXPERTS | {"CP2": HYBRID["CP2"]},
        {"rank": 4, "alpha": 8, "targets": [*ATTENTION, "in_proj_qkvz", "in_proj_ba", "out_proj"]},
    ),
}


def add_adapter(model: PreTrainedModel, lora: dict[str, Any], folder: Path) -> PeftModel:
    """The model with a random adapter, in its precision; the adapter is written in float32."""
    config = LoraConfig(
        r=lora["rank"],
        lora_alpha=lora["alpha"],
        use_rslora=lora.get("rslora", False),
        target_modules=lora["targets"],
        task_type="CAUSAL_LM",
    )
    adapted = get_peft_model(model, config, autocast_adapter_dtype=False)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, p in adapted.named_parameters():
            if "lora_" in name:
                p.copy_(torch.randn(p.shape, generator=generator) * (0.2 if "lora_A" in name else 0.1))
    adapted.float().save_pretrained(folder)
    return adapted.double().eval()


NEEDED = {
    "all-linear": ("TP2+SP, full recompute", "PP2xVPP2, MLPs recomputed", "CP2"),
    "output layer": ("TP2", "PP2xVPP2, MLPs recomputed"),
    "experts": ("TP2+SP, EP2",),
    "hybrid": ("TP1", "TP2+SP, full recompute", "PP2xVPP2", "CP2"),
    "hybrid experts, interleaved": ("TP2+SP, EP2",),
}
"""Layouts of the default tier."""


@pytest.mark.parametrize(
    ("case", "needed"),
    [
        *((case, True) for case in NEEDED),
        *(pytest.param(case, False, marks=pytest.mark.long) for case in CASES),
    ],
)
def test_numbers_of_peft_in_every_layout(tmp_path: Path, case: str, needed: bool) -> None:
    layouts, lora = CASES[case]
    if needed:
        layouts = {name: layouts[name] for name in NEEDED[case]}
    if case == "experts":
        sizes = {"vocab_size": 251, "hidden_size": 48, "intermediate_size": 100, "num_hidden_layers": 4}
        sizes |= {"num_attention_heads": 6, "moe_intermediate_size": 32, "head_dim": 16, "num_experts": 4}
        model = make_model(tmp_path / "model", "qwen3_moe", mlp_only_layers=[2], **sizes)
    elif case.startswith("experts of "):
        sizes = {"num_hidden_layers": 4, "moe_intermediate_size": 32, "n_shared_experts": 2}
        model = make_model(tmp_path / "model", case.removeprefix("experts of "), **AWKWARD | sizes)
    elif "hybrid" in case:
        # Of sizes with which transformers' own rounding is small.
        sizes = {} if "experts" in case else {"hidden_size": 64, "num_attention_heads": 4}
        family = "qwen3_next" if "experts" in case else "qwen3_5"
        model = make_model(tmp_path / "model", family, **AWKWARD | sizes | {"num_hidden_layers": 4})
    else:
        model = make_layout_model(tmp_path / "model", tied="lm_head" not in lora["targets"])
    adapted = add_adapter(model, lora, tmp_path / "adapter")
    batch, settings = make_batch(), OBJECTIVES["rpg"] | {"lora": lora}
    if "shared" in case:
        for t in batch[3::2]:
            t.prompt = batch[3].prompt
        training = {
            "minibatches": 1,
            "tokens_per_microbatch": 100,
            "logprob_chunk": 17,
            "share_prompts": True,
        }
        settings |= {"device": "cpu", "training": training}
    with use_float64():
        rows = score_batch(adapted, batch)
        expected = reference_update(adapted, batch, "rpg")
    tolerance = 1e-5
    if "hybrid" in case:
        own = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
        if "experts" in case:
            own.set_experts_implementation("eager")
        own = PeftModel.from_pretrained(own, str(tmp_path / "adapter"), is_trainable=True)
        rounded = reference_update(own, batch, "rpg")["gradients"]
        tolerance = max(1e-5, 3 * gradient_error(rounded, expected["gradients"])[0])
        assert tolerance < 5e-5
    # The worker puts the sections over those of the case.
    model_section = {"path": str(tmp_path / "model"), "vocab_multiple": 4}
    adapter = {"model": model_section | {"adapter": str(tmp_path / "adapter")}}
    results = run_layouts(tmp_path, layouts, batch, settings | adapter)
    for name, result in results.items():
        check(
            *(tmp_path, name, result, batch, rows, expected),
            file=ADAPTER_WEIGHTS,
            gradient_tolerance=tolerance,
        )
        base = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float64)
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "weights" / name, dtype=torch.float64)
        with_adapter = PeftModel.from_pretrained(
            base, str(tmp_path / "adapters" / name), autocast_adapter_dtype=False
        ).double()
        for exported in (merged, with_adapter):
            if "experts" in case:
                exported.set_experts_implementation("eager")
            with torch.no_grad(), use_float64():
                after = reference_logprobs(exported.eval(), batch)
            for t, logps, (logp, _) in zip(batch, result["after"], after, strict=True):
                np.testing.assert_allclose(logps, logp, atol=2e-5, err_msg=f"{name}: export, {t.prompt_id}")
        for t, logps, (logp, _) in zip(batch, result["anchored"], rows, strict=True):
            np.testing.assert_allclose(logps, logp, atol=2e-5, err_msg=f"{name}: anchor, {t.prompt_id}")
    assert max(np.abs(np.array(r["after"][3]) - rows[3][0]).max() for r in results.values()) > 1e-2


def test_the_distributed_optimizer_ends_at_the_same_adapters(tmp_path: Path) -> None:
    model = make_layout_model(tmp_path / "model", tied=False)
    lora = {"rank": 4, "alpha": 8}
    adapted = add_adapter(model, {**lora, "targets": "all-linear"}, tmp_path / "adapter")
    batch = make_batch()
    score_batch(adapted, batch)
    layouts: Layouts = {
        f"distributed {on}": (2, {"data": 2}, 4, {"optimizer": {"distributed": on, "overlap": on}})
        for on in (False, True)
    }
    model_section = {"path": str(tmp_path / "model"), "vocab_multiple": 4}
    adapter = {"model": model_section | {"adapter": str(tmp_path / "adapter")}, "lora": lora}
    run_layouts(tmp_path, layouts, batch, OBJECTIVES["rpg"] | adapter, updates=3, one_step=True)
    plain, sharded = (load_file(tmp_path / "adapters" / name / ADAPTER_WEIGHTS) for name in layouts)
    before = load_file(tmp_path / "adapter" / ADAPTER_WEIGHTS)
    assert all((plain[name] - before[name]).abs().max() > 1e-3 for name in before)
    for name in plain:
        torch.testing.assert_close(sharded[name], plain[name], atol=1e-6, rtol=0, msg=name)


def test_fresh_adapters_change_no_bit(tmp_path: Path) -> None:
    model = make_layout_model(tmp_path / "model", tied=False)
    batch = make_batch()
    score_batch(model, batch)
    lora = {"lora": {"rank": 4, "alpha": 8}}
    layouts: Layouts = {
        f"{name}{', adapters' if more else ''}": (ranks, parallel, 3, more)
        for name, (ranks, parallel) in {"TP1": (1, {}), "TP2+SP": (2, SP)}.items()
        for more in ({}, lora)
    }
    results = run_layouts(tmp_path, layouts, batch, OBJECTIVES["rpg"], after=False)
    for name in ("TP1", "TP2+SP"):
        assert results[name]["scored"] == results[f"{name}, adapters"]["scored"]
        a = load_file(tmp_path / "gradients" / f"{name}, adapters" / ADAPTER_WEIGHTS)
        assert all(bool(value.any()) == (".lora_B." in key) for key, value in a.items()), name  # B = 0


def test_in_emulated_fp8_the_gradients_are_near_those_of_bfloat16(tmp_path: Path) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "vocab_size": 251}
    model = make_model(tmp_path / "model", noise=0.04, **sizes)
    batch = make_batch()
    score_batch(model, batch)
    fp8 = {"dtype": "bfloat16", "fp8": {"recipe": "blockwise"}}
    layouts: Layouts = {
        name: (1, {}, 3, {"precision": precision, **FULL})
        for name, precision in {"bfloat16": {"dtype": "bfloat16"}, "fp8": fp8}.items()
    }
    run_layouts(tmp_path, layouts, batch, SMOOTH | {"lora": {"rank": 8}}, after=False)
    plain, rounded = (load_file(tmp_path / "gradients" / name / ADAPTER_WEIGHTS) for name in layouts)
    for name in plain:
        a, b = plain[name].double().flatten(), rounded[name].double().flatten()
        assert bool(a.any()) == bool(b.any()) == (".lora_B." in name), name
        if ".lora_B." in name:
            assert not torch.equal(a, b), name
            assert float(a @ b / a.norm() / b.norm()) > 0.9, name
