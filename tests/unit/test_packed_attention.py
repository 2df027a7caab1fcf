"""Packed attention computes the diagonal blocks and nothing else: no scores, no mask over a row's tokens.

Why: a dense mask over 8,192 tokens, or scores of all heads kept for backward, undo what packing saves.
With context ranks, whose chunks need masks, none of them is kept for backward.
Sequences of like length share a call, and rotary embeddings are taken once a row: no number may change.
Not covered: the numbers in a model (tests/distributed/test_layouts.py), GPUs.
"""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_thd
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

from rpg_megatron.config.model_shape import Rope
from rpg_megatron.policy import attention as packed_attention
from rpg_megatron.policy.attention import PackedAttention
from rpg_megatron.policy.length_groups import group_by_length
from rpg_megatron.policy.microbatch import pack_lengths
from rpg_megatron.policy.rotary import Rotary
from tests.support.allocations import AllocationWatch

CPU = torch.device("cpu")


def attention(context: int, window: int | None = None) -> PackedAttention:
    config = SimpleNamespace(attention_dropout=0.0, context_parallel_size=context, kv_channels=32)
    module = PackedAttention(config, 1, None, "self", rope=Rope(1e4), window=window)  # type: ignore[arg-type]
    module.rotary.frequencies.zero_()  # rotation has its own test below
    return module


def heads(tokens: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Four query heads and two of keys and values, 32 numbers each."""
    return [torch.randn(tokens, n, 32, dtype=dtype).requires_grad_() for n in (4, 2, 2)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lengths", [[700], [1, 300, 2, 397], [7] * 100])
def test_memory_is_linear_in_the_tokens(dtype: torch.dtype, lengths: list[int]) -> None:
    q, k, v = heads(sum(lengths), dtype)
    with AllocationWatch() as watch:
        out = attention(1)(q, k, v, None, pack_lengths(lengths, CPU))
        out.sum().backward()
    assert torch.Size(watch.largest).numel() <= 4 / 3 * q.numel()
    assert watch.peak <= 16 * q.numel() * q.element_size()


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_chunks_of_context_ranks(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    """A rank's chunks equal the same positions of whole sequences; no mask outlives the forward pass."""
    lengths, context = [6, 1200, 12], 3
    q, k, v = heads(sum(lengths))
    full_output = attention(1)(q, k, v, None, pack_lengths(lengths, CPU))
    packed = pack_lengths(lengths, CPU, context=context, context_rank=rank)
    positions = packed.places[rank]
    weight = torch.zeros_like(full_output).index_fill(0, positions, 1.0) * torch.randn_like(full_output)
    expected = torch.autograd.grad((full_output * weight).sum(), (q, k, v))
    monkeypatch.setattr(packed_attention.mpu, "get_context_parallel_rank", lambda: rank)
    gathered = iter((k, v))
    monkeypatch.setattr(packed_attention, "gather_places", lambda x, _, *, summed: next(gathered))
    keys, values = k[positions], v[positions]
    with AllocationWatch() as watch:
        out = attention(context)(q[positions], keys, values, None, packed)
        live = watch.live
        gradients = torch.autograd.grad((out * weight[positions]).sum(), (q, k, v))
    torch.testing.assert_close(out, full_output[positions])
    for a, b in zip(gradients, expected, strict=True):
        torch.testing.assert_close(a, b)
    assert live <= 8 * q[positions].numel() * q.element_size()


@pytest.mark.parametrize("context", [1, 2])
@pytest.mark.parametrize("window", [1, 8, 40, 1000])
def test_windows(monkeypatch: pytest.MonkeyPatch, window: int, context: int) -> None:
    """A token attends to itself and to those before it in its window; no mask outlives the forward pass."""
    lengths = [4, 40, 360, 8, 44]
    q, k, v = heads(sum(lengths))
    weight, expected = torch.randn(sum(lengths), 128), []
    for query, key, value in zip(*(x.split(lengths) for x in (q, k, v)), strict=True):
        places = torch.arange(len(query))
        seen = (places[:, None] >= places) & (places[:, None] < places + window)
        scores = torch.einsum("qhd,khd->hqk", query, key.repeat_interleave(2, 1)) / 32**0.5
        probs = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        expected.append(torch.einsum("hqk,khd->qhd", probs, value.repeat_interleave(2, 1)).flatten(1))
    wanted = torch.autograd.grad((torch.cat(expected) * weight).sum(), (q, k, v), retain_graph=True)
    total = [torch.zeros_like(x) for x in (q, k, v)]
    for rank in range(context):
        monkeypatch.setattr(packed_attention.mpu, "get_context_parallel_rank", lambda rank=rank: rank)
        packed = pack_lengths(lengths, CPU, context=context, context_rank=rank)
        own = packed.places[rank]
        gathered = iter((k, v))
        monkeypatch.setattr(packed_attention, "gather_places", lambda x, _, *, summed, of=gathered: next(of))
        with AllocationWatch() as watch:
            out = attention(context, window)(q[own], k[own], v[own], None, packed)
            live = watch.live
        torch.testing.assert_close(out, torch.cat(expected)[own])
        assert live <= 10 * q.numel() * q.element_size()
        for sum_, part in zip(total, torch.autograd.grad((out * weight[own]).sum(), (q, k, v)), strict=True):
            sum_ += part
    for a, b in zip(total, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=2e-5)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 300), min_size=1, max_size=60))
def test_groups_hold_every_token_once(lengths: list[int]) -> None:
    groups = group_by_length(lengths, CPU)
    assert sum(n for n, _ in groups.shapes) == len(lengths)
    assert sum(n * longest for n, longest in groups.shapes) <= 4 / 3 * sum(lengths)
    if groups.padded is not None:
        assert torch.equal(groups.padded[groups.restored], torch.arange(sum(lengths)))


@pytest.mark.parametrize("lengths", [[20, 9, 12, 10, 200, 8, 190], [5, 5, 5], [3]])
def test_groups_change_no_result(lengths: list[int]) -> None:
    """Grouped sequences have the outputs and gradients of each sequence alone."""
    q, k, v = heads(sum(lengths))
    weight = torch.randn(sum(lengths), 128)
    out = attention(1)(q, k, v, None, pack_lengths(lengths, CPU))
    gradients = torch.autograd.grad((out * weight).sum(), (q, k, v))
    parts = zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True)
    separate = torch.cat([attention(1)(*x, None, pack_lengths([len(x[0])], CPU)) for x in parts])
    expected = torch.autograd.grad((separate * weight).sum(), (q, k, v))
    torch.testing.assert_close(out, separate, rtol=0, atol=2e-6)
    for a, b in zip(gradients, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("context", [1, 2])
def test_rotation_is_megatrons(dtype: torch.dtype, context: int) -> None:
    """Bit for bit, gradients included."""
    lengths, head_dim = [12, 4, 400, 8], 32
    q, k, _ = heads(sum(lengths) // context, dtype)
    megatron = RotaryEmbedding(head_dim, 1.0, rotary_base=10_000, use_cpu_initialization=True)
    frequencies = megatron.get_freqs_non_repeated(max(lengths))
    angles = torch.cat([frequencies, frequencies], -1)[:, None, None]
    for rank in range(context):
        packed = pack_lengths(lengths, CPU, context=context, context_rank=rank)
        group = SimpleNamespace(size=lambda: context, rank=lambda rank=rank: rank)
        expected = [_apply_rotary_pos_emb_thd(x, packed.cu_seqlens_q, angles, cp_group=group) for x in (q, k)]
        actual = Rotary(Rope(10_000.0), head_dim)(q, k, packed)
        for a, b, x in zip(actual, expected, (q, k), strict=True):
            assert torch.equal(a, b)
            weight = torch.randn_like(a)
            assert torch.equal(*(torch.autograd.grad((y * weight).sum(), x)[0] for y in (a, b)))
