"""Fine-tuning's loss and gradients are those of transformers in float64, in every layout, for every mask.

Why: a mean of means weighs the tokens of short conversations more, a mask that is off by one trains the
user's words, and packed conversations that see each other train on text that does not precede them; all of
these train, only worse. Proved on real Megatron-Core in fp32 over gloo, with the policy and the loss of a
run: log-probs at temperature 1, the mean of -log p over all trained tokens of all ranks and micro-batches,
its norm and every gradient, with 3 to 7 uneven micro-batches;
conversations with one trained part and with several (turns), of a single token, and a mean over conversations
instead of tokens; dense models, and a mixture of experts.
Not covered here: bfloat16 and FP8 (test_fp8_layouts has the same passes), GPUs, data (tests/unit).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from rpg_megatron.data.trajectory import Trajectory
from tests.support.layouts import (
    SP,
    check,
    make_batch,
    make_layout_model,
    make_masked_batch,
    run_layouts,
    split_experts,
)
from tests.support.tiny_models import make_model, use_float64

FEW: dict[str, tuple[int, dict[str, Any], int]] = {
    "TP2+SP": (2, SP, 3),
    "PP2": (2, {"pipeline": 2}, 5),
    "DP2, packed to a budget": (2, {"data": 2}, 0),
    "CP2": (2, {"context": 2}, 3),
}
LAYOUTS: dict[str, tuple[int, dict[str, Any], int]] = {
    **FEW,
    "one rank": (1, {}, 7),
    "PP2 x VPP2": (2, {"pipeline": 2, "virtual": 2}, 4),
    "TP2+SP x DP2": (4, {**SP, "data": 2}, 3),
    "CP2 x PP2": (4, {"context": 2, "pipeline": 2}, 3),
}
EXPERTS: dict[str, tuple[int, dict[str, Any], int]] = {
    "DP2, EP2": (2, {"data": 2, "expert": 2}, 5),
    "TP2+SP, EP2": (2, {**SP, "expert": 2}, 3),
    "CP2, EP2": (2, {"context": 2, "expert": 2}, 3),
}
SFT = {"data": None, "sft": {"data": {"path": "unused"}}, "rollout": {}}
"""In place of the prompts and the temperature of ``run_layouts``."""


def reference(model: PreTrainedModel, batch: list[Trajectory], *, by_conversation: bool) -> tuple[list, dict]:
    """Log-probs and entropies of each response token; loss, mean |loss| of a token, and all gradients."""
    rows, trained = [], []
    for t in batch:
        whole = torch.tensor(np.concatenate([t.prompt, t.response]), dtype=torch.long)
        log_p = torch.log_softmax(model(whole[None, :-1]).logits[0, len(t.prompt) - 1 :], -1)
        logp = log_p.gather(1, whole[len(t.prompt) :, None])[:, 0]
        rows.append((logp.detach().numpy(), -(log_p.exp() * log_p).sum(-1).detach().numpy()))
        trained.append(-logp[torch.from_numpy(t.versions >= 0)])
    flat = torch.cat(trained)
    loss = torch.stack([part.mean() for part in trained]).mean() if by_conversation else flat.mean()
    loss.backward()
    gradients = split_experts({name: p.grad for name, p in model.named_parameters()})
    norm = torch.sqrt(sum(g.square().sum() for g in gradients.values()))
    mean = flat.mean().item()
    return rows, {"loss": loss.item(), "abs": mean, "norm": norm.item(), "gradients": gradients}


@pytest.mark.parametrize(
    ("batch", "settings", "layouts"),
    [
        (make_masked_batch, {}, FEW),
        pytest.param(make_masked_batch, {}, LAYOUTS, marks=pytest.mark.long),
        pytest.param(make_batch, {}, LAYOUTS, marks=pytest.mark.long),
        pytest.param(
            make_masked_batch, {"aggregation": {"type": "sequence_mean"}}, LAYOUTS, marks=pytest.mark.long
        ),
    ],
    ids=["few", "turns", "whole responses", "by conversation"],
)
def test_gradients_in_every_layout(
    tmp_path: Path, batch: Any, settings: dict[str, Any], layouts: dict[str, Any]
) -> None:
    model, conversations = make_layout_model(tmp_path / "model", tied=False), batch()
    rows, expected = reference(model, conversations, by_conversation="aggregation" in settings)
    results = run_layouts(tmp_path, layouts, conversations, SFT | settings, lr=0.0, after=False)
    for name, result in results.items():
        check(tmp_path, name, result, conversations, rows, expected)


@pytest.mark.long  # the experts' gradients are those of test_experts; this has the loss and the mask
def test_gradients_of_experts(tmp_path: Path) -> None:
    sizes = {"vocab_size": 251, "moe_intermediate_size": 32, "num_hidden_layers": 3}
    conversations = make_masked_batch()
    with use_float64():
        model = make_model(tmp_path / "model", "qwen3_moe", noise=0.15, **sizes)
        rows, expected = reference(model, conversations, by_conversation=False)
    results = run_layouts(tmp_path, EXPERTS, conversations, SFT, lr=0.0, after=False)
    for name, result in results.items():
        check(tmp_path, name, result, conversations, rows, expected)
