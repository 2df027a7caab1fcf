"""Checked log-ratios: what every loss is made of."""

from __future__ import annotations

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 60.0
"""Log-ratios are clamped here, far beyond any sane value, so that exp cannot overflow; clamps are counted."""


def require_alike(logp: Tensor, **others: Tensor) -> None:
    """Raise ValueError, naming the token, unless all tensors have the shape of ``logp`` and are finite."""
    for name, x in others.items():
        if x.shape != logp.shape:
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}, logp has {tuple(logp.shape)}; they must be alike"
            )
    for name, x in {"logp": logp, **others}.items():
        finite = torch.isfinite(x)
        if not bool(finite.all()):
            index = (~finite).nonzero()[0].tolist()
            place = index[0] if len(index) == 1 else tuple(index)
            raise ValueError(
                f"{name} is {float(x.detach()[tuple(index)])} at token {place}; it must be finite"
            )


def clamp_log_ratio(log_ratio: Tensor) -> tuple[Tensor, Tensor]:
    """The log-ratio within +-LOG_RATIO_LIMIT, and a boolean mask of where the limit acted; same shapes."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT), log_ratio.detach().abs() > LOG_RATIO_LIMIT


def sequence_sum(values: Tensor, sequences: Tensor) -> tuple[Tensor, Tensor]:
    """Sum of ``values`` over each sequence, given back to each of its tokens; and the sequence's token count.

    Shapes: values [tokens], sequences [tokens] integer labels -> two of [tokens]; differentiable in
    ``values``.
    """
    _, member = torch.unique(sequences, return_inverse=True)
    count = torch.bincount(member)
    total = values.new_zeros(len(count)).index_add(0, member, values)
    return total[member], count[member].to(values.dtype)
