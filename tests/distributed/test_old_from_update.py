"""``training.old``: the old policy's log-probs from the first update's forward pass, or from the engine.

Proved with real Megatron in fp32, for dense models and a mixture with replayed experts: no weight changes
before the batch is checked; ``old`` of the first mini-batch has the bits of a pass over the same rows; with
one update a step all of ``old``, and every gradient and metric, are those of ``training.old: pass``, and auto
chooses it; with several, gradients differ by rounding (the pass packs other rows). With the engine's
log-probs, the guard still gets the trainer's own of the first mini-batch. Not covered: kernels of a GPU,
where a forward pass with gradient may round differently from one without; w is exactly 1 there all the same.
"""

from __future__ import annotations

import json
import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.layouts import FULL, SELECTIVE, SP, make_case, make_layout_model, make_masked_batch
from tests.support.mixtures import EXPERTS, LAYERS, SIZES, TOPK
from tests.support.ranks import run_ranks
from tests.support.tiny_models import make_model

FIXED = {"objective": {"beta": 0.05, "entropy_bonus": 0.1}, "anchor": {"type": "fixed"}}
CORRECTED = {"correction": {"type": "truncate", "level": "sequence", "high": 1.5}, "rollout": {"ahead": 2}}
GSPO = {
    "objective": {"type": "gspo", "low": 0.1, "high": 0.1},
    "advantage": {"type": "grpo"},
    "aggregation": {"type": "sequence_mean"},
}
Layouts = dict[str, tuple[dict[str, Any], int, dict[str, Any]]]
"""Name -> (parallel settings, mini-batches, other settings)."""
DENSE: Layouts = {
    "PP2 x VPP2, full recompute, fixed anchor": ({"pipeline": 2, "virtual": 2}, 1, FULL | FIXED),
    "DP2, correction of sequences": ({"data": 2}, 1, CORRECTED),
    "CP2, two epochs of two updates": ({"context": 2}, 2, {"ppo_epochs": 2}),
}
MORE_DENSE: Layouts = {
    "TP2+SP, old anchor": (SP, 1, {}),
    "PP2, gspo": ({"pipeline": 2}, 1, GSPO),
    "CP2, selective recompute": ({"context": 2}, 1, SELECTIVE),
    "DP2, four updates": ({"data": 2}, 4, FIXED),
}
MIXTURE: Layouts = {"DP2, EP2, replay, selective recompute": ({"data": 2, "expert": 2}, 1, SELECTIVE)}
MORE_MIXTURE: Layouts = {
    "PP2, replay, full recompute": ({"pipeline": 2}, 1, FULL | FIXED),
    "TP2+SP, EP2, replay, two updates": ({**SP, "expert": 2}, 2, FULL),
}


@pytest.mark.parametrize(
    ("mixture", "layouts"),
    [
        pytest.param(False, DENSE, id="dense"),
        pytest.param(True, MIXTURE, id="mixture"),
        pytest.param(False, MORE_DENSE, id="more dense", marks=pytest.mark.long),
        pytest.param(True, MORE_MIXTURE, id="more mixtures", marks=pytest.mark.long),
    ],
)
def test_the_same_step_from_every_source(
    tmp_path: Path, mixture: bool, layouts: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    batch = make_masked_batch()
    draw = np.random.default_rng(0)
    for i, t in enumerate(batch):
        t.reward, t.group, t.sample = math.sin(i), i // 3, i % 3
        t.behaviour = np.where(t.mask, -5.5 + draw.normal(0, 0.3, len(t.response)), 0).astype(np.float32)
        if mixture:
            routes = draw.random((t.length - 1, LAYERS, EXPERTS)).argsort(-1)[..., :TOPK]
            t.routes = routes.astype(np.uint8)
    (tmp_path / "batch.pkl").write_bytes(pickle.dumps(batch))
    if mixture:
        make_model(tmp_path / "model", "qwen3_moe", noise=0.15, **SIZES)
    else:
        make_layout_model(tmp_path / "model", tied=False)
    cases = {}
    for name, (parallel, minibatches, more) in layouts.items():
        more = dict(more)
        training = {"minibatches": minibatches, "tokens_per_microbatch": 100, "logprob_chunk": 17}
        training["ppo_epochs"] = more.pop("ppo_epochs", 1)
        if mixture:
            training["router_replay"] = "rollout"
        rollout = {"prompts_per_step": 4, "samples_per_prompt": 3, "temperature": 0.7} | more.pop(
            "rollout", {}
        )
        settings = {"training": training, "rollout": rollout, **more}
        settings["optimizer"] = {"lr": 1e-6, "warmup_steps": 0, "distributed": False}
        cases[name] = make_case(tmp_path / "model", parallel, 0, settings)
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    results = run_ranks("tests.distributed.old_worker", 2, tmp_path)

    lines = []
    for name, (_, minibatches, more) in layouts.items():
        ranks = results[name]["ranks"]
        one = minibatches == 1
        for rank in ranks:
            assert rank["auto"] == ("update" if one else "pass"), name
            assert rank["same_as_its_pass"], name
            assert rank["first"], name
            assert rank["old"] <= (0 if one else 1e-5), name
            assert rank["anchor"] <= (0 if one else 1e-5), name
            assert (rank["anchor_differs"] > 1e-3) == ("anchor" in more), name
            assert len(rank["gradients"]) == minibatches * more.get("ppo_epochs", 1), name
            assert max(rank["gradients"]) <= 1e-6, name
            if "engine_gradients" in rank:
                assert max(rank["engine_gradients"]) <= 1e-6, name
                assert rank["compared_gap"] <= (0 if one else 1e-5), name
                assert rank["compared"] == (rank["first"] if rank["leads"] else []), name
        by_pass, by_update = ranks[0]["metrics"]
        assert by_pass.keys() == by_update.keys(), name
        for key, value in by_pass.items():
            if key.startswith("routes/") and "mismatch" in key and not one:
                continue  # one micro-batch is scored without replay, and it is another one
            padded = key.startswith("moe/") and not one  # padding is routed, too, and other rows have other
            assert value == pytest.approx(by_update[key], rel=0.1 if padded else 1e-5, abs=1e-6), (name, key)
        assert by_update["policy/entropy"] > 1, name
        lines.append(f"{name:45s} old {ranks[0]['old']:.1e}, gradients {max(ranks[0]['gradients']):.1e}")
    with capsys.disabled():
        print("\nold log-probs by a pass and by the first update: largest differences\n" + "\n".join(lines))
