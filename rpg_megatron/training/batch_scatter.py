"""Distributes the batch of a step over the ranks.

Rank 0 sends each leader, the first rank of a data-parallel replica, its part of the plan: a few numbers for
each trajectory, none for its tokens. The leader fetches these trajectories, and broadcasts what an update
needs to the other ranks of its replica. All tensors are in host memory and use gloo.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from rpg_megatron.data.batch_index import BatchIndex, TrajectorySource
from rpg_megatron.data.packing import Plan
from rpg_megatron.data.trajectory import NO_ROUTES, Trajectory
from rpg_megatron.policy.model import Mesh
from rpg_megatron.rollout.sampler_client import SamplerClient, TrajectoryClient
from rpg_megatron.system.collectives import broadcast_object, control_group, new_host_subgroup, run_together
from rpg_megatron.training.preemption import StopRequest

ReplicaBatch = list[list[list[Trajectory]]]
"""One data-parallel replica's part of a batch: [mini-batch][micro-batch] -> trajectories."""
EncodedPlan = NDArray[np.int64]
"""What rank 0 sends a leader: see ``encode_plan``."""

_FINISHES = ("stop", "length")
_NO_TOP_IDS, _NO_TOP_LOGPS = np.zeros((0, 0), np.int32), np.zeros((0, 0), np.float32)
Flat = tuple[Tensor, Tensor, Tensor]
"""A replica's batch as tensors: see ``flatten``."""
_FIELDS = 8
"""Number of int32 fields of a trajectory besides its tokens."""


class BatchScatter:
    """Distributes batches. Collective: every rank creates one, and all call ``scatter`` in the same order."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh, self._control = mesh, control_group()
        replicas = [mesh.replica(data) for data in range(mesh.data)]
        self._leader = replicas[mesh.data_rank][0]
        self._group: dist.ProcessGroup | None = None  # of this replica, if it has more than one rank
        if mesh.data == 1 < mesh.world:
            self._group = self._control
        elif mesh.data < mesh.world:
            self._group = new_host_subgroup(replicas)

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
        copies with the fields that an update needs: tokens, ``mask``, ``behaviour``, ``routes``, ``finish``,
        ``advantage`` rounded to float32, and prompt, group and sample numbers. When the method returns on any
        rank, all leaders have fetched. If a leader cannot fetch, all ranks raise (``run_together``).
        """
        leads, encoded = self._mesh.leads, np.zeros(0, np.int64)
        if index is not None:
            for data in reversed(range(self._mesh.data)):  # its own last
                encoded = encode_plan(plan[data], index, advantages)
                if data > 0:
                    self._send(encoded, self._mesh.replica(data)[0])
        elif leads:
            encoded = self._receive()

        def fetch() -> tuple[ReplicaBatch, list[Trajectory]]:
            assert source is not None, "a leader has no source of trajectories"
            return fetch_planned(encoded, source)

        batch, trajectories = run_together(lambda: fetch() if leads else ([], []))
        if self._group is not None:
            flat = self._broadcast(flatten(batch) if leads else None)
            batch = batch if leads else unflatten(*flat)
        return batch, trajectories

    def _send(self, encoded: EncodedPlan, to: int) -> None:
        for tensor in (torch.tensor([len(encoded)]), torch.from_numpy(encoded)):
            dist.send(tensor, to, group=self._control)

    def _receive(self) -> EncodedPlan:
        size = torch.empty(1, dtype=torch.int64)
        dist.recv(size, 0, group=self._control)
        encoded = np.empty(int(size), np.int64)
        dist.recv(torch.from_numpy(encoded), 0, group=self._control)
        return encoded

    def _broadcast(self, flat: Flat | None) -> Flat:
        """Broadcast ``flat`` from the leader to the replica's other ranks."""
        sizes = torch.empty(6, dtype=torch.int64)
        if flat:
            ints, floats, routes = flat
            sizes = torch.tensor([len(ints), len(floats), *routes.shape, routes.element_size()])
        dist.broadcast(sizes, self._leader, group=self._group)
        if flat is None:
            n_ints, n_floats, *shape, item = sizes.tolist()
            routes = torch.empty(shape, dtype=torch.uint8 if item == 1 else torch.int16)
            flat = torch.empty(n_ints, dtype=torch.int32), torch.empty(n_floats, dtype=torch.float32), routes
        ints, floats, routes = flat
        for tensor in (ints, floats, routes.view(-1).view(torch.uint8)):  # gloo does not know int16
            if tensor.numel():
                dist.broadcast(tensor, self._leader, group=self._group)
        return flat


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


def encode_plan(
    plan: list[list[list[int]]], index: BatchIndex, advantages: NDArray[np.float64]
) -> EncodedPlan:
    """A leader's part of the plan: batch sizes, and five numbers for each trajectory."""
    chosen = np.fromiter(chain.from_iterable(chain.from_iterable(plan)), np.int64)
    columns = (index.worker, index.ticket, index.row, index.group, advantages.view(np.int64))
    words = [np.array(_sizes_of(plan), np.int64), *(column[chosen] for column in columns)]
    return np.concatenate(words)


def fetch_planned(encoded: EncodedPlan, source: TrajectorySource) -> tuple[ReplicaBatch, list[Trajectory]]:
    """Fetch the planned trajectories: nested as planned, and in batch order (by group, then row)."""
    sizes, rest = _read_sizes(encoded)
    columns = rest.reshape(5, -1)
    order = np.lexsort((columns[2], columns[3]))
    worker, ticket, row, group, bits = columns[:, order]
    fetched = source.fetch(worker.tolist(), ticket.tolist(), row.tolist())
    for t, number, advantage in zip(fetched, group.tolist(), bits.view(np.float64).tolist(), strict=True):
        t.group, t.advantage = number, advantage
    return _nest([fetched[i] for i in np.argsort(order).tolist()], sizes), fetched


def flatten(batch: ReplicaBatch) -> Flat:
    """A replica's batch as three tensors.

    int32: batch sizes, fields, tokens, of which those that were not sampled are inverted, so negative;
    the teacher's likeliest tokens; float32: advantages, ``behaviour``, ``anchor`` and the likeliest tokens'
    log-probs (both of a teacher's server) of each;
    the routes of all trajectories: [rows, layers, experts of a token].
    """
    trajectories = list(iter_trajectories(batch))
    fields = [
        (
            *(len(t.prompt), len(t.response), _FINISHES.index(t.finish), t.prompt_id, t.group, t.sample),
            *(len(t.anchor), t.top_ids.shape[1]),
        )
        for t in trajectories
    ]
    tokens = [
        ids
        for t in trajectories
        for ids in (t.prompt, np.where(t.mask, t.response, ~t.response), t.top_ids.reshape(-1))
    ]
    ints = [np.array(_sizes_of(batch), np.int32), np.array(fields, np.int32).reshape(-1), *tokens]
    floats = [np.array([t.advantage for t in trajectories], np.float32)]
    floats += [values for t in trajectories for values in (t.behaviour, t.anchor, t.top_logps.reshape(-1))]
    routes = np.concatenate([t.routes for t in trajectories] or [NO_ROUTES])
    return (
        torch.from_numpy(np.concatenate(ints)),
        torch.from_numpy(np.concatenate(floats)),
        torch.from_numpy(routes),
    )


def unflatten(ints: Tensor, floats: Tensor, routes: Tensor) -> ReplicaBatch:
    """Inverse of ``flatten``. Most arrays of the trajectories are views of the tensors."""
    sizes, words = _read_sizes(ints.numpy())
    values = floats.numpy()
    count = sum(map(sum, sizes))
    fields = words[: count * _FIELDS].reshape(count, _FIELDS).tolist()
    offset, value_offset = count * _FIELDS, count  # after the fields, after the advantages
    chosen, row = routes.numpy(), 0
    trajectories = []
    for (prompt_length, length, finish, prompt_id, group, sample, scored, k), advantage in zip(
        fields, values[:count].tolist(), strict=True
    ):
        middle, end = offset + prompt_length, offset + prompt_length + length
        after = value_offset + length + scored
        response = words[middle:end]
        mask = response >= 0
        trajectories.append(
            Trajectory(
                prompt_id=prompt_id,
                sample=sample,
                prompt=words[offset:middle],
                response=response if mask.all() else np.where(mask, response, ~response),
                mask=mask,
                behaviour=values[value_offset : value_offset + length],
                anchor=values[value_offset + length : value_offset + length + scored],
                top_ids=words[end : end + length * k].reshape(-1, k) if k else _NO_TOP_IDS,
                top_logps=values[after : after + length * k].reshape(-1, k) if k else _NO_TOP_LOGPS,
                versions=np.zeros(0, np.int32),
                finish=_FINISHES[finish],
                text="",
                group=group,
                advantage=advantage,
                routes=chosen[row : row + prompt_length + length - 1] if len(chosen) else NO_ROUTES,
            )
        )
        offset, value_offset = end + length * k, after + length * k
        row += prompt_length + length - 1
    return _nest(trajectories, sizes)


def _sizes_of(batch: Sequence[Sequence[Sequence[object]]]) -> list[int]:
    """The sizes of mini- and micro-batches as one list."""
    return [len(batch), *chain.from_iterable((len(mini), *map(len, mini)) for mini in batch)]


def _read_sizes(words: NDArray[Any]) -> tuple[list[list[int]], NDArray[Any]]:
    """The inverse of ``_sizes_of`` at the start of an array, and the rest of the array."""
    sizes: list[list[int]] = []
    offset = 1
    for _ in range(words[0]):
        end = offset + 1 + int(words[offset])
        sizes.append(words[offset + 1 : end].tolist())
        offset = end
    return sizes, words[offset:]


def _nest(trajectories: Sequence[Trajectory], sizes: list[list[int]]) -> ReplicaBatch:
    rest = iter(trajectories)
    return [[[next(rest) for _ in range(size)] for size in mini] for mini in sizes]
