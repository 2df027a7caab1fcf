"""Every trajectory is trained on once, in its own mini-batch, within the budget, and on balanced ranks.

Why: a rank with more work, or a micro-batch half full, costs every rank that time, and uneven lengths are the
rule. The rows that come of it: filling behind sequences only, cut over context ranks without loss.
Not covered: whether the numbers come out right (tests/distributed).
"""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rpg_megatron.data.packing import Plan, pack_rows, padded_length, plan_batches
from rpg_megatron.data.trajectory import Trajectory
from rpg_megatron.policy.microbatch import make_micro_batch
from tests.support.trajectories import make_trajectory

CPU = torch.device("cpu")


def trajectory(length: int, response: int = 1) -> Trajectory:
    """Tokens 1, 2, 3, ..., the last ``response`` of them sampled."""
    tokens = np.arange(1, length + 1)
    ones = np.ones(response, np.float32)
    return make_trajectory(tokens[:-response], tokens[-response:], behaviour=ones, advantage=2.0)


@given(
    lengths=st.lists(st.integers(2, 200), min_size=12, max_size=12),
    minibatches=st.sampled_from([1, 2, 3, 4]),
    data=st.integers(1, 5),
    budget=st.integers(50, 400),
    context=st.sampled_from([1, 2, 4]),
    attention_length=st.sampled_from([50.0, 1000.0, math.inf]),
)
def test_every_trajectory_once_and_ranks_in_step(
    lengths: list[int], minibatches: int, data: int, budget: int, context: int, attention_length: float
) -> None:
    plan = plan_batches(
        lengths,
        minibatches=minibatches,
        data=data,
        budget=budget,
        context=context,
        attention_length=attention_length,
    )
    size = len(lengths) // minibatches
    for m in range(minibatches):
        assert len({len(rank[m]) for rank in plan}) == 1
        members = sorted(i for rank in plan for micro in rank[m] for i in micro)
        assert members == list(range(m * size, (m + 1) * size))
        for rank in plan:
            for micro in rank[m]:
                assert micro == sorted(micro)
                pack = make_micro_batch([trajectory(lengths[i]) for i in micro], CPU, context=context)
                assert len(micro) <= 1 or pack.size <= budget


@given(
    lengths=st.lists(st.integers(2, 200), max_size=40),
    budget=st.integers(50, 400),
    context=st.sampled_from([1, 2]),
)
def test_rows_to_score(lengths: list[int], budget: int, context: int) -> None:
    rows = pack_rows(lengths, budget, context)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    totals = [sum(padded_length(lengths[i], context) for i in row) for row in rows]
    assert all(total <= budget or len(row) == 1 for row, total in zip(rows, totals, strict=True))
    assert all(a + b > budget for a, b in itertools.pairwise(totals))  # no two of them fit into one


def test_balance_and_packing() -> None:
    plan = plan_batches([90, 10, 50, 50], minibatches=1, data=2, budget=100)
    assert plan == [[[[0, 1]]], [[[2, 3]]]]


def test_a_sequence_as_long_as_the_budget_and_a_longer_one() -> None:
    (((first, *_), *_), *_) = plan = plan_batches([100, 3, 130], minibatches=1, data=1, budget=100)
    assert first == [2]
    assert plan == [[[[2], [0], [1]]]]


def test_a_rank_gets_half_of_a_pack_rather_than_nothing() -> None:
    plan = plan_batches([10, 20, 30, 40], minibatches=1, data=2, budget=100)
    assert plan == [[[[1, 2]]], [[[0, 3]]]]
    assert plan_batches([7], minibatches=1, data=2, budget=100) == [[[[0]]], [[[]]]]


def test_attention_counts_in_the_balance() -> None:
    """Four rows of as many tokens; the long sequence goes with the row of the shortest ones."""
    lengths = [500, 500, 500, 500, 1000, 250, 250, 250, 250]
    plan = plan_batches(lengths, minibatches=1, data=2, budget=1000, attention_length=1000)
    assert plan == [[[[4], [5, 6, 7, 8]]], [[[0, 1], [2, 3]]]]


def imbalance(plan: Plan, lengths: list[int], attention_length: float) -> float:
    """Costliest rank over the mean, less 1; the worst mini-batch."""
    worst = 0.0
    for mini in zip(*plan, strict=True):
        costs = [sum(lengths[i] + lengths[i] ** 2 / attention_length for m in r for i in m) for r in mini]
        worst = max(worst, max(costs) * len(costs) / sum(costs) - 1)
    return worst


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(("data", "attention_length"), [(2, 30000), (8, 30000), (8, 12000)])
def test_a_log_normal_mix_is_packed_tight_and_dealt_evenly(
    seed: int, data: int, attention_length: float
) -> None:
    """Lengths of a median of 1500 with a tail that is cut at 8192, 256 sequences for each rank and update."""
    random = np.random.default_rng(seed)
    budget, minibatches = 8192, 2
    count = 256 * data * minibatches
    lengths = np.clip(random.lognormal(np.log(1500), 0.8, count).astype(int), 2, budget).tolist()
    plan = plan_batches(
        lengths, minibatches=minibatches, data=data, budget=budget, attention_length=attention_length
    )
    rows = sum(len(mini) for rank in plan for mini in rank)
    assert sum(lengths) / (rows * budget) >= 0.97
    assert imbalance(plan, lengths, attention_length) <= 0.03


@pytest.mark.parametrize(("align", "context"), [(1, 1), (2, 1), (1, 2), (2, 2), (4, 4)])
def test_rows_have_filling_behind_sequences_only(align: int, context: int) -> None:
    parts = [(9, 3), (2, 1), (30, 29), (5, 2)]
    trajectories = [trajectory(*sizes) for sizes in parts]
    packs = [
        make_micro_batch(trajectories, CPU, align=align, context=context, context_rank=r)
        for r in range(context)
    ]
    places = packs[0].packed.places
    assert sorted(places.flatten().tolist()) == list(range(packs[0].size))
    assert all(p.tokens.size(1) == packs[0].size // context for p in packs)
    assert packs[0].tokens.size(1) % align == 0
    joined = {}
    for name in ("tokens", "labels", "positions"):
        joined[name] = torch.empty(packs[0].size, dtype=torch.int64)
        for pack, positions in zip(packs, places, strict=True):
            joined[name][positions] = getattr(pack, name)[0]
    used = packs[0].real_positions()
    assert joined["tokens"][used].tolist() == [n for size, _ in parts for n in range(1, size)]
    assert joined["labels"][used].tolist() == [n for size, _ in parts for n in range(2, size + 1)]
    assert joined["positions"][used].tolist() == [n for size, _ in parts for n in range(size - 1)]
    filling = torch.ones(packs[0].size, dtype=torch.bool).index_fill(0, used, False)
    assert not joined["tokens"][filling].any()
    assert not packs[0].mask[filling].any()
    responses = [part.tolist() for _, part in packs[0].split(joined["labels"])]
    assert responses == [list(range(size - response + 1, size + 1)) for size, response in parts]
    assert packs[0].packed.cu_seqlens_q[-1] == packs[0].size
    if context == 1:
        assert packs[0].size - len(used) < align  # no padding between sequences


def test_truncated_responses_can_be_left_out_of_the_loss() -> None:
    trajectories = [trajectory(9, 3), trajectory(7, 4), trajectory(5, 2)]
    trajectories[1].finish = "length"
    pack = make_micro_batch(trajectories, CPU, mask_truncated=True)
    tokens = pack.response_tokens()
    assert pack.loss_positions.equal(pack.mask.nonzero()[:, 0])
    assert tokens.sequence_count == len(trajectories)
    assert pack.label_range == (int(pack.labels.min()), int(pack.labels.max()))
    assert tokens.sequences.tolist() == [0, 0, 0, 2, 2]
    assert [len(part) for _, part in pack.split(pack.labels[0])] == [3, 4, 2]  # all of them are scored
    assert make_micro_batch(trajectories, CPU).mask.sum() == 9


def test_only_sampled_tokens_are_in_the_loss() -> None:
    trajectories = [trajectory(9, 4), trajectory(7, 4), trajectory(5, 2), trajectory(6, 3)]
    trajectories[0].mask = np.array([True, False, False, True])
    trajectories[1].mask = np.array([False, True, True, False])
    trajectories[2].mask = np.array([False, False])
    trajectories[1].behaviour = np.array([np.nan, 3, 4, np.inf], np.float32)
    trajectories[0].old = np.arange(10, 14, dtype=np.float32)
    trajectories[3].finish = "length"
    for cut, last in ((False, [4.0, 5.0, 6.0]), (True, [])):
        pack = make_micro_batch(trajectories, CPU, mask_truncated=cut)
        labels = pack.labels[0].index_select(0, pack.loss_positions)
        assert labels.tolist() == [6, 9, 5, 6, *last]
        tokens = pack.response_tokens()
        assert tokens.sequences.tolist() == [0, 0, 1, 1, *[3 for _ in last]]
        assert tokens.behaviour.tolist() == [1, 1, 3, 4, *[1 for _ in last]]
        assert tokens.old.tolist() == [10, 13, 0, 0, *[0 for _ in last]]
        assert tokens.sequence_count == 4
        assert pack.mask.nonzero()[:, 0].equal(pack.loss_positions)
        assert [len(part) for _, part in pack.split(pack.labels[0])] == [4, 4, 2, 3]  # all of them are scored
        assert pack.size == sum(t.length - 1 for t in trajectories)


def test_uneven_minibatches_are_refused() -> None:
    with pytest.raises(ValueError, match="5 responses do not divide into 2"):
        plan_batches([1] * 5, minibatches=2, data=1, budget=10)
