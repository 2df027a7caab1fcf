"""Index of a step's trajectories for rank 0: location, lengths and reward of each, without its tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from rpg_megatron.data.trajectory import Trajectory


@dataclass
class BatchIndex:
    """One entry per trajectory, [N], in batch order: by group, then by sample."""

    worker: NDArray[np.int64]
    """Number of the sampler worker that holds the trajectory."""
    ticket: NDArray[np.int64]
    """Number of the group in the run."""
    group: NDArray[np.int64]
    """Number of the group in the step, from 0."""
    sample: NDArray[np.int64]
    """Number of the response in its group, from 0."""
    prompt_length: NDArray[np.int64]
    """Tokens of the prompt."""
    response_length: NDArray[np.int64]
    """Tokens of the response."""
    sampled: NDArray[np.int64]
    """Tokens of the response that the policy sampled."""
    reward: NDArray[np.float64]
    """The reward that the advantage is computed from."""

    def __len__(self) -> int:
        return len(self.ticket)

    def columns(self) -> list[NDArray[Any]]:
        """All columns, in the order of the fields."""
        return [getattr(self, field.name) for field in fields(self)]


class TrajectorySource(Protocol):
    """Returns trajectories by their location in a ``BatchIndex``."""

    def fetch(self, worker: Sequence[int], ticket: Sequence[int], sample: Sequence[int]) -> list[Trajectory]:
        """The trajectories with these numbers, in this order; the three lists have the same length.

        ``group`` and ``advantage`` are not set, ``old`` and ``anchor`` are empty. A trajectory may be fetched
        several times until the next rollout.
        """
        ...


def index_of(trajectories: Iterable[Trajectory]) -> BatchIndex:
    """The index of local trajectories: the worker is 0, and the ticket is the group."""
    rows = [(t.group, t.sample, len(t.prompt), len(t.response), t.sampled, t.reward) for t in trajectories]
    group, sample, prompt, response, sampled, reward = zip(*rows, strict=True) if rows else [()] * 6
    return BatchIndex(
        worker=np.zeros(len(rows), np.int64),
        ticket=np.array(group, np.int64),
        group=np.array(group, np.int64),
        sample=np.array(sample, np.int64),
        prompt_length=np.array(prompt, np.int64),
        response_length=np.array(response, np.int64),
        sampled=np.array(sampled, np.int64),
        reward=np.array(reward, np.float64),
    )
