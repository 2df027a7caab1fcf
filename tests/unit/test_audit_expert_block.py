"""The audit's arithmetic for layers with experts, and the names of their faults.

Why: of a block of experts only the sum is seen, so a verdict that names one expert and one matrix rests on
arithmetic alone; and two sides that choose differently because two experts are close must be clean. Traces
are made here by the checker itself, from faulty weights. Not covered: hooks in real engines and trainers
(tests/integration/test_audit_experts.py), ranks and stages (tests/distributed/test_trace_layouts.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from rpg_megatron.commands.audit.module_check import ModuleChecker
from rpg_megatron.models.activation_sites import EXPERT_MATRICES, LOGITS, expert_parameter
from tests.support.audit_sides import LENGTHS, Weights, make_side, only, verdict_of, weights_of
from tests.support.tiny_models import TINY_MOE, use_float64, write_checkpoint

LAYER, COUNT = 2, 8
BLOCK = f"model.layers.{LAYER}.mlp"
ROUTER = f"{BLOCK}.gate.weight"
LOOSE = (float("inf"), float("inf"))
UNNORMALISED = replace(TINY_MOE, experts=replace(TINY_MOE.experts, normalised=False))


def names(*experts: int, matrices: tuple[str, ...] = EXPERT_MATRICES) -> list[str]:
    return [expert_parameter(LAYER, e, m) for e in experts for m in matrices]


def scale(name: str, factor: float) -> Callable[[Weights, Weights], Weights]:
    return lambda weights, earlier: {name: weights[name] * factor}


def stale(*changed: str) -> Callable[[Weights, Weights], Weights]:
    return lambda weights, earlier: {name: earlier[name] for name in changed}


def exchange(one: list[str], other: list[str]) -> Callable[[Weights, Weights], Weights]:
    pairs = [*zip(one, other, strict=True), *zip(other, one, strict=True)]
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


FAULTS: dict[str, tuple[Callable[[Weights, Weights], Weights], list[tuple[str, list[str]]]]] = {
    "down scaled": (
        scale(names(3)[2], 1.01),
        [(f"{BLOCK}.experts.3.down_proj or up_proj of the engine is 1.0% too large", names(3)[:0:-1])],
    ),
    "gate scaled": (
        scale(names(3)[0], 0.9),
        [(f"{BLOCK}.experts.3.gate_proj.weight of the engine is 10.0% too small", names(3)[:1])],
    ),
    "two experts": (
        two_at_once,
        [
            (f"{BLOCK}.experts.1.down_proj or up_proj of the engine is 10.0% too small", names(1)[:0:-1]),
            (f"{BLOCK}.experts.6.down_proj or up_proj of the engine is 20.0% too large", names(6)[:0:-1]),
        ],
    ),
    "stale expert": (
        stale(*names(5)),
        [("experts.5.gate_proj, up_proj, down_proj of the engine is stale: it is that of step 3", names(5))],
    ),
    "stale down": (
        stale(names(5)[2]),
        [(f"{names(5)[2]} of the engine is stale: it is that of step 3", names(5)[2:])],
    ),
    "stale down of all": (
        stale(*names(*range(COUNT), matrices=("down_proj",))),
        [("down_proj.weight of the engine is stale: it is that of step 3", [])],
    ),
    "swapped": (
        exchange(names(2), names(6)),
        [("is swapped with that of expert 6", names(2, 6))],
    ),
    "shifted": (
        lambda weights, earlier: {
            n: weights[m] for e in range(COUNT) for n, m in zip(names(e), names((e + 4) % COUNT), strict=True)
        },
        [("is that of the expert 4 places later", [])],
    ),
    "copied": (
        lambda weights, earlier: {names(1)[0]: weights[names(4)[0]]},
        [(f"{names(1)[0]} of the engine is that of expert 4", names(1)[:1])],
    ),
    "gate and up": (
        exchange(names(0)[:1], names(0)[1:2]),
        [("experts.0.gate_proj, up_proj of the engine is wrong: gate and up are swapped", names(0)[:2])],
    ),
    "rows of down": (
        rows(names(3)[2], rows_negated),
        [(f"{names(3)[2]} of the engine is not the trainer's (rows 4-6 of 24)", names(3)[2:])],
    ),
    "random": (random_expert, [("experts.3.gate_proj, up_proj, down_proj of the engine is not", names(3))]),
    "router row scaled": (
        rows(ROUTER, row_scaled),
        [(f"{ROUTER} of the engine is 5.0% too large in rows 3 of 8", [ROUTER])],
    ),
    "router row stale": (
        stale_row,
        [(f"{ROUTER} of the engine has stale rows 6 (one per expert): those of step 3", [ROUTER])],
    ),
    "router rows swapped": (
        rows(ROUTER, lambda w: w[[0, 5, 2, 3, 4, 1, 6, 7]]),
        [(f"{ROUTER} of the engine has rows 1 and 5 (one per expert) swapped", [ROUTER])],
    ),
    "stale router": (stale(ROUTER), [(f"{ROUTER} of the engine is stale: it is that of step 3", [ROUTER])]),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_experts_and_routers_have_names(fault: str):
    weights, earlier = weights_of(TINY_MOE), weights_of(TINY_MOE, seed=1)
    change, wanted = FAULTS[fault]
    engine = make_side(TINY_MOE, weights | change(weights, earlier))
    findings = verdict_of(TINY_MOE, weights, engine, others={"step 3": earlier}, bounds=LOOSE).findings
    assert len(findings) == len(wanted), findings
    for found, (text, parameters) in zip(findings, wanted, strict=True):
        assert (found.kind, found.side, found.layers) == ("weights", "engine", [LAYER])
        assert text in found.text
        assert not parameters or found.parameters == parameters


def test_stale_layers_with_experts():
    weights, earlier = weights_of(TINY_MOE), weights_of(TINY_MOE, seed=1)
    wrong = weights | {n: w for n, w in earlier.items() if f".layers.{LAYER}." in n}
    found = only(verdict_of(TINY_MOE, weights, make_side(TINY_MOE, wrong), others={"step 3": earlier}))
    assert found.text == "layer 2 of the engine is stale: it has the weights of step 3"
    assert set(names(0, 7)) <= set(found.parameters)
    wrong = weights | {n: weights[n.replace(".2.", ".3.", 1)] for n in weights if f".layers.{LAYER}." in n}
    found = only(verdict_of(TINY_MOE, weights, make_side(TINY_MOE, wrong)))
    assert found.text == "layer 2 of the engine has the weights of layer 3"


@pytest.mark.parametrize(
    ("other", "text"),
    [
        (replace(TINY_MOE.experts, normalised=False), "uses expert weights that do not sum to 1"),
        (replace(TINY_MOE.experts, per_token=3), "uses 3 experts per token instead of 2"),
    ],
)
def test_another_use_of_the_right_experts(other, text: str):
    weights = weights_of(TINY_MOE)
    engine = make_side(replace(TINY_MOE, experts=other), weights)
    findings = verdict_of(TINY_MOE, weights, engine).findings
    assert [(f.kind, f.layers) for f in findings] == [("routing", [i]) for i in (1, 2, 3)]
    assert text in findings[0].text


@pytest.mark.parametrize("shape", [TINY_MOE, UNNORMALISED], ids=["normalised", "not normalised"])
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
    other = weights | exchange(names(1), names(5))(weights, weights)

    def spoil(site: str, checker: ModuleChecker, values: torch.Tensor) -> torch.Tensor:
        return (
            checker.expected(site, weights=other.__getitem__) if site == f"layers.{LAYER}.experts" else values
        )

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
    found = only(verdict_of(TINY_MOE, weights, engine))
    assert found.kind == "precision"
    assert "choices of experts" in found.text
    assert "router_replay=rollout" in found.advice
    assert verdict_of(TINY_MOE, weights, engine, replayed=True).clean
