"""What the trainer ranks agree on before weights are published: who holds which part, and its checksums."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from rpg_megatron.bridge.checksum import checksum
from rpg_megatron.bridge.collective import gather_objects
from rpg_megatron.bridge.layouts import Layout
from rpg_megatron.bridge.manifest import Manifest, PublishedBox, PublishedTensor, Shard
from rpg_megatron.bridge.plan import Holding, Piece, Placement, Source, assign_sources

Sums = dict[tuple[str, int], int]
"""Checksum of one rank's boxes, by (HF name, index among the tensor's sources)."""


@dataclass(frozen=True)
class Agreement:
    """The same on every rank, but for ``rank`` itself."""

    rank: int
    sources: dict[str, list[Source]]
    """For every HF tensor the pieces that make it up, each with the one rank that gives it."""
    shapes: dict[tuple[int, str], tuple[int, ...]]
    """Shape of each parameter, by (rank, Megatron name)."""
    hosts: dict[int, str]
    """Host name of each source rank."""

    @property
    def ranks(self) -> list[int]:
        """The ranks that give at least one piece, in order."""
        return sorted({s.rank for found in self.sources.values() for s in found})

    def mine(self) -> list[tuple[str, int, str, Piece]]:
        """What this rank gives: (HF name, index among the tensor's sources, parameter, piece)."""
        return [
            (name, i, s.param, s.piece)
            for name, found in self.sources.items()
            for i, s in enumerate(found)
            if s.rank == self.rank
        ]

    def sum_boxes(self, params: Mapping[str, torch.Tensor], dtype: torch.dtype) -> Sums:
        """Checksums of this rank's pieces, as they are when stored in ``dtype``."""
        return {
            (name, i): checksum(params[param].detach()[piece.local.slices()].to(dtype), piece.hf.start)
            for name, i, param, piece in self.mine()
        }


def agree(placement: Placement, params: Mapping[str, torch.Tensor], layout: Layout) -> Agreement:
    """Tell all ranks what this one holds. Collective over the default process group.

    params: parameters by Megatron name, layers numbered through the whole model.
    Raises LayoutError on every rank if the ranks together do not hold the model.
    """
    holding = Holding(placement, tuple((n, tuple(p.shape)) for n, p in params.items()))
    gathered = gather_objects((holding, socket.gethostname()))
    return Agreement(
        placement.rank,
        assign_sources(layout, [h for h, _ in gathered]),
        {(h.placement.rank, n): s for h, _ in gathered for n, s in h.params},
        {h.placement.rank: host for h, host in gathered if h.placement.is_source},
    )


def describe(
    agreement: Agreement,
    layout: Layout,
    dtype: torch.dtype,
    shards: tuple[Shard, ...],
    where: Mapping[tuple[int, str], tuple[int, int]],
    sums: Mapping[int, Sums],
    **found_by: Any,
) -> Manifest:
    """The manifest of a publication.

    where: of each (rank, parameter), the index of its shard and the byte in it where it begins. sums: each
    rank's ``sum_boxes``. found_by: the manifest's transport, place and generation.
    """
    tensors = {
        name: PublishedTensor(
            str(dtype).removeprefix("torch."),
            shape,
            tuple(
                PublishedBox(
                    *where[s.rank, s.param],
                    agreement.shapes[s.rank, s.param],
                    s.piece.local,
                    s.piece.hf,
                    sums[s.rank][name, i],
                )
                for i, s in enumerate(agreement.sources[name])
            ),
        )
        for name, shape in layout.hf_tensors().items()
    }
    return Manifest(shards=shards, tensors=tensors, **found_by)
