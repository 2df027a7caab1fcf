"""Trainer side of the live bridge on one node: every source rank's shards in a file in shared memory.

Plain files in a private folder, not ``multiprocessing.shared_memory``: there a reader's normal exit
removes the writer's segment. Files stay until their owner removes them, so a publication outlives
trainers that were killed.
"""

from __future__ import annotations

import math
import mmap
import os
import socket
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import torch

from rpg_megatron.bridge.checksum import checksum
from rpg_megatron.bridge.collective import gather_objects, run_together
from rpg_megatron.bridge.layouts import Layout
from rpg_megatron.bridge.manifest import (
    HEADER_BYTES,
    MANIFEST,
    WRITING,
    Manifest,
    PublishedBox,
    PublishedFile,
    PublishedTensor,
)
from rpg_megatron.bridge.plan import Holding, Placement, Source, assign_sources
from rpg_megatron.config.errors import UserError

ALIGNMENT = 64
"""Shards begin at multiples of a cache line, so that any element type can be viewed in place."""


def require_private_folder(folder: Path) -> Path:
    """Create the folder with mode 0700 if it is missing; returns its real path.

    Raises UserError if it belongs to another user or others may enter it: weights and acknowledgements in
    it are trusted.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    info = folder.stat()
    if info.st_uid != os.geteuid() or stat.S_IMODE(info.st_mode) & 0o077:
        raise UserError(
            f"{folder}: must belong to this user with mode 0700 (is {stat.S_IMODE(info.st_mode):04o}); "
            "make a new folder for the bridge"
        )
    return folder.resolve()


class SharedMemoryPublisher:
    """Copies this rank's parameters into shared memory, generation after generation.

    Every rank constructs one and calls every method (collectives over the default process group); only
    ranks with data and context rank 0 hold a file. What several ranks hold alike is published once.
    """

    def __init__(
        self,
        folder: Path,
        placement: Placement,
        params: Mapping[str, torch.Tensor],
        layout: Layout,
        dtype: torch.dtype,
    ) -> None:
        """Agree on who publishes what, and create this rank's file (space is reserved at once).

        folder: private folder in /dev/shm, the engines' RPG_BRIDGE_DIR. params: live parameters by
        Megatron name, read anew by each ``publish``. dtype: what engines are to receive.
        Raises UserError if there is no room, the folder is not private, or ranks sit on different machines;
        LayoutError if the ranks together do not hold the model.
        """
        self.folder = run_together(lambda: require_private_folder(folder))
        self.placement = placement
        self.layout = layout
        self.dtype = dtype
        self._params = params
        self._map: mmap.mmap | None = None
        self._shards: dict[str, torch.Tensor] = {}

        holding = Holding(placement, tuple((n, tuple(p.shape)) for n, p in params.items()))
        gathered = gather_objects((holding, socket.gethostname()))
        hosts = {host for h, host in gathered if h.placement.is_source}
        if len(hosts) > 1:
            raise UserError(
                f"weights lie on several machines ({', '.join(sorted(hosts))}); shared memory reaches one"
            )
        self._sources = assign_sources(layout, [h for h, _ in gathered])
        shapes = {(h.placement.rank, n): s for h, _ in gathered for n, s in h.params}
        self._offsets, sizes = _lay_out(self._sources, shapes, dtype)
        self._shapes = shapes
        self._files = tuple(PublishedFile(f"shard-{r:05d}.bin", size, r) for r, size in sorted(sizes.items()))
        run_together(self._create)

    @property
    def nbytes(self) -> int:
        """Size of this rank's file; 0 for ranks that are no source."""
        return next((f.size for f in self._files if f.rank == self.placement.rank), 0)

    @torch.no_grad()
    def publish(self, generation: int) -> Manifest | None:
        """Overwrite the published weights with the current ones; returns the manifest on rank 0, else None.

        While a file is being written its generation word is -1, so a reader that comes too early notices.
        Blocks until every rank is done. A failure on one rank is raised on all.
        """
        if generation < 0:
            raise ValueError(f"generation {generation}: must not be negative")
        sums = run_together(lambda: self._copy(generation))
        gathered = gather_objects((self.placement.rank, sums))
        if self.placement.rank != 0:
            return None
        manifest = self._manifest(generation, dict(gathered))
        manifest.write()
        return manifest

    def close(self) -> None:
        """Remove this rank's file, and on rank 0 the manifest. Readers that mapped it keep their view."""
        self._shards = {}
        if self._map is not None:
            self._word.fill_(WRITING)
            del self._word
            with suppress(BufferError):  # somebody still holds a view; memory goes when that one goes
                self._map.close()
            self._map = None
            self._path.unlink(missing_ok=True)
        if self.placement.rank == 0:
            (self.folder / MANIFEST).unlink(missing_ok=True)

    @property
    def _path(self) -> Path:
        return self.folder / f"shard-{self.placement.rank:05d}.bin"

    def _create(self) -> None:
        if not self.nbytes:
            return
        # A file of this name is left from a trainer that was killed; engines that mapped it keep its memory.
        self._path.unlink(missing_ok=True)
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        try:
            # Reserve every page now: writing to a full tmpfs later would be SIGBUS, not an error.
            os.posix_fallocate(fd, 0, self.nbytes)
            self._map = mmap.mmap(fd, self.nbytes)
        except OSError as e:
            self._path.unlink()
            raise UserError(
                f"{self.folder}: no room to publish {self.nbytes / 2**30:.2f} GiB of weights ({e.strerror}); "
                "enlarge the shared memory of this machine or container"
            ) from None
        finally:
            os.close(fd)
        memory = torch.frombuffer(self._map, dtype=torch.uint8)
        self._word = memory[:8].view(torch.int64)
        self._word.fill_(WRITING)
        for (rank, name), offset in self._offsets.items():
            if rank == self.placement.rank:
                shape = self._shapes[rank, name]
                nbytes = self.dtype.itemsize * math.prod(shape)
                self._shards[name] = memory[offset : offset + nbytes].view(self.dtype).view(shape)

    def _copy(self, generation: int) -> dict[tuple[str, int], int]:
        """Fill this rank's file; returns its boxes' checksums by (HF name, index in the sources)."""
        if not self._shards:
            return {}
        self._word.fill_(WRITING)
        for name, shard in self._shards.items():
            shard.copy_(self._params[name].detach())
        sums = {
            (hf_name, i): checksum(self._shards[s.param][s.piece.local.slices()], s.piece.hf.start)
            for hf_name, found in self._sources.items()
            for i, s in enumerate(found)
            if s.rank == self.placement.rank
        }
        self._word.fill_(generation)
        return sums

    def _manifest(self, generation: int, sums: Mapping[int, Mapping[tuple[str, int], int]]) -> Manifest:
        index = {f.rank: i for i, f in enumerate(self._files)}
        tensors = {
            hf_name: PublishedTensor(
                str(self.dtype).removeprefix("torch."),
                shape,
                tuple(
                    PublishedBox(
                        index[s.rank],
                        self._offsets[s.rank, s.param],
                        self._shapes[s.rank, s.param],
                        s.piece.local,
                        s.piece.hf,
                        sums[s.rank][hf_name, i],
                    )
                    for i, s in enumerate(self._sources[hf_name])
                ),
            )
            for hf_name, shape in self.layout.hf_tensors().items()
        }
        return Manifest(self.folder / MANIFEST, generation, self._files, tensors)


def _lay_out(
    sources: Mapping[str, list[Source]], shapes: Mapping[tuple[int, str], tuple[int, ...]], dtype: torch.dtype
) -> tuple[dict[tuple[int, str], int], dict[int, int]]:
    """Byte offset of each published (rank, parameter) in its rank's file, and the files' sizes by rank."""
    offsets: dict[tuple[int, str], int] = {}
    sizes: dict[int, int] = {}
    for found in sources.values():
        for source in found:
            key = (source.rank, source.param)
            if key not in offsets:
                offsets[key] = sizes.setdefault(source.rank, HEADER_BYTES)
                nbytes = dtype.itemsize * math.prod(shapes[key])
                sizes[source.rank] += -(-nbytes // ALIGNMENT) * ALIGNMENT
    return offsets, sizes
