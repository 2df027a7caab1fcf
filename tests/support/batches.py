"""Trajectories in memory as a trainer's batch: rank 0 plans, each leader fetches its share from memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from rpg_megatron.data.batch_index import index_of
from rpg_megatron.data.trajectory import Trajectory
from rpg_megatron.training.batch import Batch
from rpg_megatron.training.trainer import Trainer


def by_row(trajectories: Iterable[Trajectory], first: int = 0) -> dict[tuple[int, int], Trajectory]:
    """Trajectories by group and row, as ``index_of`` numbers them. first: added to the groups."""
    held = list(trajectories)
    index = index_of(held)
    return dict(zip(zip((index.group + first).tolist(), index.row.tolist(), strict=True), held, strict=True))


def summary_of(gap: np.ndarray, stale: int) -> dict[str, float]:
    """``mismatch.summarise`` by numpy, with all gaps in one place."""
    row = {"mismatch/tokens": float(gap.size), "mismatch/stale_tokens": float(stale)}
    if gap.size:
        row["mismatch/logp_mean"] = float(gap.mean(dtype=np.float64))
        row["mismatch/logp_p99"] = float(np.quantile(gap, 0.99))
        row["mismatch/logp_max"] = float(gap.max())
    return row


class ListSource:
    """A ``TrajectorySource`` over a list whose index is ``index_of``; counts what is fetched."""

    def __init__(self, trajectories: Iterable[Trajectory]) -> None:
        self.held = by_row(trajectories)
        self.fetched = 0

    def fetch(self, worker: Sequence[int], ticket: Sequence[int], row: Sequence[int]) -> list[Trajectory]:
        self.fetched += len(ticket)
        return [self.held[numbers] for numbers in zip(ticket, row, strict=True)]


def prepare(trainer: Trainer, trajectories: Sequence[Trajectory]) -> Batch:
    """The batch of this rank. trajectories: the whole batch, on every leader."""
    mesh = trainer.mesh
    index = index_of(trajectories) if mesh.rank == 0 else None
    return trainer.prepare_batch(index, ListSource(trajectories) if mesh.leads else None)
