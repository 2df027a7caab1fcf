"""Responses behind one copy of their prompt have the numbers of plain rows, in every layout.

Why: a response that saw its neighbour, padding of its prompt, or positions of its own would give plausible
numbers; so would a gradient that reaches the prompt from one response only. Rows with shared prompts are
compared with transformers in float64, which gets every sequence alone, and with plain rows: log-probs,
entropies, loss and every gradient. Groups of one, prompts of one and of two tokens, responses of one token,
parts that were not sampled. Routes of a prompt are the same for its group; whose they are otherwise:
tests/unit/test_shared_prompt_rows.py. Not covered: adapters (test_lora_layouts), GPUs.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from rpg_megatron.data.trajectory import NOT_SAMPLED, Trajectory
from tests.support.layouts import (
    FULL,
    OBJECTIVES,
    SELECTIVE,
    SP,
    check,
    gradient_error,
    make_layout_model,
    reference_update,
    run_layouts,
    score_batch,
)
from tests.support.mixtures import EXPERTS, LAYERS, REPLAYED, SIZES, TOPK, balance, forced
from tests.support.tiny_models import make_model, use_float64

SHARE: dict[str, Any] = {
    "minibatches": 1,
    "tokens_per_microbatch": 150,
    "logprob_chunk": 17,
    "share_prompts": True,
}
PLAIN: dict[str, Any] = {"plain rows": (1, {}, 1, {"training": {**SHARE, "share_prompts": False}})}
DENSE: dict[str, Any] = {
    "one rank": (1, {}, 1),
    "PP2": (2, {"pipeline": 2}, 3),
    "TP2+SP, full recompute": (2, SP, 1, FULL),
    "CP2": (2, {"context": 2}, 2),
    "DP2, packed to a budget": (2, {"data": 2}, 0),
}
MORE: dict[str, Any] = {
    "one rank, selective recompute, packed to a budget": (1, {}, 0, SELECTIVE),
    "PP2xVPP2, full recompute": (2, {"pipeline": 2, "virtual": 2}, 3, FULL),
    "CP2xTP2+SP, packed to a budget": (4, {"context": 2, **SP}, 0),
    "CP2xPP2": (4, {"context": 2, "pipeline": 2}, 2),
    "CP4": (4, {"context": 4}, 1),
}
MIXTURES: dict[str, Any] = {
    "DP2, EP2": (2, {"data": 2, "expert": 2}, 2),
    "CP2, EP2, full recompute": (2, {"context": 2, "expert": 2}, 2, FULL),
}
MORE_MIXTURES: dict[str, Any] = {
    "one rank": (1, {}, 1),
    "PP2": (2, {"pipeline": 2}, 3),
    "TP2+SP": (2, SP, 2),
}
ON = {"device": "cpu", "training": SHARE}


def grouped_batch() -> list[Trajectory]:
    """Prompts of 40, 2, 1, 9 and 17 tokens with 4, 3, 2, 1 and 3 responses; routes as of one prefill."""
    random = np.random.default_rng(7)
    batch: list[Trajectory] = []
    for group, (length, responses) in enumerate(
        [(40, (12, 1, 30, 5)), (2, (40, 8, 3)), (1, (6, 2)), (9, (20,)), (17, (25, 2, 33))]
    ):
        prompt = random.integers(0, 251, length).astype(np.int32)
        of_prompt = _routes(random, length - 1)
        for sample, r in enumerate(responses):
            mask = np.ones(r, bool)
            mask[r // 3 : r // 2] = False
            batch.append(
                Trajectory(
                    prompt_id=len(batch),
                    sample=sample,
                    group=group,
                    prompt=prompt,
                    response=random.integers(0, 251, r).astype(np.int32),
                    behaviour=np.zeros(r, np.float32),
                    versions=np.where(mask, 0, NOT_SAMPLED).astype(np.int32),
                    mask=mask,
                    finish="stop",
                    text="",
                    advantage=float(random.normal()),
                    routes=np.concatenate([of_prompt, _routes(random, r)]),
                )
            )
    return batch


def _routes(random: np.random.Generator, tokens: int) -> Any:
    return random.random((tokens, LAYERS, EXPERTS)).argsort(-1)[..., :TOPK].astype(np.uint8)


@pytest.mark.parametrize(
    ("kind", "layouts"),
    [
        ("rpg", DENSE),
        pytest.param("rpg", MORE, marks=pytest.mark.long),
        pytest.param("gspo", DENSE | MORE, marks=pytest.mark.long),
    ],
    ids=["rpg", "more layouts", "gspo"],
)
def test_dense(
    tmp_path: Path, kind: str, layouts: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_layout_model(tmp_path / "model", tied=False)
    batch = grouped_batch()
    rows = score_batch(model, batch)
    expected = reference_update(model, batch, kind)
    cases = PLAIN | layouts
    results = run_layouts(tmp_path, cases, batch, OBJECTIVES[kind] | ON, lr=0.0, after=False)
    gradients = {name: load_file(tmp_path / "gradients" / name / "model.safetensors") for name in results}
    plain = results["plain rows"]
    assert plain["computed"] == sum(t.length - 1 for t in batch)
    lines = []
    for name, result in results.items():
        check(tmp_path, name, result, batch, rows, expected)
        gap = max(
            np.abs(np.subtract(dict(parts)["logp"], dict(plain["scored"][key])["logp"])).max()
            for key, parts in result["scored"].items()
        )
        error, where = gradient_error(
            gradients[name], {key: g.double() for key, g in gradients["plain rows"].items()}
        )
        lines.append(f"{name:50s} log-probs {gap:.1e}, gradients {error:.1e} ({where})")
        assert gap <= 8e-6, name  # sums in another order: a log-prob of -8 has steps of 1e-6
        if layouts.get(name, ())[2:3] == (1,):  # one micro-batch
            assert result["computed"] == plain["computed"] - 3 * 39 - 2 - 2 * 16
    with capsys.disabled():
        print("\nshared prompts: largest differences to plain rows, gradients by their largest element")
        print("\n".join(lines))


@pytest.mark.parametrize("replayed", [False, True], ids=["auxiliary loss", "replayed"])
@pytest.mark.parametrize(
    "layouts",
    [MIXTURES, pytest.param(MORE_MIXTURES, marks=pytest.mark.long)],
    ids=["layouts", "more layouts"],
)
def test_mixtures(tmp_path: Path, replayed: bool, layouts: dict[str, Any]) -> None:
    """With routes, or with the auxiliary loss, in which a shared prompt counts once."""
    batch = grouped_batch()
    more = REPLAYED["training"] if replayed else {"router_aux_loss": 0.3}
    settings = OBJECTIVES["rpg"] | ON | {"training": more | SHARE}
    with use_float64():
        model = make_model(tmp_path / "model", "qwen3_moe", noise=0.15, **SIZES)
        with forced(model, batch) if replayed else nullcontext():
            rows = score_batch(model, batch)
    results = run_layouts(tmp_path, layouts, batch, settings, lr=0.0, after=False)
    for name, result in results.items():
        model.zero_grad()
        with use_float64():
            if not replayed:
                aux, count = balance(model, batch, result["micro_batches"], shared=True)
                (0.3 * aux).backward()
                assert result["update"]["aux_loss"] == pytest.approx(float(aux.detach()) / count, rel=1e-6), (
                    name
                )
            with forced(model, batch) if replayed else nullcontext():
                expected = reference_update(model, batch, "rpg")  # adds to the gradients
        check(tmp_path, name, result, batch, rows, expected)


@pytest.mark.parametrize(
    ("kind", "layouts"),
    [
        ("deepseek_v3", {"TP2+SP": MORE_MIXTURES["TP2+SP"]}),
        pytest.param("deepseek_v3", MIXTURES | MORE_MIXTURES, marks=pytest.mark.long),
        pytest.param("glm4_moe_lite", MIXTURES | MORE_MIXTURES, marks=pytest.mark.long),
    ],
    ids=["deepseek_v3, few", "deepseek_v3", "glm4_moe_lite"],
)
def test_latent_attention(tmp_path: Path, kind: str, layouts: dict[str, Any]) -> None:
    batch = grouped_batch()
    sizes = {"vocab_size": 251, "num_hidden_layers": 4, "max_position_embeddings": 512}
    with use_float64():
        model = make_model(tmp_path / "model", kind, noise=0.1, **sizes)
        rows, expected = score_batch(model, batch), reference_update(model, batch, "rpg")
    results = run_layouts(tmp_path, layouts, batch, OBJECTIVES["rpg"] | ON, lr=0.0, after=False)
    for name, result in results.items():
        check(tmp_path, name, result, batch, rows, expected)
        assert result["computed"] < sum(t.length - 1 for t in batch)  # of the trainer's rows, on all ranks
