"""Arithmetic of a layer's experts, with which an audit recomputes it from router logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from rpg_megatron.config.model_shape import ExpertShape


def routing_weights(logits: Tensor, experts: ExpertShape) -> Tensor:
    """Weight of each expert for each token: [t, experts], 0 for experts that are not chosen."""
    top, chosen = logits.topk(experts.per_token, dim=1)
    among = top if experts.normalised else logits
    weights = (top - among.logsumexp(1, keepdim=True)).exp()
    return torch.zeros_like(logits).scatter_(1, chosen, weights)


def undecided(logits: Tensor, experts: ExpertShape) -> Tensor:
    """Tokens whose logits do not determine the choice of experts: bool [t].

    The logits of the last chosen expert and the next one are equal, as is common in bfloat16, or so close
    that the rounding of a softmax decides.
    """
    if experts.per_token == experts.count:
        return torch.zeros(logits.size(0), dtype=torch.bool, device=logits.device)
    top = logits.topk(experts.per_token + 1, dim=1).values
    return top[:, -2] - top[:, -1] <= 1e-6 * (1 + logits.abs().amax(1))


def route_counts(engine: Tensor, trainer: Tensor, experts: ExpertShape) -> dict[str, int]:
    """The counts of ``AuditVerdict.routes`` for one layer, from its logits [t, experts] on both sides."""
    chosen, others = (
        torch.zeros(x.shape, dtype=torch.bool).scatter_(1, x.topk(experts.per_token).indices, True)
        for x in (engine, trainer)
    )
    return {
        "choices": len(chosen),
        "changed": int((chosen != others).any(1).sum()),
        "experts": experts.count,
        "unused": int((~chosen.any(0)).sum()),
    }


def expert_output(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Output of one expert: x [t, hidden], gate and up [columns, hidden], down [hidden, columns]."""
    return (F.silu(x @ gate.t()) * (x @ up.t())) @ down.t()


def run_experts(
    x: Tensor, logits: Tensor, experts: ExpertShape, matrices: Callable[[int], Sequence[Tensor]]
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """For each expert with tokens: its index, its tokens (int64 [n]), its contributions to them [n, hidden].

    x: [t, hidden]. logits: [t, experts]. matrices: returns those of an expert, see ``expert_output``.
    """
    weights = routing_weights(logits, experts)
    for e in range(experts.count):
        tokens = weights[:, e].nonzero()[:, 0]
        if tokens.numel():
            yield e, tokens, weights[tokens, e, None] * expert_output(x[tokens], *matrices(e))
