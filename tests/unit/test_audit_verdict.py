"""The audit's arithmetic: expected module outputs equal those of transformers; each fault is named.

Why: a verdict is only as good as its reference. Faults that are expensive to plant in a real engine
(positions, padding, rounding, other families) must be named too. The checker itself makes the traces here,
from faulty weights. Not covered: hooks in real engines and trainers (tests/integration/test_audit.py), ranks
and stages (tests/distributed/test_trace_layouts.py).
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from rpg_megatron.bridge.vllm.trace import join_workers
from rpg_megatron.commands.audit.causes import Finding
from rpg_megatron.commands.audit.module_check import ActivationTrace, ModuleChecker, distance
from rpg_megatron.config import ModelShape
from rpg_megatron.config.model_shape import Rope, YarnRope
from rpg_megatron.models.activation_sites import LOGITS, Trace, split_site
from tests.support.audit_sides import LENGTHS, make_side, only, verdict_of, weights_of
from tests.support.tiny_models import FAMILIES, HYBRIDS, TINY, TINY_MOE, tiny_shape, write_checkpoint

TRACED = [name for name in FAMILIES if name not in ("granite", "olmo3", *HYBRIDS)]
"""Families that an audit takes."""
SHAPES = {name: tiny_shape(name) for name in TRACED}
SHAPES["qwen3, YaRN"] = tiny_shape(rope=Rope(1e6, scaling=YarnRope(8.0, 32.0, 1.0, 64, 1.2)))


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_chain_is_what_transformers_computes(shape: ModelShape, tmp_path: Path):
    weights = weights_of(shape)
    write_checkpoint(tmp_path, shape, weights)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64).eval()
    side = make_side(shape, weights, dtype=torch.float64)
    side.dtype = "float32"
    with torch.no_grad():
        logits = torch.cat([model(part[None]).logits[0] for part in side.tokens.split(LENGTHS)])
    torch.testing.assert_close(side.trace[LOGITS], logits[side.predicts], rtol=0, atol=2e-5)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rounding_alone_is_clean(shape: ModelShape, dtype: str):
    weights = weights_of(shape)
    if dtype == "bfloat16":
        weights = {n: w.bfloat16() for n, w in weights.items()}
    engine = make_side(shape, weights, dtype=getattr(torch, dtype))
    verdict = verdict_of(shape, weights, engine, dtype=dtype, bounds=(float("inf"), 0.05))
    assert verdict.clean, verdict.findings
    assert verdict.broken == []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_norm_one_percent_off_stands_out_in_either_precision(dtype: str):
    shape = tiny_shape()
    weights = {n: w.to(getattr(torch, dtype)) for n, w in weights_of(shape).items()}
    name = "model.layers.1.post_attention_layernorm.weight"
    wrong = weights | {name: weights[name].float() * 1.01}
    engine = make_side(shape, wrong, dtype=getattr(torch, dtype))
    finding = only(verdict_of(shape, weights, engine, dtype=dtype))
    assert (finding.kind, finding.side, finding.layers, finding.parameters) == (
        "weights",
        "engine",
        [1],
        [name],
    )
    assert finding.values["factor"] == pytest.approx(1.01, abs=2e-3)


def test_a_matrix_that_is_ten_percent_too_small():
    shape = tiny_shape()
    weights = weights_of(shape)
    name = "model.layers.1.self_attn.o_proj.weight"
    finding = only(verdict_of(shape, weights, make_side(shape, weights | {name: 0.9 * weights[name]})))
    assert (finding.kind, finding.parameters) == ("weights", [name])
    assert finding.text == f"{name} of the engine is 10.0% too small"
    assert finding.values["factor"] == pytest.approx(0.9, abs=1e-4)


def test_weights_that_no_usual_cause_explains():
    shape = tiny_shape("llama")
    weights = weights_of(shape)
    name = "model.layers.2.mlp.down_proj.weight"
    wrong = weights | {name: weights[name].clone()}
    wrong[name][4:7] += 0.5
    verdict = verdict_of(shape, weights, make_side(shape, wrong))
    finding = only(verdict)
    assert (finding.kind, finding.layers, finding.parameters) == ("weights", [2], [name])
    error = verdict.links["engine"]["layers.2.mlp_output"]
    assert finding.text == f"{name} of the engine is wrong: the output is off by {error:.1%}"
    wrong = {n: w.flip(0) if ".layers.2.self_attn." in n and w.dim() == 2 else w for n, w in weights.items()}
    finding = only(verdict_of(shape, weights, make_side(shape, wrong)))
    assert (finding.kind, finding.layers, len(finding.parameters)) == ("layer", [2], 4)
    assert "layer 2 of the engine is wrong: 4 outputs are off, by up to" in finding.text


def test_a_bias_belongs_to_its_projection():
    shape = tiny_shape("qwen2")
    weights = weights_of(shape)
    name = "model.layers.0.self_attn.k_proj.bias"
    finding = only(verdict_of(shape, weights, make_side(shape, weights | {name: weights[name] + 1})))
    assert finding.parameters == ["model.layers.0.self_attn.k_proj.weight"]


def test_all_layers_stale_and_a_foreign_layer():
    shape = tiny_shape()
    weights, earlier = weights_of(shape), weights_of(shape, seed=1)
    stale = weights | {n: w for n, w in earlier.items() if ".layers." in n}
    finding = only(verdict_of(shape, weights, make_side(shape, stale), others={"step 3": earlier}))
    assert finding.text == "layers 0-3 of the engine are stale: the weights are those of step 3"
    foreign = weights | {n: w for n, w in earlier.items() if ".layers.2." in n}
    finding = only(verdict_of(shape, weights, make_side(shape, foreign)))
    assert "layer 2 of the engine is wrong: 11 outputs are off, by up to" in finding.text
    name = "model.layers.0.self_attn.o_proj.weight"
    finding = only(
        verdict_of(
            shape, weights, make_side(shape, weights | {name: earlier[name]}), others={"step 3": earlier}
        )
    )
    assert finding.text == f"{name} of the engine is stale: the weights are those of step 3"


def test_the_embedding_and_a_tied_head():
    shape = tiny_shape(tied_embeddings=True)
    weights = weights_of(shape)
    name = "model.embed_tokens.weight"
    engine = make_side(shape, weights | {name: weights[name].roll(1, 0)})
    findings = verdict_of(shape, weights, engine).findings
    assert [f.parameters for f in findings] == [[name], [name]]


def test_rounded_weights_and_a_side_of_another_dtype():
    shape = tiny_shape()
    weights = weights_of(shape)
    rounded = {n: w.bfloat16().float() for n, w in weights.items()}
    finding = only(verdict_of(shape, weights, make_side(shape, rounded)))
    assert finding.kind == "precision"
    assert "weights that are rounded to bfloat16" in finding.text
    finding = only(verdict_of(shape, weights, make_side(shape, weights, dtype=torch.bfloat16)))
    assert finding.text == "the engine computes in bfloat16, precision.dtype is float32"


def test_weights_of_a_few_bits():
    shape = tiny_shape()
    weights = weights_of(shape)

    def quantise(w: torch.Tensor) -> torch.Tensor:
        step = w.abs().amax(1, keepdim=True) / 31
        return (w / step).round() * step

    wrong = {n: quantise(w) if w.dim() == 2 and ".layers." in n else w for n, w in weights.items()}
    finding = only(verdict_of(shape, weights, make_side(shape, wrong)))
    assert (finding.kind, finding.layers) == ("precision", [0, 1, 2, 3])
    assert "as if quantised" in finding.text


def test_rounding_that_adds_up_beyond_the_guard():
    shape = tiny_shape()
    weights = {n: w.bfloat16() for n, w in weights_of(shape).items()}
    engine = make_side(shape, weights, dtype=torch.bfloat16)
    engine.logp = engine.logp + 1e-3  # less than a module's rounding
    finding = only(verdict_of(shape, weights, engine, dtype="bfloat16", bounds=(1e-4, 1e-5)))
    assert finding.kind == "precision"
    assert "rounding in bfloat16 accumulates" in finding.text


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_another_rotation(family: str):
    shape = tiny_shape(family)
    weights = weights_of(shape)

    def base(site: str, checker: ModuleChecker, values: torch.Tensor) -> torch.Tensor:
        altered = replace(checker, shape=replace(shape, rope=replace(shape.rope, theta=5e5)))
        return altered.expected(site) if site.endswith("_rope") else values

    verdict = verdict_of(shape, weights, make_side(shape, weights, spoil=base))
    finding = only(verdict)
    assert (finding.kind, finding.layers) == ("rope", [0, 1, 2, 3])
    error = max(e for site, e in verdict.links["engine"].items() if site.endswith("_rope"))
    assert finding.values["error"] == error
    assert "rope in layers 0-3 of the engine does not match its inputs, it is off by" in finding.text
    assert "rope_theta" in finding.advice


def test_attention_that_is_wrong_alone_too():
    shape = tiny_shape()
    weights = weights_of(shape)

    def spoil(site: str, _: ModuleChecker, values: torch.Tensor) -> torch.Tensor:
        return values.roll(1, 0) if site == "layers.1.attention" else values

    finding = only(verdict_of(shape, weights, make_side(shape, weights, spoil=spoil)))
    assert (finding.kind, finding.layers) == ("attention", [1])


@pytest.mark.parametrize("side", ["engine", "trainer"])
def test_log_probs_that_do_not_follow_from_the_logits(side: str):
    shape = tiny_shape()
    weights = weights_of(shape)

    def find(faulty: ActivationTrace) -> Finding:
        plain = make_side(shape, weights)
        engine, trainer = (faulty, None) if side == "engine" else (plain, faulty)
        finding = only(verdict_of(shape, weights, engine, trainer=trainer))
        assert finding.side == side
        return finding

    finding = find(make_side(shape, weights, side, temperature=1.3))
    assert (finding.kind, finding.values["temperature"]) == ("temperature", pytest.approx(1.3, abs=1e-3))
    padded = make_side(shape, weights, side)
    logits = padded.trace[LOGITS].double()
    total = torch.logaddexp(logits.logsumexp(1), torch.tensor(11.0).log().double())
    padded.logp = (logits.gather(1, padded.sampled[:, None])[:, 0] - total).float()
    finding = find(padded)
    assert finding.kind == "other"
    assert "do not match its logits" in finding.text
    assert "columns that pad the vocabulary" in finding.advice


def test_a_temperature_that_rounding_would_hide():
    """A confident policy in bfloat16: the log-probs are near 0 at either temperature."""
    shape = tiny_shape()
    weights = weights_of(shape)
    weights["lm_head.weight"] = 12 * weights["lm_head.weight"]
    weights = {n: w.bfloat16() for n, w in weights.items()}

    def confident(name: str, temperature: float) -> ActivationTrace:
        side = make_side(shape, weights, name, dtype=torch.bfloat16)
        side.sampled = side.trace[LOGITS].argmax(1)
        checker = ModuleChecker(side, shape, lambda n: weights[n], 1.0)
        side.logp = checker.logprobs(temperature).float()
        del side.trace[LOGITS]  # as in a trainer's trace, whose rounding is unknown
        return side

    engine, loose = confident("engine", 1.0), {"dtype": "bfloat16", "bounds": (9.0, 9.0)}
    right = verdict_of(shape, weights, engine, trainer=confident("trainer", 1.0), **loose)
    wrong = verdict_of(shape, weights, engine, trainer=confident("trainer", 0.8), **loose)
    assert right.clean, right.findings
    assert right.links["trainer"]["logprobs"] > 0
    finding = only(wrong)
    assert (finding.kind, finding.side) == ("temperature", "trainer")
    assert finding.values["temperature"] == pytest.approx(0.8, rel=0.03)


def test_nan_is_a_fault_where_it_first_is():
    shape = tiny_shape()
    weights = weights_of(shape)

    def spoil(site: str, _: ModuleChecker, values: torch.Tensor) -> torch.Tensor:
        return values * float("nan") if site == "layers.2.activation" else values

    verdict = verdict_of(shape, weights, make_side(shape, weights, spoil=spoil))
    assert not verdict.clean
    assert verdict.broken[0]["site"] == "layers.2.activation"
    json.dumps(verdict.to_json(), allow_nan=False)


def cut_for_workers(trace: Trace, shape: ModelShape, workers: int) -> list[Trace]:
    """Cut a trace into the parts that vLLM's workers would record."""
    shards: list[Trace] = [{} for _ in range(workers)]
    for site, values in trace.items():
        stem, part = site.rpartition(".")[0], split_site(site)[1]
        for r, shard in enumerate(shards):
            repeat = max(1, workers // shape.num_kv_heads)
            kv = values.chunk(max(1, min(workers, shape.num_kv_heads)), 1)
            if part == "query":
                k, v = (trace[f"{stem}.{p}"].chunk(len(kv), 1)[r // repeat] for p in ("key", "value"))
                shard[f"{stem}.qkv"] = torch.cat([values.chunk(workers, 1)[r], k, v], 1)
            elif part == "gate":
                up = trace[f"{stem}.up"].chunk(workers, 1)[r]
                shard[f"{stem}.gate_up"] = torch.cat([values.chunk(workers, 1)[r], up], 1)
            elif part in ("key_norm", "key_rope"):
                shard[site] = kv[r // repeat]
            elif part in ("query_norm", "query_rope", "attention", "activation"):
                shard[site] = values.chunk(workers, 1)[r]
            elif part not in ("key", "value", "up") and (part != LOGITS or r == 0):
                shard[site] = values
    return shards


@pytest.mark.parametrize("model", [TINY, TINY_MOE], ids=lambda shape: shape.family)
@pytest.mark.parametrize(("workers", "groups"), [(1, 4), (2, 4), (4, 4), (4, 2), (8, 1)])
def test_workers_shares_make_the_whole(model: ModelShape, workers: int, groups: int):
    shape = replace(model, num_kv_heads=groups)
    trace = make_side(shape, weights_of(shape)).trace
    joined = join_workers(cut_for_workers(trace, shape, workers), shape)
    assert joined.keys() == trace.keys()
    assert all(torch.equal(joined[s], trace[s]) for s in trace)


def test_distance_sees_one_channel():
    expected = torch.randn(50, 400, generator=torch.Generator().manual_seed(0))
    assert distance(expected, expected) == 0
    wrong = expected.clone()
    wrong[:, 7] *= 1.5
    assert distance(wrong, expected) > 0.2
