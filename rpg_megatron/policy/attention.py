"""Attention in packed rows: each sequence causally to itself, a response also to the prompt that it shares.

Where a sequence's queries are not its keys' (behind a shared prompt, or in chunks with context parallelism,
where a rank gathers all keys and values), each run of queries gets a copy of the keys that it sees. It is
aligned at the last key: the last query attends to all of them, the one before to all but the last.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from megatron.core import parallel_state as mpu
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from torch.utils.checkpoint import checkpoint

from rpg_megatron.config.model_shape import Rope
from rpg_megatron.policy.context_parallel import gather_places
from rpg_megatron.policy.length_groups import copy_to
from rpg_megatron.policy.microbatch import PackedSequences
from rpg_megatron.policy.rotary import Rotary


@dataclass(frozen=True)
class Runs:
    """A context rank's runs of queries, and the keys of each."""

    places: Tensor
    """int64 [n]: positions in the row of the keys of all runs."""
    queries: list[int]
    """Number of queries of each run."""
    keys: list[int]
    """Number of keys of each run."""
    query_bounds: Tensor
    """int32 [runs + 1]: where the runs begin and end."""
    key_bounds: Tensor
    """int32 [runs + 1]: where their keys do in ``places``."""


def runs_of(row: PackedSequences, context: int, rank: int) -> Runs:
    """The runs of a context rank: of each sequence two chunks, or without other ranks all of it."""
    chunks, parts = ((rank, 2 * context - 1 - rank), 2 * context) if context > 1 else ((0,), 1)
    queries, keys, start = [], [], 0
    for length, (prompt, tokens) in zip(row.lengths, row.prompts or [(0, 0)] * len(row.lengths), strict=True):
        n = length // parts
        for chunk in chunks:
            own = np.arange(start, start + (chunk + 1) * n)
            queries.append(n)
            keys.append(np.concatenate([np.arange(prompt, prompt + tokens), own]))
        start += length
    sizes, device = (queries, [len(places) for places in keys]), row.positions.device
    bounds = [copy_to(np.cumsum([0, *each], dtype=np.int32), device) for each in sizes]
    return Runs(copy_to(np.concatenate(keys), device), *sizes, *bounds)


def attend_runs(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    row: PackedSequences,
    scale: float | None = None,
    window: int | None = None,
) -> Tensor:
    """Attention of rotated queries [c, heads, d] and keys and values [c, kv_heads, d] -> [c, heads, d].

    scale: of the scores; None: 1 / sqrt(d). window: not with shared prompts. Collective over the context
    group.
    """
    context = row.places.size(0)
    if row.runs is None:
        row.runs = runs_of(row, context, mpu.get_context_parallel_rank() if context > 1 else 0)
    runs: Runs = row.runs
    whole = (gather_places(x, row.places, summed=True) for x in (key, value))
    keys, values = (x.index_select(0, runs.places) for x in whole)
    if query.is_cuda and row.prompts is not None:  # FlashAttention
        bounds, longest = (runs.query_bounds, runs.key_bounds), (max(runs.queries), max(runs.keys))
        out: Any = varlen_attn(
            *(query, keys, values, *bounds, *longest), scale=scale, window_size=(-1, 0), enable_gqa=True
        )
        return out  # type: ignore[no-any-return]
    parts = zip(query.split(runs.queries), keys.split(runs.keys), values.split(runs.keys), strict=True)
    return torch.cat([attend_last(q[None], k[None], v[None], scale, window)[0] for q, k, v in parts])


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float | None, mask: Tensor | None = None) -> Tensor:
    """Attention of sequences of one length: [sequences, length, heads, d]; causal without a mask."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True, scale=scale
    )
    return out.transpose(1, 2)


def attend_last(q: Tensor, k: Tensor, v: Tensor, scale: float | None, window: int | None = None) -> Tensor:
    """Attention of the last tokens of sequences to all that they see: [sequences, length, heads, d].

    k, v: of all tokens. Recomputed in backward: the masks of all layers would need more memory than
    everything else.
    """
    before = k.size(1) - q.size(1)
    start = 0 if window is None else max(0, before + 1 - window)
    arguments = before - start, q, k[:, start:], v[:, start:], scale, window
    out: Tensor = checkpoint(_attend_from, *arguments, use_reentrant=False, preserve_rng_state=False)
    return out


def _attend_from(
    first: int, q: Tensor, k: Tensor, v: Tensor, scale: float | None, window: int | None
) -> Tensor:
    """Attention of queries that start at ``first`` of the keys."""
    mask = torch.ones(q.size(1), k.size(1), dtype=torch.bool, device=q.device).tril(first)
    return attend(q, k, v, scale, mask if window is None else mask.triu(first + 1 - window))


class PackedAttention(torch.nn.Module):
    """Rotary embedding and causal attention of each packed sequence, by torch's scaled_dot_product_attention.

    Megatron's local attention does not support packed sequences. Sequences of similar length share a call.
    Each is padded at its end, where no real token attends, so no mask over all tokens is needed. Dropout is
    not supported. With a window, the queries of a sequence that is longer are computed in blocks of the
    window's size, each with the keys that it sees.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        softmax_scale: float | None = None,
        *,
        rope: Rope | None,
        window: int | None = None,
        **_: Any,
    ) -> None:
        """rope: of the layer; None: queries and keys are rotated. window: see ``ModelShape``. The rest as
        Megatron passes it.
        """
        super().__init__()
        if config.attention_dropout:
            raise ValueError("attention dropout is not supported with packed sequences; set it to 0")
        assert config.kv_channels is not None
        self.rotary: Any = Rotary(rope, config.kv_channels) if rope else None
        self.scale, self.window = softmax_scale, window
        self.context = config.context_parallel_size

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: None,
        packed_seq_params: PackedSequences,
        **_: Any,
    ) -> Tensor:
        """Shapes: query [c, heads, d], key and value [c, kv_heads, d] -> [c, heads * d].

        The row's lengths sum to t = c x context ranks.
        """
        row = packed_seq_params
        if self.rotary is not None:
            query, key = self.rotary(query, key, row)
        if row.prompts is not None or self.context > 1:
            return attend_runs(query, key, value, row, self.scale, self.window).flatten(1)
        groups = row.groups
        if groups.padded is not None:
            query, key, value = (x.index_select(0, groups.padded) for x in (query, key, value))
        # split, not slices: its backward is one concatenation; each slice would create a zero tensor of full
        # size.
        sizes = [n * longest for n, longest in groups.shapes]
        parts = zip(query.split(sizes), key.split(sizes), value.split(sizes), groups.shapes, strict=True)
        out = torch.cat([self._attend_group(*(x.unflatten(0, g) for x in qkv)) for *qkv, g in parts])
        if groups.restored is not None:
            out = out.index_select(0, groups.restored)
        return out.flatten(1)

    def _attend_group(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Sequences of one length: [sequences, length, heads, d] -> [sequences x length, heads, d]."""
        length, size = query.size(1), self.window
        if size is None or length <= size:
            return attend(query, key, value, self.scale).flatten(0, 1)
        ends = [(first, first + size) for first in range(0, length, size)]
        blocks = [
            attend_last(query[:, first:end], key[:, :end], value[:, :end], self.scale, size)
            for first, end in ends
        ]
        return torch.cat(blocks, 1).flatten(0, 1)
