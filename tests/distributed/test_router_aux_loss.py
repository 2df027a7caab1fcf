"""The auxiliary loss has its configured weight, with every aggregation and in every layout.

Why: Megatron divides all gradients by what the loss counts, and each rank sees a part of the tokens; a factor
that is wrong by the share of prompts, of padding or of a rank trains all the same. With a coefficient that
gives this loss a large part of the gradient, every gradient, its norm and the metric are compared with
float64: transformers' model, a second implementation of the formula, and the micro-batches of the layout,
since the load is that of a micro-batch. They are ragged, some are empty, context ranks have padding, and an
update on other tokens comes first. Log-probs and the reported loss are bit for bit those without it.
Not covered here: bfloat16, Transformer Engine's layers, waits of the host (test_fake_cuda).
"""

from __future__ import annotations

import json
import pickle
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

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
)
from tests.support.mixtures import EXPERTS, LAYERS, SIZES, TOPK, balance, forced
from tests.support.ranks import run_ranks
from tests.support.tiny_models import make_model, use_float64

COEFFICIENT = 0.3
Layouts = dict[str, tuple[int, dict[str, Any], int, dict[str, Any]]]
ONE: Layouts = {
    "without": (1, {}, 5, {}),
    "one rank": (1, {}, 5, {}),
    "one rank, mean over sequences": (1, {}, 3, OBJECTIVES["gspo"]),
}
"""Name -> (ranks, parallel settings, micro-batches; 0: packed to a token budget, other settings)."""
MORE: Layouts = {
    "without": (1, {}, 5, {}),
    "one rank, experts recomputed": (1, {}, 5, SELECTIVE),
    "one rank, full recompute": (1, {}, 5, FULL),
    "one rank, replay": (1, {}, 5, {}),
    "DP2": (2, {"data": 2}, 5, {}),
    "DP2, mean over sequences": (2, {"data": 2}, 5, OBJECTIVES["gspo"]),
    "DP2, EP2, experts recomputed": (2, {"data": 2, "expert": 2}, 5, SELECTIVE),
    "DP2, EP2, replay": (2, {"data": 2, "expert": 2}, 5, {}),
    "TP2+SP": (2, SP, 3, {}),
    "TP2+SP, ETP2, full recompute": (2, {**SP, "expert_tensor": 2}, 3, FULL),
    "TP2+SP, EP2, experts recomputed": (2, {**SP, "expert": 2}, 3, SELECTIVE),
    "CP2": (2, {"context": 2}, 3, {}),
    "CP2, EP2, full recompute": (2, {"context": 2, "expert": 2}, 3, FULL),
    "PP2": (2, {"pipeline": 2}, 5, {}),
    "PP2, experts recomputed": (2, {"pipeline": 2}, 5, SELECTIVE),
    "PP2 x VPP2": (2, {"pipeline": 2, "virtual": 2}, 5, {}),
    "PP2 x VPP2, full recompute, mean over sequences": (
        2,
        {"pipeline": 2, "virtual": 2},
        5,
        FULL | OBJECTIVES["gspo"],
    ),
    "TP2+SP x DP2, EP4": (4, {**SP, "data": 2, "expert": 4}, 5, {}),
    "TP2+SP x PP2, EP2, experts recomputed": (4, {**SP, "pipeline": 2, "expert": 2}, 3, SELECTIVE),
    "TP2+SP x CP2, EP2, full recompute": (4, {**SP, "context": 2, "expert": 2}, 3, FULL),
    "CP2 x DP2, EP2, packed to a budget": (4, {"context": 2, "data": 2, "expert": 2}, 0, {}),
    "CP2 x PP2, EP2": (4, {"context": 2, "pipeline": 2, "expert": 2}, 3, {}),
    "PP2 x DP2, EP2, full recompute": (4, {"pipeline": 2, "data": 2, "expert": 2}, 5, FULL),
}


@pytest.mark.parametrize(
    "layouts", [ONE, pytest.param(MORE, marks=pytest.mark.long)], ids=["one rank", "every layout"]
)
def test_the_auxiliary_loss_of_an_update(
    tmp_path: Path, layouts: Layouts, capsys: pytest.CaptureFixture[str]
) -> None:
    random = np.random.default_rng(3)
    batches = {"batch.pkl": make_batch(), "replay.pkl": make_batch()}
    for t in batches["replay.pkl"]:
        t.routes = random.random((t.length - 1, LAYERS, EXPERTS)).argsort(-1)[..., :TOPK].astype(np.uint8)
    rows: dict[str, Any] = {}
    with use_float64():
        model = make_model(tmp_path / "model", "qwen3_moe", noise=0.15, **SIZES)
        for file, batch in batches.items():
            with torch.no_grad(), forced(model, batch) if file == "replay.pkl" else nullcontext():
                rows[file] = [(a.numpy(), b.numpy()) for a, b in reference_logprobs(model, batch)]
            for t, (logp, _) in zip(batch, rows[file], strict=True):
                noise = np.random.default_rng(t.prompt_id)
                t.old = (logp + noise.normal(0, 0.15, len(logp))).astype(np.float32)
                t.anchor = (logp + noise.normal(0, 0.3, len(logp))).astype(np.float32)
            (tmp_path / file).write_bytes(pickle.dumps(batch))
    results: dict[str, Any] = {}
    for world in sorted({w for w, *_ in layouts.values()}):
        cases = {
            name: case_of(tmp_path / "model", name, parallel, micro, more)
            for name, (w, parallel, micro, more) in layouts.items()
            if w == world
        }
        (tmp_path / "cases.json").write_text(json.dumps(cases))
        results |= run_ranks("tests.distributed.layout_worker", world, tmp_path, timeout=600)
    lines = []
    for name, result in results.items():
        file = "replay.pkl" if "replay" in name else "batch.pkl"
        batch, kind = batches[file], "gspo" if "sequences" in name else "rpg"
        coefficient = 0.0 if name == "without" else COEFFICIENT
        model.zero_grad()
        with use_float64():
            with forced(model, batch) if file == "replay.pkl" else nullcontext():
                aux, layers = balance(model, batch, result["micro_batches"])
            (coefficient * aux).backward()
            share = float(norm(model))
            with forced(model, batch) if file == "replay.pkl" else nullcontext():
                expected = reference_update(model, batch, kind)  # adds to the gradients
        assert layers == LAYERS
        check(tmp_path, name, result, batch, rows[file], expected)
        value = result["update"]["aux_loss"]
        if name == "without":
            assert value is None
            continue
        mean = float(aux.detach()) / LAYERS
        assert value == pytest.approx(mean, rel=1e-6), name
        part = share / expected["norm"]
        assert part > 0.2, name  # else a wrong factor would not be seen
        gradients = load_file(tmp_path / "gradients" / name / "model.safetensors")
        error, where = gradient_error(gradients, expected["gradients"])
        lines.append(f"{name:50s} {part:.2f}; {value:.6f}, off by {value - mean:.1e}; {error:.1e} ({where})")
    without, *same = (
        r for name, r in results.items() if layouts[name][:3] == (1, {}, 5) and "replay" not in name
    )
    for result in same:
        assert result["scored"] == without["scored"]
        assert result["update"]["loss"] == without["update"]["loss"]
    assert same
    with capsys.disabled():
        print("\nauxiliary loss: norm of its gradient over that of all; value, and differences to float64")
        print("\n".join(lines))


def case_of(model: Path, name: str, parallel: dict, micro: int, more: dict[str, Any]) -> dict[str, Any]:
    training: dict[str, Any] = {"minibatches": 1, "tokens_per_microbatch": 100, "logprob_chunk": 17}
    if name != "without":
        training["router_aux_loss"] = COEFFICIENT
    if "replay" in name:
        training["router_replay"] = "rollout"
    settings = {**(OBJECTIVES["rpg"] if "objective" not in more else {}), "training": training, **more}
    case = make_case(model, parallel, micro, settings, lr=0.0, after=False)
    return case | {"before": 1, "batch": "replay.pkl" if "replay" in name else "batch.pkl"}


def norm(model: torch.nn.Module) -> torch.Tensor:
    return torch.sqrt(sum(p.grad.square().sum() for p in model.parameters() if p.grad is not None))
