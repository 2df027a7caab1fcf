"""The same batch gives the same, and right, log-probs, loss and gradient norm in every parallel layout.

Proved: real Megatron-Core with our packing, attention, norm, log-prob head and token normalisation, in fp32
over gloo, against transformers run in float64 one sequence at a time: log-probs and entropies of each token,
the REINFORCE-URKL loss and the norm of its gradient; for TP, PP, DP, SP and their mixtures, uneven
micro-batches, tied and untied embeddings, and a vocabulary that the layout pads; and that the Hugging Face
export of each layout, after an update, gives transformers the log-probs that Megatron computes. Not covered
here: single gradients (the norm stands for them), GPUs, bfloat16, the engine's side.
"""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from rpg_megatron.data.trajectory import Trajectory
from tests.distributed.spawn import run_ranks

TEMPERATURE = 0.7
LAYOUTS = {
    "TP1": (1, {}, {}),
    "TP1-small-packs": (1, {}, {"tokens_per_microbatch": 60}),
    "TP2": (2, {"tensor": 2}, {}),
    "TP2+SP": (2, {"tensor": 2, "sequence": True}, {}),
    "PP2": (2, {"pipeline": 2}, {"tokens_per_microbatch": 60}),
    "DP2": (2, {"data": 2}, {"tokens_per_microbatch": 60}),
    "TP2xPP2": (4, {"tensor": 2, "pipeline": 2}, {"tokens_per_microbatch": 60}),
    "TP2xDP2+SP": (4, {"tensor": 2, "data": 2, "sequence": True}, {}),
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


def reference_update(model: Qwen3ForCausalLM, batch: list[Trajectory], *, beta: float) -> dict[str, float]:
    """RPG-REINFORCE-URKL with the dual clip: loss, mean |loss| of a token, gradient norm."""
    losses = []
    for t, (logp, _) in zip(batch, reference_logprobs(model, batch), strict=True):
        log_w = logp.detach() - torch.tensor(t.old).double()
        w = log_w.exp()
        weight = w * t.advantage - beta * w * log_w
        keep = torch.where(weight >= 0, w < 1.28, (w > 0.8) & (w < 10))
        losses.append(-(keep * weight).detach() * logp)
    flat = torch.cat(losses)
    flat.mean().backward()
    norm = torch.sqrt(sum(p.grad.square().sum() for p in model.parameters()))
    return {"loss": flat.mean().item(), "abs": flat.abs().mean().item(), "norm": norm.item()}


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_same_numbers_in_every_layout(tmp_path: Path, tied: bool) -> None:
    model = make_model(tmp_path / "model", tied=tied)
    batch = make_batch()
    with torch.no_grad():
        rows = [(logp.numpy(), entropy.numpy()) for logp, entropy in reference_logprobs(model, batch)]
    for t, (logp, _) in zip(batch, rows, strict=True):
        drift = np.random.default_rng(t.prompt_id).normal(0, 0.15, len(logp))
        t.old = t.anchor = (logp + drift).astype(np.float32)
    wanted = reference_update(model, batch, beta=0.05)
    (tmp_path / "batch.pkl").write_bytes(pickle.dumps(batch))

    results: dict[str, Any] = {}
    for world in sorted({w for w, _, _ in LAYOUTS.values()}):
        cases = {
            name: {
                "model": {"path": str(tmp_path / "model"), "vocab_multiple": 4},
                "data": {"path": "unused"},
                "parallel": parallel,
                "precision": {"dtype": "float32"},
                "optimizer": {"clip_grad": 1.0},
                "training": {"minibatches": 1, "tokens_per_microbatch": 400, "logprob_chunk": 17, **training},
                "rollout": {"prompts_per_step": 12, "temperature": TEMPERATURE},
            }
            for name, (w, parallel, training) in LAYOUTS.items()
            if w == world
        }
        (tmp_path / "cases.json").write_text(json.dumps(cases))
        results |= run_ranks("layout_worker", world, tmp_path)

    assert set(results) == set(LAYOUTS)
    for name, result in results.items():
        assert len(result["scored"]) == len(batch), name
        for key, parts in result["scored"].items():
            got = dict(parts)
            logp, entropy = rows[int(key)]
            np.testing.assert_allclose(got["logp"], logp, atol=2e-5, err_msg=f"{name}: log-probs of {key}")
            np.testing.assert_allclose(
                got["entropy"], entropy, atol=2e-5, err_msg=f"{name}: entropy of {key}"
            )
        (update,) = result["updates"]
        assert update["tokens"] == sum(len(t.response) for t in batch), name
        assert update["grad_norm"] == pytest.approx(wanted["norm"], rel=1e-5), name
        assert abs(update["loss"] - wanted["loss"]) <= 1e-5 * wanted["abs"], name
        assert update["abs_loss"] == pytest.approx(wanted["abs"], rel=1e-5), name

        exported = Qwen3ForCausalLM.from_pretrained(tmp_path / f"hf-{name}", dtype=torch.float64).eval()
        with torch.no_grad():
            after = reference_logprobs(exported, batch)
        for t, got, (logp, _) in zip(batch, result["after"], after, strict=True):
            np.testing.assert_allclose(got, logp, atol=2e-5, err_msg=f"{name}: export, {t.prompt_id}")
