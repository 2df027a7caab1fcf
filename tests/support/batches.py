"""Trajectories in memory as a trainer's batch: rank 0 plans, each leader fetches its share from memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rpg_megatron.data.batch_index import index_of
from rpg_megatron.data.trajectory import Trajectory
from rpg_megatron.training.trainer import Batch, Trainer


class ListSource:
    """A ``TrajectorySource`` over a list whose index is ``index_of``; counts what is fetched."""

    def __init__(self, trajectories: Iterable[Trajectory]) -> None:
        self.held = {(t.group, t.sample): t for t in trajectories}
        self.fetched = 0

    def fetch(self, worker: Sequence[int], ticket: Sequence[int], sample: Sequence[int]) -> list[Trajectory]:
        self.fetched += len(ticket)
        return [self.held[numbers] for numbers in zip(ticket, sample, strict=True)]


def prepare(trainer: Trainer, trajectories: Sequence[Trajectory]) -> Batch:
    """The batch of this rank. trajectories: the whole batch, on every leader."""
    mesh = trainer.mesh
    index = index_of(trajectories) if mesh.rank == 0 else None
    return trainer.prepare_batch(index, ListSource(trajectories) if mesh.leads else None)
