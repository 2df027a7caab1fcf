"""Trainer side of the live bridge, whatever carries the weights."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import torch

from rpg_megatron.bridge.manifest import Manifest
from rpg_megatron.config.cluster import ADDRESS_VARIABLE
from rpg_megatron.config.rollout import BridgeSettings
from rpg_megatron.models.mapping import ModelMapping
from rpg_megatron.models.placement import RankCoordinates


class Publisher(Protocol):
    """This rank's share in publishing weights; every rank calls every method in the same order."""

    def publish(self, version: int) -> Manifest | None:
        """Let engines read the present weights; returns the manifest on rank 0, else None."""
        ...

    def retract(self) -> None:
        """End that: from here on the weights may change."""
        ...

    def close(self) -> None:
        """Let go of memory and connections."""
        ...


@contextmanager
def published(publisher: Publisher, version: int) -> Iterator[Manifest | None]:
    """Within the block engines may read the weights, which must not change; the manifest on rank 0."""
    manifest = publisher.publish(version)
    try:
        yield manifest
    finally:
        publisher.retract()


def open_publisher(
    settings: BridgeSettings,
    folder: Path,
    coordinates: RankCoordinates,
    params: Mapping[str, torch.Tensor],
    mapping: ModelMapping,
    dtype: torch.dtype,
    *,
    adopt: bool,
    colocated: bool = False,
) -> Publisher:
    """The publisher of the configured transport; see ``SharedMemoryPublisher``, ``CudaIpcPublisher``,
    ``GroupPublisher``.

    folder: RPG_BRIDGE_DIR of this node's engines. adopt: whether parameters may be moved into shared memory
    for good. colocated: engines are on the trainers' devices, on every node.
    """
    if settings.transport == "process_group":
        from rpg_megatron.bridge.transports.process_group_publisher import GroupPublisher

        return GroupPublisher(
            settings.address or os.environ.get(ADDRESS_VARIABLE, "127.0.0.1"),
            coordinates,
            params,
            mapping,
            dtype,
            timeout=settings.timeout,
            bucket_bytes=settings.bucket_mib * 1024**2,
            colocated_in=folder if colocated else None,
        )
    if settings.transport == "cuda_ipc":
        from rpg_megatron.bridge.transports.cuda_ipc import CudaIpcPublisher

        return CudaIpcPublisher(folder, coordinates, params, mapping, dtype)
    from rpg_megatron.bridge.transports.shared_memory import SharedMemoryPublisher

    return SharedMemoryPublisher(folder, coordinates, params, mapping, dtype, adopt=adopt)
