"""Context parallelism: each rank of a group holds two chunks of each sequence; attention needs all."""

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
    """Which places of a packed row each context rank holds: [context, t / context], in the order it has them.

    Each sequence is cut into 2 x context equal chunks, of which rank r has number r and, from the end, number
    r again: under causal attention every rank then has the same work. This is the order that Megatron's
    rotary embedding takes for granted. ``lengths`` are multiples of 2 x context, but for one rank.
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
    """Every rank's places put together; backward takes this rank's out of the sum, or of its own gradient."""

    @staticmethod
    def forward(ctx: Any, mine: Tensor, places: Tensor, summed: bool) -> Tensor:
        group = mpu.get_context_parallel_group()
        parts = mine.new_empty(places.size(0), *mine.shape)
        dist.all_gather(list(parts), mine.contiguous(), group=group)
        ctx.places, ctx.group, ctx.summed = places, group, summed
        whole = mine.new_empty(places.numel(), *mine.shape[1:])
        whole[places.flatten()] = parts.flatten(0, 1)
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        if ctx.summed:
            gradient = gradient.contiguous()
            dist.all_reduce(gradient, group=ctx.group)
        return gradient[ctx.places[ctx.group.rank()]], None, None


def gather_places(mine: Tensor, places: Tensor, *, summed: bool) -> Tensor:
    """The whole row of values [t, ...] from what each context rank holds of it [t / context, ...].

    ``places`` as of ``zigzag_places``. ``summed``: the ranks go on to compute different things with the
    result, and their gradients are added up; otherwise all of them compute the same thing, and each keeps its
    part of the one gradient. Collective over the context group; without one, ``mine`` itself.
    """
    if places.size(0) == 1:
        return mine
    whole: Tensor = _Gather.apply(mine, places, summed)  # type: ignore[no-untyped-call]  # torch's own
    return whole
