"""What the trainer ranks agree on before weights are published: who holds which part, and its checksums."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rpg_megatron.bridge.checksum import checksums
from rpg_megatron.bridge.manifest import Manifest, PublishedBox, PublishedTensor, Shard
from rpg_megatron.models.boxes import Piece
from rpg_megatron.models.mapping import ModelMapping
from rpg_megatron.models.placement import RankCoordinates, RankShards, SliceOwner, assign_owners
from rpg_megatron.system.collectives import gather_objects, run_together
from rpg_megatron.system.dtypes import dtype_name

Sums = dict[tuple[str, int], int]
"""Checksum of one rank's boxes, by (HF name, index among the tensor's owners)."""


@dataclass(frozen=True)
class PublishPlan:
    """The same on every rank, or on every rank of a node, but for ``rank`` itself."""

    rank: int
    owners: dict[str, list[SliceOwner]]
    """For every HF tensor the pieces that make it up, each with the one rank that gives it."""
    shapes: dict[tuple[int, str], tuple[int, ...]]
    """Shape of each parameter, by (rank, Megatron name)."""
    replicas: dict[int, tuple[int, ...]]
    """The ranks that hold the same parameters as a source rank does, itself among them."""
    lead: int
    """The first of the ranks that agreed: it writes down what they did."""
    alone: bool
    """Whether they are all ranks of the run."""

    @property
    def ranks(self) -> list[int]:
        """The ranks that give at least one piece, in order."""
        return sorted({s.rank for owners in self.owners.values() for s in owners})

    def slices_of(self, rank: int) -> list[tuple[str, int, str, Piece]]:
        """What a source rank sends: (HF name, index among the tensor's owners, parameter, piece)."""
        return [
            (name, i, s.param, s.piece)
            for name, owners in self.owners.items()
            for i, s in enumerate(owners)
            if s.rank == rank
        ]

    def sum_boxes(self, params: Mapping[str, torch.Tensor], dtype: torch.dtype) -> Sums:
        """Checksums of this rank's pieces, as they are when stored in ``dtype``."""
        mine = self.slices_of(self.rank)
        sums = checksums(
            (params[param].detach()[piece.local.slices()].to(dtype), piece.hf.start)
            for _, _, param, piece in mine
        )
        return {(name, i): number for (name, i, _, _), number in zip(mine, sums, strict=True)}


def make_publish_plan(
    coordinates: RankCoordinates, params: Mapping[str, torch.Tensor], mapping: ModelMapping, node: str = ""
) -> PublishPlan:
    """Tell all ranks what this one holds. Collective over the default process group.

    params: parameters by Megatron name, layers numbered through the whole model. node: the ranks that give
    the same agree among themselves, so that each node's engines read from ranks of that node.
    Raises an error on every rank if the ranks of a node together do not hold the model.
    """
    shards = RankShards(coordinates, tuple((n, tuple(p.shape)) for n, p in params.items()))
    gathered = gather_objects((shards, node))
    peers = [h for h, where in gathered if where == node]
    owners = run_together(lambda: assign_owners(mapping, peers))
    held: dict[tuple[int, int], list[int]] = {}
    for c in (h.coordinates for h in peers):
        held.setdefault((c.pipeline_rank, c.tensor_rank), []).append(c.rank)
    return PublishPlan(
        coordinates.rank,
        owners,
        {(h.coordinates.rank, n): s for h in peers for n, s in h.params},
        {min(ranks): tuple(sorted(ranks)) for ranks in held.values()},
        min(h.coordinates.rank for h in peers),
        len(peers) == len(gathered),
    )


def node_name(folder: Path) -> str:
    """Of the node whose processes share a folder: names of machines alone may be alike."""
    return f"{socket.gethostname()}:{folder}"


def build_manifest(
    plan: PublishPlan,
    mapping: ModelMapping,
    dtype: torch.dtype,
    shards: tuple[Shard, ...],
    where: Mapping[tuple[int, str], tuple[int, int]],
    sums: Mapping[int, Sums],
    **found_by: Any,
) -> Manifest:
    """The manifest of a publication.

    where: of each (rank, parameter), the index of its shard and the byte in it where it begins. sums: each
    rank's ``sum_boxes``. found_by: the manifest's transport, place and version.
    """
    tensors = {
        name: PublishedTensor(
            dtype_name(dtype),
            shape,
            tuple(
                PublishedBox(
                    *where[s.rank, s.param],
                    plan.shapes[s.rank, s.param],
                    s.piece.local,
                    s.piece.hf,
                    sums[s.rank][name, i],
                )
                for i, s in enumerate(plan.owners[name])
            ),
        )
        for name, shape in mapping.hf_tensors().items()
    }
    return Manifest(shards=shards, tensors=tensors, **found_by)
