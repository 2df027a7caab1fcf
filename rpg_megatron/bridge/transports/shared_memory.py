"""Trainer side of the live bridge on one node's CPUs: the weights lie in files in shared memory.

They do not only lie there for a sync: the parameters themselves are moved into the files, once, and training
goes on in them. So publishing copies nothing, and engines read the memory that the optimizer writes; a word
at the start of each file says whether they may.

Plain files in a private folder, not ``multiprocessing.shared_memory``: there a reader's normal exit removes
the writer's segment. Files stay until their owner removes them, so a publication outlives trainers that were
killed.
"""

from __future__ import annotations

import math
import mmap
import os
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import torch

from rpg_megatron.bridge.checksum import checksum
from rpg_megatron.bridge.manifest import HEADER_BYTES, MANIFEST, WRITING, Manifest, Shard
from rpg_megatron.bridge.publisher import Sums, build_manifest, make_publish_plan, node_name
from rpg_megatron.config.errors import UserError
from rpg_megatron.models.mapping import ModelMapping
from rpg_megatron.models.placement import RankCoordinates
from rpg_megatron.system.collectives import gather_objects, run_together
from rpg_megatron.system.files import atomic_write_text

ALIGNMENT = 64
"""Shards begin at multiples of a cache line, so that any element type can be viewed in place."""


def require_private_folder(folder: Path) -> Path:
    """Create the folder with mode 0700 if it is missing; returns its real path.

    Raises UserError if it belongs to another user or others may enter it: the weights in it are trusted.
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
    """Lets engines on this node read this rank's parameters, version after version.

    Every rank constructs one and calls every method (collectives over the default process group). What
    several ranks of a node hold alike is published once, and those that give nothing hold no file. On several
    nodes each has all of the weights, in a folder of its own.
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
        """Agree on who publishes what, and create this rank's file (space is reserved at once).

        folder: private folder in /dev/shm, the engines' RPG_BRIDGE_DIR. params: live parameters by
        Megatron name, layers numbered through the whole model. dtype: what engines are to receive.
        adopt: move parameters of that dtype into the file for good (``param.data`` is set anew); others, and
        all if false, are copied into it by each ``publish``. False where somebody else holds views of their
        memory, as Megatron's distributed optimizer does.
        Raises UserError if there is no room or the folder is not private, MappingError if the ranks of a node
        together do not hold the model.
        """
        self.folder = run_together(lambda: require_private_folder(folder))
        self.coordinates, self.mapping, self.dtype = coordinates, mapping, dtype
        self._params = params
        self._map: mmap.mmap | None = None
        self._shards: dict[str, torch.Tensor] = {}
        self._adopted: set[str] = set()
        self._plan = make_publish_plan(coordinates, params, mapping, node_name(self.folder))
        self._offsets, sizes = self._lay_out()
        self._files = tuple(Shard(r, size, f"shard-{r:05d}.bin") for r, size in sorted(sizes.items()))
        run_together(lambda: self._create(adopt))

    @property
    def nbytes(self) -> int:
        """Size of this rank's file; 0 for ranks that are no source."""
        return next((f.size for f in self._files if f.rank == self.coordinates.rank), 0)

    @torch.no_grad()
    def publish(self, version: int) -> Manifest | None:
        """Let engines read the present weights; returns the manifest on rank 0, else None.

        On several nodes it is that of the first one. The weights must not change before ``retract``. Blocks
        until every rank is done. A failure on one rank is raised on all.
        """
        if version < 0:
            raise ValueError(f"version {version}: must not be negative")
        sums = run_together(lambda: self._fill(version))
        gathered = gather_objects((self.coordinates.rank, sums))
        return run_together(lambda: self._write_manifest(version, dict(gathered)))

    def _write_manifest(self, version: int, sums: dict[int, Sums]) -> Manifest | None:
        if self.coordinates.rank != self._plan.lead:
            return None
        path = self.folder / MANIFEST
        index = {f.rank: i for i, f in enumerate(self._files)}
        manifest = build_manifest(
            self._plan,
            self.mapping,
            self.dtype,
            self._files,
            {key: (index[key[0]], offset) for key, offset in self._offsets.items()},
            sums,
            transport="shared_memory",
            # On several nodes each engine looks into its own folder.
            place={"manifest": str(path) if self._plan.alone else MANIFEST},
            version=version,
        )
        atomic_write_text(path, manifest.to_json(), private=True)
        return manifest if self.coordinates.rank == 0 else None

    def retract(self) -> None:
        """From here on the weights may change: engines that still read notice it. Not collective."""
        if self._map is not None:
            self._word.fill_(WRITING)

    def close(self) -> None:
        """Remove this rank's file, and on a node's first rank the manifest.

        Memory that is still in use, by adopted parameters or by readers, lives on without a name.
        """
        self.retract()
        self._shards = {}
        if self._map is not None:
            del self._word
            with suppress(BufferError):  # somebody still holds a view; memory goes when that one goes
                self._map.close()
            self._map = None
            self._path.unlink(missing_ok=True)
        if self.coordinates.rank == self._plan.lead:
            (self.folder / MANIFEST).unlink(missing_ok=True)

    @property
    def _path(self) -> Path:
        return self.folder / f"shard-{self.coordinates.rank:05d}.bin"

    @torch.no_grad()
    def _create(self, adopt: bool) -> None:
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
            if rank == self.coordinates.rank:
                param = self._params[name]
                nbytes = self.dtype.itemsize * param.numel()
                shard = memory[offset : offset + nbytes].view(self.dtype).view(param.shape)
                self._shards[name] = shard
                if adopt and param.device.type == "cpu" and param.dtype == self.dtype:
                    shard.copy_(param)
                    param.data = shard
                    self._adopted.add(name)

    def _fill(self, version: int) -> Sums:
        """Bring this rank's file up to date and mark it so; returns its boxes' checksums."""
        if not self._shards:
            return {}
        self._word.fill_(WRITING)
        for name, shard in self._shards.items():
            if name not in self._adopted:
                shard.copy_(self._params[name].detach())
            elif self._params[name].data_ptr() != shard.data_ptr():
                raise RuntimeError(
                    f"{name} was given other memory after it was moved into {self._path}; "
                    "construct the publisher with adopt=False"
                )
        sums = {
            (hf_name, i): checksum(self._shards[param][piece.local.slices()], piece.hf.start)
            for hf_name, i, param, piece in self._plan.slices_of(self.coordinates.rank)
        }
        self._word.fill_(version)
        return sums

    def _lay_out(self) -> tuple[dict[tuple[int, str], int], dict[int, int]]:
        """Byte offset of each published (rank, parameter) in its file, and the files' sizes by rank."""
        offsets: dict[tuple[int, str], int] = {}
        sizes: dict[int, int] = {}
        for owners in self._plan.owners.values():
            for owner in owners:
                key = (owner.rank, owner.param)
                if key not in offsets:
                    offsets[key] = sizes.setdefault(owner.rank, HEADER_BYTES)
                    nbytes = self.dtype.itemsize * math.prod(self._plan.shapes[key])
                    sizes[owner.rank] += -(-nbytes // ALIGNMENT) * ALIGNMENT
        return offsets, sizes
