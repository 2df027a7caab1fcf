"""From losses of tokens to the loss of a batch, in a form that adds up over micro-batches and ranks."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from rpg_megatron.objectives.ratios import sequence_sum

Aggregation = Literal["token_mean", "sequence_mean", "constant"]


def aggregate(
    per_token: Tensor, sequences: Tensor, *, kind: Aggregation = "token_mean", constant: float = 1.0
) -> tuple[Tensor, Tensor]:
    """(sum, count) of a micro-batch: the batch's loss is the total of the sums over that of the counts.

    Shapes: per_token [tokens], sequences [tokens] integer labels -> a scalar and an int64 scalar. Whoever
    holds several micro-batches, data or context ranks adds both up over all of them and divides once; then
    the gradient does not depend on how the batch was cut, provided that no sequence is cut.

    ``token_mean``: every token counts alike. ``sequence_mean``: every sequence counts alike, its tokens share
    its weight. ``constant``: every sequence's sum is divided by ``constant`` (Dr.GRPO: the largest response
    length).
    Sources: token mean arXiv 2503.14476; sequence mean arXiv 2402.03300; constant arXiv 2503.20783.
    """
    if kind == "token_mean":
        return per_token.sum(), torch.tensor(per_token.numel(), device=per_token.device)
    count = torch.tensor(len(torch.unique(sequences)), device=per_token.device)
    if kind == "constant":
        return per_token.sum() / constant, count
    _, length = sequence_sum(torch.zeros_like(per_token.detach()), sequences)
    return (per_token / length).sum(), count
