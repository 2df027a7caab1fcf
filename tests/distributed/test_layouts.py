"""The same batch gives the same, correct log-probs, loss and gradients in every parallel layout.

Proved: real Megatron-Core with our packing, attention, norm, log-prob head and normalisation, in fp32 over
gloo, against transformers in float64, one sequence at a time: log-probs and entropies of each token, the loss
of RPG-REINFORCE-URKL with an anchor of its own and of GSPO (whole sequences) with an entropy bonus, every
gradient and their norm; for TP, PP, virtual stages (VPP), DP, SP and mixtures, 1 to 7 uneven micro-batches,
tied and untied embeddings, a vocabulary that the layout pads. The Hugging Face export of each, after an
update, gives transformers the log-probs that Megatron computes; a held anchor still gives those from before
the update, and the weights come back bit for bit. Several updates by each optimizer end at the weights of the
same optimizer on the float64 model. With responses of several parts, of which the policy did not sample some:
loss and gradients are those of the sampled tokens, and numbers at the others change no bit of a gradient.
Not covered here: GPUs, bfloat16, the other losses (their gradients: tests/unit), the engine's side.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import schedulefree
import torch
from safetensors.torch import load_file
from transformers import Qwen3ForCausalLM

from rpg_megatron.data.trajectory import NOT_SAMPLED, Trajectory
from tests.support.layouts import (
    OBJECTIVES,
    branched_batch,
    check,
    make_batch,
    make_layout_model,
    make_masked_batch,
    reference_logprobs,
    reference_update,
    run_layouts,
    score_batch,
)
from tests.support.muon import Muon, split_parameters

LAYOUTS: dict[str, tuple[int, dict[str, Any], int]] = {
    "TP1": (1, {}, 1),
    "TP1, 2 micro-batches": (1, {}, 2),
    "TP1, 3 micro-batches": (1, {}, 3),
    "TP1, 7 micro-batches": (1, {}, 7),
    "TP1, packed to a budget": (1, {}, 0),
    "TP2": (2, {"tensor": 2}, 3),
    "TP2+SP": (2, {"tensor": 2, "sequence": True}, 3),
    "PP2": (2, {"pipeline": 2}, 7),
    "DP2, 7 micro-batches": (2, {"data": 2}, 7),
    "DP2, packed to a budget": (2, {"data": 2}, 0),
    "PP2xVPP2": (2, {"pipeline": 2, "virtual": 2}, 7),
    "TP2xPP2": (4, {"tensor": 2, "pipeline": 2}, 3),
    "TP2xPP2xVPP2+SP": (4, {"tensor": 2, "pipeline": 2, "virtual": 2, "sequence": True}, 5),
    "PP2xVPP2xDP2, packed to a budget": (4, {"pipeline": 2, "virtual": 2, "data": 2}, 0),
    "TP2xDP2+SP": (4, {"tensor": 2, "data": 2, "sequence": True}, 3),
    "CP2": (2, {"context": 2}, 3),
    "CP2xTP2": (4, {"context": 2, "tensor": 2}, 3),
    "CP2xTP2+SP, packed to a budget": (4, {"context": 2, "tensor": 2, "sequence": True}, 0),
    "CP2xPP2": (4, {"context": 2, "pipeline": 2}, 3),
    "CP2xDP2, packed to a budget": (4, {"context": 2, "data": 2}, 0),
}
"""Name -> (ranks, parallel settings, micro-batches; 0: packed to a token budget)."""
FEW = (
    "TP1, 7 micro-batches",
    "TP2xPP2xVPP2+SP",
    "PP2xVPP2xDP2, packed to a budget",
    "CP2xTP2+SP, packed to a budget",
    "CP2xPP2",
)
"""The others are part of a larger layout, or have another number of micro-batches."""
REPEATED = tuple(name for name in LAYOUTS if name not in FEW)
TIED = ("TP1", "TP2xPP2xVPP2+SP", "CP2xPP2")
"""Layouts that tied embeddings could break; the others run untied."""
MORE_TIED = ("PP2", "PP2xVPP2", "DP2, 7 micro-batches", "TP2xPP2")
SEQUENCES = ("TP2+SP", "DP2, 7 micro-batches", "CP2")
"""Layouts that losses of whole sequences could break."""
ENTROPIES = ("TP1, 2 micro-batches", "TP2+SP", "CP2")
"""Layouts that the entropy's gradient could break: vocabulary and sequence split over ranks."""
REJECTED = (
    "TP1",
    "TP1, 3 micro-batches",
    "PP2",
    "DP2, 7 micro-batches",
    "CP2",
    "CP2xDP2, packed to a budget",
)
"""Layouts that denominators without rejected tokens could break: counts differ between their ranks."""


@pytest.mark.parametrize(
    ("tied", "kind", "names"),
    [
        (False, "rpg", FEW),
        (True, "rpg", TIED),
        (False, "gspo", SEQUENCES),
        pytest.param(False, "rpg", REPEATED, marks=pytest.mark.long),
        pytest.param(True, "rpg", MORE_TIED, marks=pytest.mark.long),
        pytest.param(False, "rpg, entropy bonus", ENTROPIES, marks=pytest.mark.long),
        pytest.param(False, "rejected tokens", REJECTED, marks=pytest.mark.long),
        pytest.param(False, "rejected sequences", REJECTED, marks=pytest.mark.long),
    ],
    ids=[
        "untied",
        "tied",
        "gspo",
        "repeated",
        "repeated, tied",
        "entropy bonus",
        "rejected tokens",
        "rejected sequences",
    ],
)
def test_same_numbers_in_every_layout(tmp_path: Path, tied: bool, kind: str, names: Sequence[str]) -> None:
    model = make_layout_model(tmp_path / "model", tied=tied)
    batch = make_batch()
    rows = score_batch(model, batch)
    expected = reference_update(model, batch, kind)
    results = run_layouts(tmp_path, {name: LAYOUTS[name] for name in names}, batch, OBJECTIVES[kind])
    for name, result in results.items():
        check(tmp_path, name, result, batch, rows, expected)
        exported = Qwen3ForCausalLM.from_pretrained(tmp_path / "weights" / name, dtype=torch.float64).eval()
        with torch.no_grad():
            after = reference_logprobs(exported, batch)
        for t, logps, (logp, _) in zip(batch, result["after"], after, strict=True):
            np.testing.assert_allclose(logps, logp, atol=2e-5, err_msg=f"{name}: export, {t.prompt_id}")
        for t, logps, (logp, _) in zip(batch, result["anchored"], rows, strict=True):
            np.testing.assert_allclose(logps, logp, atol=2e-5, err_msg=f"{name}: held anchor, {t.prompt_id}")


MASKED = ("PP2", "DP2, packed to a budget", "CP2")
"""Layouts that a mask could break, of at most two ranks."""
INFLUENCES = {"last before a part": (3, 19), "first after a part": (3, 50)}
"""Sampled tokens next to tokens that were not: prompt, position in the response."""


@pytest.mark.parametrize(
    ("kinds", "influenced"),
    [
        ({"rpg": MASKED, "gspo": ("CP2",)}, ("CP2",)),
        pytest.param(
            {"rpg": [name for name in LAYOUTS if name not in MASKED], "rpg, entropy bonus": ENTROPIES}
            | {"gspo": [name for name in LAYOUTS if name != "CP2"]}
            | {"rejected tokens": REJECTED, "rejected sequences": REJECTED},
            ("TP1", "PP2xVPP2"),
            marks=pytest.mark.long,
        ),
    ],
    ids=["two ranks", "all"],
)
def test_only_sampled_tokens_have_a_gradient(
    tmp_path: Path, kinds: dict[str, Sequence[str]], influenced: Sequence[str]
) -> None:
    model = make_layout_model(tmp_path / "model", tied=False)
    batch = make_masked_batch()
    rows = score_batch(model, batch)
    expected = {}
    for kind in kinds:
        model.zero_grad()
        expected[kind] = reference_update(model, batch, kind)
    cases, batches = {}, {}
    for layout, sizes in LAYOUTS.items():  # so that cases of one layout follow each other
        layout_cases = {kind: (*sizes, OBJECTIVES[kind]) for kind in kinds if layout in kinds[kind]}
        if "rpg" in layout_cases:
            changed = {"other numbers": _with_other_numbers(batch)}
            places = INFLUENCES.items() if layout in influenced else ()
            changed |= {case_name: _with_influence(batch, *place) for case_name, place in places}
            layout_cases |= dict.fromkeys(changed, layout_cases["rpg"])
            batches |= {
                f"{case_name}, {layout}": changed_batch for case_name, changed_batch in changed.items()
            }
        cases |= {f"{case_name}, {layout}": case for case_name, case in layout_cases.items()}
    results = run_layouts(tmp_path, cases, batch, {}, batches=batches, lr=0.0, after=False)

    for kind, layouts in kinds.items():
        for layout in layouts:
            name = f"{kind}, {layout}"
            check(tmp_path, name, results[name], batch, rows, expected[kind])
    for layout in kinds["rpg"]:
        first = _gradient_bits(tmp_path, f"rpg, {layout}")
        assert _gradient_bits(tmp_path, f"other numbers, {layout}") == first, layout
        for case_name in INFLUENCES if layout in influenced else ():
            assert _gradient_bits(tmp_path, f"{case_name}, {layout}") != first, f"{case_name}, {layout}"


def test_each_turn_of_a_branched_conversation_is_trained_once(tmp_path: Path) -> None:
    """Rows that share turns give the gradient of the turns, each alone with the tokens before it."""
    model = make_layout_model(tmp_path / "model", tied=False)
    rows, turns = branched_batch()
    expected_rows = score_batch(model, rows)
    for (row, start), turn in turns:
        part = slice(start, start + len(turn.response))
        turn.old, turn.anchor = row.old[part], row.anchor[part]
        turn.behaviour, turn.advantage = row.behaviour[part], row.advantage
    expected = reference_update(model, [turn for _, turn in turns], "rpg")
    layouts = {name: LAYOUTS[name] for name in MASKED}
    results = run_layouts(tmp_path, layouts, rows, OBJECTIVES["rpg"], lr=0.0, after=False)
    for name, result in results.items():
        check(tmp_path, name, result, rows, expected_rows, expected)


def _with_other_numbers(batch: Sequence[Trajectory]) -> list[Trajectory]:
    """The batch with numbers that would spoil any loss, at the tokens that were not sampled."""
    changed = pickle.loads(pickle.dumps(batch))
    for t in changed:
        left_out = t.versions == NOT_SAMPLED
        t.old[left_out], t.anchor[left_out], t.behaviour[left_out] = np.nan, 1e30, -np.inf
        t.versions[left_out] = 7
    assert any(np.isnan(t.old).any() for t in changed)
    return changed


def _with_influence(batch: Sequence[Trajectory], prompt: int, place: int) -> list[Trajectory]:
    """The batch with another ``old`` of a sampled token."""
    changed = pickle.loads(pickle.dumps(batch))
    assert changed[prompt].mask[place]
    changed[prompt].old[place] += np.float32(0.01)
    return changed


def _gradient_bits(folder: Path, name: str) -> dict[str, bytes]:
    gradients = load_file(folder / "gradients" / name / "model.safetensors")
    return {key: gradient.numpy().tobytes() for key, gradient in gradients.items()}


@pytest.mark.parametrize(
    ("kind", "layouts"),
    [
        ("adamw, distributed", ("TP2+SP", "PP2xVPP2xDP2, packed to a budget")),
        ("schedule_free_adamw", ("DP2, 7 micro-batches",)),
        ("muon", ("TP2xPP2", "TP2xDP2+SP")),
        pytest.param("adamw", ("DP2, 7 micro-batches", "TP2"), marks=pytest.mark.long),
        pytest.param("adamw, distributed", ("DP2, 7 micro-batches",), marks=pytest.mark.long),
        pytest.param("schedule_free_adamw", ("PP2",), marks=pytest.mark.long),
        pytest.param("muon", ("DP2, 7 micro-batches", "TP2+SP", "PP2xVPP2", "CP2"), marks=pytest.mark.long),
    ],
)
def test_optimizers_end_where_the_reference_does(tmp_path: Path, kind: str, layouts: tuple[str, ...]) -> None:
    model = make_layout_model(tmp_path / "model", tied=False)
    batch = make_batch()
    with torch.no_grad():
        for t, (logp, _) in zip(batch, reference_logprobs(model, batch), strict=True):
            t.old = t.anchor = logp.float().numpy()
    # A large epsilon: where gradients are tiny, Adam's first steps would otherwise blow rounding errors up.
    settings = {"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-3, "clip_grad": 0.0}
    optimizer = {"type": kind.partition(",")[0], "distributed": "distributed" in kind, **settings}
    results = run_layouts(
        tmp_path,
        {name: LAYOUTS[name] for name in layouts},
        batch,
        {"optimizer": optimizer, **OBJECTIVES["rpg"]},
        updates=3,
        lr=1e-2,
    )

    matrices, others = split_parameters(model) if kind == "muon" else ([], list(model.parameters()))
    decayed = [p for p in others if p.dim() > 1]
    plain = [p for p in others if p.dim() == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    free = kind == "schedule_free_adamw"
    reference = (schedulefree.AdamWScheduleFree if free else torch.optim.AdamW)(
        groups, lr=1e-2, betas=(0.9, 0.999), eps=1e-3
    )
    orthogonal = [Muon(matrices, 1e-2, 0.1)] if matrices else []
    for _ in range(3):
        if free:
            reference.train()
        model.zero_grad()
        reference_update(model, batch, "rpg")
        for each in (reference, *orthogonal):
            each.step()
        if free:
            reference.eval()
    expected = model.state_dict()
    for name in results:
        exported = load_file(tmp_path / "weights" / name / "model.safetensors")
        for key, weight in exported.items():
            torch.testing.assert_close(
                weight.double(),
                expected[key],
                rtol=0,
                atol=5e-6,
                msg=lambda m, k=key, n=name: f"{n}, {k}: {m}",
            )
