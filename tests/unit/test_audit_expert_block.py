"""The audit's arithmetic for layers with experts, and the usual causes of their faults.

Why: a trace has only the sum over a block's experts, so a verdict that names an expert rests on arithmetic
alone. Two sides that choose differently because two experts are close must be clean. The checker itself makes
the traces here, from faulty weights. Not covered: hooks in real engines and trainers
(tests/integration/test_audit_experts.py), ranks and stages (tests/distributed/test_trace_layouts.py).
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from rpg_megatron.commands.audit.module_check import ModuleChecker
from rpg_megatron.models.activation_sites import LOGITS, expert_matrices
from tests.support.audit_sides import LENGTHS, Weights, make_side, only, verdict_of, weights_of
from tests.support.tiny_models import TINY_MOE, use_float64, write_checkpoint

LAYER, COUNT = 2, 8
BLOCK = f"model.layers.{LAYER}.mlp"
ROUTER = f"{BLOCK}.gate.weight"
LOOSE = (float("inf"), float("inf"))
UNNORMALISED = replace(TINY_MOE, experts=replace(TINY_MOE.experts, normalised=False))
FEW_HEADS = replace(UNNORMALISED, num_heads=4, num_kv_heads=2)
SHARED = replace(
    FEW_HEADS,
    family="qwen2_moe",
    qk_norm=False,
    qkv_bias=True,
    experts=replace(UNNORMALISED.experts, shared_ffn_hidden_size=16),
)
WIDE = replace(
    FEW_HEADS,
    family="olmoe",
    ffn_hidden_size=24,
    wide_qk_norm=True,
    experts=replace(UNNORMALISED.experts, layers=(0, 1, 2, 3)),
)


def names(*experts: int) -> list[str]:
    return [name for e in experts for name in expert_matrices(LAYER, f"experts.{e}")]


def scale(name: str, factor: float) -> Callable[[Weights, Weights], Weights]:
    return lambda weights, earlier: {name: weights[name] * factor}


def stale(*changed: str) -> Callable[[Weights, Weights], Weights]:
    return lambda weights, earlier: {name: earlier[name] for name in changed}


def exchange(first: list[str], second: list[str]) -> Callable[[Weights, Weights], Weights]:
    pairs = [*zip(first, second, strict=True), *zip(second, first, strict=True)]
    return lambda weights, earlier: {a: weights[b] for a, b in pairs}


def rows(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Weights, Weights], Weights]:
    return lambda weights, earlier: {name: change(weights[name].clone())}


def row_scaled(w: torch.Tensor) -> torch.Tensor:
    w[3] *= 1.05
    return w


def rows_negated(w: torch.Tensor) -> torch.Tensor:
    w[4:7] *= -1
    return w


def stale_row(weights: Weights, earlier: Weights) -> Weights:
    wrong = weights[ROUTER].clone()
    wrong[6] = earlier[ROUTER][6]
    return {ROUTER: wrong}


def random_expert(weights: Weights, earlier: Weights) -> Weights:
    g = torch.Generator().manual_seed(5)
    return {n: torch.randn(weights[n].shape, generator=g) for n in names(3)}


def two_at_once(weights: Weights, earlier: Weights) -> Weights:
    return scale(names(1)[2], 0.9)(weights, earlier) | scale(names(6)[1], 1.2)(weights, earlier)


def all_scaled(weights: Weights, earlier: Weights) -> Weights:
    return {n: 2.5 * weights[n] for n in names(*range(COUNT))[2::3]}


EXPERTS = f"{BLOCK}.experts of the engine is"
WRONG = "wrong: the output is off by"
FAULTS: dict[str, tuple[Callable[[Weights, Weights], Weights], str]] = {
    "all experts scaled": (all_scaled, f"{EXPERTS} 150.0% too large"),
    "all experts stale": (
        stale(*names(*range(COUNT))),
        f"{EXPERTS} stale: the weights are those of step 3",
    ),
    "one matrix scaled": (scale(names(3)[2], 1.01), f"{EXPERTS} {WRONG}"),
    "two experts scaled": (two_at_once, f"{EXPERTS} {WRONG}"),
    "one expert stale": (stale(*names(5)), f"{EXPERTS} {WRONG}"),
    "two experts swapped": (exchange(names(2), names(6)), f"{EXPERTS} {WRONG}"),
    "rows of one matrix": (rows(names(3)[2], rows_negated), f"{EXPERTS} {WRONG}"),
    "one expert random": (random_expert, f"{EXPERTS} {WRONG}"),
    "router scaled": (scale(ROUTER, 1.05), f"{ROUTER} of the engine is 5.0% too large"),
    "router stale": (stale(ROUTER), f"{ROUTER} of the engine is stale: the weights are those of step 3"),
    "router row scaled": (rows(ROUTER, row_scaled), f"{ROUTER} of the engine is {WRONG}"),
    "router row stale": (stale_row, f"{ROUTER} of the engine is {WRONG}"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_experts_and_routers(fault: str):
    weights, earlier = weights_of(TINY_MOE), weights_of(TINY_MOE, seed=1)
    change, begins = FAULTS[fault]
    engine = make_side(TINY_MOE, weights | change(weights, earlier))
    finding = only(verdict_of(TINY_MOE, weights, engine, others={"step 3": earlier}, bounds=LOOSE))
    assert (finding.kind, finding.side, finding.layers) == ("weights", "engine", [LAYER])
    assert finding.text.startswith(begins)
    assert finding.parameters == ([ROUTER] if "router" in fault else names(*range(COUNT)))


@pytest.mark.parametrize(
    "name", ["_gate.weight", ".gate_proj.weight", ".up_proj.weight", ".down_proj.weight"]
)
def test_a_fault_of_a_shared_expert(name: str) -> None:
    weights = weights_of(SHARED)
    wrong = f"{BLOCK}.shared_expert{name}"
    engine = make_side(SHARED, weights | {wrong: torch.zeros_like(weights[wrong])})
    finding = only(verdict_of(SHARED, weights, engine, bounds=LOOSE))
    assert (finding.kind, finding.side, finding.layers) == ("weights", "engine", [LAYER])
    assert finding.text.startswith(f"{EXPERTS} {WRONG}")
    assert wrong in finding.parameters


@pytest.mark.parametrize("part", ["q", "k"])
def test_a_channel_of_a_wide_norm(part: str) -> None:
    """Of the second half of the heads: a norm of one head does not reach it."""
    weights = weights_of(WIDE)
    name = f"model.layers.{LAYER}.self_attn.{part}_norm.weight"
    wrong = weights[name].clone()
    wrong[-2] *= 1.0 + 3e-3
    verdict = verdict_of(WIDE, weights, make_side(WIDE, weights | {name: wrong}), bounds=LOOSE)
    assert verdict_of(WIDE, weights, make_side(WIDE, weights), bounds=LOOSE).clean
    assert only(verdict).parameters == [name]


def test_stale_layers_with_experts():
    weights, earlier = weights_of(TINY_MOE), weights_of(TINY_MOE, seed=1)
    wrong = weights | {n: w for n, w in earlier.items() if f".layers.{LAYER}." in n}
    finding = only(verdict_of(TINY_MOE, weights, make_side(TINY_MOE, wrong), others={"step 3": earlier}))
    assert finding.text == "layer 2 of the engine is stale: the weights are those of step 3"
    assert set(names(0, 7)) <= set(finding.parameters)
    wrong = weights | {n: weights[n.replace(".2.", ".3.", 1)] for n in weights if f".layers.{LAYER}." in n}
    finding = only(verdict_of(TINY_MOE, weights, make_side(TINY_MOE, wrong)))
    assert finding.text == "layer 2 of the engine is misplaced: the weights are those of layer 3"


@pytest.mark.parametrize(
    "experts", [replace(TINY_MOE.experts, normalised=False), replace(TINY_MOE.experts, per_token=3)]
)
def test_another_use_of_the_right_experts(experts):
    weights = weights_of(TINY_MOE)
    engine = make_side(replace(TINY_MOE, experts=experts), weights)
    findings = verdict_of(TINY_MOE, weights, engine).findings
    assert [f.layers for f in findings] == [[1], [2], [3]]
    assert all("mlp.experts of the engine is" in f.text for f in findings)


@pytest.mark.parametrize(
    "shape",
    [TINY_MOE, UNNORMALISED, SHARED, WIDE],
    ids=["normalised", "not normalised", "shared expert", "wide norms"],
)
def test_the_chain_is_what_transformers_computes(shape, tmp_path: Path):
    weights = weights_of(shape)
    write_checkpoint(tmp_path, shape, weights)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64).eval()
    model.set_experts_implementation("eager")
    side = make_side(shape, weights, dtype=torch.float64)
    with torch.no_grad(), use_float64():
        logits = torch.cat([model(part[None]).logits[0] for part in side.tokens.split(LENGTHS)])
    torch.testing.assert_close(side.trace[LOGITS], logits[side.predicts], rtol=0, atol=2e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rounding_alone_is_clean(dtype: str):
    weights = {n: w.to(getattr(torch, dtype)) for n, w in weights_of(TINY_MOE).items()}
    engine = make_side(TINY_MOE, weights, dtype=getattr(torch, dtype))
    verdict = verdict_of(TINY_MOE, weights, engine, dtype=dtype, bounds=LOOSE)
    assert verdict.clean, verdict.findings
    assert verdict.routes == {"choices": 3 * sum(LENGTHS), "changed": 0, "experts": 24, "unused": 2}


def test_either_of_two_experts_with_equal_logits_is_right():
    weights = weights_of(TINY_MOE)
    weights[ROUTER][5] = weights[ROUTER][1]
    swapped = weights | exchange(names(1), names(5))(weights, weights)

    def spoil(site: str, checker: ModuleChecker, values: torch.Tensor) -> torch.Tensor:
        changed = replace(checker, weights=swapped.__getitem__)
        return changed.expected(site) if site == f"layers.{LAYER}.experts" else values

    engine = make_side(TINY_MOE, weights, spoil=spoil)
    verdict = verdict_of(TINY_MOE, weights, engine, bounds=LOOSE)
    assert verdict.clean, verdict.findings
    assert verdict.logprobs["max"] > 1e-3, "the choice matters"


def test_a_choice_between_close_experts_is_no_fault():
    """Two experts whose router rows are almost equal: rounding decides, and differs between the sides."""
    weights = weights_of(TINY_MOE)
    weights[ROUTER][5] = weights[ROUTER][1] * (1 + 1e-7)
    g = torch.Generator().manual_seed(4)

    def spoil(site: str, _: ModuleChecker, values: torch.Tensor) -> torch.Tensor:
        rounding = 1e-6 * torch.randn(values.shape, generator=g, dtype=values.dtype)
        return values + rounding if site == f"layers.{LAYER}.router" else values

    engine = make_side(TINY_MOE, weights, spoil=spoil)
    loose = verdict_of(TINY_MOE, weights, engine, bounds=LOOSE)
    assert loose.clean, loose.findings
    assert loose.broken == []
    assert loose.routes["changed"] > 0
    assert loose.logprobs["max"] > 1e-3, "the choice matters"
    finding = only(verdict_of(TINY_MOE, weights, engine))
    assert finding.kind == "precision"
    assert "choices of experts" in finding.text
    assert "router_replay=rollout" in finding.advice
    assert verdict_of(TINY_MOE, weights, engine, replayed=True).clean
