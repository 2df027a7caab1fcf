"""Rows whose responses share prompts: layout, attention on both kinds of device, plans, and what they count.

Why: a response that attends to its neighbour, to padding, or with positions of its own gives plausible
numbers. Attention is compared with each sequence alone: on CPUs, and for GPUs with a plain attention in place
of the kernel, which has no CPU version. Transformer Engine's module is a stand-in, too. Not covered: the
numbers in a model (tests/distributed/test_shared_prompts.py), GPUs.
"""

import importlib
import math
import pickle
import sys
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import megatron.core.extensions.transformer_engine as te
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rpg_megatron.config.model_shape import ExpertShape, Rope
from rpg_megatron.data.batch_index import index_of
from rpg_megatron.data.packing import count_shared, pack_rows, plan_batches
from rpg_megatron.data.row_layout import lay_out, shareable
from rpg_megatron.data.trajectory import NO_ROUTES, NOT_SAMPLED, Trajectory
from rpg_megatron.policy import attention as packed_attention
from rpg_megatron.policy.attention import PackedAttention, attend_runs
from rpg_megatron.policy.microbatch import PackedSequences, make_micro_batch, pack_lengths
from rpg_megatron.training import batch_scoring
from tests.support.allocations import AllocationWatch
from tests.support.trajectories import make_trajectory

CPU = torch.device("cpu")
LENGTHS = [60, 12, 120, 24, 36, 12, 12, 96]
REAL = 53
"""Tokens of the first prompt; the rest of its 60 positions is padding."""
PROMPTS = [(0, 0), (0, REAL), (0, REAL), (0, REAL), (0, 0), (0, 0), (264, 7), (264, 7)]
"""Two prompts with three and two responses, and a sequence of its own between them."""


def sequences() -> list[list[int]]:
    """For each sequence of the row, the positions that its last token attends to."""
    starts = np.cumsum([0, *LENGTHS]).tolist()
    assert starts[5] == 252
    assert starts[6] == 264
    return [
        [*range(first, first + n), *range(start, start + length)]
        for (first, n), start, length in zip(prompts(), starts, LENGTHS, strict=False)
    ]


def prompts() -> list[tuple[int, int]]:
    """``PROMPTS``, with the second prompt where it starts."""
    return [(252, n) if n == 7 else (first, n) for first, n in PROMPTS]


def heads(tokens: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    torch.manual_seed(tokens)
    return [torch.randn(tokens, n, 32, dtype=dtype).requires_grad_() for n in (4, 2, 2)]


def alone(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Each sequence by a softmax of its own; [t, heads, d]."""
    parts = []
    for places, length in zip(sequences(), LENGTHS, strict=True):
        parts.append(plain_attention(q[places[-length:]], k[places], v[places]))
    return torch.cat(parts)


def plain_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The last query attends to all keys, the one before to all but the last, and so on."""
    k, v = (x.repeat_interleave(q.size(1) // x.size(1), 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(q.size(-1))
    seen = torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q))
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -math.inf).softmax(-1), v)


def varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    query_bounds: torch.Tensor,
    key_bounds: torch.Tensor,
    *longest: int,
    scale: float | None,
    window_size: tuple[int, int],
    enable_gqa: bool,
) -> torch.Tensor:
    """In place of torch's kernel: a causal mask that is aligned at the last key."""
    assert (scale, window_size, enable_gqa) == (None, (-1, 0), True)
    sizes = [bounds.diff().tolist() for bounds in (query_bounds, key_bounds)]
    assert [max(each) for each in sizes] == list(longest)
    parts = zip(q.split(sizes[0]), k.split(sizes[1]), v.split(sizes[1]), strict=True)
    return torch.cat([plain_attention(*part) for part in parts])


class OnGpu(torch.Tensor):
    """A tensor that says it is on a GPU."""

    is_cuda = True


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(("context", "rank"), [(1, 0), (2, 0), (2, 1), (3, 1)])
def test_each_response_attends_to_its_prompt_and_itself(
    monkeypatch: pytest.MonkeyPatch, device: str, context: int, rank: int
) -> None:
    """Values and gradients of a context rank's positions, in float64."""
    q, k, v = heads(sum(LENGTHS), torch.float64)
    row = pack_lengths(LENGTHS, CPU, context=context, context_rank=rank, prompts=prompts())
    places = row.places[rank]
    before = torch.tensor([places[-length] for places, length in zip(sequences(), LENGTHS, strict=True)])
    assert before.tolist() == np.cumsum([0, *LENGTHS])[:-1].tolist()
    expected = alone(q, k, v)
    weight = torch.zeros_like(expected).index_fill(0, places, 1.0) * torch.randn_like(expected)
    monkeypatch.setattr(packed_attention.mpu, "get_context_parallel_rank", lambda: rank)
    whole = iter((k, v))
    if context > 1:
        monkeypatch.setattr(packed_attention, "gather_places", lambda x, _, *, summed: next(whole))
    queries, kernel = q[places], Mock(side_effect=varlen)
    if device == "cuda":
        monkeypatch.setattr(packed_attention, "varlen_attn", kernel)
        queries = queries.as_subclass(OnGpu)
    out = attend_runs(queries, k[places], v[places], row)
    assert kernel.called == (device == "cuda")
    out = out.as_subclass(torch.Tensor)
    torch.testing.assert_close(out, expected[places], rtol=0, atol=1e-12)
    actual = torch.autograd.grad((out * weight[places]).sum(), (q, k, v))
    reference = torch.autograd.grad((expected * weight).sum(), (q, k, v))
    for a, b in zip(actual, reference, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_is_that_of_the_keys_that_responses_see(dtype: torch.dtype) -> None:
    """Each has a copy of its prompt's; scores and masks are those of one response at a time."""
    lengths = [600, *[30] * 20]
    q, k, v = heads(sum(lengths), dtype)
    row = pack_lengths(lengths, CPU, prompts=[(0, 0), *[(0, 600)] * 20])
    with AllocationWatch() as watch:
        attend_runs(q, k, v, row).sum().backward()
    keys = 600 + 20 * 630
    assert torch.Size(watch.largest).numel() <= keys * k[0].numel()
    assert watch.peak <= 5 * keys * k[0].numel() * k.element_size()


def test_transformer_engines_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rotation is ours in all rows, attention in those with shared prompts."""

    class Stand:
        def __init__(self, *_: Any, **more: Any) -> None:
            assert more == {"layer_number": 1}
            self.config = SimpleNamespace(kv_channels=32, softmax_scale=None)

        def forward(self, query: Any, key: Any, value: Any, mask: None, **more: Any) -> Any:
            assert set(more) == {"packed_seq_params", "attn_mask_type"}
            return query, key

    monkeypatch.setattr(te, "TEDotProductAttention", Stand)
    monkeypatch.delitem(sys.modules, "rpg_megatron.policy.fused_attention", raising=False)
    module = importlib.import_module("rpg_megatron.policy.fused_attention")
    monkeypatch.delitem(sys.modules, "rpg_megatron.policy.fused_attention")
    rope = Rope(100.0, 0.5)
    attention = module.RotatingAttention(layer_number=1, rope=rope)
    q, k, v = heads(sum(LENGTHS))
    config = SimpleNamespace(attention_dropout=0.0, context_parallel_size=1, kv_channels=32)
    local = PackedAttention(config, 1, None, "self", rope=rope)  # type: ignore[arg-type]

    def row(shared: bool) -> PackedSequences:
        return pack_lengths(LENGTHS, CPU, prompts=prompts() if shared else None)

    more = {"attn_mask_type": "causal"}
    out = attention.forward(q, k, v, None, packed_seq_params=row(True), **more)
    assert torch.equal(out, local(q, k, v, None, row(True)))
    rotated = attention.forward(q, k, v, None, packed_seq_params=row(False), **more)
    for a, b in zip(rotated, local.rotary(q, k, row(False)), strict=True):
        assert torch.equal(a, b)


# -- rows ----------------------------------------------------------------------------------------------------


def trajectory(prompt: list[int], response: list[int], number: int = 0) -> Trajectory:
    values = np.arange(len(response), dtype=np.float32) + 100 * number
    routes = np.full((len(prompt) + len(response) - 1, 1, 1), number, np.uint8)
    numbers = {"prompt_id": number, "sample": number, "behaviour": values, "old": values}
    return make_trajectory(prompt, response, routes=routes, **numbers)


GROUP = [
    trajectory([5, 6, 7], [1, 2], 1),
    trajectory([9], [4, 4, 4], 2),
    trajectory([5, 6, 7], [3], 3),
    trajectory([5, 6, 8], [8, 9], 4),
    trajectory([5, 6, 7], [11, 12, 13], 5),
    trajectory([9], [5], 6),
]
"""Three have a prompt in common; that of one differs in its last token; two have one of a single token."""


@pytest.mark.parametrize("context", [1, 2])
def test_a_row_holds_each_prompt_once(context: int) -> None:
    pack = make_micro_batch(GROUP, CPU, context=context, share=0.0)
    if context == 1:
        assert pack.tokens[0].tolist() == [5, 6, 7, 1, 7, 7, 11, 12, 9, 4, 4, 5, 6, 8, 8, 9]
        assert pack.labels[0].tolist() == [6, 7, 1, 2, 3, 11, 12, 13, 4, 4, 4, 6, 8, 8, 9, 5]
        assert pack.positions[0].tolist() == [0, 1, 2, 3, 2, 2, 3, 4, 0, 1, 2, 0, 1, 2, 3, 0]
        assert pack.packed.prompts == [(0, 0), (0, 2), (0, 2), (0, 2), (0, 0), (0, 0), (0, 0)]
    assert pack.tokens_computed == len(pack.real_positions()) == sum(t.length - 1 for t in GROUP) - 4
    for name in ("old", "behaviour"):
        for t, part in pack.split(getattr(pack, name)):
            assert part.tolist() == t.old.tolist()
    assert [t.prompt_id for t, _ in pack.split(pack.old)] == [1, 2, 3, 4, 5, 6]
    tokens = pack.response_tokens()
    assert sorted(tokens.old.tolist()) == sorted(np.concatenate([t.old for t in GROUP]).tolist())
    assert tokens.sequences.bincount().tolist() == [2, 3, 1, 2, 3, 1]
    for number, t in enumerate(GROUP):
        assert tokens.old[tokens.sequences == number].tolist() == t.old.tolist()


def test_the_routes_of_a_prompt_are_those_of_its_first_response() -> None:
    experts = ExpertShape(count=8, per_token=1, ffn_hidden_size=4, normalised=True, layers=(0,))
    routes = make_micro_batch(GROUP, CPU, share=0.0, experts=experts).packed.routes
    assert routes.experts[0, :, 0].tolist() == [1, 1, 1, 1, 3, 5, 5, 5, 2, 2, 2, 4, 4, 4, 4, 6]


def test_prompts_that_other_weights_routed_are_not_shared() -> None:
    """Ahead of training, groups of other versions may have the prompt of a turn in common."""
    batch = pickle.loads(pickle.dumps([GROUP[0], GROUP[2], GROUP[4]]))
    alike = lay_out(batch, 0.0)
    assert sum(piece.shared for piece in alike) == 1
    batch[1].versions += 1
    apart = lay_out(batch, 0.0)
    prompts = {piece.trajectory: piece.prompt for piece in apart if not piece.shared}
    assert prompts[1] is None
    assert index_of(batch).routed_by.tolist() == [0, 1, 0]
    batch[1].versions[0] = NOT_SAMPLED  # a response may begin with tokens of its environment
    batch[1].versions[1:] = 0
    batch[2].versions[0] = NOT_SAMPLED
    assert index_of(batch).routed_by.tolist() == [0, -1, 0]
    for t in batch:
        t.routes = NO_ROUTES
    assert lay_out(batch, 0.0) == alike


def test_short_prompts_are_not_shared() -> None:
    assert shareable(100, 900, None) == 0
    assert shareable(100, 900, 0.0) == 99
    assert shareable(1, 5, 0.0) == 0
    assert shareable(101, 900, 0.1) == 100
    assert shareable(101, 901, 0.1) == 0
    batch = [trajectory([5] * 11, [1] * r) for r in (90, 91, 90)]
    assert [p.prompt for p in lay_out(batch, 0.1)] == [None, 0, 0, None]
    assert not any(p.shared for p in lay_out(batch))


# -- plans ---------------------------------------------------------------------------------------------------


@st.composite
def groups(draw: st.DrawFn) -> list[list[int]]:
    """Groups of four responses: the prompt's length and theirs."""
    group = st.tuples(st.integers(1, 60), *[st.integers(1, 60)] * 4).map(list)
    return draw(st.lists(group, min_size=4, max_size=4))


@given(
    sizes=groups(),
    minibatches=st.sampled_from([1, 2, 4]),
    data=st.integers(1, 4),
    budget=st.integers(40, 400),
    context=st.sampled_from([1, 2]),
)
def test_plans_hold_every_trajectory_once_within_the_budget(
    sizes: list[list[int]], minibatches: int, data: int, budget: int, context: int
) -> None:
    batch = [
        trajectory([group] * prompt, [7] * r) for group, (prompt, *rest) in enumerate(sizes) for r in rest
    ]
    keys = [(t.prompt.tobytes(), shareable(len(t.prompt), len(t.response), 0.0)) for t in batch]
    lengths = [t.length for t in batch]
    plan = plan_batches(
        lengths, minibatches=minibatches, data=data, budget=budget, context=context, prompts=keys
    )
    size = len(batch) // minibatches
    computed = 0
    for m in range(minibatches):
        assert len({len(rank[m]) for rank in plan}) == 1
        members = sorted(i for rank in plan for micro in rank[m] for i in micro)
        assert members == list(range(m * size, (m + 1) * size))
        for micro in (micro for rank in plan for micro in rank[m]):
            pack = make_micro_batch([batch[i] for i in micro], CPU, context=context, share=0.0)
            computed += pack.tokens_computed
            assert len(micro) <= 1 or pack.size <= budget
    assert computed == sum(t.length - 1 for t in batch) - count_shared(plan, keys)[0]
    rows = pack_rows(lengths, budget, context, keys)
    assert sorted(i for row in rows for i in row) == list(range(len(batch)))
    for row in rows:
        assert len(row) <= 1 or make_micro_batch([batch[i] for i in row], CPU, share=0.0).size <= budget


def test_a_group_stays_together_as_far_as_the_budget_and_the_ranks_allow() -> None:
    lengths, keys = [150] * 8, [(0, 100)] * 8
    fits = plan_batches(lengths, minibatches=1, data=1, budget=500, prompts=keys)
    assert fits == [[[list(range(8))]]]
    assert count_shared(fits, keys) == (700, 70_000)
    narrow = plan_batches(lengths, minibatches=1, data=1, budget=300, prompts=keys)
    assert sorted(map(len, narrow[0][0])) == [4, 4]
    ranks = plan_batches(lengths, minibatches=1, data=4, budget=500, prompts=keys)
    assert [[len(micro) for micro in rank[0]] for rank in ranks] == [[2]] * 4
    assert plan_batches(lengths, minibatches=1, data=1, budget=120, prompts=keys) == [
        [[[i] for i in range(8)]]
    ]


def test_shared_prompts_fill_rows_and_balance_ranks() -> None:
    """64 groups of 8, prompts of about 2,000 and responses of about 1,000 tokens, on 4 ranks."""
    rng = np.random.default_rng(0)
    lengths, keys = [], []
    for group in range(64):
        prompt = int(rng.lognormal(np.log(2000), 0.3))
        keys += [(group, prompt - 1)] * 8
        lengths += [prompt + int(rng.lognormal(np.log(1000), 0.5)) for _ in range(8)]
    budget = 32768
    plan = plan_batches(lengths, minibatches=1, data=4, budget=budget, prompts=keys, attention_length=30_000)
    whole = sum(lengths)
    computed = [
        sum(lengths[i] for micro in rank[0] for i in micro) - count_shared([rank], keys)[0] for rank in plan
    ]
    assert sum(computed) == whole - count_shared(plan, keys)[0]
    assert count_shared(plan, keys)[0] >= 0.85 * sum(p for _, p in keys) * 7 / 8
    rows = sum(len(rank[0]) for rank in plan)
    assert sum(computed) / (rows * budget) >= 0.85
    assert max(computed) * 4 <= 1.05 * sum(computed)


@pytest.mark.parametrize(("least", "rows"), [(None, 4), (0.0, 1), (0.9, 4)])
def test_rows_of_two_minibatches_are_scored_with_their_prompts_once(
    monkeypatch: pytest.MonkeyPatch, least: float | None, rows: int
) -> None:
    """Behind 19 positions of the prompt four sequences have 6 each: 43 positions, or 4 times 25; 44 fit."""
    group = [trajectory(list(range(20)), [1, 2, 3, 4, n], 1) for n in range(4)]
    monkeypatch.setattr(batch_scoring, "max_over_ranks", lambda count: count + 1)
    scorer = object.__new__(batch_scoring.BatchScorer)
    scorer._settings = SimpleNamespace(  # type: ignore[assignment]
        training=SimpleNamespace(tokens_per_microbatch=44, shared_from=least)
    )
    scorer._mesh = SimpleNamespace(context=1)  # type: ignore[assignment]
    scored = scorer._rows_to_score([[group[:2]], [group[2:]]])
    assert len(scored) == rows + 1
    assert scored[-1] == [], "another rank has a row more"
    assert sorted(int(t.response[-1]) for row in scored for t in row) == [0, 1, 2, 3]
