"""``rpg-megatron audit`` of a mixture names faults that are planted in a real vLLM engine or trainer.

Why: as test_audit, for layers with experts: their routers and sums are hooked in vLLM's own modules and in
Megatron's, whose ranks hold other experts in every layout. Not covered: GPUs, Transformer Engine's grouped
experts, engines with expert parallelism (vLLM has none on a CPU). More faults are in
tests/unit/test_audit_expert_block.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from rpg_megatron.config import load_settings
from tests.support.audit_faults import (
    EAGER,
    Weights,
    audit_faults,
    only_finding,
    scale,
    write_checkpoints,
)
from tests.support.engine import running_service
from tests.support.runs import QUICKSTART_MOE
from tests.support.tiny_models import write_byte_model

pytestmark = [pytest.mark.usefixtures("forked_starts"), pytest.mark.long, pytest.mark.timeout(1800)]
MODEL = QUICKSTART_MOE.parent / "quickstart" / "moe_model"
BLOCK = "model.layers.2.mlp"
MATRICES = ("gate_proj", "up_proj", "down_proj")
WRONG = "of the engine is wrong: the output is off by"


def names(expert: int) -> list[str]:
    return [f"{BLOCK}.experts.{expert}.{m}.weight" for m in MATRICES]


def stale_expert(weights: Weights) -> None:
    earlier = load_file(MODEL / "model.safetensors")
    weights.update({n: earlier[n] for n in names(6)})


def stale_row(weights: Weights) -> None:
    weights[f"{BLOCK}.gate.weight"][4] = load_file(MODEL / "model.safetensors")[f"{BLOCK}.gate.weight"][4]


def swap_experts(weights: Weights) -> None:
    for first, second in zip(names(1), names(5), strict=True):
        weights[first], weights[second] = weights[second], weights[first]


def scale_row(weights: Weights) -> None:
    weights[f"{BLOCK}.gate.weight"][3] *= 1.2


def stale_layer(weights: Weights) -> None:
    earlier = load_file(MODEL / "model.safetensors")
    weights.update({n: w for n, w in earlier.items() if n.startswith("model.layers.2.")})


FAULTS = {
    "down": scale(f"{BLOCK}.experts.3.down_proj.weight", 1.01),
    "half": scale(f"{BLOCK}.experts.3.down_proj.weight", 1.5),
    "stale_expert": stale_expert,
    "swapped": swap_experts,
    "row": scale_row,
    "stale_row": stale_row,
    "stale": stale_layer,
}
TEXTS = {
    "half": (f"{BLOCK}.experts {WRONG}", "%"),
    "down": (f"{BLOCK}.experts {WRONG}", "%"),
    "stale_expert": (f"{BLOCK}.experts {WRONG}", "%"),
    "swapped": (f"{BLOCK}.experts {WRONG}", "%"),
    "row": (f"{BLOCK}.gate.weight {WRONG}", "%"),
    "stale_row": (f"{BLOCK}.gate.weight {WRONG}", "%"),
    "stale": ("layer 2 of the engine is stale", "the weights are those of version 0"),
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoints(tmp_path_factory.mktemp("audit"), MODEL, FAULTS)


def check_clean(report: dict, logprobs: float) -> None:
    assert report["clean"], report["findings"]
    assert report["broken"] == []
    assert len(report["links"]["engine"]) == 4 * 15 + 4, "every step was looked at"
    assert len(report["links"]["trainer"]) == 4 * 15 + 3
    assert {"layers.3.router", "layers.3.experts"} <= set(report["links"]["engine"])
    assert report["logprobs"]["max"] < logprobs
    assert report["routes"]["choices"] > 100


def check_fault(report: dict, case: str) -> None:
    finding = only_finding(report)
    kind = "layer" if case == "stale" else "weights"
    assert (finding["kind"], finding["side"], finding["layers"]) == (kind, "engine", [2]), finding
    begins, ends = TEXTS[case]
    assert finding["text"].startswith(begins)
    assert finding["text"].endswith(ends)


def check_trainer(report: dict) -> None:
    """The first expert of every expert rank, in all layers."""
    assert [(f["kind"], f["side"], f["layers"]) for f in report["findings"]] == [
        ("weights", "trainer", [i]) for i in range(4)
    ], report["findings"]
    for i, finding in enumerate(report["findings"]):
        assert finding["text"].startswith(f"model.layers.{i}.mlp.experts of the trainer is wrong: ")


def test_faults_of_experts_and_routers(checkpoints: Path, tmp_path: Path) -> None:
    engine = ["engine.max_sequences=16", f"model.path={checkpoints / 'trained'}", EAGER, "evaluation=null"]
    with running_service(tmp_path, load_settings(QUICKSTART_MOE, engine)) as service:
        cases = ["clean", *(c for c in FAULTS if c != "half"), "trainer_expert"]
        reports = audit_faults(service, checkpoints, "EP2", cases, [], QUICKSTART_MOE)
    check_clean(reports["clean"], 1e-4)
    for case in cases[1:-1]:
        check_fault(reports[case], case)
    check_trainer(reports["trainer_expert"])
    assert reports["down"]["first"]["site"] == "layers.2.experts"
    assert reports["row"]["first"]["site"] == "layers.2.router"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_layout_against_an_engine_of_two_workers(checkpoints: Path, tmp_path: Path, dtype: str) -> None:
    split = ["parallel.data=1", "parallel.tensor=2", "parallel.sequence=true"]
    layouts = {
        "EP2": [],
        "TP2+SP, EP2": split,
        "TP2+SP, ETP2": [*split, "parallel.expert=1", "parallel.expert_tensor=2"],
        "PP2": ["parallel.data=1", "parallel.expert=1", "parallel.pipeline=2"],
    }
    settings = [f"precision.dtype={dtype}", "engine.tensor=2", "guards.mismatch_mean=1"]
    engine = ["engine.max_sequences=16", f"model.path={checkpoints / 'trained'}", EAGER, "evaluation=null"]
    cases = ["clean", "half", "row", "stale", "trainer_expert"]
    with running_service(tmp_path, load_settings(QUICKSTART_MOE, [*engine, *settings])) as service:
        for name, layout in layouts.items():
            reports = audit_faults(service, checkpoints, name, cases, [*layout, *settings], QUICKSTART_MOE)
            check_clean(reports["clean"], 1e-4 if dtype == "float32" else 1)
            check_fault(reports["half"], "half")
            check_fault(reports["row"], "row")
            check_fault(reports["stale"], "stale")
            check_trainer(reports["trainer_expert"])


def test_a_shared_expert_without_its_gate(tmp_path: Path) -> None:
    model = write_byte_model(tmp_path / "model", family="qwen2_moe", num_attention_heads=2)
    block = "model.layers.1.mlp"
    faults = {
        "gate": scale(f"{block}.shared_expert_gate.weight", 0.0),
        "shared": scale(f"{block}.shared_expert.down_proj.weight", 1.1),
    }
    checkpoints = write_checkpoints(tmp_path / "checkpoints", model, faults)
    settings = [EAGER, "evaluation=null", "engine.tensor=2"]
    engine = ["engine.max_sequences=16", f"model.path={checkpoints / 'trained'}", *settings]
    with running_service(tmp_path, load_settings(QUICKSTART_MOE, engine)) as service:
        layouts = {
            "EP2": [],
            "TP2+SP, ETP2": ["parallel={tensor: 2, sequence: true, expert_tensor: 2}"],
        }
        for name, layout in layouts.items():
            cases = ["clean", *faults]
            reports = audit_faults(service, checkpoints, name, cases, [*layout, settings[2]], QUICKSTART_MOE)
            assert reports["clean"]["clean"], reports["clean"]["findings"]
            for case in faults:
                finding = only_finding(reports[case])
                assert (finding["kind"], finding["side"], finding["layers"]) == ("weights", "engine", [1])
                assert finding["text"].startswith(f"{block}.experts {WRONG}")
                assert f"{block}.shared_expert_gate.weight" in finding["parameters"]


def test_norms_over_all_heads_of_two_workers(tmp_path: Path) -> None:
    model = write_byte_model(tmp_path / "model", family="olmoe", num_attention_heads=2)
    norm = "model.layers.1.self_attn.q_norm.weight"
    checkpoints = write_checkpoints(tmp_path / "checkpoints", model, {"norm": scale(norm, 1.1)})
    settings = [EAGER, "evaluation=null", "engine.tensor=2"]
    engine = ["engine.max_sequences=16", f"model.path={checkpoints / 'trained'}", *settings]
    with running_service(tmp_path, load_settings(QUICKSTART_MOE, engine)) as service:
        layout = ["parallel={tensor: 2, sequence: true, expert: 2}", settings[2]]
        reports = audit_faults(service, checkpoints, "TP2", ["clean", "norm"], layout, QUICKSTART_MOE)
    assert reports["clean"]["clean"], reports["clean"]["findings"]
    assert only_finding(reports["norm"])["parameters"] == [norm]
