"""Errors of the chunked log-prob head and of plain torch in float32, both against float64 on one process."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rpg_megatron.policy.logprobs import Head, token_logprobs


def measure_errors(
    *,
    vocab: int,
    tokens: int,
    width: int,
    chunk: int,
    temperature: float,
    scale: float = 1.0,
    padding: int = 0,
    adapter: int = 0,
    group: Any = None,
) -> list[str]:
    """Errors out of bounds: log-probs, entropies, gradients of hidden states and weight, padding's gradient.

    Bounds: twice the error of plain float32 torch, and 2e-6 x max(1, largest |logit|). ``scale``: of the
    weights, and so of the logits. ``padding``: rows after the vocabulary. ``group``: cuts the rows.
    ``adapter``: so many columns of both are given as A h and B of an adapter, which adds the same to logits.
    """
    generator = torch.Generator().manual_seed(vocab + tokens)
    hidden = torch.randn(tokens, width, generator=generator)
    weight = torch.randn(vocab + padding, width, generator=generator) * scale
    targets = torch.randint(0, vocab, (tokens,), generator=generator)
    targets[:2] = torch.tensor([0, vocab - 1])[:tokens]
    mix = torch.randn(2, tokens, generator=generator)

    def plain(dtype: torch.dtype) -> tuple[dict[str, Tensor], float]:
        h, w = (x.detach().clone().to(dtype).requires_grad_() for x in (hidden, weight))
        logits = h @ w[:vocab].t() / temperature
        log_p = torch.log_softmax(logits, -1)
        rows = torch.stack([log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)])
        (rows * mix.to(dtype)).sum().backward()
        return _named(rows, h.grad, w.grad), logits.abs().max().item()

    exact, largest = plain(torch.float64)
    usual, _ = plain(torch.float32)
    h = hidden.requires_grad_()
    size, rank = (1, 0) if group is None else (group.size(), group.rank())
    w = weight.chunk(size)[rank].clone().requires_grad_()
    assert size * len(w) == len(weight)
    head = Head(temperature, chunk, vocab)
    (h_part, narrow), (w_part, b) = (x.split([width - adapter, adapter], 1) for x in (h, w))
    added = (narrow, b) if adapter else None
    rows = torch.stack(token_logprobs(h_part, w_part, targets, head, group=group, added=added))
    (rows * mix).sum().backward()
    d_hidden, d_weight = h.grad, w.grad
    if size > 1:  # each rank has its share of the one, and its rows of the other
        dist.all_reduce(d_hidden, group=group)
        parts = [torch.empty_like(w) for _ in range(size)]
        dist.all_gather(parts, d_weight, group=group)
        d_weight = torch.cat(parts)
    actual = _named(rows, d_hidden, d_weight)
    problems = [] if d_weight[vocab:].eq(0).all() else ["padding has a gradient"]
    for name, expected in exact.items():
        error = (actual[name] - expected).abs().max().item()
        bound = min(2 * (usual[name] - expected).abs().max().item(), 2e-6 * max(1.0, largest))
        if not error <= bound:
            problems.append(f"{name}: off by {error:.2e}, bound {bound:.2e}")
    case = f"vocab {vocab}+{padding}, {tokens} tokens, chunk {chunk}, temperature {temperature}"
    return [f"{case}: {problem}" for problem in problems]


def _named(rows: Tensor, d_hidden: Tensor, d_weight: Tensor) -> dict[str, Tensor]:
    values = {"log-prob": rows[0], "entropy": rows[1], "d hidden": d_hidden, "d weight": d_weight}
    return {name: value.detach().double() for name, value in values.items()}
