"""Index of a step's trajectories for rank 0: location, lengths and reward of each, without its tokens."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import count
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

    @classmethod
    def of(cls, entries: Iterable[tuple[float, ...]]) -> BatchIndex:
        """The index of these trajectories: of each, a value for every column, in the order of the fields."""
        names = [field.name for field in fields(cls)]
        columns = [*zip(*entries, strict=True)] or [()] * len(names)
        types: dict[str, Any] = dict.fromkeys(names, np.int64) | {"reward": np.float64}
        return cls(**{n: np.array(c, types[n]) for n, c in zip(names, columns, strict=True)})

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
    rows: defaultdict[int, Iterator[int]] = defaultdict(count)
    return BatchIndex.of(
        (
            *(0, t.group, t.group, t.sample, t.branch, next(rows[t.group])),
            *(len(t.prompt), len(t.response), t.sampled, routed_by(t), t.reward),
        )
        for t in trajectories
    )
