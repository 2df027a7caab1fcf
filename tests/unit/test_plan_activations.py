"""``plan``'s figures for Transformer Engine's layers equal figures written out by hand.

Why: no GPU checks these figures, so each term is tested by itself. Not covered: that the packages' sources
were read correctly (docs/evidence/plan.md names the places); Megatron's own layers, which are measured
(tests/distributed/test_plan_memory).
"""

import importlib.util
from itertools import product
from pathlib import Path

import pytest
import torch

from rpg_megatron.commands.plan.engine_memory import share_gpu
from rpg_megatron.commands.plan.gpus import gpu_bytes
from rpg_megatron.commands.plan.layout import plan_batch
from rpg_megatron.commands.plan.plan import Plan, Target, make_plan, plan_for
from rpg_megatron.commands.plan.trainer_memory import phase_peaks
from rpg_megatron.config import Settings, load_settings, read_model_shape
from rpg_megatron.policy.precision import uses_transformer_engine
from tests.support.recipes import SEPARATE_8B

EXAMPLES = Path(__file__).parents[2] / "examples"
QWEN3_8B = EXAMPLES / "models" / "Qwen3-8B-Base"
TOKENS = 18_432


def plan_of(*overrides: str, gpu: str = "h100-80") -> Plan:
    """Qwen3-8B at TP2 with sequence parallelism, 18,432 tokens a micro-batch, unless overridden."""
    file = EXAMPLES / "qwen3_8b_dapo_math_8k.yaml"
    layout = [*SEPARATE_8B, "parallel={tensor: 2, sequence: true}"]
    return make_plan(load_settings(file, [*layout, *overrides]), gpu)


def part(plan: Plan, name: str) -> int:
    return next(p.nbytes for p in plan.largest.parts if p.name == name)


def test_qwen3_8b_in_numbers() -> None:
    """TP2 + SP, numbers a token: 2,048 of the stream, 2,048 of queries, 512 of keys, 6,144 of the MLP.

    In float32 1/rms of 16 heads of queries and 4 of keys, and log-sum-exp of 16.
    """
    attention = (4096 + 4096) + (4096 + 1024 + 80) + (4096 + 1024 + 1024 + 4096 + 64) + 4096
    layer = attention + 4096 + 24_576 + 12_288
    head = 4096 + 8192 + 20
    plan = plan_of()
    assert plan.implementation == "transformer_engine"
    assert plan.batch.tokens_per_microbatch == TOKENS
    assert plan.activations == {
        "none": TOKENS * (36 * layer + head),
        "selective": TOKENS * (36 * attention + head),
        "full": TOKENS * (36 * 4096 + head),
    }
    assert [round(b / 2**30, 1) for b in plan.activations.values()] == [42.7, 17.4, 2.7]
    local = plan_of("model.implementation=local")
    assert local.implementation == "local"
    assert local.activations["none"] / plan.activations["none"] == pytest.approx(1.119, abs=0.001)


def test_how_cuts_change_them() -> None:
    plan, head = plan_of(), TOKENS * (4096 + 8192 + 20)
    for kind, nbytes in plan.activations.items():
        # Each context rank holds half of the tokens, and one rank's worth of keys and values.
        assert plan_of("parallel.context=2").activations[kind] == nbytes // 2
        # Two micro-batches of half the layers; the head is on the other rank.
        assert plan_of("parallel.pipeline=2").activations[kind] == nbytes - head
    # Without sequence parallelism the stream and what norms give are whole: 4 tensors a layer.
    difference = plan_of("parallel.sequence=false").activations["none"] - plan.activations["none"]
    assert difference == TOKENS * (36 * 4 * 4096 + 4096)


def test_fp8_counts_its_layers_and_the_weights_second_form() -> None:
    saved = {"none": 4096 + 4096 + 12_288, "fp8": 2112 + 2112 + 6336}
    plain, all_fp8 = plan_of(), plan_of("precision.fp8={recipe: blockwise}")
    less = plain.activations["none"] - all_fp8.activations["none"]
    assert less == TOKENS * 36 * (saved["none"] - saved["fp8"])
    assert plain.activations["full"] == all_fp8.activations["full"]
    ends = plan_of("precision.fp8={recipe: blockwise, first_last_bf16: 2}")
    assert plain.activations["none"] - ends.activations["none"] == less * 32 // 36
    linear = (4096 * 6144 + 4096 * 4096 + 4096 * 24_576 + 12_288 * 4096) // 2  # of one layer on one rank
    assert part(all_fp8, "weights in FP8") == 2 * 36 * linear
    assert part(ends, "weights in FP8") == 2 * 32 * linear
    cut = plan_of("precision.fp8={recipe: blockwise, first_last_bf16: 2}", "parallel.pipeline=2")
    assert part(cut, "weights in FP8") == 2 * 16 * linear
    served = plan_of("precision.fp8={recipe: blockwise, parameters: true}")
    assert part(served, "weights in bfloat16, for engines") == 2 * 36 * linear
    assert served.rank_total == all_fp8.rank_total


def test_on_a_shared_card_only_state_that_stays_counts() -> None:
    """Weights in FP8 are dropped with the gradients; FP8 parameters stay, like their copies."""
    shared = ["engine={colocated: true, replicas: 2, kv_cache_gib: 10}", "parallel.data=2"]
    ipc = ["bridge={transport: cuda_ipc}"]
    card = [
        plan_of(*shared, *ipc, *precision, gpu="b200-180").turns["rollout"]
        for precision in ([], ["precision.fp8={}"], ["precision.fp8={parameters: true}"])
    ]
    linear = (4096 * 6144 + 4096 * 4096 + 4096 * 24_576 + 12_288 * 4096) // 2
    assert [c - card[0] for c in card] == [0, 0, 2 * 36 * linear]


def test_a_shared_card_is_that_of_the_stage_that_needs_most() -> None:
    """The second stage has the most activations; while engines sample, the ends hold most weights."""
    layout = ["parallel={pipeline: 8, data: 4}", "memory.recompute=selective", "engine.tensor=1"]
    file = EXAMPLES / "qwen2.5_7b_dapo_math_8k.yaml"
    plan = make_plan(load_settings(file, [*layout, "lora={rank: 32}"]), "h100-80")
    peaks = {
        rank.stage: phase_peaks(share_gpu(plan.settings, rank, plan.engine, plan.gpus)) for rank in plan.ranks
    }
    assert plan.largest.stage == 1
    assert peaks[1]["update"] > peaks[0]["update"]
    assert min(peaks[0]["rollout"], peaks[7]["rollout"]) > max(peaks[1].values())
    assert plan.need == max(max(peak.values()) for peak in peaks.values())


def test_what_fp8_layers_recompute_is_in_fp8() -> None:
    """A layer's working set with full recomputation, 18,432 tokens: inputs of products, one of two bytes."""
    full = "memory.recompute=full"
    working = [part(plan_of(full, *fp8), "a layer and a logits chunk") for fp8 in ((), ("precision.fp8={}",))]
    assert working[0] - working[1] == TOKENS * (4096 + 4096 + 12_288 - 2112 - 2112 - 6336)


def test_fp8_fills_up_micro_batches_and_needs_its_cards() -> None:
    loaded = load_settings(
        EXAMPLES / "qwen3_8b_dapo_math_8k.yaml",
        [
            *SEPARATE_8B,
            "parallel={tensor: 2, sequence: true}",
            "training.tokens_per_microbatch=18433",
            "precision.fp8={}",
        ],
    )
    assert plan_batch(loaded, 40_960).tokens_per_microbatch == 18_432 + 256
    for gpu, fits in (("a100-80", False), ("L40S-48", False), ("h100-80", True)):
        problems = plan_of("precision.fp8={}", "parallel.data=4", gpu=gpu).problems
        assert any("needs compute capability 9.0" in p for p in problems) != fits


def test_layers_are_chosen_as_the_policy_chooses_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    results = set()
    for device, dtype, implementation in product(
        ("cpu", "cuda"), ("float32", "bfloat16"), ("auto", "local", "transformer_engine")
    ):
        if implementation == "transformer_engine" and (device, dtype) != ("cuda", "bfloat16"):
            continue  # refused
        settings = Settings.model_validate(
            {
                "device": device,
                "model": {"path": str(QWEN3_8B), "implementation": implementation},
                "data": {"path": "none"},
                "precision": {"dtype": dtype},
            }
        )
        expected = uses_transformer_engine(settings, torch.device(device))
        assert settings.has_fused_layers(device) == expected
        results.add(expected)
    assert results == {True, False}
    # The card that is named decides, not the device of the settings.
    settings = load_settings(EXAMPLES / "quickstart.yaml", [f"model.path={QWEN3_8B}", "precision={}"])
    target = Target("cuda", "h100-80", gpu_bytes("h100-80"))
    planned = plan_for(settings, read_model_shape(QWEN3_8B), target)
    assert (settings.device, planned.implementation) == ("cpu", "transformer_engine")
