"""Attention in rows whose responses share prompts: each attends to its prompt and, causally, to itself.

On a CPU two kinds of blocks, merged by their log-sum-exp as in ring attention: causal squares, every sequence
with itself, and rectangles, all responses to a prompt with it. No key is copied and there is no mask; each
pair of tokens is computed once. On a GPU torch's ``varlen_attn`` (FlashAttention, whose causal mask is
aligned at the last key): the queries of a sequence, and the keys of its prompt and its own, of which each
response gets a copy.

With context parallelism a rank has two chunks of the queries of each sequence, and gathers all keys and
values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state as mpu
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from rpg_megatron.policy.context_parallel import gather_places
from rpg_megatron.policy.length_groups import LengthGroups, copy_to, group_by_length
from rpg_megatron.policy.microbatch import PackedSequences

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@dataclass(frozen=True)
class Blocks:
    """What a context rank computes on a CPU, in positions of its queries [c] and of the row's keys [t]."""

    squares: LengthGroups
    """Runs of queries, each of which attends causally to the keys at the same positions."""
    rectangles: list[tuple[slice, slice]]
    """Queries, and keys that all of them attend to."""


@dataclass(frozen=True)
class CopiedKeys:
    """What a context rank computes on a GPU: runs of queries, each with its own copy of its keys."""

    places: Tensor
    """int64 [n]: positions in the row of the keys of all runs."""
    query_bounds: Tensor
    """int32 [runs + 1]: where the runs begin and end."""
    key_bounds: Tensor
    """int32 [runs + 1]: where their keys do in ``places``."""
    longest: tuple[int, int]
    """Queries of the longest run, and most keys of one."""


def attend_with_prompts(
    query: Tensor, key: Tensor, value: Tensor, row: PackedSequences, scale: float | None = None
) -> Tensor:
    """Attention of rotated queries [c, heads, d] and keys and values [c, kv_heads, d] -> [c, heads, d].

    row: with ``prompts``. scale: of the scores; None: 1 / sqrt(d). Collective over the context group.
    """
    context = row.places.size(0)
    if row.shared is None:
        rank = mpu.get_context_parallel_rank() if context > 1 else 0
        plan = copied_keys if query.is_cuda else blocks
        row.shared = plan(row, context, rank)
    keys, values = (gather_places(x, row.places, summed=True) for x in (key, value))
    if isinstance(row.shared, Blocks):
        out: Tensor = _Attention.apply(query, key, value, keys, values, row.shared, scale)  # type: ignore[no-untyped-call]  # torch's own
        return out
    runs: CopiedKeys = row.shared
    attended: Any = varlen_attn(
        query,
        keys.index_select(0, runs.places),
        values.index_select(0, runs.places),
        runs.query_bounds,
        runs.key_bounds,
        *runs.longest,
        scale=scale,
        window_size=(-1, 0),
        enable_gqa=True,
    )
    return attended  # type: ignore[no-any-return]


def _runs(row: PackedSequences, context: int, rank: int) -> list[tuple[int, slice, slice]]:
    """This rank's runs of queries: number of tokens, positions of the shared prompt and of the earlier
    tokens of the same sequence in the row.
    """
    assert row.prompts is not None
    parts = 2 * context if context > 1 else 1
    runs, start = [], 0
    for length, (prompt, tokens) in zip(row.lengths, row.prompts, strict=True):
        n = length // parts
        chunks = (rank, parts - 1 - rank) if context > 1 else (0,)
        runs += [(n, slice(prompt, prompt + tokens), slice(start, start + c * n)) for c in chunks]
        start += length
    return runs


def blocks(row: PackedSequences, context: int, rank: int) -> Blocks:
    """The blocks of a context rank."""
    runs = _runs(row, context, rank)
    rectangles: list[tuple[slice, slice]] = []
    users: dict[int, tuple[slice, slice]] = {}
    end = 0
    for n, prompt, earlier in runs:
        start, end = end, end + n
        if earlier.start < earlier.stop:
            rectangles.append((slice(start, end), earlier))
        if prompt.start < prompt.stop:  # the responses to a prompt follow each other: one block for all
            first = users[prompt.start][0].start if prompt.start in users else start
            users[prompt.start] = slice(first, end), prompt
    groups = group_by_length([n for n, *_ in runs], row.positions.device)
    return Blocks(groups, [*rectangles, *users.values()])


def copied_keys(row: PackedSequences, context: int, rank: int) -> CopiedKeys:
    """The runs of a context rank."""
    runs = _runs(row, context, rank)
    keys: list[NDArray[np.int64]] = [
        np.concatenate([np.arange(p.start, p.stop), np.arange(earlier.start, earlier.stop + n)])
        for n, p, earlier in runs
    ]
    queries, lengths = [n for n, *_ in runs], [len(places) for places in keys]
    device = row.positions.device
    bounds = [copy_to(np.cumsum([0, *sizes], dtype=np.int32), device) for sizes in (queries, lengths)]
    return CopiedKeys(
        copy_to(np.concatenate(keys), device), bounds[0], bounds[1], (max(queries), max(lengths))
    )


class _Attention(torch.autograd.Function):
    """The blocks of a row. Backward of a block with the merged output and log-sum-exp is its exact part."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        keys: Tensor,
        values: Tensor,
        plan: Blocks,
        scale: float | None,
    ) -> Tensor:
        """key, value: this rank's; keys, values: the row's."""
        groups = plan.squares
        parts = zip(*(_split(groups, _padded(groups, x)) for x in (query, key, value)), strict=True)
        done = [_flash(*qkv, is_causal=True, scale=scale) for qkv in parts]
        out, lse = (_joined(groups, part) for part in zip(*done, strict=True))
        for queries, places in plan.rectangles:
            inputs = query[queries], keys[places], values[places]
            other, other_lse = (_flat(x) for x in _flash(*map(_batch, inputs), scale=scale))
            # The weight of these keys among all so far.
            weight = torch.sigmoid(other_lse - lse[queries])[..., None]
            out[queries] = torch.lerp(out[queries].to(weight.dtype), other.to(weight.dtype), weight)
            lse[queries] = torch.logaddexp(lse[queries], other_lse)
        ctx.save_for_backward(query, key, value, keys, values, out, lse)
        ctx.plan, ctx.scale = plan, scale
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, keys, values, out, lse = ctx.saved_tensors
        groups = ctx.plan.squares
        padded = gradient
        if groups.restored is not None:  # none for padding
            padded = gradient.new_zeros(len(groups.padded), *gradient.shape[1:])
            padded[groups.restored] = gradient
        rest = [_split(groups, _padded(groups, x)) for x in (query, key, value, out, lse)]
        squares = zip(_split(groups, padded), *rest, strict=True)
        done = [_flash_backward(*inputs, 0.0, True, scale=ctx.scale) for inputs in squares]
        of_query, of_key, of_value = (_joined(groups, part) for part in zip(*done, strict=True))
        of_keys, of_values = torch.zeros_like(keys), torch.zeros_like(values)
        for queries, places in ctx.plan.rectangles:
            inputs = (
                gradient[queries],
                query[queries],
                keys[places],
                values[places],
                out[queries],
                lse[queries],
            )
            done = _flash_backward(*map(_batch, inputs), 0.0, False, scale=ctx.scale)
            totals = of_query[queries], of_keys[places], of_values[places]
            for total, part in zip(totals, done, strict=True):
                total += _flat(part)
        return of_query, of_key, of_value, of_keys, of_values, None, None


def _padded(groups: LengthGroups, x: Tensor) -> Tensor:
    """The positions of the groups of a row's values [t, ...], each sequence padded to its group's length."""
    return x if groups.padded is None else x.index_select(0, groups.padded)


def _split(groups: LengthGroups, x: Tensor) -> list[Tensor]:
    """Values at the groups' positions, [n, heads, ...], as [sequences, heads, length, ...] of each group."""
    parts = x.split([n * longest for n, longest in groups.shapes])
    return [
        part.unflatten(0, shape).transpose(1, 2) for part, shape in zip(parts, groups.shapes, strict=True)
    ]


def _joined(groups: LengthGroups, parts: Sequence[Tensor]) -> Tensor:
    """Inverse of ``_split`` and ``_padded``: [t, heads, ...]."""
    x = torch.cat([_flat(part) for part in parts])
    return x if groups.restored is None else x.index_select(0, groups.restored)


def _batch(x: Tensor) -> Tensor:
    """[t, heads, ...] -> [1, heads, t, ...]."""
    return x.transpose(0, 1)[None]


def _flat(x: Tensor) -> Tensor:
    """[sequences, heads, length, ...] -> [sequences x length, heads, ...]."""
    return x.transpose(1, 2).flatten(0, 1)
