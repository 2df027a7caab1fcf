"""Transformers' mixtures of experts as a reference: with given experts, and their auxiliary loss."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.models.qwen3_moe import modeling_qwen3_moe

from rpg_megatron.data.trajectory import Trajectory
from tests.support.layouts import (
    OBJECTIVES,
    make_batch,
    reference_logprobs,
    reference_update,
    score_batch,
)
from tests.support.tiny_models import HYBRIDS, make_model, use_float64

SIZES = {
    "vocab_size": 251,
    "hidden_size": 48,
    "intermediate_size": 100,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "head_dim": 16,
    "moe_intermediate_size": 32,
    "mlp_only_layers": [1],
    "num_experts": 8,
    "max_position_embeddings": 512,
}
"""Sizes of a mixture whose second layer is dense; EP of 2 and 4 divides its experts."""
LAYERS, EXPERTS, TOPK = 3, 8, 2
"""Layers with experts, experts of each, experts a token."""

REPLAYED: dict[str, Any] = OBJECTIVES["rpg"] | {
    "training": {
        "minibatches": 1,
        "tokens_per_microbatch": 100,
        "logprob_chunk": 17,
        "router_replay": "rollout",
    }
}
"""Settings of a replay."""


def make_replayed(
    folder: Path, family: str = "qwen3_moe"
) -> tuple[list[Trajectory], list[Any], dict[str, Any], dict[str, float]]:
    """A mixture, and a batch whose routes are random; with its scores, its update and the shares of
    ``forced``, by transformers in float64 that uses these routes.
    """
    random = np.random.default_rng(3)
    batch = make_batch()
    for t in batch:
        shape = t.length - 1, LAYERS, EXPERTS
        t.routes = random.random(shape).argsort(-1)[..., :TOPK].astype(np.uint8)
    with use_float64():
        heads = {"num_key_value_heads": 6} if family == "deepseek_v3" else {}
        noise = (
            0.06 if family in (*HYBRIDS, "deepseek_v3") else 0.15
        )  # norms amplify the noise of short vectors
        model = make_model(folder, family, noise=noise, **SIZES, **heads)
        with forced(model, batch) as counts:
            rows = score_batch(model, batch)
        with torch.no_grad():
            unforced = [logp.numpy() for logp, _ in reference_logprobs(model, batch)]
        with forced(model, batch):
            expected = reference_update(model, batch, "rpg")
    assert 0.2 < counts["routes/changed"] < counts["routes/changed_tokens"] <= 1
    assert min(np.abs(a - b).max() for (a, _), b in zip(rows, unforced, strict=True) if len(b) > 9) > 1e-2
    return batch, rows, expected, counts


@contextmanager
def forced(model: PreTrainedModel, batch: list[Trajectory]) -> Iterator[dict[str, float]]:
    """Within the block, one pass over the batch, a sequence at a time, uses its routes.

    Yields the shares of choices and of tokens at which the router would have chosen others, after the pass.
    """
    routers = [m for m in model.modules() if type(m).__name__.lower().endswith("topkrouter")]
    kind: Any = type(routers[0])
    passed = {id(router): 0 for router in routers}
    changed = [np.zeros(t.length - 1, int) for t in batch]

    def route(self: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        number, layer = passed[id(self)], [id(r) for r in routers].index(id(self))
        passed[id(self)] += 1
        chosen = torch.from_numpy(batch[number].routes[:, layer].astype(np.int64))
        logits = x.reshape(-1, self.hidden_dim) @ self.weight.t()
        own_choice = before(self, x)[2].sort(-1).values
        changed[number] += (own_choice != chosen.sort(-1).values).any(-1).numpy()
        if not hasattr(self, "e_score_correction_bias"):
            return logits, logits.gather(1, chosen).softmax(-1), chosen
        weights = logits.sigmoid().gather(1, chosen)
        return logits, weights / weights.sum(-1, keepdim=True) * self.routed_scaling_factor, chosen

    before, kind.forward = kind.forward, route
    counts: dict[str, float] = {}
    try:
        yield counts
    finally:
        kind.forward = before
    flat = np.concatenate(changed)
    counts |= {"routes/changed": flat.mean() / len(routers), "routes/changed_tokens": (flat > 0).mean()}


def balance(
    model: PreTrainedModel,
    batch: list[Trajectory],
    micro_batches: Sequence[Sequence[int]],
    *,
    shared: bool = False,
) -> tuple[torch.Tensor, int]:
    """The auxiliary loss of an update, summed over layers and without a coefficient; and these layers.

    A second implementation, in the model's precision. micro_batches: indices of the trajectories of each one.
    The routers choose by themselves, also within ``forced``. shared: equal prompts of a micro-batch count
    once.
    """
    routers = [m for m in model.modules() if isinstance(m, modeling_qwen3_moe.Qwen3MoeTopKRouter)]
    probs: list[list[torch.Tensor]] = [[] for _ in routers]  # of each layer, of each sequence
    hooks = [
        router.register_forward_pre_hook(
            lambda m, args, layer_probs=layer_probs: layer_probs.append(
                (args[0].flatten(0, -2) @ m.weight.t()).softmax(-1)
            )
        )
        for router, layer_probs in zip(routers, probs, strict=True)
    ]
    reference_logprobs(model, batch)
    for hook in hooks:
        hook.remove()
    total, tokens = torch.zeros(()), 0
    for micro in filter(None, micro_batches):
        prompts: dict[bytes, int] = {}
        for i in micro:
            prompts.setdefault(batch[i].prompt.tobytes() if shared else bytes([i]), i)
        first = {i: 0 if i in prompts.values() else len(batch[i].prompt) - 1 for i in micro}
        tokens += sum(batch[i].length - 1 - first[i] for i in micro)
        for router, layer_probs in zip(routers, probs, strict=True):
            p = torch.cat([layer_probs[i][first[i] :] for i in micro])
            chosen = p.detach().topk(router.top_k).indices.flatten()
            share = chosen.bincount(minlength=p.size(1)) / len(chosen)
            total = total + len(p) * p.size(1) * (share * p.mean(0)).sum()
    return total / tokens, len(routers)
