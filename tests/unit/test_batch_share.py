"""A share of a batch survives being sent, empty micro-batches and shares included.

A leader builds it from its part of the plan. Not covered: that it goes to the right ranks
(tests/distributed/test_batch_scatter).
"""

from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rpg_megatron.data.batch_index import index_of
from rpg_megatron.data.row_layout import lay_out
from rpg_megatron.data.trajectory import Trajectory
from rpg_megatron.system.encoding import decode, encode
from rpg_megatron.training.batch_scatter import (
    ReplicaBatch,
    fetch_planned,
    iter_trajectories,
    slim,
)
from tests.support.batches import ListSource

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
        versions=np.ones(response, np.int32),
        finish=("stop", "length")[number % 2],
        text="text",
        answer="2",
        extracted="3",
        reason="why",
        parts={"correct": 1.0},
        advantage=float(np.float32(draw.normal())),
        mask=draw.random(response) < number % 3 / 2,
        # Of a teacher's server:
        anchor=draw.normal(size=response * (number % 2)).astype(np.float32),
        top_ids=draw.integers(0, 99, (response, number % 4)).astype(np.int32),
        top_logps=draw.normal(size=(response, number % 4)).astype(np.float32),
    )


sizes = st.tuples(st.integers(0, 2**31 - 1), st.integers(1, 5), st.integers(0, 9))
shares = st.lists(st.lists(st.lists(sizes, max_size=3), max_size=3), max_size=3)


@given(shares, st.sampled_from([None, np.uint8, np.int16]))
def test_there_and_back(cut: list[list[list[tuple[int, int, int]]]], kind: type | None) -> None:
    share: ReplicaBatch = [[[trajectory(*t) for t in micro] for micro in mini] for mini in cut]
    for t in iter_trajectories(share) if kind else ():
        t.routes = np.random.default_rng(t.length).integers(0, 99, (t.length - 1, 3, 2)).astype(kind)
    decoded = decode(encode(slim(share)), ReplicaBatch)
    assert [[len(micro) for micro in mini] for mini in decoded] == [[len(m) for m in mini] for mini in cut]
    for a, b in zip(iter_trajectories(share), iter_trajectories(decoded), strict=True):
        assert all(getattr(a, name) == getattr(b, name) for name in NAMES)
        assert all(
            np.array_equal(getattr(a, n), getattr(b, n))
            for n in ("prompt", "response", "behaviour", "mask", "anchor", "top_ids", "top_logps", "routes")
        )
        assert (b.response.dtype, b.mask.dtype, b.routes.dtype) == (np.int32, np.bool_, a.routes.dtype)
        assert (b.text, b.answer, b.extracted, b.reason, b.parts) == ("", "", None, "", {})
        assert len(b.versions) == (len(a.versions) if kind else 0)
        assert (a.text, len(a.versions)) == ("text", len(a.response))  # the leader keeps its own


@pytest.mark.parametrize("routed", [False, True])
def test_all_ranks_of_a_replica_lay_out_the_same_rows(routed: bool) -> None:
    """Of shared prompts too, which depend on the versions of responses with routes."""
    batch = [trajectory(7, 4, 3) for _ in range(4)]
    for number, t in enumerate(batch):
        t.versions = np.full(3, number // 2, np.int32)
        if routed:
            t.routes = np.zeros((t.length - 1, 3, 2), np.uint8)
    copies = decode(encode(slim([[batch]])), ReplicaBatch)[0][0]
    assert lay_out(copies, 0.0) == lay_out(batch, 0.0)
    assert sum(piece.shared for piece in lay_out(batch, 0.0)) == (2 if routed else 1)


@given(shares, st.randoms())
def test_a_leader_has_its_part_of_the_plan(cut: list[list[list[tuple[int, int, int]]]], dice: Random) -> None:
    flat = [size for mini in cut for micro in mini for size in micro]
    # The last trajectory is another leader's.
    batch = [trajectory(number, *size[1:]) for number, size in enumerate([*flat, (0, 1, 1)])]
    places = list(range(len(flat)))
    dice.shuffle(places)
    rest = iter(places)
    plan = [[sorted(next(rest) for _ in micro) for micro in mini] for mini in cut]
    advantages = np.array([dice.random() for _ in batch])
    index = index_of(batch)
    index.group = index.group + 7  # of the step; the source knows the ticket
    columns = [index.worker, index.ticket, index.row, index.group, advantages]
    share, trajectories = fetch_planned(plan, columns, ListSource(batch))
    assert [[[t.prompt_id for t in micro] for micro in mini] for mini in share] == plan
    assert [t.prompt_id for t in trajectories] == sorted(places)
    assert {id(t) for t in trajectories} == {id(t) for t in iter_trajectories(share)}
    assert all(t.advantage == advantages[t.prompt_id] for t in trajectories)  # in float64
    assert all(t.group == t.prompt_id // 5 + 7 for t in trajectories)
