"""Aggregation of per-token losses, as sums and counts that add up over micro-batches and ranks."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from rpg_megatron.objectives.ratios import sequence_lengths

Aggregation = Literal["token_mean", "sequence_mean", "constant"]


def aggregate(
    per_token: Tensor,
    sequences: Tensor,
    *,
    kind: Aggregation = "token_mean",
    constant: float = 1.0,
    sequence_count: int | None = None,
    kept: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(sum, count) of a micro-batch. The batch's loss is the total sum divided by the total count.

    Shapes: per_token [tokens], sequences [tokens] integer labels -> a scalar and an int64 scalar. To
    aggregate over micro-batches and ranks, sum both values, then divide once: the gradient does not depend on
    how the batch is split, provided that no sequence is split.

    ``token_mean``: all tokens have equal weight. ``sequence_mean``: all sequences have equal weight, divided
    evenly among their tokens. ``constant``: every sequence's sum is divided by ``constant`` (Dr.GRPO: the
    largest response length).
    ``sequence_count``: as in ``sequence_lengths``; sequences without a token are not counted.
    ``kept``: bool [tokens]; the other tokens are left out of sums and counts.
    Sources: token mean arXiv 2503.14476; sequence mean arXiv 2402.03300; constant arXiv 2503.20783.
    """
    if kept is not None:
        per_token = torch.where(kept, per_token, 0.0)
    if kind == "token_mean" and kept is not None:
        return per_token.sum(), kept.sum()
    if kind == "token_mean":
        # Not torch.tensor: the copy of a single number to a GPU waits for all that is queued there.
        return per_token.sum(), torch.full((), per_token.numel(), device=per_token.device)
    lengths, member = sequence_lengths(sequences, sequence_count)
    if kept is not None:
        lengths = torch.zeros_like(lengths).index_add(0, member, kept.to(lengths.dtype))
    count = (lengths > 0).sum()
    if kind == "constant":
        return per_token.sum() / constant, count
    return (per_token / lengths.clamp(min=1)[member].to(per_token.dtype)).sum(), count
