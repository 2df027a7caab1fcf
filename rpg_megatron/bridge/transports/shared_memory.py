"""Transport ``shared_memory``, trainer side: weights in files in /dev/shm, mapped by engines on the node.

The parameters themselves are moved into the files once, and training continues in them. Publishing therefore
copies nothing: engines read the memory that the optimizer writes. The version word at the start of each file
says whether they may.

These are plain files in a private folder, not ``multiprocessing.shared_memory``, where a reader's normal exit
removes the writer's segment. They stay until their owner removes them, so they survive trainers that were
killed.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path

import torch

from rpg_megatron.bridge.manifest import HEADER_BYTES, MANIFEST, WRITING, Manifest, Shard
from rpg_megatron.bridge.publisher import (
    ManifestBuilder,
    PublishPlan,
    SliceSums,
    make_publish_plan,
    node_name,
)
from rpg_megatron.config.errors import UserError, gib
from rpg_megatron.config.files import open_own, open_private, remove
from rpg_megatron.models.mapping import ModelMapping
from rpg_megatron.models.partition import RankCoordinates
from rpg_megatron.system.collectives import gather_objects, run_together

ALIGNMENT = 64
"""Byte alignment of parameters in a file (a cache line), so that any element type can be viewed in place."""


def require_private_folder(folder: Path) -> Path:
    """Create the folder with mode 0700 if it is missing; returns its real path.

    Raises UserError if it belongs to another user or is accessible to others: readers trust the weights in
    it.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        os.close(open_private(folder))
    except OSError as e:
        raise UserError(f"{folder}: {e.strerror}; use a new folder for the bridge") from None
    return folder.resolve()


class SharedMemoryPublisher:
    """``Publisher`` whose engines read this rank's parameters in place.

    Every rank constructs one and calls every method (collectives over the default process group). Parameters
    that several ranks of a node hold are published by one of them; ranks that send nothing have no file. With
    several nodes, each node publishes all weights in a folder of its own.
    """

    def __init__(
        self,
        folder: Path,
        coordinates: RankCoordinates,
        params: Mapping[str, torch.Tensor],
        mapping: ModelMapping,
        dtype: torch.dtype,
        *,
        adopt: bool = True,
    ) -> None:
        """Make the publish plan and create this rank's file, with its space reserved.

        folder: private folder in /dev/shm, the engines' RPG_BRIDGE_DIR. params: live parameters by Megatron
        name, layers numbered through the whole model. dtype: what engines receive. adopt: move parameters of
        that dtype into the file for good (sets ``param.data``); all other parameters, and all of them if
        False, are copied into the file by each ``publish``. Must be False if other objects hold views of the
        parameters' memory, as Megatron's distributed optimizer does.
        Raises UserError if there is no space or the folder is not private, MappingError if the ranks of a
        node do not hold the whole model.
        """
        self.folder = run_together(lambda: require_private_folder(folder))
        self.coordinates, self.mapping, self.dtype = coordinates, mapping, dtype
        self._params, self._builder = params, ManifestBuilder(mapping, dtype)
        self._map: mmap.mmap | None = None
        self._shards: dict[str, torch.Tensor] = {}
        self._adopted: set[str] = set()
        self._dtypes: dict[str, torch.dtype] = {}
        self._plan = make_publish_plan(coordinates, params, mapping, node_name(self.folder))
        self._offsets, sizes = self._lay_out()
        self._files = tuple(Shard(r, size, f"shard-{r:05d}.bin") for r, size in sorted(sizes.items()))
        run_together(lambda: self._create(adopt))

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's file; 0 for ranks that send nothing."""
        return next((f.size for f in self._files if f.rank == self.coordinates.rank), 0)

    @torch.no_grad()
    def publish(self, version: int, only: Collection[str] | None = None) -> Manifest | None:
        """Let engines read the current weights as ``version``; returns the manifest (of the first node) on
        rank 0.

        The weights must not change before ``retract``. Returns when every rank is done. A failure on one rank
        is raised on all.
        """
        plan = self._plan.restricted(only)
        sums = run_together(lambda: self._fill(version, plan))
        gathered = gather_objects((self.coordinates.rank, sums), tuple[int, SliceSums], plan.group)
        return run_together(lambda: self._write_manifest(version, plan, dict(gathered)))

    def _write_manifest(self, version: int, plan: PublishPlan, sums: dict[int, SliceSums]) -> Manifest | None:
        if self.coordinates.rank != plan.lead:
            return None
        index = {f.rank: i for i, f in enumerate(self._files)}
        where = {key: (index[key[0]], offset) for key, offset in self._offsets.items()}
        return self._builder.write(
            *(self.folder, plan, self._files, where, sums), transport="shared_memory", version=version
        )

    def retract(self) -> None:
        """From here on the weights may change; engines that are still reading detect it. Not collective."""
        if self._map is not None:
            self._word.fill_(WRITING)

    def close(self) -> None:
        """Remove this rank's file and, on the plan's lead rank, the manifest.

        Memory that adopted parameters or readers still use stays allocated, without a file name.
        """
        self.retract()
        self._shards = {}
        if self._map is not None:
            del self._word
            with suppress(BufferError):  # a view is still alive; the memory is freed with it
                self._map.close()
            self._map = None
            remove(self._path)
        if self.coordinates.rank == self._plan.lead:
            remove(self.folder / MANIFEST)

    @property
    def _path(self) -> Path:
        return self.folder / f"shard-{self.coordinates.rank:05d}.bin"

    @torch.no_grad()
    def _create(self, adopt: bool) -> None:
        if not self.nbytes:
            return
        # An existing file is left from a trainer that was killed; engines that mapped it keep its memory.
        remove(self._path)
        with open_own(self._path, "x+b", permissions=0o600) as file:
            try:
                # Reserve every page now: writing to a full tmpfs later would be SIGBUS, not an error.
                os.posix_fallocate(file.fileno(), 0, self.nbytes)
                self._map = mmap.mmap(file.fileno(), self.nbytes)
            except OSError as e:
                remove(self._path)
                raise UserError(
                    f"{self.folder}: no room to publish {gib(self.nbytes)} of weights "
                    f"({e.strerror}); increase the size of /dev/shm on this machine or container"
                ) from None
        memory = torch.frombuffer(self._map, dtype=torch.uint8)
        self._word = memory[:8].view(torch.int64)
        self._word.fill_(WRITING)
        for (rank, name), offset in self._offsets.items():
            if rank == self.coordinates.rank:
                param, dtype = self._params[name], self._dtypes[name]
                nbytes = dtype.itemsize * param.numel()
                shard = memory[offset : offset + nbytes].view(dtype).view(param.shape)
                self._shards[name] = shard
                if adopt and param.device.type == "cpu" and param.dtype == dtype:
                    shard.copy_(param)
                    param.data = shard
                    self._adopted.add(name)

    def _fill(self, version: int, plan: PublishPlan) -> SliceSums:
        """Update this rank's file and write its version word; returns the checksums of its slices."""
        if not self._shards:
            return {}
        self._word.fill_(WRITING)
        for name in {param for _, _, param, _ in plan.slices_of(plan.rank)}:
            shard = self._shards[name]
            if name not in self._adopted:
                shard.copy_(self._params[name].detach())
            elif self._params[name].data_ptr() != shard.data_ptr():
                raise RuntimeError(
                    f"{name}: its memory was replaced after it was moved into {self._path}; "
                    "construct the publisher with adopt=False"
                )
        sums = plan.sum_boxes(self._shards, self.dtype)
        self._word.fill_(version)
        return sums

    def _lay_out(self) -> tuple[dict[tuple[int, str], int], dict[int, int]]:
        """Byte offset of each published (rank, parameter) in its file, and the file sizes by rank."""
        offsets: dict[tuple[int, str], int] = {}
        sizes: dict[int, int] = {}
        for name, owners in self._plan.owners.items():
            for owner in owners:
                key = (owner.rank, owner.param)
                if key not in offsets:
                    offsets[key] = sizes.setdefault(owner.rank, HEADER_BYTES)
                    dtype = self._dtypes[owner.param] = self._plan.dtype_of(name, self.dtype)
                    nbytes = dtype.itemsize * math.prod(self._plan.shapes[key])
                    sizes[owner.rank] += -(-nbytes // ALIGNMENT) * ALIGNMENT
        return offsets, sizes
