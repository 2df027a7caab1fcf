"""Log-ratio helpers with input checks, shared by all losses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 60.0
"""Log-ratios are clamped here, far beyond any sane value, so that exp cannot overflow; clamps are counted."""


_unread: ContextVar[list[tuple[Tensor, dict[str, Tensor]]] | None] = ContextVar("_unread", default=None)
"""Within ``finite_at_end``: whether the inputs of each loss are finite, on their device, and these inputs."""


def check_shapes_and_finite(logp: Tensor, **others: Tensor) -> None:
    """Raise ValueError, naming the token, unless all tensors have the shape of ``logp`` and are finite."""
    for name, x in others.items():
        if x.shape != logp.shape:
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}, logp has {tuple(logp.shape)}; they must be the same"
            )
    inputs = {name: x.detach() for name, x in {"logp": logp, **others}.items()}
    finite = torch.stack([torch.isfinite(x).all() for x in inputs.values()]).all()
    unread = _unread.get()
    if unread is not None:
        unread.append((finite, inputs))
    elif not bool(finite):
        _raise_not_finite(inputs)


@contextmanager
def finite_at_end() -> Iterator[None]:
    """Within the block ``check_shapes_and_finite`` raises for no value that is not finite; its end does.

    For the micro-batches of an update: on a GPU the host waits for each result that it reads.
    """
    unread: list[tuple[Tensor, dict[str, Tensor]]] = []
    token = _unread.set(unread)
    try:
        yield
    finally:
        _unread.reset(token)
    if unread and not bool(torch.stack([finite for finite, _ in unread]).all()):
        for _, inputs in unread:
            _raise_not_finite(inputs)


def _raise_not_finite(inputs: Mapping[str, Tensor]) -> None:
    for name, x in inputs.items():
        wrong = (~torch.isfinite(x)).nonzero().tolist()
        if wrong:
            place = wrong[0][0] if len(wrong[0]) == 1 else tuple(wrong[0])
            raise ValueError(f"{name} is {float(x[tuple(wrong[0])])} at token {place}; it must be finite")


def clamp_log_ratio(log_ratio: Tensor) -> tuple[Tensor, Tensor]:
    """The log-ratio within +-LOG_RATIO_LIMIT, and a boolean mask of where the limit acted; same shapes."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT), log_ratio.detach().abs() > LOG_RATIO_LIMIT


def sequence_lengths(sequences: Tensor, sequence_count: int | None = None) -> tuple[Tensor, Tensor]:
    """Token count of each sequence, and each token's sequence index.

    Shapes: sequences [tokens] integer labels -> int64 [sequences], int64 [tokens]. ``sequence_count``: the
    labels are int64 in 0 .. sequence_count - 1; some may have no token. Without it, labels may be any
    integers, and on a GPU the host waits until they are numbered.
    """
    if sequence_count is None:
        _, member = torch.unique(sequences, return_inverse=True)
        return torch.bincount(member), member
    none = torch.zeros(sequence_count, dtype=torch.int64, device=sequences.device)
    return none.index_add(0, sequences, torch.ones_like(sequences)), sequences


def sequence_sum(
    values: Tensor, sequences: Tensor, sequence_count: int | None = None
) -> tuple[Tensor, Tensor]:
    """For each token: the sum of ``values`` over its sequence, and the token count of that sequence.

    Shapes: values [tokens], sequences [tokens] integer labels -> two of [tokens]; differentiable in
    ``values``. ``sequence_count``: as in ``sequence_lengths``.
    """
    lengths, member = sequence_lengths(sequences, sequence_count)
    total = values.new_zeros(len(lengths)).index_add(0, member, values)
    return total[member], lengths[member].to(values.dtype)
