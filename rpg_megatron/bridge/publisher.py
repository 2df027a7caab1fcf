"""Publishes Megatron weights for vLLM: the transports' common interface, and the plan that the ranks share.

Publishing copies no weights by itself. The ranks agree once on a ``PublishPlan``, which says which rank sends
which slice of which Hugging Face tensor. Each ``publish`` then computes the checksums and writes a
``Manifest``, from which the engine workers find the slices that they read.
"""

from __future__ import annotations

import socket
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from rpg_megatron.bridge.manifest import MANIFEST, Layout, Manifest, PublishedBox, PublishedTensor, Shard
from rpg_megatron.bridge.slice_table import Slice, SliceTable, TableCache, checksums, modulo
from rpg_megatron.config.files import atomic_write_text
from rpg_megatron.models.boxes import Piece
from rpg_megatron.models.lora import AdaptedMapping
from rpg_megatron.models.mapping import ModelMapping
from rpg_megatron.models.partition import RankCoordinates
from rpg_megatron.models.placement import (
    RankShards,
    SliceOwner,
    assign_owners,
    local_pieces,
)
from rpg_megatron.system.collectives import gather_objects, new_host_subgroup, run_together
from rpg_megatron.system.dtypes import dtype_name

SliceSums = dict[tuple[str, int], int]
"""Checksums of one rank's slices: (HF tensor name, index in ``PublishPlan.owners`` of that tensor) -> sum."""


class Publisher(Protocol):
    """Trainer side of a transport, one on each rank. Every rank calls every method in the same order."""

    def publish(self, version: int, only: Collection[str] | None = None) -> Manifest | None:
        """Let engines read the current weights as ``version``; returns the manifest on rank 0, else None.

        only: names of HF tensors; None: all.
        """
        ...

    def retract(self) -> None:
        """Stop publishing: from here on the weights may change."""
        ...

    def close(self) -> None:
        """Release memory and connections."""
        ...


@contextmanager
def published(
    publisher: Publisher, version: int, only: Collection[str] | None = None
) -> Iterator[Manifest | None]:
    """Publish within the block, in which the weights must not change; yields the manifest on rank 0."""
    manifest = publisher.publish(version, only)
    try:
        yield manifest
    finally:
        publisher.retract()


@dataclass(frozen=True)
class PublishPlan:
    """Which rank sends which slice. Equal, except for ``rank``, on all ranks that share the plan."""

    rank: int
    owners: dict[str, list[SliceOwner]]
    """HF tensor name -> the slices that make up the tensor, each with the rank that sends it."""
    shapes: dict[tuple[int, str], tuple[int, ...]]
    """(rank, Megatron name) -> shape of the parameter on that rank."""
    replicas: dict[int, tuple[int, ...]]
    """Owning rank -> all ranks that hold the same parameters, itself included."""
    shared: dict[tuple[str, int], tuple[SliceOwner, ...]]
    """(HF tensor name, index in ``owners`` of that tensor) -> the other owning ranks that hold the slice."""
    lead: int
    """The lowest of the ranks that share the plan; it writes the manifest."""
    alone: bool
    """Whether all ranks of the run share the plan (False: each node has a plan of its own)."""
    float32: frozenset[str]
    """Names of HF tensors that are sent in float32, see ``ModelMapping``."""
    group: dist.ProcessGroup | None
    """The host group of the ranks that share the plan; None: the control group."""
    tables: TableCache[tuple[list[tuple[str, int]], SliceTable | None]] = field(
        default_factory=TableCache, compare=False, repr=False
    )
    """Of ``sum_boxes``."""

    @property
    def ranks(self) -> list[int]:
        """The ranks that send at least one slice, ascending."""
        return sorted({s.rank for owners in self.owners.values() for s in owners})

    def restricted(self, only: Collection[str] | None) -> PublishPlan:
        """The plan of some HF tensors; None: of all."""
        if only is None:
            return self
        return replace(
            self,
            owners={name: slices for name, slices in self.owners.items() if name in only},
            shared={key: slices for key, slices in self.shared.items() if key[0] in only},
        )

    def dtype_of(self, name: str, dtype: torch.dtype) -> torch.dtype:
        """The dtype of an HF tensor if the others are sent in ``dtype``."""
        return torch.float32 if name in self.float32 else dtype

    def slices_of(self, rank: int, *, shared: bool = False) -> list[tuple[str, int, str, Piece]]:
        """What a rank sends: (HF tensor name, index in ``owners`` of that tensor, Megatron name, slice).

        shared: and what it holds of ``self.shared``.
        """
        slices = [(name, i, s) for name, owners in self.owners.items() for i, s in enumerate(owners)]
        slices += [(*key, s) for key, others in self.shared.items() if shared for s in others]
        return [(name, i, s.param, s.piece) for name, i, s in slices if s.rank == rank]

    def sum_boxes(
        self, params: Mapping[str, torch.Tensor], dtype: torch.dtype, *, shared: bool = False
    ) -> SliceSums:
        """Checksums of this rank's slices after a cast to ``dtype_of``; ``shared``: also of those in
        ``self.shared``.
        """

        def values() -> Iterator[Slice]:
            for name, _, param, piece in self.slices_of(self.rank, shared=shared):
                part = params[param].detach()[piece.local.slices()]
                yield part.to(self.dtype_of(name, dtype)), piece.hf.start

        def table() -> tuple[list[tuple[str, int]], SliceTable | None]:
            slices = self.slices_of(self.rank, shared=shared)
            keys = [(name, i) for name, i, _, _ in slices]
            # Slices that must be cast are other memory in each sync.
            cast = any(params[param].dtype != self.dtype_of(name, dtype) for name, _, param, _ in slices)
            on_gpu = bool(keys) and next(iter(params.values())).device.type == "cuda"
            return keys, SliceTable(list(values())) if on_gpu and not cast else None

        keys, prepared = self.tables.get((dtype, shared, tuple(self.owners)), params.values(), table)
        sums = modulo(prepared.sums()) if prepared is not None else checksums(values())
        return dict(zip(keys, sums, strict=True))


def make_publish_plan(
    coordinates: RankCoordinates, params: Mapping[str, torch.Tensor], mapping: ModelMapping, node: str = ""
) -> PublishPlan:
    """Agree with all ranks on which one sends which slice. Collective over all ranks.

    params: parameters by Megatron name, layers numbered through the whole model. node: ranks that pass the
    same string share a plan, so that the engines of a node read from ranks of that node.
    Raises MappingError, on every rank, if the ranks that share a plan do not hold the whole model.
    """
    shards = RankShards(coordinates, tuple((n, tuple(p.shape)) for n, p in params.items()))
    gathered = gather_objects((shards, node), tuple[RankShards, str])
    peers = [s for s, where in gathered if where == node]
    owners = run_together(lambda: assign_owners(mapping, peers))
    replicas: dict[tuple[int, ...], list[int]] = {}
    for c in (s.coordinates for s in peers):
        replicas.setdefault(c.shard, []).append(c.rank)
    firsts = {min(ranks) for ranks in replicas.values()}
    parts: dict[str, list[int]] = {}
    for s, where in gathered:
        parts.setdefault(where, []).append(s.coordinates.rank)
    return PublishPlan(
        coordinates.rank,
        owners,
        {(s.coordinates.rank, n): shape for s in peers for n, shape in s.params},
        {min(ranks): tuple(sorted(ranks)) for ranks in replicas.values()},
        _shared_slices(mapping, owners, [s for s in peers if s.coordinates.rank in firsts]),
        min(s.coordinates.rank for s in peers),
        len(parts) == 1,
        mapping.float32,
        None if len(parts) == 1 else new_host_subgroup(list(parts.values())),
    )


def _shared_slices(
    mapping: ModelMapping, owners: Mapping[str, Sequence[SliceOwner]], holders: Sequence[RankShards]
) -> dict[tuple[str, int], tuple[SliceOwner, ...]]:
    """``PublishPlan.shared``. holders: one rank of each set of ranks that hold the same parameters."""
    index = {(name, s.piece.hf): (i, s.rank) for name, slices in owners.items() for i, s in enumerate(slices)}
    sending = {rank for _, rank in index.values()}
    shared: dict[tuple[str, int], tuple[SliceOwner, ...]] = {}
    for shards in holders:
        rank = shards.coordinates.rank
        for param, shape in shards.params if rank in sending else ():
            for piece in local_pieces(mapping, shards.coordinates, param, shape):
                i, owner = index[piece.hf_name, piece.hf]
                if rank != owner:
                    key = piece.hf_name, i
                    shared[key] = (*shared.get(key, ()), SliceOwner(rank, param, piece))
    return shared


def node_name(folder: Path) -> str:
    """Identifies the node whose processes share a folder; the host name alone may not be unique."""
    return f"{socket.gethostname()}:{folder}"


class ManifestBuilder:
    """Builds a publisher's manifests. The layout is made again only if it has changed."""

    def __init__(self, mapping: ModelMapping, dtype: torch.dtype):
        """dtype: what engines receive; see ``PublishPlan.dtype_of``."""
        self._mapping, self._dtype = mapping, dtype
        self._scale = mapping.adapters.lora.scale if isinstance(mapping, AdaptedMapping) else 0.0
        self._key: Any = None
        self._layout = b""
        self._order: list[tuple[int, tuple[str, int]]] = []
        """(rank, key of ``SliceSums``) of each box."""

    def build(
        self,
        plan: PublishPlan,
        shards: tuple[Shard, ...],
        where: Mapping[tuple[int, str], tuple[int, int]],
        sums: Mapping[int, SliceSums],
        shared: Mapping[tuple[str, int], tuple[int, ...]] | None = None,
        **header: Any,
    ) -> Manifest:
        """The manifest of one published version.

        where: (rank, Megatron name) -> (index into ``shards``, byte offset of the parameter in that shard).
        sums: rank -> its ``sum_boxes``. shared: (HF tensor name, index of the slice) -> indices into
        ``shards`` of others that hold the slice. header: the manifest's ``transport``, ``place`` and
        ``version``.
        """
        shared = dict(shared or {})
        key = shards, dict(where), shared, list(plan.owners)
        if key != self._key:
            shapes = self._mapping.hf_tensors()
            names = [name for name in shapes if name in plan.owners]
            tensors = {
                name: PublishedTensor(
                    dtype_name(plan.dtype_of(name, self._dtype)),
                    shapes[name],
                    tuple(
                        PublishedBox(
                            *where[s.rank, s.param],
                            plan.shapes[s.rank, s.param],
                            s.piece.local,
                            s.piece.hf,
                            shared.get((name, i), ()),
                        )
                        for i, s in enumerate(plan.owners[name])
                    ),
                )
                for name in names
            }
            self._layout = Layout(shards, tensors).to_json()
            self._order = [(s.rank, (name, i)) for name in names for i, s in enumerate(plan.owners[name])]
            self._key = key
        in_order = tuple(sums[rank][slice_] for rank, slice_ in self._order)
        return Manifest(layout=self._layout, sums=in_order, scale=self._scale, **header)

    def write(
        self,
        folder: Path,
        plan: PublishPlan,
        shards: tuple[Shard, ...],
        where: Mapping[tuple[int, str], tuple[int, int]],
        sums: Mapping[int, SliceSums],
        **header: Any,
    ) -> Manifest | None:
        """Write a manifest that engines on the node read in place; called by ``plan.lead``.

        folder: private folder of the node, the engines' RPG_BRIDGE_DIR. Otherwise as ``build``. Returns the
        manifest on rank 0, else None.
        """
        path = folder / MANIFEST
        # With several nodes, each engine reads the manifest in its own node's folder.
        place = {"manifest": str(path) if plan.alone else MANIFEST}
        manifest = self.build(plan, shards, where, sums, place=place, **header)
        atomic_write_text(path, manifest.to_json(), private=True)
        return manifest if plan.rank == 0 else None
