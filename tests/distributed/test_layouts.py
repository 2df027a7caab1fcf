"""The same batch gives the same, and right, log-probs, loss and gradients in every parallel layout.

Proved: real Megatron-Core with our packing, attention, norm, log-prob head and normalisation, in fp32 over
gloo, against transformers in float64, one sequence at a time: log-probs and entropies of each token, the loss
of RPG-REINFORCE-URKL with an anchor of its own and of GSPO (whole sequences), every gradient and their norm;
for TP, PP, virtual stages (VPP), DP, SP and mixtures, 1 to 7 uneven micro-batches, tied and untied
embeddings, a vocabulary that the layout pads. The Hugging Face export of each, after an update, gives
transformers the log-probs that Megatron computes; a held anchor still gives those from before the update, and
the weights come back bit for bit. Several updates by each optimizer end at the weights of the same optimizer
on the float64 model.
Not covered here: GPUs, bfloat16, the other losses (their gradients: tests/unit), the engine's side.
"""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import schedulefree
import torch
from safetensors.torch import load_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from rpg_megatron.data.trajectory import Trajectory
from tests.distributed.spawn import run_ranks

TEMPERATURE = 0.7
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
OBJECTIVES: dict[str, dict[str, Any]] = {
    "rpg": {"objective": {"beta": 0.05}, "anchor": {"type": "fixed"}},
    "gspo": {
        "objective": {"type": "gspo", "low": 0.1, "high": 0.1},
        "aggregation": {"type": "sequence_mean"},
    },
}


def make_model(folder: Path, *, tied: bool) -> Qwen3ForCausalLM:
    """A random Qwen3 whose vocabulary no tensor-parallel size divides, with norms that are not ones."""
    config = Qwen3Config(
        vocab_size=251,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )
    model = Qwen3ForCausalLM(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=generator)
            p.copy_(1 + 0.2 * noise if "norm" in name else 0.08 * noise)
    model.save_pretrained(folder)
    return model.double().eval()


def make_batch() -> list[Trajectory]:
    """Twelve ragged trajectories, some prompts and responses of a single token."""
    random = np.random.default_rng(1)
    sizes = [
        (3, 4),
        (30, 3),
        (1, 1),
        (40, 80),
        (2, 3),
        (7, 57),
        (1, 63),
        (5, 1),
        (9, 20),
        (3, 90),
        (1, 2),
        (12, 12),
    ]
    return [
        Trajectory(
            prompt_id=i,
            sample=0,
            prompt=random.integers(0, 251, p).astype(np.int32),
            response=random.integers(0, 251, r).astype(np.int32),
            behaviour=np.zeros(r, np.float32),
            versions=np.zeros(r, np.int32),
            finish="stop",
            text="",
            advantage=float(random.normal()),
        )
        for i, (p, r) in enumerate(sizes)
    ]


def reference_logprobs(
    model: Qwen3ForCausalLM, batch: list[Trajectory]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Log-prob and entropy of each response token, one sequence at a time, in the model's precision."""
    rows = []
    for t in batch:
        whole = torch.tensor(np.concatenate([t.prompt, t.response]), dtype=torch.long)
        logits = model(whole[None, :-1]).logits[0, len(t.prompt) - 1 :] / TEMPERATURE
        log_p = torch.log_softmax(logits, -1)
        rows.append((log_p.gather(1, whole[len(t.prompt) :, None])[:, 0], -(log_p.exp() * log_p).sum(-1)))
    return rows


def reference_update(model: Qwen3ForCausalLM, batch: list[Trajectory], kind: str) -> dict[str, Any]:
    """In float64, with the losses written out anew: loss, mean |loss| of a token, and every gradient."""
    per_token, per_sequence = [], []
    for t, (logp, _) in zip(batch, reference_logprobs(model, batch), strict=True):
        log_w, log_u = logp - torch.tensor(t.old).double(), logp - torch.tensor(t.anchor).double()
        if kind == "rpg":  # REINFORCE-URKL, dual clip, an anchor of its own
            w = log_w.detach().exp()
            weight = w * t.advantage - 0.05 * w * log_u.detach()
            keep = torch.where(weight >= 0, w < 1.28, (w > 0.8) & (w < 10))
            per_token.append(-(keep * weight) * logp)
        else:  # GSPO
            s = log_w.mean().exp()
            loss = torch.maximum(-s * t.advantage, -s.clamp(0.9, 1.1) * t.advantage)
            per_sequence.append(loss)
            per_token.append(loss.detach().expand(len(logp)))
    flat = torch.cat(per_token)
    loss = flat.mean() if kind == "rpg" else torch.stack(per_sequence).mean()
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    norm = torch.sqrt(sum(g.square().sum() for g in gradients.values()))
    mean = flat.detach().abs().mean().item()
    return {"loss": loss.item(), "abs": mean, "norm": norm.item(), "gradients": gradients}


def run_layouts(
    folder: Path, layouts: dict[str, Any], settings: dict[str, Any], *, updates: int = 1, lr: float = 1e-3
) -> dict[str, Any]:
    """Run each layout on the batch in ``folder``; layouts of one size share their processes."""
    results: dict[str, Any] = {}
    for world in sorted({w for w, _, _ in layouts.values()}):
        cases = {
            name: make_case(folder / "model", parallel, microbatches, settings, updates=updates, lr=lr)
            for name, (w, parallel, microbatches) in layouts.items()
            if w == world
        }
        (folder / "cases.json").write_text(json.dumps(cases))
        results |= run_ranks("layout_worker", world, folder)
    assert set(results) == set(layouts)
    return results


def make_case(
    model: Path,
    parallel: dict[str, Any],
    microbatches: int,
    settings: dict[str, Any],
    *,
    updates: int = 1,
    lr: float = 1e-3,
    after: bool = True,
) -> dict[str, Any]:
    """One layout for ``layout_worker``; ``settings`` replaces whole sections. ``after``: score again then."""
    return {
        "microbatches": microbatches,
        "after": after,
        "updates": updates,
        "lr": lr,
        "settings": {
            "model": {"path": str(model), "vocab_multiple": 4},
            "data": {"path": "unused"},
            "parallel": parallel,
            "precision": {"dtype": "float32"},
            "optimizer": {"clip_grad": 1.0, "distributed": False},
            "training": {"minibatches": 1, "tokens_per_microbatch": 100, "logprob_chunk": 17},
            "rollout": {"prompts_per_step": 12, "temperature": TEMPERATURE},
            **settings,
        },
    }


def check(
    folder: Path, name: str, result: dict, batch: list[Trajectory], rows: list, wanted: dict[str, Any]
) -> None:
    """One layout's results against the reference."""
    assert len(result["scored"]) == len(batch), name
    for key, parts in result["scored"].items():
        got = dict(parts)
        logp, entropy = rows[int(key)]
        np.testing.assert_allclose(got["logp"], logp, atol=2e-5, err_msg=f"{name}: log-probs of {key}")
        np.testing.assert_allclose(got["entropy"], entropy, atol=2e-5, err_msg=f"{name}: entropy of {key}")
    update = result["update"]
    assert update["tokens"] == sum(len(t.response) for t in batch), name
    assert update["grad_norm"] == pytest.approx(wanted["norm"], rel=1e-5), name
    assert abs(update["loss"] - wanted["loss"]) <= 1e-5 * wanted["abs"], name
    assert update["abs_loss"] == pytest.approx(wanted["abs"], rel=1e-5), name
    gradients = load_file(folder / "gradients" / name / "model.safetensors")
    assert set(gradients) == set(wanted["gradients"]), name
    for key, reference in wanted["gradients"].items():
        error = (gradients[key].double() - reference).abs().max() / reference.abs().max()
        assert error <= 1e-5, f"{name}: gradient of {key} off by {error:.1e} of its largest element"


@pytest.mark.parametrize(("tied", "kind"), [(False, "rpg"), (True, "rpg"), (False, "gspo")])
def test_same_numbers_in_every_layout(tmp_path: Path, tied: bool, kind: str) -> None:
    model = make_model(tmp_path / "model", tied=tied)
    batch = make_batch()
    with torch.no_grad():
        rows = [(logp.numpy(), entropy.numpy()) for logp, entropy in reference_logprobs(model, batch)]
    for t, (logp, _) in zip(batch, rows, strict=True):
        random = np.random.default_rng(t.prompt_id)
        t.old = (logp + random.normal(0, 0.15, len(logp))).astype(np.float32)
        t.anchor = (logp + random.normal(0, 0.3, len(logp))).astype(np.float32)
    wanted = reference_update(model, batch, kind)
    (tmp_path / "batch.pkl").write_bytes(pickle.dumps(batch))
    # Everything once with untied embeddings; what ties or whole sequences could break, again.
    again = ("TP2+SP", "DP2, 7 micro-batches", "CP2")
    if tied:
        again = ("TP1", "PP2", "DP2, 7 micro-batches", "PP2xVPP2", "TP2xPP2", "TP2xPP2xVPP2+SP", "CP2xPP2")
    full = kind == "rpg" and not tied
    layouts = LAYOUTS if full else {name: LAYOUTS[name] for name in again}
    results = run_layouts(tmp_path, layouts, OBJECTIVES[kind])
    for name, result in results.items():
        check(tmp_path, name, result, batch, rows, wanted)
        exported = Qwen3ForCausalLM.from_pretrained(tmp_path / "weights" / name, dtype=torch.float64).eval()
        with torch.no_grad():
            after = reference_logprobs(exported, batch)
        for t, got, (logp, _) in zip(batch, result["after"], after, strict=True):
            np.testing.assert_allclose(got, logp, atol=2e-5, err_msg=f"{name}: export, {t.prompt_id}")
        for t, got, (logp, _) in zip(batch, result["anchored"], rows, strict=True):
            np.testing.assert_allclose(got, logp, atol=2e-5, err_msg=f"{name}: held anchor, {t.prompt_id}")


@pytest.mark.parametrize(
    ("kind", "layouts"),
    [
        ("adamw", ("DP2, 7 micro-batches", "TP2")),
        ("adamw, distributed", ("DP2, 7 micro-batches", "TP2+SP", "PP2xVPP2xDP2, packed to a budget")),
        ("schedule_free_adamw", ("DP2, 7 micro-batches", "PP2")),
    ],
)
def test_optimizers_end_where_the_reference_does(tmp_path: Path, kind: str, layouts: tuple[str, ...]) -> None:
    model = make_model(tmp_path / "model", tied=False)
    batch = make_batch()
    with torch.no_grad():
        for t, (logp, _) in zip(batch, reference_logprobs(model, batch), strict=True):
            t.old = t.anchor = logp.float().numpy()
    (tmp_path / "batch.pkl").write_bytes(pickle.dumps(batch))
    # A large epsilon: where gradients are tiny, Adam's first steps would otherwise blow rounding errors up.
    settings = {"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-3, "clip_grad": 0.0}
    optimizer = {"type": kind.partition(",")[0], "distributed": "distributed" in kind, **settings}
    results = run_layouts(
        tmp_path,
        {name: LAYOUTS[name] for name in layouts},
        {"optimizer": optimizer, **OBJECTIVES["rpg"]},
        updates=3,
        lr=1e-2,
    )

    decayed = [p for p in model.parameters() if p.dim() > 1]
    plain = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    free = kind == "schedule_free_adamw"
    reference = (schedulefree.AdamWScheduleFree if free else torch.optim.AdamW)(
        groups, lr=1e-2, betas=(0.9, 0.999), eps=1e-3
    )
    for _ in range(3):
        if free:
            reference.train()
        reference.zero_grad()
        reference_update(model, batch, "rpg")
        reference.step()
        if free:
            reference.eval()
    wanted = model.state_dict()
    for name in results:
        got = load_file(tmp_path / "weights" / name / "model.safetensors")
        for key, weight in got.items():
            torch.testing.assert_close(
                weight.double(), wanted[key], rtol=0, atol=5e-6, msg=lambda m, k=key, n=name: f"{n}, {k}: {m}"
            )
