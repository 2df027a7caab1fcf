"""Index of a step's trajectories for rank 0: location, lengths and reward of each, without its tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from rpg_megatron.data.row_layout import routed_by
from rpg_megatron.data.trajectory import Trajectory


@dataclass
class BatchIndex:
    """One entry per trajectory, [N], in batch order: by group, then by row."""

    worker: NDArray[np.int64]
    """Number of the sampler worker that holds the trajectory."""
    ticket: NDArray[np.int64]
    """Number of the group in the run."""
    group: NDArray[np.int64]
    """Number of the group in the step, from 0."""
    sample: NDArray[np.int64]
    """Number of the response in its group, from 0."""
    branch: NDArray[np.int64]
    """Number of the trajectory in its response, from 0."""
    row: NDArray[np.int64]
    """Number of the trajectory in its group, from 0; that of the response unless one has several rows."""
    prompt_length: NDArray[np.int64]
    """Tokens of the prompt."""
    response_length: NDArray[np.int64]
    """Tokens of the response."""
    sampled: NDArray[np.int64]
    """Tokens of the response that the policy sampled."""
    routed_by: NDArray[np.int64]
    """``row_layout.routed_by``: only equal ones share a prompt."""
    reward: NDArray[np.float64]
    """The reward that the advantage is computed from."""

    def __len__(self) -> int:
        return len(self.ticket)

    @property
    def starts(self) -> NDArray[np.int64]:
        """The first trajectory of each response, ascending."""
        return np.flatnonzero(self.branch == 0)

    def columns(self) -> list[NDArray[Any]]:
        """All columns, in the order of the fields."""
        return [getattr(self, field.name) for field in fields(self)]


class TrajectorySource(Protocol):
    """Returns trajectories by their location in a ``BatchIndex``."""

    def fetch(self, worker: Sequence[int], ticket: Sequence[int], row: Sequence[int]) -> list[Trajectory]:
        """The trajectories with these numbers, in this order; the three lists have the same length.

        ``group`` and ``advantage`` are not set, ``old`` and ``anchor`` are empty. A trajectory may be fetched
        several times until the next rollout.
        """
        ...


def index_of(trajectories: Iterable[Trajectory]) -> BatchIndex:
    """The index of local trajectories: the worker is 0, and the ticket is the group."""
    entries = [
        (t.group, t.sample, t.branch, len(t.prompt), len(t.response), t.sampled, routed_by(t), t.reward)
        for t in trajectories
    ]
    columns = zip(*entries, strict=True) if entries else [()] * 8
    group, sample, branch, prompt, response, sampled, routed, reward = columns
    sizes, rows = Counter[int](), []
    for number in group:
        rows.append(sizes[number])
        sizes[number] += 1
    return BatchIndex(
        worker=np.zeros(len(entries), np.int64),
        ticket=np.array(group, np.int64),
        group=np.array(group, np.int64),
        sample=np.array(sample, np.int64),
        branch=np.array(branch, np.int64),
        row=np.array(rows, np.int64),
        prompt_length=np.array(prompt, np.int64),
        response_length=np.array(response, np.int64),
        sampled=np.array(sampled, np.int64),
        routed_by=np.array(routed, np.int64),
        reward=np.array(reward, np.float64),
    )
