"""Scatter a batch from rank 0 to the data-parallel replicas, and gather log-probs back.

Rank 0 sends each replica its share once, as flat tensors without text, to the replica's first rank, which
broadcasts it to the others. Log-probs are sent back by the first ranks only. Shares are sent one at a time,
so rank 0's memory for them does not grow with the number of ranks. All tensors are in host memory and use
gloo.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rpg_megatron.data.packing import Plan
from rpg_megatron.data.trajectory import Trajectory
from rpg_megatron.policy.model import Mesh
from rpg_megatron.system.collectives import TIMEOUT, control_group

Share = list[list[list[Trajectory]]]
"""One data-parallel replica's part of a batch: [mini-batch][micro-batch] -> trajectories."""

_FINISHES = ("stop", "length")
_FIELDS = 6
"""Number of int32 fields of a trajectory besides its tokens."""


class BatchScatter:
    """Scatter and gather of this rank. Collective: every rank makes one and calls its methods in order."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh, self._control = mesh, control_group()
        replicas = [mesh.replica(data) for data in range(mesh.data)]
        self._replica = replicas[mesh.data_rank]
        self._group: dist.ProcessGroup | None = None  # of this replica, if it has more than one rank
        if mesh.data == 1 < mesh.world:
            self._group = self._control
        elif mesh.data < mesh.world:
            self._group, _ = dist.new_subgroups_by_enumeration(replicas, timeout=TIMEOUT, backend="gloo")
        self._shares: list[Share] = []
        """Rank 0: every replica's share of the last batch."""

    def scatter(self, plan: Plan, batch: Sequence[Trajectory]) -> Share:
        """Return this rank's share. plan, batch: on rank 0; empty elsewhere.

        Rank 0 gets the trajectories of ``batch`` themselves, the others copies with the fields that an update
        needs: tokens, ``behaviour``, ``finish``, ``advantage`` rounded to float32, and prompt, group and
        sample numbers.
        """
        first = self._replica[0]
        self._shares = [[[[batch[i] for i in micro] for micro in mini] for mini in rank] for rank in plan]
        flat: tuple[Tensor, Tensor] | None = None
        for data, share in enumerate(self._shares):
            if data > 0:
                self._send(flatten(share), self._mesh.replica(data)[0])
        if self._mesh.rank == first and first > 0:
            flat = self._receive()
        if self._group is not None:
            if self._mesh.rank == 0:
                flat = flatten(self._shares[0])
            flat = self._broadcast(flat)
        if self._mesh.rank == 0:
            return self._shares[0]
        assert flat is not None
        return unflatten(*flat)

    def gather(self, name: str, share: Share) -> None:
        """Copy an attribute of the trajectories from all other replicas' shares to rank 0's batch.

        name: attribute, float32 [R]. All ranks of a replica have the same values.
        """
        if self._mesh.rank == 0:
            for data, other in enumerate(self._shares[1:], start=1):
                values = torch.empty(sum(len(t.response) for t in each(other)), dtype=torch.float32)
                dist.recv(values, self._mesh.replica(data)[0], group=self._control)
                start = 0
                for t in each(other):
                    setattr(t, name, values[start : start + len(t.response)].numpy())
                    start += len(t.response)
        elif self._mesh.rank == self._replica[0]:
            values = np.concatenate([np.zeros(0, np.float32), *(getattr(t, name) for t in each(share))])
            dist.send(torch.from_numpy(values), 0, group=self._control)

    def _send(self, flat: tuple[Tensor, Tensor], to: int) -> None:
        for tensor in (_sizes(flat), *flat):
            dist.send(tensor, to, group=self._control)

    def _receive(self) -> tuple[Tensor, Tensor]:
        sizes = torch.empty(2, dtype=torch.int64)
        dist.recv(sizes, 0, group=self._control)
        flat = _buffers(sizes)
        for tensor in flat:
            dist.recv(tensor, 0, group=self._control)
        return flat

    def _broadcast(self, flat: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
        """Broadcast ``flat`` from the replica's first rank to the others."""
        first, group = self._replica[0], self._group
        sizes = _sizes(flat) if flat else torch.empty(2, dtype=torch.int64)
        dist.broadcast(sizes, first, group=group)
        flat = flat or _buffers(sizes)
        for tensor in flat:
            dist.broadcast(tensor, first, group=group)
        return flat


def each(share: Share) -> Iterator[Trajectory]:
    """The trajectories of a share, in order."""
    return chain.from_iterable(chain.from_iterable(share))


def flatten(share: Share) -> tuple[Tensor, Tensor]:
    """A share as two tensors: int32 (batch sizes, fields, tokens) and float32 (advantages, ``behaviour``)."""
    trajectories = list(each(share))
    sizes = [len(share)]
    for mini in share:
        sizes += [len(mini), *(len(micro) for micro in mini)]
    fields = [
        (len(t.prompt), len(t.response), _FINISHES.index(t.finish), t.prompt_id, t.group, t.sample)
        for t in trajectories
    ]
    tokens = [ids for t in trajectories for ids in (t.prompt, t.response)]
    ints = [np.array(sizes, np.int32), np.array(fields, np.int32).reshape(-1), *tokens]
    floats = [np.array([t.advantage for t in trajectories], np.float32), *(t.behaviour for t in trajectories)]
    return torch.from_numpy(np.concatenate(ints)), torch.from_numpy(np.concatenate(floats))


def unflatten(ints: Tensor, floats: Tensor) -> Share:
    """Inverse of ``flatten``. Arrays of the trajectories are views of the two tensors."""
    words, values = ints.numpy(), floats.numpy()
    offset = 1
    sizes: list[list[int]] = []
    for _ in range(words[0]):
        end = offset + 1 + int(words[offset])
        sizes.append(words[offset + 1 : end].tolist())
        offset = end
    count = sum(map(sum, sizes))
    fields = words[offset : offset + count * _FIELDS].reshape(count, _FIELDS).tolist()
    offset += count * _FIELDS
    value_offset = count  # after the advantages
    trajectories = []
    for (prompt_length, length, finish, prompt_id, group, sample), advantage in zip(
        fields, values[:count].tolist(), strict=True
    ):
        middle, end = offset + prompt_length, offset + prompt_length + length
        trajectories.append(
            Trajectory(
                prompt_id=prompt_id,
                sample=sample,
                prompt=words[offset:middle],
                response=words[middle:end],
                behaviour=values[value_offset : value_offset + length],
                versions=np.zeros(0, np.int32),
                finish=_FINISHES[finish],
                text="",
                group=group,
                advantage=advantage,
            )
        )
        offset, value_offset = end, value_offset + length
    rest = iter(trajectories)
    return [[[next(rest) for _ in range(size)] for size in mini] for mini in sizes]


def _sizes(flat: tuple[Tensor, Tensor]) -> Tensor:
    return torch.tensor([len(tensor) for tensor in flat])


def _buffers(sizes: Tensor) -> tuple[Tensor, Tensor]:
    ints, floats = sizes.tolist()
    return torch.empty(ints, dtype=torch.int32), torch.empty(floats, dtype=torch.float32)
