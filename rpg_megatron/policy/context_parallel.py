"""Context parallelism: each rank holds two chunks of every sequence; gathers keys, values and log-probs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from numpy.typing import NDArray
from torch import Tensor


def zigzag_places(lengths: Sequence[int], context: int) -> NDArray[np.int64]:
    """Positions of a packed row that each context rank holds, in its order: [context, t / context].

    Each sequence is split into 2 x context equal chunks; rank r holds chunk r and chunk 2 x context - 1 - r,
    so that causal attention is balanced over ranks. Megatron's rotary embedding assumes this order.
    ``lengths`` are multiples of 2 x context if there are several ranks.
    """
    if context == 1:
        return np.arange(sum(lengths))[None]
    ranks: list[list[NDArray[np.int64]]] = [[] for _ in range(context)]
    start = 0
    for length in lengths:
        chunks = np.arange(start, start + length).reshape(2 * context, -1)
        for rank, parts in enumerate(ranks):
            parts += [chunks[rank], chunks[-1 - rank]]
        start += length
    return np.stack([np.concatenate(parts) for parts in ranks])


class _Gather(torch.autograd.Function):
    """Joins the positions of all ranks; backward selects this rank's from the summed, or from its own,
    gradient.
    """

    @staticmethod
    def forward(ctx: Any, part: Tensor, places: Tensor, summed: bool) -> Tensor:
        group = mpu.get_context_parallel_group()
        parts = part.new_empty(places.size(0), *part.shape)
        dist.all_gather(list(parts), part.contiguous(), group=group)
        ctx.places, ctx.group, ctx.summed = places, group, summed
        whole = part.new_empty(places.numel(), *part.shape[1:])
        whole[places.flatten()] = parts.flatten(0, 1)
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        if ctx.summed:
            gradient = gradient.contiguous()
            dist.all_reduce(gradient, group=ctx.group)
        return gradient[ctx.places[ctx.group.rank()]], None, None


def gather_places(part: Tensor, places: Tensor, *, summed: bool) -> Tensor:
    """The full row of values [t, ...] from each context rank's part [t / context, ...].

    places: as from ``zigzag_places``. summed: the ranks use the result for different computations, so
    gradients are summed over ranks; otherwise all ranks compute the same, and each takes its part of its own
    gradient. Collective over the context group; with one rank returns ``part``.
    """
    if places.size(0) == 1:
        return part
    whole: Tensor = _Gather.apply(part, places, summed)  # type: ignore[no-untyped-call]  # torch's own
    return whole
