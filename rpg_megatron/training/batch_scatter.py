"""Distributes the batch of a step over the ranks.

Rank 0 broadcasts the plan and where each trajectory is: a few numbers for each, none for its tokens. Each
leader, the first rank of a data-parallel replica, fetches the trajectories of its part, and broadcasts what
an update needs to the other ranks of its replica. All of it is in host memory and uses gloo.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray

from rpg_megatron.data.batch_index import BatchIndex, TrajectorySource
from rpg_megatron.data.packing import Plan
from rpg_megatron.data.trajectory import Trajectory
from rpg_megatron.policy.model import Mesh
from rpg_megatron.rollout.sampler_client import SamplerClient, TrajectoryClient
from rpg_megatron.system.collectives import broadcast_object, control_group, new_host_subgroup, run_together
from rpg_megatron.training.preemption import StopRequest

ReplicaBatch = list[list[list[Trajectory]]]
"""One data-parallel replica's part of a batch: [mini-batch][micro-batch] -> trajectories."""

_LARGEST = 1 << 38
"""Maximum bytes of a replica's batch; the routes of router replay may be a kilobyte a token."""


class BatchScatter:
    """Distributes batches. Collective: every rank creates one, and all call ``scatter`` in the same order."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._group: dist.ProcessGroup | None = None  # of this replica, if it has more than one rank
        if mesh.data == 1 < mesh.world:
            self._group = control_group()
        elif mesh.data < mesh.world:
            self._group = new_host_subgroup([mesh.replica(data) for data in range(mesh.data)])

    def scatter(
        self,
        plan: Plan,
        index: BatchIndex | None,
        advantages: NDArray[np.float64],
        source: TrajectorySource | None,
    ) -> tuple[ReplicaBatch, list[Trajectory]]:
        """Return this replica's batch and, on a leader, its trajectories in batch order (elsewhere empty).

        plan, index, advantages [N]: on rank 0; empty, None and empty elsewhere. source: on leaders. A leader
        gets the trajectories as the source returns them, with group and advantage set. The other ranks get
        copies without what only a leader needs (``slim``). When the method returns on any rank, all leaders
        have fetched. If a leader cannot fetch, all ranks raise (``run_together``).
        """
        sent = None
        if index is not None:
            sent = plan, [index.worker, index.ticket, index.row, index.group, advantages]
        plan, columns = broadcast_object(sent, tuple[Plan, list[Any]])
        leads = self._mesh.leads

        def fetch() -> tuple[ReplicaBatch, list[Trajectory]]:
            assert source is not None, "a leader has no source of trajectories"
            return fetch_planned(plan[self._mesh.data_rank], columns, source)

        batch, trajectories = run_together(lambda: fetch() if leads else ([], []))
        if self._group is not None:
            copies = broadcast_object(slim(batch), ReplicaBatch, self._group, largest=_LARGEST)
            batch = batch if leads else copies
        return batch, trajectories


def open_source(
    sampler: SamplerClient | None, token: str, mesh: Mesh, stop: StopRequest
) -> TrajectoryClient | None:
    """A leader's connection to the sampler workers; None on the other ranks. Collective.

    sampler: on rank 0. token: the run's, on every rank; it is not broadcast, since others may listen to gloo.
    A stop signal ends a fetch with RuntimeError.
    """
    addresses = broadcast_object(sampler.addresses() if sampler else None, list[str])

    def check() -> None:
        if stop.received:
            raise RuntimeError("a stop signal was received while trajectories were fetched")

    return TrajectoryClient(addresses, token, while_waiting=check) if mesh.leads else None


def iter_trajectories(batch: ReplicaBatch) -> Iterator[Trajectory]:
    """The trajectories of a replica's batch, in order."""
    return chain.from_iterable(chain.from_iterable(batch))


def fetch_planned(
    plan: list[list[list[int]]], columns: list[NDArray[Any]], source: TrajectorySource
) -> tuple[ReplicaBatch, list[Trajectory]]:
    """Fetch a leader's part of the plan: nested as planned, and in batch order (by group, then row).

    columns: worker, ticket, row, group and advantage of each trajectory of the step, [N].
    """
    chosen = np.array(list(chain.from_iterable(chain.from_iterable(plan))), np.int64)
    order = chosen[np.lexsort((columns[2][chosen], columns[3][chosen]))]
    worker, ticket, row, group, advantages = (column[order].tolist() for column in columns)
    fetched = source.fetch(worker, ticket, row)
    for t, number, advantage in zip(fetched, group, advantages, strict=True):
        t.group, t.advantage = number, advantage
    by_number = dict(zip(order.tolist(), fetched, strict=True))
    return [[[by_number[i] for i in micro] for micro in mini] for mini in plan], fetched


def slim(batch: ReplicaBatch) -> ReplicaBatch:
    """The batch with copies of the trajectories that lack texts, which no update needs, and versions, which
    only the layout of rows with routes does (``lay_out``).
    """
    blank: dict[str, Any] = {"text": "", "answer": "", "extracted": None, "reason": "", "parts": {}}
    none = np.zeros(0, np.int32)

    def copy(t: Trajectory) -> Trajectory:
        return replace(t, **blank, versions=t.versions if len(t.routes) else none)

    return [[[copy(t) for t in micro] for micro in mini] for mini in batch]
