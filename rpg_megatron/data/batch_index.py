"""What rank 0 knows of a step's trajectories: place, lengths and reward of each, without its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from rpg_megatron.data.trajectory import Trajectory


@dataclass
class BatchIndex:
    """One entry per trajectory, [N], in batch order: by group, then by sample."""

    worker: NDArray[np.int64]
    """Where the trajectory is: number of the sampler worker that holds its group."""
    ticket: NDArray[np.int64]
    """Number of the group in the run, unlike ``group`` that in the step."""
    group: NDArray[np.int64]
    """Number of the group in the step, from 0."""
    sample: NDArray[np.int64]
    """Number of the response in its group, from 0."""
    prompt_length: NDArray[np.int64]
    """Tokens of the prompt."""
    response_length: NDArray[np.int64]
    """Tokens of the response."""
    reward: NDArray[np.float64]
    """The reward that the advantage is computed from."""

    def __len__(self) -> int:
        return len(self.ticket)

    def columns(self) -> list[NDArray[Any]]:
        """All columns, in the order of the fields."""
        return [getattr(self, field.name) for field in fields(self)]


class TrajectorySource(Protocol):
    """Gives trajectories by their place in a ``BatchIndex``."""

    def fetch(self, worker: Sequence[int], ticket: Sequence[int], sample: Sequence[int]) -> list[Trajectory]:
        """The trajectories with these numbers, in this order; the three lists have one length.

        ``group`` and ``advantage`` are not set, ``old`` and ``anchor`` are empty. A trajectory may be fetched
        again until the next rollout.
        """
        ...


def index_of(trajectories: Sequence[Trajectory]) -> BatchIndex:
    """The index of trajectories that are at hand: worker 0, and the group as ticket."""

    def integers(values: Sequence[int]) -> NDArray[np.int64]:
        return np.array(values, np.int64)

    group = integers([t.group for t in trajectories])
    return BatchIndex(
        worker=np.zeros(len(trajectories), np.int64),
        ticket=group,
        group=group,
        sample=integers([t.sample for t in trajectories]),
        prompt_length=integers([len(t.prompt) for t in trajectories]),
        response_length=integers([len(t.response) for t in trajectories]),
        reward=np.array([t.reward for t in trajectories], np.float64),
    )
