"""Every trajectory is trained on once, in its own mini-batch, within the budget, and on balanced ranks.

Not covered: how the packs become tensors (test_packed) and whether the numbers come out right
(tests/distributed).
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rpg_megatron.data.packing import plan_batches


@given(
    lengths=st.lists(st.integers(2, 200), min_size=12, max_size=12),
    minibatches=st.sampled_from([1, 2, 3, 4]),
    data=st.integers(1, 5),
    budget=st.integers(50, 400),
)
def test_every_trajectory_once_and_ranks_in_step(
    lengths: list[int], minibatches: int, data: int, budget: int
) -> None:
    plan = plan_batches(lengths, minibatches=minibatches, data=data, budget=budget)
    size = len(lengths) // minibatches
    for m in range(minibatches):
        assert len({len(rank[m]) for rank in plan}) == 1
        members = sorted(i for rank in plan for micro in rank[m] for i in micro)
        assert members == list(range(m * size, (m + 1) * size))
        for rank in plan:
            for micro in rank[m]:
                assert len(micro) == 1 or sum(lengths[i] for i in micro) <= budget


def test_balance_and_packing() -> None:
    plan = plan_batches([90, 10, 50, 50], minibatches=1, data=2, budget=100)
    assert plan == [[[[0, 1]]], [[[2, 3]]]]


def test_uneven_minibatches_are_refused() -> None:
    with pytest.raises(ValueError, match="5 trajectories do not divide into 2"):
        plan_batches([1] * 5, minibatches=2, data=1, budget=10)
