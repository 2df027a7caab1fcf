"""Weights from trainer layouts into every engine layout by every transport, for each family of models.

Real Megatron ranks, changed by random noise between syncs, and real vLLM engines with one and two workers
that start with weights of their own. What is compared are log-probs of tokens that the engines sampled, also
of responses that were under way when the weights changed: engines are held there, so that each token must
be of the old weights or of the new ones. As a control, an engine gets the old weights back for one token,
which the same comparison finds in each response. The default tier has one rank and one worker, for a mixture
with latent attention, a hybrid's adapters and YaRN; test_bridge_vllm has more for one dense family. Not
covered: GPUs, CUDA IPC, NCCL, several machines.

A router's tie that an engine decides otherwise changes log-probs by up to some nats. With its sync at 54
tokens ``test_experts`` has one, at token 373 of the third response (logits 2e-7 apart). The comparison
decides ties both ways (``one_switch``).
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from rpg_megatron.config.lora import INTERLEAVED_TARGETS, SOFTMAX_TARGETS, TARGETS
from tests.support.bridge_rig import bridge_engines, check_matrix

WORLDS: dict[int, dict[str, dict[str, int]]] = {
    1: {"TP1": {}},
    2: {"TP2": {"tensor": 2}, "PP2": {"pipeline": 2}, "DP2": {"data": 2}},
    4: {"TP2xPP2": {"tensor": 2, "pipeline": 2}},
}
HYBRID: dict[int, dict[str, dict[str, Any]]] = {
    1: {"TP1": {}},
    2: {"TP2+SP": {"tensor": 2, "sequence": True}, "PP2": {"pipeline": 2}, "DP2": {"data": 2}},
    4: {"TP2+SP x PP2": {"tensor": 2, "sequence": True, "pipeline": 2}},
}
EXPERTS: dict[int, dict[str, dict[str, Any]]] = {
    1: {"TP1": {}},
    2: {
        "DP2, EP2": {"data": 2, "expert": 2},
        "TP2+SP": {"tensor": 2, "sequence": True},
        "TP2+SP, EP2": {"tensor": 2, "sequence": True, "expert": 2},
        "TP2+SP, ETP2": {"tensor": 2, "sequence": True, "expert_tensor": 2},
    },
    4: {"PP2 x DP2, EP2": {"pipeline": 2, "data": 2, "expert": 2}},
}


@pytest.mark.long
@pytest.mark.usefixtures("forked_starts")
def test_experts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with bridge_engines(tmp_path, "qwen3-moe", [1]) as engines:
        moments = [(54,), (54, 56, 57)]
        check_matrix(
            tmp_path, engines, "qwen3-moe", {1: EXPERTS[1]}, 1, capsys, tolerance=1e-4, moments=moments
        )


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.usefixtures("forked_starts")
def test_a_hundred_syncs_under_way(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each with weights and responses of its own, at its own moment; and ten controls.

    On a busy machine: 264,000 tokens within 1.3e-5 of their weights, one of 660 responses with a tie.
    """
    place = random.Random(0).randrange
    moments = [(place(1, 390),) for _ in range(55)] + [(m, m + 2, m + 3) for m in (1, 7, 54, 120, 380)]
    with bridge_engines(tmp_path, "qwen3-moe", [1]) as engines:
        check_matrix(
            tmp_path, engines, "qwen3-moe", {1: EXPERTS[1]}, 1, capsys, tolerance=1e-4, moments=moments
        )


@pytest.mark.long
@pytest.mark.timeout(5400)
@pytest.mark.parametrize(
    "name",
    [
        *("qwen3-moe", "qwen2-moe", "olmoe", "glm-4.5", "qwen3.5-moe", "qwen3-next"),
        *("deepseek-v3", "moonlight", "glm-4.7-flash"),
    ],
)
def test_experts_after_five_perturbations(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The two syncs of a perturbation, one by each transport, bring different weights."""
    with bridge_engines(tmp_path, name, [1, 2]) as engines:
        check_matrix(tmp_path, engines, name, EXPERTS, 5, capsys, tolerance=1e-4)


@pytest.mark.long
@pytest.mark.timeout(5400)
@pytest.mark.parametrize(
    "name",
    ["qwen2, tied", "qwen3", "qwen3, YaRN", "llama 3, tied", "mistral", "phi3", "olmo3", "granite, tied"],
)
def test_every_family_after_five_perturbations(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with bridge_engines(tmp_path, name, [1, 2]) as engines:
        check_matrix(tmp_path, engines, name, WORLDS, 5, capsys)


@pytest.mark.long
@pytest.mark.usefixtures("forked_starts")
def test_hybrid(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with bridge_engines(tmp_path, "qwen3.5", [1]) as engines:
        check_matrix(tmp_path, engines, "qwen3.5", {1: HYBRID[1]}, 1, capsys, tolerance=1e-4)


@pytest.mark.parametrize("name", ["qwen3, YaRN", pytest.param("qwen3.5, YaRN", marks=pytest.mark.long)])
@pytest.mark.usefixtures("forked_starts")
def test_positions_beyond_the_original_ones(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with bridge_engines(tmp_path, name, [1]) as engines:
        check_matrix(tmp_path, engines, name, {1: HYBRID[1]}, 1, capsys, tolerance=1e-4)


@pytest.mark.long
@pytest.mark.usefixtures("forked_starts")
def test_sigmoid_router(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with bridge_engines(tmp_path, "glm-4.5", [1]) as engines:
        check_matrix(tmp_path, engines, "glm-4.5", {1: EXPERTS[1]}, 1, capsys, tolerance=1e-4)


@pytest.mark.usefixtures("forked_starts")
def test_latent_attention(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with bridge_engines(tmp_path, "moonlight", [1]) as engines:
        check_matrix(tmp_path, engines, "moonlight", {1: EXPERTS[1]}, 1, capsys, tolerance=1e-4)


@pytest.mark.long
@pytest.mark.timeout(5400)
def test_hybrid_after_five_perturbations(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with bridge_engines(tmp_path, "qwen3.5", [1, 2]) as engines:
        check_matrix(tmp_path, engines, "qwen3.5", HYBRID, 5, capsys, tolerance=1e-4)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.long)])
@pytest.mark.usefixtures("forked_starts")
def test_adapters_of_a_hybrid(tmp_path: Path, workers: int, capsys: pytest.CaptureFixture[str]) -> None:
    lora = {"rank": 6, "alpha": 9}
    with bridge_engines(tmp_path, "qwen3.5", [workers], lora=lora) as engines:
        check_matrix(tmp_path, engines, "qwen3.5", {workers: HYBRID[workers]}, 1, capsys, 1e-4, lora=lora)


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.usefixtures("forked_starts")
def test_adapters_beside_windows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lora = {"rank": 4, "targets": TARGETS}
    with bridge_engines(tmp_path, "mistral", [1], lora=lora) as engines:
        check_matrix(tmp_path, engines, "mistral", {1: WORLDS[1]}, 1, capsys, tolerance=1e-4, lora=lora)


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.usefixtures("forked_starts")
def test_adapters_of_interleaved_projections(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lora = {"rank": 6, "targets": [*SOFTMAX_TARGETS, *INTERLEAVED_TARGETS, "out_proj"]}
    with bridge_engines(tmp_path, "qwen3-next", [1], lora=lora) as engines:
        check_matrix(tmp_path, engines, "qwen3-next", {1: HYBRID[1]}, 1, capsys, tolerance=1e-4, lora=lora)
