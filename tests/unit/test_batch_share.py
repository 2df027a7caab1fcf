"""A share of a batch is the same after its way as two flat tensors, empty micro-batches and shares included.

That it goes to the right ranks is tests/distributed/test_batch_scatter.
"""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from rpg_megatron.data.trajectory import Trajectory
from rpg_megatron.training.batch_scatter import Share, each, flatten, unflatten

NAMES = ("prompt_id", "sample", "group", "finish", "advantage")


def trajectory(number: int, prompt: int, response: int) -> Trajectory:
    draw = np.random.default_rng(number)
    return Trajectory(
        prompt_id=number,
        sample=number % 5,
        group=number // 5,
        prompt=draw.integers(0, 2**31 - 1, prompt).astype(np.int32),
        response=draw.integers(0, 2**31 - 1, response).astype(np.int32),
        behaviour=draw.normal(size=response).astype(np.float32),
        versions=np.zeros(response, np.int32),
        finish=("stop", "length")[number % 2],
        text="text",
        advantage=float(np.float32(draw.normal())),
    )


sizes = st.tuples(st.integers(0, 2**31 - 1), st.integers(1, 5), st.integers(0, 9))
shares = st.lists(st.lists(st.lists(sizes, max_size=3), max_size=3), max_size=3)


@given(shares)
def test_there_and_back(cut: list[list[list[tuple[int, int, int]]]]) -> None:
    share: Share = [[[trajectory(*t) for t in micro] for micro in mini] for mini in cut]
    ints, floats = flatten(share)
    assert (ints.dtype, floats.dtype) == (torch.int32, torch.float32)
    back = unflatten(ints, floats)
    assert [[len(micro) for micro in mini] for mini in back] == [[len(m) for m in mini] for mini in cut]
    for a, b in zip(each(share), each(back), strict=True):
        assert all(getattr(a, name) == getattr(b, name) for name in NAMES)
        assert all(np.array_equal(getattr(a, n), getattr(b, n)) for n in ("prompt", "response", "behaviour"))
        assert (b.text, len(b.versions)) == ("", 0)
