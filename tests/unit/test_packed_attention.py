"""Packed attention computes the diagonal blocks and nothing else: no scores, no mask over a row's tokens.

Why: a dense mask over 8,192 tokens, or scores of all heads kept for backward, undo what packing saves.
With context ranks, whose chunks need masks, none of them is kept for backward.
Not covered: the numbers in a model (tests/distributed/test_layouts.py), GPUs.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from benchmarks.allocations import AllocationWatch
from rpg_megatron.policy import layers
from rpg_megatron.policy.context_parallel import zigzag_places
from rpg_megatron.policy.layers import PackedAttention


def attention(context: int) -> PackedAttention:
    config = SimpleNamespace(attention_dropout=0.0, context_parallel_size=context)
    return PackedAttention(config, 1, None, "self")  # type: ignore[arg-type]


def heads(tokens: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Four query heads and two of keys and values, 32 numbers each."""
    return [torch.randn(tokens, n, 32, dtype=dtype).requires_grad_() for n in (4, 2, 2)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lengths", [[700], [1, 300, 2, 397], [7] * 100])
def test_memory_is_linear_in_the_tokens(dtype: torch.dtype, lengths: list[int]) -> None:
    q, k, v = heads(sum(lengths), dtype)
    with AllocationWatch() as watch:
        out = attention(1)(q, k, v, None, SimpleNamespace(lengths=lengths))
        out.sum().backward()
    assert torch.Size(watch.largest).numel() <= q.numel()
    assert watch.peak <= 16 * q.numel() * q.element_size()


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_chunks_of_context_ranks(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    """A rank's chunks get what whole sequences give at their places; no mask outlives the forward pass."""
    lengths, context = [6, 1200, 12], 3
    q, k, v = heads(sum(lengths))
    whole = attention(1)(q, k, v, None, SimpleNamespace(lengths=lengths))
    places = torch.from_numpy(zigzag_places(lengths, context))
    mine = places[rank]
    weight = torch.zeros_like(whole).index_fill(0, mine, 1.0) * torch.randn_like(whole)
    wanted = torch.autograd.grad((whole * weight).sum(), (q, k, v))
    monkeypatch.setattr(layers.mpu, "get_context_parallel_rank", lambda: rank)
    monkeypatch.setattr(layers, "gather_places", lambda x, _, *, summed: k if x is keys else v)
    keys, values = k[mine], v[mine]
    with AllocationWatch() as watch:
        packed = SimpleNamespace(lengths=lengths, places=places)
        out = attention(context)(q[mine], keys, values, None, packed)
        kept = watch.live
        got = torch.autograd.grad((out * weight[mine]).sum(), (q, k, v))
    torch.testing.assert_close(out, whole[mine])
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b)
    assert kept <= 8 * q[mine].numel() * q.element_size()
